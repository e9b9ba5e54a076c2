"""The target's own answers, written many at a time, with the features they were made from. Plain batched
decoding, made for throughput.

The features cost nothing extra here, so an answer is a finished training sequence. Rows are padded on the
left; a finished row leaves the batch. Needs a Llama-like target (any whose attention goes through
transformers' AttentionInterface and takes a 4-D mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eagle_fsd.training.features import FeatureSequence


@dataclass(frozen=True)
class AnswerSettings:
    """max_new_tokens per answer; temperature 0 is greedy, else sampling from the top_k most likely tokens."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 50

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0 or self.top_k < 1:
            raise ValueError(
                f"{self}: max_new_tokens and top_k must be at least 1, temperature at least 0; change it"
            )


class GrowingCache:
    """Keys and values of every layer in one buffer each, written in place; `update` is what a transformers
    model calls.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        new = key.shape[2]
        if layer_idx not in self.layers:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            self.layers[layer_idx] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self.layers[layer_idx]
        keys[:, :, self.length : self.length + new] = key
        values[:, :, self.length : self.length + new] = value
        return keys[:, :, : self.length + new], values[:, :, : self.length + new]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def keep_rows(self, rows: Tensor) -> None:
        self.layers = {index: (keys[rows], values[rows]) for index, (keys, values) in self.layers.items()}


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention that reads each key head once for all its query heads: [B, H, n, D] against [B, Hkv, T, D],
    additive mask [B, 1, n, T].
    """
    batch, heads, rows, width = query.shape
    groups, length = key.shape[1], key.shape[2]
    scale = width**-0.5 if scaling is None else scaling
    stacked = query.reshape(batch * groups, heads // groups * rows, width)
    # flatten(0, 1) of a slice of the buffer stays a view: nothing is copied. Keys go first because a CPU's
    # bmm is slow on a strided right side.
    scores = torch.bmm(key.flatten(0, 1), stacked.transpose(1, 2)).transpose(1, 2).float() * scale
    assert attention_mask is not None
    scores = scores.reshape(batch, heads, rows, length) + attention_mask
    mixed = torch.bmm(
        scores.softmax(-1).to(query.dtype).view(batch * groups, -1, length), value.flatten(0, 1)
    )
    return mixed.view(batch, heads, rows, width).transpose(1, 2), None


AttentionInterface.register("eagle_fsd_grouped", grouped_attention)


@torch.inference_mode()
def write_answers(
    model: nn.Module,
    prompts: Sequence[list[int]],
    settings: AnswerSettings,
    end_tokens: Sequence[int],
    generator: torch.Generator | None = None,
) -> list[FeatureSequence]:
    """Answer a batch of encoded prompts; each result holds prompt and answer without the end token, `learn`
    marks the answer.

    The last token of an answer cut by the limit has no feature yet and is left off. The rows come back in
    the prompts' order.
    """
    count, longest = len(prompts), max(len(prompt) for prompt in prompts)
    device = model.get_input_embeddings().weight.device
    before = model.config._attn_implementation
    model.set_attn_implementation("eagle_fsd_grouped")
    try:
        ids = torch.zeros(count, longest, dtype=torch.int64)  # [B, n], padded on the left
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # [B]
        cache = GrowingCache(longest + settings.max_new_tokens)
        slots = torch.arange(cache.capacity, device=device)
        hidden_floor = torch.finfo(torch.float32).min
        rows = torch.arange(count, device=device)  # which prompt each row of the batch is
        step_ids = ids.to(device)
        features: list[list[Tensor]] = [[] for _ in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        for step in range(settings.max_new_tokens):
            end = cache.length + step_ids.shape[1]
            queries = slots[cache.length : end]
            seen = (slots[:end] <= queries[:, None]) & (slots[:end] >= padding[:, None, None])  # [B, n, T]
            seen |= (
                slots[:end] == queries[:, None]
            )  # a padding query sees itself, so that no row of scores is empty
            mask = torch.where(seen, 0.0, hidden_floor)[:, None]
            positions = (queries - padding[:, None]).clamp_min(0)
            state = model.base_model(
                input_ids=step_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state  # [B, n, d]
            cache.length = end
            chosen = choose(model.lm_head(state[:, -1]), settings, generator)  # [B]
            for row, index in enumerate(rows.tolist()):
                features[index].append(
                    state[row, padding[row] :].clone() if step == 0 else state[row].clone()
                )
            ended = torch.isin(chosen, torch.tensor(list(end_tokens), device=device))
            for index, token, over in zip(rows.tolist(), chosen.tolist(), ended.tolist(), strict=True):
                if not over:
                    answers[index].append(token)
            going = (~ended).nonzero().squeeze(1)
            if len(going) == 0:
                break
            if len(going) < len(rows):
                cache.keep_rows(going)
                rows, padding, chosen = rows[going], padding[going], chosen[going]
            step_ids = chosen[:, None]
    finally:
        model.set_attn_implementation(before)
    return [
        finished(prompt, answer, torch.cat(parts))
        for prompt, answer, parts in zip(prompts, answers, features, strict=True)
    ]


def choose(logits: Tensor, settings: AnswerSettings, generator: torch.Generator | None) -> Tensor:
    """The next token of every row, [B, V] -> [B]."""
    if settings.temperature == 0:
        return logits.argmax(-1)
    best, tokens = logits.float().topk(settings.top_k, dim=-1)
    drawn = torch.multinomial((best / settings.temperature).softmax(-1), 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1)


def finished(prompt: list[int], answer: list[int], features: Tensor) -> FeatureSequence:
    """Put prompt, answer and features together, as long as there is a feature for each token."""
    tokens = torch.tensor(prompt + answer)[: len(features)]
    learn = torch.arange(len(tokens)) >= len(prompt)
    return FeatureSequence(tokens, learn, features[: len(tokens)])
