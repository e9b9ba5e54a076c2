"""How much of the caches texts may take, counted in slots: one token's keys and values in target and drafter.

Caches are rectangles: every row of a batch has as many slots as its longest text may need. So that is what is
counted, and not the sum of what the texts need. A target's states are in every row, and count as the slots
that take as much memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.request import Text
from eagle_fsd.drafting.tree_growth import slots_per_row


class CacheBudget:
    """A limit on slots. limit: None: there is none. block: slots that are allocated together.

    tree: of every text; a row needs slots for its nodes and for their growth. states: the slots of a row's.
    """

    def __init__(self, limit: int | None, block: int, tree: TreeConfig, states: int = 0) -> None:
        if limit is not None:
            require_integer("cache_tokens", limit, 1, "None sets no limit")
        self.limit, self.block, self.tree, self.states = limit, block, tree, states

    def of_tokens(self, tokens: int) -> int:
        """Return the slots that are allocated for this many tokens."""
        return -(-tokens // self.block) * self.block

    def of_text(self, text: Text) -> int:
        """Return the slots of a text at its longest."""
        return self.of_tokens(slots_per_row(longest(text), self.tree)) + self.states

    def of_batch(self, texts: Sequence[Text]) -> int:
        """Return the slots of a batch of these texts at their longest."""
        return len(texts) * max(map(self.of_text, texts), default=0)

    def of_batches(self, active: Sequence[Text], joining: Sequence[Text]) -> int:
        """Return the slots of a batch of `active` texts and of `joining` ones that are about to join it.

        Joining texts have a cache of their own until they join. With no active text it becomes the batch's.
        """
        together = self.of_batch([*active, *joining])
        return together + self.of_batch(joining) if active else together

    def of_batches_now(self, batch: Batch | None, joining: Sequence[Text], first: Sequence[Text] = ()) -> int:
        """Return the slots that `of_batches` counts, from the sizes that the batch's cache has right now.

        batch: None if there is none with an unfinished text. first: texts that join it before `joining` ones.
        """
        if batch is None:
            return self.of_batches(first, joining)
        rows = max(batch.target.cache.rows, len(batch.active) + len(first) + len(joining))
        longest_row = max(map(self.of_text, [*batch.texts, *first, *joining]))
        now = batch.target.cache.capacity + self.states
        return rows * max(now, longest_row) + self.of_batch(joining)

    def of_overtaking(self, batch: Batch | None, first: Sequence[Text], last: Sequence[Text]) -> int:
        """Return the most slots while `first` texts overtake `last` ones, whose prompts are being read.

        That is when the former join the batch, the latter's cache beside it, or when the latter do.
        """
        joined = self.of_batches_now(batch, first) + self.of_batch(last)
        return max(joined, self.of_batches_now(batch, last, first))

    def require(self, text: Text) -> None:
        """Raise ValueError for a text that does not fit on its own."""
        if self.limit is not None and (slots := self.of_text(text)) > self.limit:
            raise ValueError(
                f"prompt {text.number} has {len(text.prompt)} tokens and may get {text.limit} more, so that "
                f"it needs {slots} slots of the cache: cache_tokens allows {self.limit}; shorten the prompt, "
                "ask for fewer tokens or raise cache_tokens"
            )


def longest(text: Text) -> int:
    """Return the most tokens that a text may have, its prompt included."""
    return len(text.prompt) + text.limit
