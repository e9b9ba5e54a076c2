"""Texts that are kept from one call to the next, so that what the turns of a chat begin with is read once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.devices import autocast_dtype
from eagle_fsd.decoding.prompts.prefix_cache import PrefixCache
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.files.fingerprints import state_of
from eagle_fsd.target.model import TargetModel


class PromptCache:
    """Kept texts for `GenerationOptions.prompt_cache`, which is an argument of `EagleFSD.generate` as well.

    A call with one text goes on from the kept text that its prompt begins most like, and keeps its own when
    it ends; so does each text of `generate_many`. What is kept is of one target, one way to draft, one
    autocast and one state of the weights: others that use the cache begin anew. Call `clear` after a change
    of weights that torch does not count: through `.data`, or of those that were made in inference mode.

    tokens: how many the kept texts may have together. The least recently used go first. Each takes the
    memory of its keys and values, and of recurrent states, which count as the tokens that take as much. The
    models are not kept. Raises ValueError if it is negative.
    Copies have as many tokens and hold no text, and so has what is unpickled.
    """

    def __init__(self, tokens: int = 8192) -> None:
        require_integer("tokens", tokens, 0, "0 keeps no text")
        self.tokens = tokens
        self._lock = threading.Lock()
        # Weak references, mostly: models are not kept for their texts' sake.
        self._target: Callable[[], TargetModel | None] = lambda: None
        self._drafter: Callable[[], DrafterSpec | None] = lambda: None
        self._way: Hashable = None
        self._texts = PrefixCache(tokens)

    def __repr__(self) -> str:
        return f"PromptCache(tokens={self.tokens})"

    def __reduce__(self) -> tuple[type[PromptCache], tuple[int]]:
        return type(self), (self.tokens,)

    def clear(self) -> None:
        """Drop all texts, and the memory that they take."""
        with self._lock:
            self._texts = PrefixCache(self.tokens)

    def texts_of(self, target: TargetModel, drafter: DrafterSpec) -> PrefixCache:
        """Return the kept texts of these models, and drop those of others."""
        with self._lock:
            weights = None if target.ranks.several else state_of((target.held, drafter.network))
            way = (autocast_dtype(target.device), weights)
            others = self._target() is not target or self._drafter() != drafter
            if others or self._way != way:
                self._texts, self._way = PrefixCache(self.tokens), way
                # A spec without weights may be made for one call, and an equal one for the next.
                self._target, light = weakref.ref(target), drafter.network is None
                self._drafter = (lambda: drafter) if light else weakref.ref(drafter)
            return self._texts
