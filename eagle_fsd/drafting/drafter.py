"""Who proposes trees: the protocol that the decoding loop knows, and plain decoding, which proposes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import DraftTree, root_only


class Drafter(Protocol):
    """Whatever proposes trees for a batch of texts; after every step it is told the truth."""

    def extend(self, features: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
        """Learn counts[row] new pairs: the target's features [B, P, d], the tokens [B, P] after them.

        The first call reads the prompts. Later, 0 is for a row that is done and still in the batch.
        """

    def draft(self, roots: Tensor, config: TreeConfig) -> DraftTree:
        """Propose a tree below roots [B], the last emitted tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""


class Vocabulary(Protocol):
    """The target's two ends: tokens to embeddings [..., d] and features to logits [..., W].

    A TargetModel where the head drafts all tokens, a DraftVocabulary of its tokens where it does not.
    """

    def embed(self, tokens: Tensor) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...


class NoDrafter:
    """Plain decoding: the tree of one node."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def extend(self, features: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
        pass

    def draft(self, roots: Tensor, config: TreeConfig) -> DraftTree:
        return root_only(roots, self.vocab_size)

    def select(self, rows: Sequence[int]) -> None:
        pass
