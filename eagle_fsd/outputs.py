"""What a generation gives back: a batch's output, or one text as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from eagle_fsd.acceptance import AcceptanceRule
from eagle_fsd.config import TreeConfig
from eagle_fsd.stats import GenerationStats, Stopwatch


@dataclass(frozen=True)
class GenerationOutput:
    """sequences: [B, L + most new tokens], the input as given, then new tokens, right-padded with the pad
    token. new_tokens: the new tokens of each row, an end token included. stats: one GenerationStats per row.
    tree: the draft trees' size, rule: the acceptance rule, both as they were settled; None for the target
    alone.
    """

    sequences: Tensor
    new_tokens: list[list[int]]
    stats: list[GenerationStats]
    tree: TreeConfig | None = None
    rule: AcceptanceRule | None = None


@dataclass(frozen=True)
class BatchStream:
    """A batch as it is made: each of `steps` is what every row emitted in it, nothing once the row is done.

    stats: one per row, live; their seconds are the caller's to take, of the watch and of its own. tree, rule:
    as they were settled.
    """

    steps: Iterator[list[list[int]]]
    stats: list[GenerationStats]
    watch: Stopwatch
    tree: TreeConfig
    rule: AcceptanceRule


class TokenStream:
    """The chunks of one text (token ids, a list per step) as they are made; `stats` is live.

    tree, rule: as they were settled.
    """

    def __init__(self, started: BatchStream) -> None:
        (self.stats,) = started.stats
        self.tree, self.rule = started.tree, started.rule
        self._steps = started.steps
        self._watch = started.watch

    def __iter__(self) -> Iterator[list[int]]:
        seconds = 0.0  # spent here; what the caller does between two chunks is not ours
        try:
            while True:
                start = time.perf_counter()
                chunks = next(self._steps, None)
                seconds += time.perf_counter() - start
                self.stats.set_times(self._watch, seconds)
                if chunks is None:
                    break
                yield chunks[0]
        finally:
            if self.stats.finish_reason is None:
                self.stats.finish_reason = "interrupted"
