"""The outputs of a generation: a whole batch, or one text as a stream of chunks."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.core.checks import format_value
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.randomness.streams import Seed
from eagle_fsd.core.stats import GenerationStats, Stopwatch
from eagle_fsd.decoding.request import Text, TokenLogprob, interrupt


@dataclass(frozen=True, eq=False)  # a tensor has no single truth value to compare
class GenerationOutput:
    """The texts of a batch, and how they were made.

    sequences: [B, L + most new tokens], the input as given, then the new tokens, right-padded with the pad
    token. new_tokens: the new tokens of each row, an end token included. stats: one GenerationStats per row.
    tree, rule: the size of the draft trees and the acceptance rule that were used; None for the target alone.
    seed: the seed that gives the same texts again, also if it was drawn; None if nothing was sampled.
    logprobs: of each row's new tokens, if they were asked for; see GenerationOptions. An output equals itself
    alone: compare its fields.
    """

    sequences: Tensor
    new_tokens: list[list[int]]
    stats: list[GenerationStats]
    tree: TreeConfig | None = None
    rule: AcceptanceRule | None = None
    seed: Seed | None = None
    logprobs: list[list[TokenLogprob]] | None = None

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        new_tokens: list[list[int]],
        stats: list[GenerationStats],
        pad_token_id: int,
        **settled: Any,
    ) -> GenerationOutput:
        """Put inputs [B, L] and new tokens together, of which each input may have several rows."""
        added = pad_right(new_tokens, pad_token_id).to(input_ids.device)
        input_ids = input_ids.repeat_interleave(len(added) // len(input_ids), dim=0)
        return cls(torch.cat((input_ids, added), dim=1), new_tokens, stats, **settled)


@dataclass(frozen=True)
class BatchStream:
    """A batch while it is made. Each step yields the tokens of every row, none once the row is done.

    texts: by row. watch: the seconds of its phases. tree, rule, seed: see GenerationOutput. Call `close()`,
    or use a `with`, to end early. ended: is set then, for a step that runs in another thread.
    """

    steps: Generator[list[list[int]]]
    texts: list[Text]
    watch: Stopwatch
    tree: TreeConfig
    rule: AcceptanceRule
    seed: Seed | None = None
    ended: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        _suspended.add(self.steps)

    @property
    def stats(self) -> list[GenerationStats]:
        """One per row, updated at every step except for the seconds, which the caller sets."""
        return [text.stats for text in self.texts]

    @property
    def logprobs(self) -> list[list[TokenLogprob]] | None:
        """Those of the tokens so far, by row, if they were asked for; see GenerationOptions."""
        asked = any(text.top_logprobs is not None for text in self.texts)
        return [text.logprobs for text in self.texts] if asked else None

    def close(self) -> None:
        """End the texts and free their memory, after the step that another thread may be running."""
        self.ended.set()
        if close_quietly(self.steps):
            interrupt(self.texts)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_quietly(steps: Generator[object]) -> bool:
    """Close a generator, unless another thread is running it. Return whether it is closed."""
    with contextlib.suppress(ValueError):
        steps.close()
        return True
    return False


# Generators that are still suspended when the interpreter exits are closed while torch is still loaded.
# Otherwise their last lines would run after modules were torn down.
_suspended: weakref.WeakSet[Generator[object]] = weakref.WeakSet()


@atexit.register
def _close_suspended() -> None:
    for steps in list(_suspended):
        close_quietly(steps)


class Streamer(Protocol):
    """Hugging Face's BaseStreamer: it is shown the prompt [1, L], then new tokens [n], and then the end."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class Feed:
    """Shows one text to a streamer while it is made; without one it does nothing.

    rows: of the batch. Raises ValueError if there are several, or if it is no streamer.
    """

    def __init__(self, streamer: Streamer | None, input_ids: Tensor, rows: int) -> None:
        if streamer is not None and rows != 1:
            raise ValueError(f"streamer with {rows} texts: it can show one; give one prompt, or stream_batch")
        methods = [getattr(streamer, name, None) for name in ("put", "end")]
        if streamer is not None and not all(map(callable, methods)):
            raise ValueError(
                f"streamer is {format_value(streamer)}: it must have put and end, such as a TextStreamer of "
                "transformers; leave it out"
            )
        self.streamer = streamer
        if streamer is not None:
            streamer.put(input_ids.cpu())

    def put(self, chunks: list[list[int]]) -> None:
        """Show the tokens of a step."""
        if self.streamer is not None and chunks[0]:
            self.streamer.put(torch.tensor(chunks[0], device="cpu"))

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        if self.streamer is not None:
            self.streamer.end()


def run_to_end(
    input_ids: Tensor, started: BatchStream, streamer: Streamer | None, pad_token_id: int
) -> GenerationOutput:
    """Run a batch to its end and return its texts. streamer: is shown the text, of which there is one."""
    feed = Feed(streamer, input_ids, len(started.stats))
    start = time.perf_counter()  # after the tree was chosen, which does not count
    with started, feed:
        for chunks in started.steps:
            feed.put(chunks)
    for stats in started.stats:
        stats.set_times(started.watch, time.perf_counter() - start)
    settled = {name: getattr(started, name) for name in ("tree", "rule", "seed", "logprobs")}
    new_tokens = [text.new_tokens for text in started.texts]
    return GenerationOutput.of(input_ids, new_tokens, started.stats, pad_token_id, **settled)


class TokenStream:
    """The chunks of one text, a list of token ids per step, as they are made.

    stats: updated at every step. tree, rule, seed: see GenerationOutput. Leaving the loop ends the text, and
    so do `close()` and the end of a `with`.
    """

    def __init__(self, started: BatchStream) -> None:
        (self.stats,) = started.stats
        self.tree, self.rule, self.seed = started.tree, started.rule, started.seed
        self._started = started
        self._seconds = 0.0  # spent here, and not by the caller between two chunks

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens so far, if they were asked for; see GenerationOptions."""
        return (self._started.logprobs or [[]])[0]

    def close(self) -> None:
        """End the text and free its memory."""
        self._started.close()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[int]]:
        try:
            while True:
                start = time.perf_counter()
                chunks = next(self._started.steps, None)
                self._seconds += time.perf_counter() - start
                self.stats.set_times(self._started.watch, self._seconds)
                if chunks is None:
                    break
                yield chunks[0]
        finally:
            self.close()
