"""Who proposes trees: what the decoding loop and the engine know of a drafter, and plain decoding.

A `DrafterSpec` says what a way to draft is, before there is any text; the `Drafter` that it makes drafts for
one batch of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import DraftTree, root_only


@dataclass(frozen=True)
class Needs:
    """What a drafter wants to see of the target beside its tokens.

    features: the hidden state behind the target's last norm, at every token.
    """

    features: bool = False


@dataclass(frozen=True)
class Seen:
    """Text that the target has committed, as a drafter is shown it.

    tokens: [B, P] int64, right-padded: at first each whole prompt from its first token on, then what each
    step emitted. A row's last token is its next root. counts: the tokens of each row.
    features: [B, P, d], or None where the drafter does not need them. features[:, j] is the target's feature
    of the token before tokens[:, j], which is what tokens[:, j] was chosen by; zero for a text's first token.
    """

    tokens: Tensor
    counts: Sequence[int]
    features: Tensor | None = None


class Drafter(Protocol):
    """Proposes trees for one batch of texts. After every step it is shown what the target committed."""

    @property
    def needs(self) -> Needs: ...

    @property
    def rows(self) -> int:
        """How many texts it has memory for."""

    def begin(self, seen: Seen) -> None:
        """Read whole prompts, after `make` or `reset`."""

    def extend(self, seen: Seen) -> None:
        """Read what a step emitted; a count of 0 is a row that is done and still in the batch."""

    def draft(self, roots: Tensor, config: TreeConfig) -> DraftTree:
        """Propose a tree below roots [B], each text's last token."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        """Put the texts of another drafter of the same spec, one for each, in the place of these rows."""

    def reset(self, longest: int, tree: TreeConfig) -> None:
        """Forget the texts. longest: the most tokens that one of the next texts may come to."""


class DrafterSpec(Protocol):
    """A way to draft for one target.

    name: its kind, for reports. tokens: how many tokens it can propose, which bounds a tree's top_k.
    trained_positions: the longest text that it was trained on; None where there is no such bound. network:
    its weights, None if it has none.
    """

    @property
    def name(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    @property
    def trained_positions(self) -> int | None: ...

    @property
    def network(self) -> nn.Module | None: ...

    @property
    def identity(self) -> str | None:
        """Tell it from others of its kind, as JSON can hold it: a digest of its weights."""

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> Drafter:
        """Make a drafter for `batch` texts, with room for texts of this many tokens at first."""


class NoDrafter:
    """Plain decoding: every tree is a root alone. It is its own spec, for it remembers nothing of a text."""

    name = "none"
    needs = Needs()
    trained_positions = None
    network = None
    identity = None

    def __init__(self, vocab_size: int, rows: int = 0) -> None:
        self.tokens = vocab_size
        self.rows = rows

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> NoDrafter:
        return NoDrafter(self.tokens, batch)

    def begin(self, seen: Seen) -> None:
        pass

    def extend(self, seen: Seen) -> None:
        pass

    def draft(self, roots: Tensor, config: TreeConfig) -> DraftTree:
        return root_only(roots, self.tokens)

    def select(self, rows: Sequence[int]) -> None:
        pass

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        pass

    def reset(self, longest: int, tree: TreeConfig) -> None:
        pass
