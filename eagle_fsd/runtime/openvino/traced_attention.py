"""Attention as it is traced into graphs. It reads the committed keys and values where they lie.

Where our operator TreeAttention can be compiled, it attends, and writes the new keys and values to their
slots by itself. Else `attend_pages` does, an operator of OpenVINO that was made for serving: it writes them
too, and its mask is that of a tree. It has neither soft-caps nor sliding windows, and in it a level of a tree
cannot see a part of the levels above. `attend_blocks` is made of plain products and does all that a model may
ask. Shapes: B rows, H query heads, K key-value heads, g = H / K query heads that share one, n new tokens, D
head size, N blocks of BLOCK slots, P pages of PAGE slots, S slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.block_cache import (
    BLOCK,
    FIRST_ADDRESS,
    BlockCache,
    PagedCache,
    WrittenCache,
)


class Scoring(NamedTuple):
    """How queries and keys make scores: see attend_blocks."""

    scale: float
    softcap: float | None
    sinks: Tensor | None


class TracedAttention:
    """The attention of a traced network: it gives a layer its keys and values, and takes its new ones.

    masks: one for each kind, to be handed to `attend`. members: each layer's committed (keys, values).
    """

    def __init__(self, masks: Sequence[Tensor], members: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.masks, self.members = list(masks), members
        self.new: dict[int, tuple[Tensor, Tensor]] = {}  # by layer

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention of new tokens over committed ones and each other: [B, H, n, D of values].

        layer: the place of its members. q: [B, H, n, D]. k, v: [B, K, n, D], of the new tokens. softcap,
        sinks: see attend_blocks. Raises NotImplementedError for what this attention cannot do.
        """
        self.new[layer] = k, v
        return self._attend(layer, q, k, v, mask, Scoring(scale, softcap, sinks))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: Scoring) -> Tensor:
        return attend_blocks(q, k, v, *self.members[layer], mask, *how)


class PagedAttention(TracedAttention):
    """The same over pages, by OpenVINO's operator. tables: see PagedCache.sight, in the masks' place."""

    def __init__(
        self, masks: Sequence[Tensor], members: Sequence[tuple[Tensor, Tensor]], tables: Sequence[Tensor]
    ) -> None:
        super().__init__(masks, members)
        self.tables = tables

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: Scoring) -> Tensor:
        if how.softcap is not None or how.sinks is not None:
            raise NotImplementedError("its attention has soft-caps or sinks")
        return attend_pages(q, k, v, *self.members[layer], self.tables, how.scale)


class TreeAttention(TracedAttention):
    """The same over a WrittenCache, by our operator.

    addresses: see WrittenCache.sight. The masks stand for those whose addresses these are, and are told apart
    by their identity.
    """

    def __init__(self, masks: Sequence[Tensor], addresses: Tensor) -> None:
        super().__init__(masks, ())
        self.addresses = addresses

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: Scoring) -> Tensor:
        kind = next((kind for kind, its in enumerate(self.masks) if its is mask), None)
        if kind is None:
            raise NotImplementedError("a layer attends under a mask that it has changed")
        none = torch.zeros(0, dtype=torch.float32, device="cpu")
        given = (q, k, v, self.addresses, none if how.sinks is None else how.sinks)
        places = (FIRST_ADDRESS + kind, FIRST_ADDRESS + len(self.masks) + 2 * layer)
        return _tree_attention(*given, how.scale, how.softcap or 0.0, *places).transpose(1, 2)


def attention_in_place(
    cache: type[BlockCache],
    masks: Sequence[Tensor],
    members: Sequence[tuple[Tensor, Tensor]],
    seen: Sequence[Tensor],
) -> TracedAttention:
    """Return the attention over a cache that the graph writes. seen: what the cache's `sight` returns."""
    return PagedAttention(masks, members, seen) if cache is PagedCache else TreeAttention(masks, seen[0])


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of new tokens over committed ones and each other: [B, H, n, D].

    The scores of both parts are computed apart, joined for the softmax, and split again for the values.

    q: [B, H, n, D]. k, v: [B, K, n, D], of the new tokens. keys, values: [N, B, K, BLOCK, D], committed.
    mask: [B, 1, n, S + n], additive, for committed slots and then for the new tokens. softcap: scores become
    softcap * tanh(scores / softcap). sinks: [H], a score for nothing at all, which takes part in the softmax.
    """
    batch, kv_heads, count, width = k.shape
    groups = q.shape[1] // kv_heads
    rows = (q * scale).reshape(1, batch, kv_heads, groups * count, width)
    committed = rows @ keys.transpose(-1, -2)  # [N, B, K, g * n, BLOCK]
    committed = committed.permute(1, 2, 3, 0, 4).reshape(batch, kv_heads, groups * count, -1)
    new = rows[0] @ k.transpose(-1, -2)
    scores = torch.cat((committed, new), dim=-1).view(batch, kv_heads, groups, count, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask[:, :, None]
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, count, -1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.reshape(batch, kv_heads, groups * count, -1)
    before = weights[..., :-count].reshape(batch, kv_heads, groups * count, -1, BLOCK).permute(3, 0, 1, 2, 4)
    mixed = (before @ values).sum(0) + weights[..., -count:] @ v
    return mixed.reshape(batch, kv_heads * groups, count, v.shape[-1])


# -- pages ----------------------------------------

PAGES = "eagle_fsd::attend_pages"


@torch.library.custom_op(PAGES, mutates_args=())
def _page_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor,
    pages: Tensor,
    page_starts: Tensor,
    longest: Tensor,
    relation: Tensor,
    relation_starts: Tensor,
    scale: float,
) -> Tensor:
    """Stand for OpenVINO's operator while a graph is traced. Only the shape of what it returns is right."""
    return q.new_zeros(len(q), q.shape[1] // k.shape[1] * v.shape[1])


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Sequence[Tensor], scale: float
) -> Tensor:
    """Return what `attend_blocks` returns, [B, H, n, D]; the graph also writes k and v into their slots.

    q: [B, H, n, D]. k, v: [B, K, n, D], of the new tokens. keys, values: [P, K, PAGE, D]. tables: see
    PagedCache.sight.
    """
    batch, heads, count, _ = q.shape
    rows = [one.transpose(1, 2).reshape(batch * count, -1) for one in (q, k, v)]
    mixed = _page_attention(*rows, keys, values, *tables, scale)
    return mixed.view(batch, count, heads, -1).transpose(1, 2)


def page_operator() -> Any:
    """Return OpenVINO's class of the operator, which it may change or take away; None if it has none."""
    return getattr(library.openvino().op, "_PagedAttentionExtension", None)


def page_extension() -> Any:
    """Return what lets OpenVINO's converter make its own operator of the one that stands for it."""
    library.openvino()  # quietly
    from openvino.frontend.pytorch import ConversionExtension

    return ConversionExtension(PAGES, _convert_pages)


def _convert_pages(context: Any) -> list[Any]:
    """Return the operator's output, given the traced one's inputs."""
    ops = library.openvino().opset13
    q, k, v, keys, values, *tables = (context.get_input(place) for place in range(12))
    lengths, starts, pages, page_starts, longest, relation, relation_starts = tables
    scale = context.get_values_from_const_input(12, None, float)

    def constant(value: float | list[float], kind: type) -> Any:
        return ops.constant(np.array(value, dtype=kind)).output(0)

    none, zero, no_floats = constant([], np.int32), constant(0, np.int32), constant([], np.float32)
    window, slopes, scores, types = zero, no_floats, none, none  # sliding windows, ALiBi and what is not used
    rotation, sparsity, eviction = [none, none, no_floats], [no_floats, zero, zero], [zero, none, none, none]
    sinks = ops.constant(np.empty((0, 0, 0, 0), dtype=np.float32)).output(0)
    how = [constant(scale, np.float32), window, slopes, longest, scores]
    inputs = [q, k, v, keys, values, lengths, starts, pages, page_starts, *how]
    made = page_operator()(
        [*inputs, *rotation, *sparsity, sinks, *eviction, types, relation, relation_starts]
    )
    return [made.output(0)]


# -- our operator ----------------------------------------

TREE = "eagle_fsd::tree_attention"


@torch.library.custom_op(TREE, mutates_args=())
def _tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    addresses: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float,
    mask: int,
    keys: int,
) -> Tensor:
    """Stand for TreeAttention while a graph is traced. Only the shape of what it returns is right.

    mask, keys: the places of their addresses.
    """
    batch, heads, count, _ = q.shape
    return q.new_zeros(batch, count, heads, v.shape[3])


def tree_attention_extension() -> Any:
    """Return what lets OpenVINO's converter make TreeAttention of what stands for it."""
    library.openvino()  # quietly
    from openvino.frontend.pytorch import ConversionExtension

    return ConversionExtension(TREE, _convert_tree)


def _convert_tree(context: Any) -> list[Any]:
    """Return the operator's output, given the traced one's inputs."""
    inputs = [context.get_input(place) for place in range(5)]
    kinds = {"scale": float, "softcap": float, "mask": int, "keys": int}
    attributes = {
        name: context.get_values_from_const_input(place, None, kind)
        for place, (name, kind) in enumerate(kinds.items(), len(inputs))
    }
    made = library.node_factory().create("TreeAttention", inputs, attributes)
    return [made.output(0)]


# What lets OpenVINO's converter make operators of what stands for them, by the cache that they write.
EXTENSIONS = {PagedCache: page_extension, WrittenCache: tree_attention_extension}
