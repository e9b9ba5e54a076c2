"""Lossless decoding on real prompts: greedy text at T = 0 against Hugging Face's own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.prompt_sets import answer_all

NEAR_TIE = 1e-4  # two logits closer than this may change places between kernels in float32


@dataclass(frozen=True)
class Difference:
    """The first place where two texts part.

    best: the target's two likeliest tokens there; gap: between their logits. A text that has ended there has
    no token.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    best: tuple[int, int]
    gap: float

    @property
    def excused(self) -> bool:
        return self.excused_by(NEAR_TIE)

    def excused_by(self, near: float) -> bool:
        """Return whether rounding explains it: the two texts took the two tokens, and these tie."""
        return self.gap < near and {self.expected, self.found} == set(self.best)


def reference(engine: EagleFSD, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Return the target's own greedy text for every prompt, made one at a time."""
    return [
        engine.target_alone(torch.tensor([prompt]), max_new_tokens=max_new_tokens).new_tokens[0]
        for prompt in tqdm(prompts, desc="Hugging Face generate", unit="prompt")
    ]


def compare(
    engine: EagleFSD,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    tree: TreeConfig,
    batch_size: int,
    max_new_tokens: int,
) -> tuple[list[Difference], GenerationStats]:
    """Generate losslessly, in batches in the order given, and list where texts leave `expected`."""
    said = f"tree {tree}, batch {batch_size}"
    options = {"max_new_tokens": max_new_tokens, "rule": Lossless(), "tree": tree}
    texts, stats = answer_all(engine, prompts, batch_size, said, **options)
    pairs = enumerate(zip(prompts, expected, texts, strict=True))
    differing = [(row, *texts) for row, texts in pairs if texts[1] != texts[2]]
    return [first_difference(engine, *one) for one in differing], stats


@torch.inference_mode()
def first_difference(
    engine: EagleFSD, row: int, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> Difference:
    """Find where `found` leaves `expected`, with the target's logit gap there."""
    shared = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    place = min(len(expected), len(found)) if shared is None else shared
    context = torch.tensor([[*prompt, *expected[:place]]], device=engine.target.input_device)
    best = engine.target.model(input_ids=context).logits[0, -1].float().topk(2)
    token = [text[place] if place < len(text) else None for text in (expected, found)]
    gap = float(best.values[0] - best.values[1])
    return Difference(row, place, *token, best=tuple(best.indices.tolist()), gap=gap)
