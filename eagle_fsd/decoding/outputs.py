"""What a generation gives back: a batch's output, or one text as a stream of chunks."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.sampling import Seed
from eagle_fsd.core.stats import GenerationStats, Stopwatch


@dataclass(frozen=True)
class GenerationOutput:
    """sequences: [B, L + most new tokens], the input as given, then new tokens, right-padded with the pad
    token. new_tokens: the new tokens of each row, an end token included. stats: one GenerationStats per row.
    tree: the draft trees' size, rule: the acceptance rule, both as they were settled; None for the target
    alone. seed: what gives the same texts again, drawn where none was given; None if nothing was sampled.
    """

    sequences: Tensor
    new_tokens: list[list[int]]
    stats: list[GenerationStats]
    tree: TreeConfig | None = None
    rule: AcceptanceRule | None = None
    seed: Seed | None = None


@dataclass(frozen=True)
class BatchStream:
    """A batch as it is made: each of `steps` is what every row emitted in it, nothing once the row is done.

    stats: one per row, live; their seconds are the caller's to take, of the watch and of its own. tree, rule,
    seed: as they were settled; see GenerationOutput. `close()` it, or use it in a `with`, to end it early.
    """

    steps: Generator[list[list[int]]]
    stats: list[GenerationStats]
    watch: Stopwatch
    tree: TreeConfig
    rule: AcceptanceRule
    seed: Seed | None = None

    def __post_init__(self) -> None:
        _suspended.add(self.steps)

    def close(self) -> None:
        """Free the memory of the texts; there are no further steps."""
        close_quietly(self.steps)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_quietly(steps: Generator[object]) -> None:
    """Close a generator; one that another thread is in goes on until its next step."""
    with contextlib.suppress(ValueError):
        steps.close()


# Steps that are still suspended when the interpreter exits are closed while torch is there: left to
# themselves, they would run their last lines among modules that are half gone.
_suspended: weakref.WeakSet[Generator[object]] = weakref.WeakSet()


@atexit.register
def _close_suspended() -> None:
    for steps in list(_suspended):
        close_quietly(steps)


class TokenStream:
    """The chunks of one text (token ids, a list per step) as they are made; `stats` is live.

    tree, rule, seed: as they were settled; see GenerationOutput. A loop that is left ends the text; so do
    `close()` and a `with`.
    """

    def __init__(self, started: BatchStream) -> None:
        (self.stats,) = started.stats
        self.tree, self.rule, self.seed = started.tree, started.rule, started.seed
        self._started = started

    def close(self) -> None:
        """Free the memory of the text; there are no further chunks."""
        self._started.close()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[int]]:
        seconds = 0.0  # spent here; what the caller does between two chunks is not ours
        try:
            while True:
                start = time.perf_counter()
                chunks = next(self._started.steps, None)
                seconds += time.perf_counter() - start
                self.stats.set_times(self._started.watch, seconds)
                if chunks is None:
                    break
                yield chunks[0]
        finally:
            self.close()
            if self.stats.finish_reason is None:
                self.stats.finish_reason = "interrupted"
