"""One batch of texts on a target: prefill, verify a tree in one masked forward, keep a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eagle_fsd.core.tree import DraftTree, ancestors, visible_slots
from eagle_fsd.runtime.kv_cache import KVCache, SavedRow
from eagle_fsd.runtime.ranks import Ranks
from eagle_fsd.runtime.step_recorder import Stepper
from eagle_fsd.target.media.table import MediaTable


class MaskedForward(Protocol):
    """The part of a model that a session uses: of a TargetModel, or of one that is being admitted."""

    device: torch.device
    stepper: Stepper
    ranks: Ranks
    hidden_size: int
    max_positions: int
    vocab_size: int
    media: MediaTable

    @property
    def dtype(self) -> torch.dtype: ...

    def features(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slot_positions: Tensor,
        cache: KVCache,
        relation: Tensor | None = None,
    ) -> Tensor: ...

    def tapped_features(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slot_positions: Tensor,
        cache: KVCache,
        relation: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]: ...

    def logits(self, features: Tensor) -> Tensor: ...

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...


class TargetSession:
    """One batch of texts on a target: the committed tokens, and the tree that is being verified.

    taps: the layers whose states are its features, side by side; see target.taps. Empty: the state after the
    last norm is.
    """

    def __init__(self, target: MaskedForward, batch: int, capacity: int, taps: tuple[int, ...] = ()) -> None:
        self.target, self.ranks = target, target.ranks
        self.taps = taps
        self.cache = target.new_cache(batch, capacity)
        self._forward = target.stepper.wrap(self._verify, self.cache)
        self._compact = target.stepper.wrap(self.cache.compact, self.cache, repeatable=False, by_view=False)

    def another(self, batch: int, capacity: int) -> TargetSession:
        """Return a session of its own on this target."""
        return TargetSession(self.target, batch, capacity, self.taps)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def media(self) -> MediaTable:
        return self.target.media

    @property
    def cache_bytes(self) -> int:
        """The bytes that keys and values have been given, used or not."""
        return self.cache.nbytes

    def prefill(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Read the first lengths[row] of right-padded tokens [B, L] behind what is there; return features.

        Features are [B, L, D], where D is d, or taps * d. Tokens past a row's length are padding: their
        features mean nothing, and their slots are overwritten.
        """
        batch, width = tokens.shape
        size = self.target.hidden_size * max(len(self.taps), 1)
        parts = [torch.empty(batch, 0, size, dtype=self.target.dtype, device=self.target.device)]
        for start in range(0, width, self.cache.widest):
            chunk = tokens[:, start : start + self.cache.widest]
            self.cache.reserve(chunk.shape[1], offset=start, exact=True)
            slots = self.cache.place(chunk.shape[1], offset=start)  # [B, q]
            self.cache.expect_prompt(lengths, start, chunk.shape[1])
            slot_positions = torch.arange(self.cache.view, device=slots.device).expand(batch, -1)
            visible = slot_positions[:, None, :] <= slots[:, :, None]
            parts.append(self._run(chunk, slots, visible, slot_positions)[1])
        self.cache.advance(lengths)
        return torch.cat(parts, dim=1)

    def logits(self, features: Tensor) -> Tensor:
        """Return the target's logits [B, n, V] float32 of features [B, n, d]."""
        return self.target.logits(features)

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Run one forward over all nodes under the tree mask.

        Returns logits [B, N, V] float32 and features [B, N, D], see `prefill`.
        """
        self.cache.reserve(tree.tokens.shape[1])
        self.cache.expect_tree(tree.parents, tree.depths)
        logits, features, self.cache.slots = self._forward(tree.tokens, tree.parents, tree.depths, tree.depth)
        return logits, features

    def _verify(
        self, tokens: Tensor, parents: Tensor, depths: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, features and the nodes' slots [B, N]; see DraftTree."""
        cache, view = self.cache, self.cache.view
        slots = cache.place(tokens.shape[1])  # [B, N]
        # A node past the last position is never emitted, but a learned embedding must not be read out of
        # range.
        positions = (cache.lengths[:, None] + depths).clamp(max=self.target.max_positions - 1)
        relation = ancestors(parents, depth)
        visible = visible_slots(cache.lengths, slots, relation, view)
        slot_positions = torch.arange(view, device=slots.device).expand(len(slots), -1)
        slot_positions = slot_positions.scatter(1, slots, positions)
        last, features = self._run(tokens, positions, visible, slot_positions, relation)
        return self.target.logits(last), features, slots

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slot_positions: Tensor,
        relation: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the states after the last norm and the features; see TargetModel.features."""
        inputs = (tokens, positions, visible, slot_positions, self.cache, relation)
        if self.taps:
            return self.target.tapped_features(*inputs, self.taps)
        last = self.target.features(*inputs)
        return last, last

    def keep(self, path: Tensor, counts: Sequence[int]) -> None:
        """Commit counts[row] nodes of the path [B, P] (node indices, -1 padded), root included."""
        self._compact(path, self.cache.slots)
        self.cache.advance(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        self.cache.select(rows)

    def replace(self, rows: Sequence[int], other: TargetSession) -> None:
        """Replace these rows, one by one, by the texts of another session."""
        self.cache.replace(rows, other.cache)

    def save_row(self, row: int, count: int) -> SavedRow:
        """Return a copy of what is stored of a row's first `count` tokens."""
        return self.cache.save_row(row, count)

    def load_row(self, row: int, saved: SavedRow, count: int) -> None:
        """Let a row hold the first `count` tokens of a saved row, as if it had read them."""
        self.cache.load_row(row, saved, count)
