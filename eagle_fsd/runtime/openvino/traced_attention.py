"""The two attentions that are traced into graphs. Both read the committed keys and values where they lie.

`attend_blocks` is made of plain products, and can do all that a model may ask for. `attend_pages` is one
operator of OpenVINO, made for serving: it writes the new keys and values into their pages by itself, and its
mask is that of a tree. It is faster the longer the context is and the more tokens are new, but it has neither
soft-caps nor sliding windows. Shapes: B rows, H query heads, K key-value heads, g = H / K query heads that
share one, n new tokens, D head size, N blocks of BLOCK slots, S = N * BLOCK, P pages of PAGE slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.runtime.openvino.block_cache import BLOCK
from eagle_fsd.runtime.openvino.library import openvino


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

OPERATOR = "eagle_fsd::attend_pages"


@torch.library.custom_op(OPERATOR, mutates_args=())
def _stand_in(
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
    mixed = _stand_in(*rows, keys, values, *tables, scale)
    return mixed.view(batch, count, heads, -1).transpose(1, 2)


def page_operator() -> Any:
    """Return OpenVINO's class of the operator, which it may change or take away; None if it has none."""
    return getattr(openvino().op, "_PagedAttentionExtension", None)


def page_extension() -> Any:
    """Return what lets OpenVINO's converter make its own operator of the one that stands for it."""
    openvino()  # quietly
    from openvino.frontend.pytorch import ConversionExtension

    return ConversionExtension(OPERATOR, _convert)


def _convert(context: Any) -> list[Any]:
    """Return the operator's output, given the traced one's inputs."""
    ops = openvino().opset13
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
