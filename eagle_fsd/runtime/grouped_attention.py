"""Masked attention of many query heads over few key heads, without copying the keys for every group."""

from __future__ import annotations

from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# All but cuDNN's, which prepares itself anew for every shape, and each prompt has one of its own: on an H100
# that took a tenth of a second, as long as four steps.
ON_GPUS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T + mask) v: q [B, H, n, D], k and v [B, Hkv, S, D] -> [B, H, n, D].

    mask: [B, 1, n, S], bool or additive. Query head h reads key head h // (H / Hkv). scale: 1 / sqrt(D) if
    None. The queries of a group are stacked as rows over its one key head. That repeats the mask instead of
    the keys, so with many queries, where the mask would be the larger copy, the keys are repeated.
    """
    batch, heads, count, width = q.shape
    groups = heads // k.shape[1]
    if groups == 1:
        return attention(q, k, v, mask, scale)
    if count > 2 * k.shape[1] * width:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return attention(q, k, v, mask, scale)
    rows = q.reshape(batch, -1, groups * count, width)
    mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # [B, 1, H / Hkv * n, S]
    mixed = attention(rows, k, v, mask, scale)
    return mixed.reshape(batch, heads, count, v.shape[-1])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Call torch's attention, on a GPU without cuDNN's."""
    with sdpa_kernel(ON_GPUS) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
