"""Drafting with a second language model: which tokens it reads, and where.

Token t of a text is in slot t of the model's cache, at position t, from the text's first token on. The last
token of a text, the root of its next tree, is committed with the others, so a node of depth i below a root at
position L is read at position L + i. After a step, the tokens that it emitted are read again as text, over
whatever the tree left behind it. A predictor's state is the model's last hidden state at a token.

The model may be any that can be a target: another one with the same vocabulary, or the target's own first
layers. Its vocabulary may be padded differently: only tokens that both have are drafted, and logits are cut
to them before the softmax. Shapes: B rows, K top_k, d hidden size, S cache slots, W drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.drafting.draft_vocabulary import OwnTokens
from eagle_fsd.drafting.drafter import Needs, Seen, Verifier
from eagle_fsd.drafting.tree_growth import BeamDrafter, level_positions, read_view, slots_per_row
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.runtime.kv_cache import KVCache, commit_in_chunks
from eagle_fsd.runtime.step_recorder import EAGER, Stepper


class Graphs(Protocol):
    """paged: whether forwards see all slots before their own, whatever their mask says."""

    paged: bool


class LanguageModel(Protocol):
    """The part of a TargetModel that drafting with it uses.

    max_positions: the longest text that it reads. recurrent: whether layers have states. flash: whether a run
    of text may be read without a mask. graphs: what computes it in place of torch.
    """

    device: torch.device
    stepper: Stepper
    hidden_size: int
    vocab_size: int
    max_positions: int
    recurrent: bool
    flash: bool

    @property
    def graphs(self) -> Graphs | None: ...

    @property
    def held(self) -> nn.Module: ...

    @property
    def weight_format(self) -> str: ...

    def identity(self, name: str) -> dict[str, str]: ...

    def features(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, slot_positions: Tensor, cache: KVCache
    ) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...


@dataclass(frozen=True)
class DraftModelSpec:
    """A way to draft with a language model.

    tokens: how many it proposes: the ids below it, which target and draft both have. some: whether the target
    has more. whole_trees: whether the target needs all trees of a config to have the same shapes.
    """

    draft: LanguageModel
    tokens: int
    some: bool = False
    whole_trees: bool = False
    name: str = "draft-model"
    sparse: ClassVar[bool] = False
    rests: ClassVar[bool] = False

    @classmethod
    def for_target(cls, draft: LanguageModel, target: Verifier, name: str = "draft-model") -> DraftModelSpec:
        """Return the spec that drafts for a target. That their tokens mean the same is up to the caller.

        Raises ValueError for graphs that attend over pages: they would show every node all others above it.
        """
        if draft.graphs is not None and draft.graphs.paged:
            raise ValueError(
                "the draft model's graphs attend over pages, which knows no tree: make its TargetModel with "
                "pages=False"
            )
        tokens = min(draft.vocab_size, target.vocab_size)
        return cls(draft, tokens, tokens < target.vocab_size, target.stepper.records, name)

    @property
    def network(self) -> nn.Module:
        return self.draft.held

    @property
    def longest(self) -> int:
        return self.draft.max_positions

    @property
    def identity(self) -> str:
        """A digest of the model's weights, of their format and of the tokens that it proposes."""
        weights = self.draft.identity("")
        return f"{self.name}-{digest_json(weights, self.draft.weight_format, self.tokens)}"

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> BeamDrafter:
        cache = self.draft.new_cache(batch, slots_per_row(tokens, tree))
        predictor = DraftModelPredictor(self, cache, self.draft.stepper)
        return BeamDrafter(predictor, self.draft.stepper, self.whole_trees)


class DraftModelPredictor:
    """A language model as a predictor. It needs nothing of the target but its text."""

    behind = 0
    own = None

    def __init__(self, spec: DraftModelSpec, cache: KVCache, stepper: Stepper = EAGER) -> None:
        self.draft, self.tokens, self.cache = spec.draft, spec.tokens, cache
        self.needs = Needs(whole=cache.whole)
        self.drafted = torch.arange(spec.tokens, device=cache.device) if spec.some else None
        self.width = spec.draft.hidden_size
        self.longest = spec.draft.max_positions
        self._read = stepper.wrap(self._read_text, cache)

    def commit(self, seen: Seen, first: bool) -> Tensor:
        """Read committed text, the root included, and return the states [B, d] at the roots."""
        # A target with more tokens may write one that the model does not know. Any will do in its place.
        tokens = seen.tokens.to(self.cache.device).clamp(max=self.draft.vocab_size - 1)
        # Prompts have any length, so a recording for one would hardly ever be replayed.
        read = self._read_text if first else self._read

        def read_what_counts(tokens: Tensor, start: int) -> Tensor:
            self.cache.expect_prompt(seen.counts, start, tokens.shape[1])
            if min(self.cache.row_lengths) + start < self.longest:
                return read(tokens, start)
            # Nothing is drafted for any of these texts any more, however they go on.
            return torch.zeros(*tokens.shape, self.width, device=tokens.device)

        return commit_in_chunks(self.cache, read_what_counts, (tokens,), seen.counts, first)

    def _read_text(self, tokens: Tensor, start: int) -> Tensor:
        """Return the states [B, q, d] at tokens [B, q], `start` slots past the committed ones."""
        slots, visible, slot_positions = read_view(self.cache, tokens.shape[1], start)
        positions = slots.clamp(max=self.longest - 1)  # nothing is drafted past it, and it must not fail
        return self.draft.features(tokens, positions, visible, slot_positions, self.cache)

    def log_q(self, states: Tensor, own: OwnTokens | None = None) -> Tensor:
        """Return log-probabilities [..., W] at temperature 1, float32, from states [..., d]."""
        # Cut first, so that q sums to 1 over the tokens that can be drafted.
        return F.log_softmax(self.draft.logits(states)[..., : self.tokens], dim=-1)

    def step(self, tokens: Tensor, parents: Tensor, level: int, visible: Tensor) -> Tensor:
        """Read a level of drafted tokens [B, K]; the model's cache has all that is known of their parents."""
        positions, slot_positions = level_positions(self.cache, tokens, level)
        if self.draft.recurrent:
            self.cache.expect_level(self._parents_of(visible, level) if level > 1 else None)
        if self.draft.flash:
            self.cache.span = None  # flash-attn would take a level for a run of text, without its mask
        positions = positions.clamp(max=self.longest - 1)
        return self.draft.features(tokens, positions, visible, slot_positions, self.cache)

    def _parents_of(self, visible: Tensor, level: int) -> Tensor:
        """Return the place [B, K] of each token's parent in the level before. visible: see `step`."""
        top_k = visible.shape[1]
        above = torch.arange((level - 2) * top_k, (level - 1) * top_k, device=visible.device)
        slots = (self.cache.lengths[:, None] + above)[:, None].expand(-1, top_k, -1)
        return visible.gather(2, slots).long().argmax(2)
