"""Masked attention of many query heads over few key heads, without copying the keys for every group."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T + mask) v: q [B, H, n, D], k and v [B, Hkv, S, D] -> [B, H, n, D].

    mask: [B, 1, n, S], bool or additive. Query head h reads key head h // (H / Hkv). scale: 1 / sqrt(D) if
    None. The queries of a group are stacked as rows over its one key head. That repeats the mask instead of
    the keys, so with many queries, where the mask would be the larger copy, the keys are repeated.
    """
    batch, heads, count, width = q.shape
    groups = heads // k.shape[1]
    if groups == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if count > 2 * k.shape[1] * width:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    rows = q.reshape(batch, -1, groups * count, width)
    mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # [B, 1, H / Hkv * n, S]
    mixed = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return mixed.reshape(batch, heads, count, v.shape[-1])
