"""The baseline of every comparison: the target alone, with its own Hugging Face `generate`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.padding import pad_left
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
    options: Mapping[str, Any] | None = None,
    endless: bool = False,
) -> tuple[list[list[int]], list[GenerationStats]]:
    """Generate with the target alone; return each prompt's new tokens and stats.

    New tokens include the end token, and stats count one step per token. options: more arguments of
    `generate`, such as a cache or an assistant. endless: no token ends a text.
    """
    end_tokens = () if endless else target.eos_token_ids
    warpers = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    ids, mask = pad_left(prompts, pad_token_id)  # `generate` needs left padding
    start = time.perf_counter()
    with (
        torch.random.fork_rng(),
        plain_linears(target.model),  # the baseline must not use our speed-ups
    ):
        torch.manual_seed(seed)
        sequences = target.without_generation_defaults().generate(
            ids.to(target.input_device),
            attention_mask=mask.to(target.input_device),
            max_new_tokens=max_new_tokens,
            do_sample=not sampling.greedy,
            **({} if sampling.greedy else warpers),
            **({"eos_token_id": target.vocab_size} if endless else {}),  # a token that does not exist
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
