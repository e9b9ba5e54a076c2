"""Texts that are decoded together: who is in the batch, who leaves it, and who joins it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.stats import Stopwatch
from eagle_fsd.decoding.request import Observer, Text
from eagle_fsd.drafting.drafter import Drafter
from eagle_fsd.target.session import TargetSession


class Batch:
    """Texts that are decoded together. Rows leave when their text is done, and others may take their places.

    texts: by row. roots: [B], the newest token of each row, which the target has not read yet. tree: of the
    next step; a smaller tree than the batch was made for may be set between any two steps.
    """

    def __init__(
        self,
        target: TargetSession,
        drafter: Drafter,
        random: RowRandom,
        tree: TreeConfig,
        watch: Stopwatch | None = None,
        accept_step: AcceptStep | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.target, self.drafter, self.random, self.tree = target, drafter, random, tree
        self.watch = watch or Stopwatch()
        self.accept_step = accept_step or AcceptStep()
        self.observer = observer
        self.texts: list[Text] = []
        self.roots: Tensor

    @property
    def active(self) -> list[Text]:
        """The texts that are not done."""
        return [text for text in self.texts if not text.done]

    def shown_tokens(self, row: int) -> list[int]:
        """Return the tokens of a row that its drafter was shown: those of the last step were not."""
        text = self.texts[row]
        return [*text.prompt, *text.new_tokens][: self.target.cache.row_lengths[row] + 1]

    def begin(self, texts: Sequence[Text], roots: Tensor) -> None:
        """Start with these texts. Target and drafter have read their prompts up to the roots [B]."""
        self.texts, self.roots = list(texts), roots

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        for part in (self.target, self.drafter, self.random):
            part.select(rows)
        self.texts = [self.texts[row] for row in rows]
        self.roots = self.roots[on_device(rows, self.roots.device)]

    def join(self, other: Batch) -> None:
        """Take in the texts of another batch on the same models, in the places of finished texts first.

        The other batch has read its prompts and made no step.
        """
        places = [place for place, text in enumerate(self.texts) if text.done][: len(other.texts)]
        if more := len(other.texts) - len(places):
            count = len(self.texts)
            self.select([*range(count), *[0] * more])  # rows to be overwritten
            places += range(count, count + more)
        self.target.replace(places, other.target)
        self.drafter.replace(places, other.drafter)
        self.random.replace(places, other.random)
        self.roots = self.roots.index_copy(0, on_device(places, self.roots.device), other.roots)
        for place, text in zip(places, other.texts, strict=True):
            self.texts[place] = text

    def drop_done_rows(self, few_sizes: bool = False) -> None:
        """Drop rows whose texts are done; see `choose_rows`. few_sizes: as if steps were recorded."""
        kept = choose_rows([text.done for text in self.texts], few_sizes or self.accept_step.stepper.records)
        if len(kept) < len(self.texts):
            self.select(kept)


def choose_rows(done: Sequence[bool], recorded: bool) -> list[int]:
    """Choose the rows of the next step's batch, in order. done: by row, whether its text is done.

    Without recording, only unfinished rows stay. A recording works for one number of rows only, so with
    recording, finished rows stay until half of the batch can leave at once. They commit no token: their texts
    and caches do not grow, and nothing of theirs is emitted or counted.
    """
    active = done.count(False)
    count = active
    if recorded:
        count = len(done)
        while (half := (count + 1) // 2) < count and active <= half:
            count = half
    idle = [row for row, is_done in enumerate(done) if is_done][: count - active]
    return [row for row, is_done in enumerate(done) if not is_done or row in idle]
