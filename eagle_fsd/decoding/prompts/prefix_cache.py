"""Texts that have ended are kept for a while, so that a prompt that begins like one is read from there on.

What is kept is a copy of the text's slots in the caches of target and drafter. It is the state between two
steps: a text of n tokens, the last of which is a root that the target has not read. Slots of the first tokens
depend on these tokens alone, so a prompt may go on from any of them. States of recurrent layers are those at
the end, so with them it may go on from there alone. So where such a prompt parts from another text, what has
been read is kept as a text of its own: others are likely to part there too (Marconi, MLSys 2025).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle_fsd.core.checks import one_line, require_integer
from eagle_fsd.core.devices import ran_out_of_memory
from eagle_fsd.decoding.prompts.prefill import LISTED, SHARED, PromptReader
from eagle_fsd.drafting.drafter import Drafter, Resumable
from eagle_fsd.runtime.kv_cache import SavedRow
from eagle_fsd.target.session import TargetSession

logger = logging.getLogger(__name__)
LEAST = 16  # tokens that a prompt must share with a kept text; reading fewer is faster than copying them


@dataclass(frozen=True, eq=False)
class KeptText:
    """A text that has ended. tokens: [n] int64. slots: that it takes of a cache, and those for its states.

    drafter: None if its drafter reads every prompt at once and needs only tokens.
    """

    tokens: Tensor
    slots: int
    target: SavedRow
    drafter: tuple[SavedRow, ...] | None

    @cached_property
    def beginning(self) -> list[int]:
        """The tokens that a prompt has to share at least."""
        return self.tokens[:LEAST].tolist()

    @property
    def whole(self) -> bool:
        """Whether a prompt can go on only from the text's end."""
        return any(saved.whole for saved in (self.target, *(self.drafter or ())))

    def load(self, start: int, tokens: Tensor, session: TargetSession, drafter: Drafter) -> PromptReader:
        """Let row 0 hold the first `start` tokens of a prompt [1, L], and return a reader of the others."""
        session.load_row(0, self.target, start - 1)
        if self.drafter is not None and isinstance(drafter, Resumable):
            drafter.load_row(0, self.drafter, session.media.words(tokens[0, :start]).tolist())
        return PromptReader(tokens, session, drafter, start)


class PrefixCache:
    """Kept texts, in the order of their last use. Several threads may use them.

    limit: the slots that all of them may take; 0 keeps none. read_anyway: how many tokens at the end of a
    prompt are read in any case: one, or those whose next-token lists the drafter needs. whole: whether target
    or drafter can go on only from a text's end. states: the slots that its states take, once that is known.
    """

    def __init__(self, limit: int, read_anyway: int = 1) -> None:
        require_integer("prefix_tokens", limit, 0, "0 keeps no text")
        self.limit, self.read_anyway = limit, read_anyway
        self.whole, self.states = False, 0
        self.texts: list[KeptText] = []
        self._lock = threading.RLock()

    @property
    def slots(self) -> int:
        """The slots that the kept texts take."""
        return sum(kept.slots for kept in self.texts)

    def beginning_like(self, tokens: Sequence[int]) -> list[KeptText]:
        """Return the kept texts that begin with the same LEAST tokens."""
        beginning = list(tokens[:LEAST])
        return [kept for kept in self.texts if kept.beginning == beginning]

    def find(self, prompt: Sequence[int]) -> tuple[KeptText, int] | None:
        """Return the kept text that begins most like a prompt, and how many tokens need not be read.

        None: no text begins with at least LEAST of the prompt's tokens.
        """
        if not (alike := self.beginning_like(prompt)):
            return None
        tokens, best, length = host_tokens(prompt), None, LEAST - 1
        for kept in alike:
            # With states there is one place to go on from, so the drafter then has to do with fewer lists.
            most = len(prompt) - (1 if kept.whole else self.read_anyway)
            agreed = min(count_agreed(kept.tokens, tokens), most)
            if agreed > length and (agreed == len(kept.tokens) or not kept.whole):
                best, length = kept, agreed
        return None if best is None else (best, length)

    def branch(self, prompt: Sequence[int], start: int, others: Iterable[Sequence[int]] = ()) -> int:
        """Return how many first tokens of a prompt are worth keeping as soon as they are read; 0: none.

        It parts from a kept text or from one of `others` there, has SHARED tokens or more in common with it
        beyond the `start` that it goes on from, and cannot go on from that text.
        """
        if not self.whole:
            return 0
        tokens, beginning = host_tokens(prompt), list(prompt[:LEAST])
        texts = [kept.tokens for kept in self.beginning_like(prompt)]
        texts += [host_tokens(other) for other in others if list(other[:LEAST]) == beginning]
        agreed = max((count_agreed(one, tokens) for one in texts), default=0)
        # Different questions often begin with the same few words, from which a third one parts earlier.
        place = agreed - LEAST
        return place if agreed >= start + SHARED and place + self.states <= self.limit else 0

    def use(self, kept: KeptText) -> None:
        """Note that a text is used now. It stays out if another thread has dropped it."""
        with self._lock:
            if any(one is kept for one in self.texts):
                self.texts = [*(one for one in self.texts if one is not kept), kept]

    def read(self, prompt: Sequence[int], session: TargetSession, drafter: Drafter) -> tuple[Tensor, int]:
        """Read a prompt with an empty session of one row, from where it parts from the kept texts.

        Returns its root [1], and how many tokens were not read. Of several ranks, one may have lacked the
        memory to keep a text; all read on from where the last of them has to.
        """
        self.expect(session, drafter)
        tokens = host_tokens(prompt)[None].to(session.cache.device)
        found = self.find(prompt)
        start = 0 if found is None else found[1]
        starts, branches = zip(*session.ranks.gather((start, self.branch(prompt, start))), strict=True)
        start = min(starts)
        if found is not None and found[0].whole and start < max(starts):
            start = 0
        if found is None or not start:
            reader = PromptReader(tokens, session, drafter)
        else:
            self.use(found[0])
            reader = found[0].load(start, tokens, session, drafter)
        if (branch := min(branches)) > start:
            reader.read(branch - 1 - reader.position)
            self.keep(prompt[:branch], branch, self.limit, session, drafter, 0)
        reader.read(len(prompt))
        return tokens[:, -1], start

    def expect(self, session: TargetSession, drafter: Drafter) -> None:
        """Note what target and drafter need of the texts that they go on from."""
        self.read_anyway = LISTED if drafter.needs.next_tokens else 1
        self.whole = session.cache.whole or drafter.needs.whole

    def saves_reading(self, read: Sequence[int], prompts: Sequence[Sequence[int]]) -> bool:
        """Return whether one of these prompts goes on from a prompt that was read, and from no kept text.

        So of texts that arrive together, a long beginning that they share is read once. Where it cannot be
        gone on from, it was kept while it was read; see `branch`.
        """
        if self.whole or not self.limit:
            return False
        found = self.find(read)
        least = SHARED + (0 if found is None else found[1])  # what they share beyond kept texts is worth it
        if len(read) < least:
            return False
        beginning = list(read[:least])
        return any(list(prompt[:least]) == beginning for prompt in prompts)

    def keep(
        self,
        tokens: Sequence[int],
        slots: int,
        room: int,
        session: TargetSession,
        drafter: Drafter,
        row: int,
    ) -> None:
        """Keep a row's text, of these tokens, if there is room for it and other texts can go on from it.

        slots: that it takes, without its states. room: the slots that all kept texts may take now.
        """
        limit = min(self.limit, room)
        if slots + self.states > limit or session.cache.row_lengths[row] != len(tokens) - 1:
            return
        if drafter.needs.features and not isinstance(drafter, Resumable):
            return
        drafted: tuple[SavedRow, ...] | None = None
        try:
            if isinstance(drafter, Resumable) and (drafted := drafter.save_row(row, len(tokens))) is None:
                return
            with self._lock:
                if self.prepare(tokens, slots + self.states, room):
                    saved = session.save_row(row, len(tokens) - 1)
                    # Recurrent states may take as much memory as thousands of tokens.
                    self.states = sum(one.slots_of_states for one in (saved, *(drafted or ())))
                    if (slots := slots + self.states) <= limit:
                        self.shrink(limit - slots)
                        self.texts = [*self.texts, KeptText(host_tokens(tokens), slots, saved, drafted)]
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            logger.info("a text is not kept for prompts that begin like it: %s", one_line(error, 100))

    def prepare(self, tokens: Sequence[int], slots: int, room: int) -> bool:
        """Make room for a text, and return whether it is to be added.

        room: the slots that all kept texts may take now. A text that another one begins with adds nothing,
        unless only the end of that one can be gone on from.
        """
        limit = min(self.limit, room)
        if slots > limit or len(tokens) <= LEAST:
            return False
        new = host_tokens(tokens)
        agreed = {kept: count_agreed(kept.tokens, new) for kept in self.beginning_like(tokens)}
        for kept, count in agreed.items():
            if count == len(new) and (not kept.whole or count == len(kept.tokens)):
                self.use(kept)
                return False
        self.texts = [one for one in self.texts if one.whole or agreed.get(one, 0) < len(one.tokens)]
        self.shrink(limit - slots)
        return True

    def shrink(self, slots: int) -> None:
        """Drop texts, the least recently used first, until the others take at most this many slots."""
        with self._lock:
            while self.texts and self.slots > slots:
                self.texts = self.texts[1:]


def host_tokens(tokens: Sequence[int]) -> Tensor:
    """Return tokens as a tensor [n] int64, which is compared faster than a list."""
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")


def count_agreed(one: Tensor, other: Tensor) -> int:
    """Return how many of the first tokens of two texts are the same."""
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero()
    return int(differ[0, 0]) if len(differ) else shorter
