"""The baseline of every comparison: the target alone, with its own Hugging Face `generate`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.processing import UNPROCESSED, Processing
from eagle_fsd.core.randomness.streams import DEFAULT_GENERATOR
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.runtime.packed_linear import plain_linears
from eagle_fsd.target.model import TargetModel


def generate_alone(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int,
    pad_token_id: int,
    processing: Processing = UNPROCESSED,
    options: Mapping[str, Any] | None = None,
    endless: bool = False,
) -> tuple[list[list[int]], list[GenerationStats]]:
    """Generate with the target alone; return each prompt's new tokens and stats.

    New tokens include the end token, and stats count one step per token. processing: of the logits, by
    Hugging Face's own processors where it has them. options: more arguments of `generate`, such as a cache or
    an assistant. endless: no token ends a text.
    """
    end_tokens = () if endless else target.eos_token_ids
    warpers = {**asdict(sampling), "min_p": sampling.min_p or None}
    ids, mask = pad_left(prompts, pad_token_id)  # `generate` needs left padding
    processors = hf_options(processing, ids.shape[1])
    model = target.model  # which may have to be loaded first
    start = time.perf_counter()
    with (
        DEFAULT_GENERATOR,
        torch.random.fork_rng(),
        plain_linears(model),  # the baseline must not use our speed-ups
    ):
        torch.manual_seed(seed)
        sequences = target.without_generation_defaults().generate(
            ids.to(target.input_device),
            attention_mask=mask.to(target.input_device),
            max_new_tokens=max_new_tokens,
            do_sample=not sampling.greedy,
            **({} if sampling.greedy else warpers),
            **({"eos_token_id": target.vocab_size} if endless else {}),  # a token that does not exist
            **processors,
            **(options or {}),
        )
    seconds = time.perf_counter() - start
    new_tokens, stats = [], []
    for row in sequences[:, ids.shape[1] :].tolist():
        ends = [i for i, token in enumerate(row) if token in end_tokens]
        new_tokens.append(row[: ends[0] + 1] if ends else row)
        count = len(new_tokens[-1])
        stats.append(
            GenerationStats(
                steps=count,
                new_tokens=count,
                accept_histogram=[0, count],
                seconds=seconds,
                finish_reason="stop" if ends else "length",
            )
        )
    return new_tokens, stats


def hf_options(processing: Processing, prompt_length: int) -> dict[str, Any]:
    """Return arguments of `generate` that process logits alike. prompt_length: of the padded prompts.

    Penalties that Hugging Face lacks come after its own processors. The order matters only beside a
    repetition_penalty, which multiplies.
    """
    named: dict[str, Any] = {
        "sequence_bias": dict(processing.logit_bias),
        "bad_words_ids": [list(words) for words in processing.bad_words_ids],
        "suppress_tokens": list(processing.suppress_tokens),
        "no_repeat_ngram_size": processing.no_repeat_ngram_size,
        "min_new_tokens": processing.min_new_tokens,
    }
    if processing.repetition_penalty != 1:
        named["repetition_penalty"] = processing.repetition_penalty
    penalties = AnswerPenalties(processing.presence_penalty, processing.frequency_penalty, prompt_length)
    own = [penalties] if processing.presence_penalty or processing.frequency_penalty else []
    return {
        name: value for name, value in {**named, "logits_processor": [*own, *processing.own]}.items() if value
    }


class AnswerPenalties(LogitsProcessor):
    """Presence and frequency penalties, which Hugging Face lacks; see Processing."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
