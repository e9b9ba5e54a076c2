"""Drafting with an EAGLE-3 head: the pairs it reads, and where.

As in EAGLE-1/2, pair j is (the target's features at token j, token j + 1), stored in slot j at position j,
and a tree node of depth i >= 1 is read at position L - 1 + i; see eagle_drafter. Features are taps, or the
state after the target's last norm. They are projected once, for committed pairs; below the root, the head's
own states stand in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import within_training, within_window
from eagle_fsd.drafting.draft_vocabulary import OwnTokens
from eagle_fsd.drafting.drafter import Embedder, Needs, Seen
from eagle_fsd.drafting.eagle3.graph import Eagle3Graph
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_drafter import (
    HeadVerifier,
    embed_prompts,
    new_pairs,
    require_equal,
    require_float32,
)
from eagle_fsd.drafting.tree_growth import NO_LIMIT, BeamDrafter, level_positions, read_view, slots_per_row
from eagle_fsd.files.fingerprints import digest_json, digest_weights
from eagle_fsd.runtime.grouped_attention import grouped_attention
from eagle_fsd.runtime.kv_cache import KVCache, commit_in_chunks
from eagle_fsd.runtime.openvino.block_cache import BlockCache
from eagle_fsd.runtime.step_recorder import EAGER, Stepper


class TappedVerifier(HeadVerifier, Protocol):
    """A TargetModel whose layers can be read."""

    def admit_taps(self, taps: tuple[int, ...]) -> None: ...


class Eagle3Vocabulary:
    """Embeddings and logits for an EAGLE-3 head: its own, or the target's where its file has none.

    graph: computes the logits instead of torch.
    """

    def __init__(self, head: Eagle3Head, target: HeadVerifier, graph: Eagle3Graph | None = None) -> None:
        self.head, self.target, self.graph = head, target, graph

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [..., d] of tokens [...] of the whole vocabulary, unscaled."""
        own = self.head.embed_tokens
        return self.target.embed(tokens) if own is None else own(tokens)

    def logits(self, states: Tensor) -> Tensor:
        """Return the draft's logits [..., W] float32 of states [..., d].

        The target's own scaling and soft-cap are not applied: the head was trained on their results.
        """
        hidden = self.head.readout(states)
        lm_head = self.head.lm_head if self.graph is None else self.graph.lm_head
        logits = self.target.raw_logits(hidden).to(states.device) if lm_head is None else lm_head(hidden)
        return logits.float() * self.head.config.logit_scale


@dataclass(frozen=True)
class Eagle3Spec:
    """A way to draft with one EAGLE-3 head.

    vocabulary: its embeddings and logits. graph: computes the head instead of torch.
    """

    head: Eagle3Head
    vocabulary: Eagle3Vocabulary
    device: torch.device
    stepper: Stepper = EAGER
    graph: Eagle3Graph | None = None
    name: str = "eagle3"
    sparse: ClassVar[bool] = False
    rests: ClassVar[bool] = False
    longest: ClassVar[None] = None

    @classmethod
    def for_target(cls, head: Eagle3Head, target: TappedVerifier) -> Eagle3Spec:
        """Return the spec that drafts for this target with a head on the same device.

        Raises ValueError if the head is for another target, or the target's layers cannot be read.
        """
        require_fit(head, target)
        if target.runtime is not None:
            require_float32(head.dtype, target.runtime)
        target.admit_taps(head.config.taps)
        graph = None if target.runtime is None else Eagle3Graph.of(head, target.runtime)
        return cls(head, Eagle3Vocabulary(head, target, graph), target.device, target.stepper, graph)

    @property
    def network(self) -> Eagle3Head:
        return self.head

    @property
    def tokens(self) -> int:
        return self.head.config.draft_vocab_size

    @property
    def identity(self) -> str:
        """A digest of the head's weights, its draft vocabulary and the way it is read."""
        weights = digest_weights([*self.head.parameters(), *self.head.buffers()])
        return digest_json(weights, asdict(self.head.config))

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> BeamDrafter:
        slots = slots_per_row(tokens, tree)
        if self.graph is None:
            cache = KVCache(batch, slots, self.device, self.stepper.view)
        else:
            cache = self.graph.layers.new_cache(batch, slots)
        predictor = Eagle3Predictor(self.head, self.vocabulary, cache, self.stepper, self.graph)
        return BeamDrafter(predictor, self.stepper)


class Eagle3Predictor:
    """An EAGLE-3 head as a predictor. Its states are those that one draft step hands to the next."""

    longest = NO_LIMIT
    behind = 1  # no pair ends with a text's first token
    own = None

    def __init__(
        self,
        head: Eagle3Head,
        vocabulary: Eagle3Vocabulary,
        cache: KVCache,
        stepper: Stepper = EAGER,
        graph: Eagle3Graph | None = None,
    ) -> None:
        self.head, self.vocabulary, self.cache, self.graph = head, vocabulary, cache, graph
        self.needs = Needs(features=True, taps=head.config.taps)
        self.drafted = head.draft_tokens
        self.width = head.config.hidden_size
        self._read = stepper.wrap(self._read_pairs, cache)

    def commit(self, seen: Seen, first: bool) -> Tensor:
        """Commit pairs with the target's features and return the states [B, d] at the roots."""
        return self.commit_pairs(*new_pairs(seen, self.cache, first), first, seen.media)

    def commit_pairs(
        self,
        features: Tensor,
        tokens: Tensor,
        counts: Sequence[int],
        first: bool = False,
        media: Embedder | None = None,
    ) -> Tensor:
        """Commit the first counts[row] pairs of features and tokens; see EaglePredictor.commit_pairs."""
        # Prompts have any length, so a recording for one would hardly ever be replayed.
        read = partial(self._read_pairs, media=media) if first else self._read
        return commit_in_chunks(self.cache, read, (features, tokens), counts, first)

    def _read_pairs(
        self, features: Tensor, tokens: Tensor, start: int, media: Embedder | None = None
    ) -> Tensor:
        """Return the states [B, q, d] at pairs [B, q], `start` slots past the committed ones."""
        # Pair j is in slot j, at position j.
        slots, visible, slot_positions = read_view(self.cache, tokens.shape[1], start)
        fc = None if self.graph is None else self.graph.fc
        states = self.head.project(features.to(self.head.dtype), fc)
        embeddings = embed_prompts(tokens, self.vocabulary.embed, media)
        return self.forward(states, embeddings, slots, visible, slot_positions)

    def log_q(self, states: Tensor, own: OwnTokens | None = None) -> Tensor:
        """Return log-probabilities [..., W] at temperature 1 from states [..., d]."""
        return F.log_softmax(self.vocabulary.logits(states.to(self.head.dtype)), dim=-1)

    def step(self, tokens: Tensor, parents: Tensor, level: int, visible: Tensor) -> Tensor:
        """Read a level of pairs: drafted tokens [B, K] with the states at their parents."""
        # The root's pair is committed at position L - 1, so its children, level 1, are at position L.
        positions, slot_positions = level_positions(self.cache, tokens, level)
        embeddings = self.vocabulary.embed(tokens)
        return self.forward(parents.to(self.head.dtype), embeddings, positions, visible, slot_positions)

    def forward(
        self, states: Tensor, embeddings: Tensor, positions: Tensor, visible: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """Run the head on pairs [B, n] under the mask visible [B, n, S]; keys go to the placed slots.

        states, embeddings: [B, n, d].
        """
        windows = self.head.config.windows
        visible = within_training(visible, positions, slot_positions, self.head.config.longest_trained)
        masks = {
            window: within_window(visible, positions, slot_positions, window) if window else visible
            for window in set(windows)
        }

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = masks[windows[number]][:, None]
            return grouped_attention(q, *self.cache.update(k, v, layer_idx=number), mask)

        embeddings = embeddings.to(states.device, states.dtype)
        if self.graph is not None:
            assert isinstance(self.cache, BlockCache)
            in_order = [masks[window] for window in self.graph.windows]
            return self.graph.layers((states, embeddings, positions), in_order, self.cache)
        return self.head(states, embeddings, positions, attend)


def require_fit(head: Eagle3Head, target: HeadVerifier) -> None:
    """Raise ValueError unless the head has the target's sizes."""
    require_equal("target hidden_size", head.config.target_size, target.hidden_size)
    require_equal("vocab_size", head.config.vocab_size, target.vocab_size)
