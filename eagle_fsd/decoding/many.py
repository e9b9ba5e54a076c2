"""Many prompts, some of them at a time: a text that ends gives its place to the next prompt."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from eagle_fsd.core.randomness.streams import Seed, row_streams
from eagle_fsd.core.stats import GenerationStats, Stopwatch
from eagle_fsd.decoding.prompts.prompt_cache import PromptCache
from eagle_fsd.decoding.request import Request, Text, TokenLogprob, interrupt
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.decoding.workspace import settle_seed
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.target.model import TargetModel


@dataclass(frozen=True)
class FinishedText:
    """One text. number: the place of its prompt, counted from 0; copies of a prompt count one by one.

    new_tokens: an end token included. stats: seconds are from the first look at its prompt to its end, while
    others were decoded beside it. logprobs: if they were asked for. failure: why no token could be chosen, if
    its finish_reason is "failed".
    """

    number: int
    new_tokens: list[int]
    stats: GenerationStats
    logprobs: list[TokenLogprob] | None = None
    failure: Exception | None = None

    @classmethod
    def of(cls, text: Text) -> FinishedText:
        logprobs = None if text.top_logprobs is None else text.logprobs
        return cls(text.number, text.new_tokens, text.stats, logprobs, text.failure)


class TextStream:
    """The texts of many prompts: iterating yields each when it ends, so that short ones overtake long ones.

    rows: how many are decoded together. crowded: whether drafts may shrink where a text gets the same
    tokens with any tree; see TreeConfig.for_many. tree, rule, seed: see GenerationOutput. Leaving the loop
    leaves the rest undone: nothing runs between two texts.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterSpec | None,
        request: Request,
        seed: Seed | None,
        rows: int,
        crowded: bool = False,
    ) -> None:
        self.tree, self.rule, greedy = request.tree, request.rule, request.sampling.greedy
        seed = settle_seed(seed, greedy, target.ranks)
        self.seed = None if greedy else seed
        self._watch, self._seconds = Stopwatch(), 0.0
        self._ended: list[GenerationStats] = []  # the sum over texts that have ended, once there are any
        texts = request.texts()
        for text, stream in zip(texts, row_streams(seed, len(texts)), strict=True):
            text.stream = stream
            text.see(target.media)  # now: it may wait for long
        self._pending, self._rows = deque(texts), rows
        self._begun: dict[Text, tuple[float, dict[str, float]]] = {}  # the clock and the watch at that time
        shrinks = crowded and target.device.type == "cpu" and not target.ranks.several
        self._scheduler = Scheduler.for_many(
            target,
            drafter,
            request.tree,
            rows,
            watch=self._watch,
            # A task's examples, or a long system prompt, are read once in any case.
            prefix_tokens=request.prompt_cache or PromptCache(),
            observer=request.observer,
            crowded=request.tree.for_many(rows) if shrinks else None,
        )

    @property
    def busy(self) -> bool:
        """Whether any text has not ended."""
        return bool(self._pending) or self._scheduler.busy

    @property
    def total(self) -> GenerationStats:
        """The sum over all texts that have ended; its seconds are those of all steps so far."""
        total = GenerationStats.total(self._ended)
        total.set_times(self._watch, self._seconds)
        return total

    def __iter__(self) -> Iterator[FinishedText]:
        for ended in self.steps():
            yield from ended

    def steps(self) -> Iterator[list[FinishedText]]:
        """Yield what ends in each step, until all texts have ended."""
        while self.busy:
            yield self.step()

    def step(self) -> list[FinishedText]:
        """Run one step of the texts under way, and return those that ended in it.

        Raises whatever target and drafter raise, NonFiniteLogits included; no text can go on after that.
        """
        start, before = time.perf_counter(), dict(self._watch.seconds)
        waiting = self._scheduler.waiting
        while self._pending and len(waiting) < self._rows:
            self._scheduler.admit(self._pending.popleft())
        begun = list(waiting)
        try:
            emitted = self._scheduler.step()
        finally:
            for text in begun:
                if text not in waiting:
                    self._begun[text] = (start, before)
            self._seconds += time.perf_counter() - start
        return [self._finish(text) for text in emitted if text.done]

    def end(self) -> list[FinishedText]:
        """End all texts and begin no other. Returns those under way, as far as they came.

        This may follow a step that raised, as a Ctrl-C does: those that ended in it are returned as well.
        """
        self._pending.clear()
        self._scheduler.abandon()
        ended = list(self._begun)
        interrupt(ended)
        return [self._finish(text) for text in ended]

    def _finish(self, text: Text) -> FinishedText:
        begun, before = self._begun.pop(text)
        text.stats.set_times(self._watch.since(before), time.perf_counter() - begun)
        self._ended = [GenerationStats.total([*self._ended, text.stats])]
        return FinishedText.of(text)
