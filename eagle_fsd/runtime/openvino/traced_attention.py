"""The attention that is traced into a graph: over committed blocks and new tokens, without joining the two.

The scores of both parts are computed apart, joined for the softmax, and split again for the values. So the
committed keys and values are read where they lie. Shapes: B rows, H query heads, K key-value heads, g = H / K
query heads that share one, n new tokens, D head size, N blocks of BLOCK slots, S = N * BLOCK.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_fsd.runtime.openvino.block_cache import BLOCK


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
