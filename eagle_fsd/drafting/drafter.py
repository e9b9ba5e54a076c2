"""The drafter protocol, which the decoding loop and the engine use, and plain decoding.

A `DrafterSpec` describes a way to draft, independent of any text. It makes a `Drafter`, which drafts for one
batch of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.long_rows import logsumexp, topk
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import DraftTree, root_only
from eagle_fsd.runtime.kv_cache import SavedRow
from eagle_fsd.runtime.step_recorder import Stepper

NO_HEAD = "none"  # the name that asks for no head


class Verifier(Protocol):
    """The part of a TargetModel that every way to draft for it uses."""

    vocab_size: int
    device: torch.device
    stepper: Stepper


@dataclass(frozen=True)
class Needs:
    """The data of the target that a drafter needs beside its tokens.

    features: the target's hidden state at every token. taps: which ones, side by side: tap i is what enters
    the target's layer i, counted from 0. Empty: the state after its last norm. next_tokens: the length of the
    lists of the target's best next tokens; 0: none. whole: whether it goes on only from all of a saved text,
    because it has states that cannot be taken back.
    """

    features: bool = False
    taps: tuple[int, ...] = ()
    next_tokens: int = 0
    whole: bool = False


@dataclass(frozen=True)
class NextTokens:
    """The target's best next tokens after X tokens: ids [B, X, k], and log_p [B, X, k] at temperature 1."""

    ids: Tensor
    log_p: Tensor

    @classmethod
    def from_logits(cls, logits: Tensor, count: int) -> NextTokens:
        """Return lists of `count` tokens from logits [B, X, V]."""
        values, ids = topk(logits, count)
        return cls(ids, values - logsumexp(logits))


class Embedder(Protocol):
    """Embeds the ids of images and sound as the target reads them; see target.media."""

    def embed(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Seen:
    """Committed text, as it is shown to a drafter.

    tokens: [B, P] int64, right-padded: at first prompts from their first tokens on, whole or in parts (see
    Resumable), later the tokens that a step emitted. A row's last token is its next root. counts: the tokens
    of each row. features: [B, P, d], or [B, P, taps * d], or None if the drafter needs none. features[:, j]
    is the target's feature at the token before tokens[:, j], from which tokens[:, j] was chosen; zero for a
    text's first token. next_tokens: None unless the drafter needs them. At first, the lists after the X
    tokens before each root, in order; a text of fewer tokens has meaningless lists first. Beside taps, from
    which no logits can be read, there are none at first. Later, those at all nodes of the step's tree.
    known: the tokens of each row without padding, if the host has them. ids: [B, P], of prompts with images
    or sound: these have ids of their own where tokens are placeholders, and media embeds them; else None.
    """

    tokens: Tensor
    counts: Sequence[int]
    features: Tensor | None = None
    next_tokens: NextTokens | None = None
    known: Sequence[Sequence[int]] | None = None
    ids: Tensor | None = None
    media: Embedder | None = None

    @cached_property
    def on_host(self) -> Sequence[Sequence[int]]:
        """The tokens of each row without padding; read from the device if the host has none."""
        if self.known is not None:
            return self.known
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.counts, strict=True)]

    def without_padding(self) -> Seen:
        """Return the same without the places that are padding in all rows; one place stays."""
        width = max(1, *self.counts)
        features, ids = (None if one is None else one[:, :width] for one in (self.features, self.ids))
        return replace(self, tokens=self.tokens[:, :width], features=features, ids=ids)


class Drafter(Protocol):
    """Proposes trees for one batch of texts. After every step it is shown the tokens that were committed."""

    @property
    def needs(self) -> Needs: ...

    @property
    def rows(self) -> int:
        """The number of texts that it has memory for."""

    def begin(self, seen: Seen) -> None:
        """Read whole prompts. This is the first call after `make` or `reset`."""

    def extend(self, seen: Seen) -> None:
        """Read the tokens that a step emitted. A count of 0 marks a row that is done and still there."""

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        """Propose a tree below roots [B], the last token of each text.

        noise: what is known of the target's draws below them, None if nothing. A drafter need not use it.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        """Replace these rows, one by one, by the texts of another drafter of the same spec."""

    def reset(self, longest: int, tree: TreeConfig) -> None:
        """Forget the texts, and make all rows ready for new ones, those that have left as well.

        longest: the most tokens that one of the next texts may have.
        """


@runtime_checkable
class Resumable(Drafter, Protocol):
    """A drafter that can read a prompt in parts, and go on from another text's first tokens.

    A drafter without these methods reads every prompt at once.
    """

    def read_on(self, seen: Seen) -> None:
        """Read the next part of prompts of which `begin` or `load_row` gave the first part.

        seen: tokens, counts and features of this part alone, and of the last part the lists before the roots.
        """

    def save_row(self, row: int, tokens: int) -> tuple[SavedRow, ...] | None:
        """Return a copy of what it holds of a row's text of this many tokens, its root included.

        None: another text cannot go on from it.
        """

    def load_row(self, row: int, saved: tuple[SavedRow, ...], tokens: Sequence[int]) -> None:
        """Let a row hold these first tokens of a saved text, of which there is at least one more to read."""


class DrafterSpec(Protocol):
    """A way to draft for one target.

    name: its kind, for reports. tokens: the number of tokens that it can propose, which limits a tree's
    top_k. longest: the longest text that it drafts for; None if there is no such limit.
    network: its weights; None if it has none. sparse: whether its q lists a few tokens of its own at every
    node. rests: whether many of its trees are a root alone, though they might have more nodes.
    """

    @property
    def name(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    @property
    def longest(self) -> int | None: ...

    @property
    def network(self) -> nn.Module | None: ...

    @property
    def sparse(self) -> bool: ...

    @property
    def rests(self) -> bool: ...

    @property
    def identity(self) -> str | None:
        """A digest of its weights, which tells it from other specs of its kind."""

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> Drafter:
        """Make a drafter for `batch` texts, with memory for texts of `tokens` tokens at first."""


class NoDrafter:
    """Plain decoding: every tree is only a root. It remembers no text, so it is its own spec.

    Those of one vocabulary are equal: they draft alike.
    """

    name = "none"
    needs = Needs()
    longest = None
    network = None
    identity = None
    sparse = rests = False

    def __init__(self, vocab_size: int, rows: int = 0) -> None:
        self.tokens = vocab_size
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoDrafter) and other.tokens == self.tokens

    def __hash__(self) -> int:
        return hash(self.tokens)

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> NoDrafter:
        return NoDrafter(self.tokens, batch)

    def begin(self, seen: Seen) -> None:
        pass

    def extend(self, seen: Seen) -> None:
        pass

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        return root_only(roots, self.tokens)

    def select(self, rows: Sequence[int]) -> None:
        pass

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        pass

    def reset(self, longest: int, tree: TreeConfig) -> None:
        pass
