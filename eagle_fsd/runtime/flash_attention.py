"""Attention by flash-attn, if it is installed: over a prompt, and over the prefix of a draft tree.

flash-attn takes no masks. A tree's attention therefore has two parts: over the prefix, which every node sees
whole, and over the tree's own few tokens under the ancestor mask. The log-sum-exp of the first part weighs it
against the second. Keys are not copied for groups of heads. Shapes: B rows, H query heads, Hkv key heads, n
queries (N nodes of a tree), S cache slots in view, D head size; query head h reads key head h // (H / Hkv).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Prefix = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FlashPlan:
    """Describes what the queries of one forward see, without a mask.

    mask: [B, 1, n, S], the same as a mask; a layer that is given this very tensor may use the plan instead.
    lengths: [B] int32, the committed slots. relation: [B, n, n] bool, which new tokens each new token sees
    behind its row's prefix. None: each sees its own slot and all before it, and the last query's slot is
    S - 1.
    """

    mask: Tensor
    lengths: Tensor
    relation: Tensor | None


def flash_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash-attn is installed and runs on this device in this dtype."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    try:
        from flash_attn import flash_attn_func, flash_attn_with_kvcache  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # a build for another torch may raise any of these
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def supports_heads(q: Tensor, v: Tensor) -> bool:
    """Return whether flash-attn takes heads of this size, q and v [..., D], without padded copies."""
    return q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0


def flash_attention(q: Tensor, k: Tensor, v: Tensor, plan: FlashPlan, scale: float) -> Tensor:
    """Return attention of q [B, H, n, D] over k and v [B, Hkv, S, D] under a plan: [B, H, n, D]."""
    if plan.relation is None:
        return flash_causal(q, k, v, scale)
    return prefix_and_tree(q, k, v, plan.lengths, plan.relation, scale, flash_prefix)


def prefix_and_tree(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, relation: Tensor, scale: float, prefix: Prefix
) -> Tensor:
    """Return attention of N nodes over their row's prefix and each other: q [B, H, N, D] -> [B, H, N, D].

    k, v: [B, Hkv, S, D]; the first lengths[b] slots are the prefix, the next N the nodes. relation: [B, N, N]
    bool, whether node n sees node m (last); every node sees itself. prefix: attention over the first part.
    """
    batch, heads, count, _ = q.shape
    kv_heads = k.shape[1]
    out, lse = prefix(q, k, v, lengths, scale)  # [B, H, N, D], [B, H, N]
    slots = lengths[:, None] + torch.arange(count, device=q.device)  # [B, N]
    own_k, own_v = (
        x.gather(2, slots[:, None, :, None].expand(-1, kv_heads, -1, x.shape[-1])).to(lse.dtype)
        for x in (k, v)
    )
    rows = q.reshape(batch, kv_heads, -1, q.shape[-1]).to(lse.dtype)  # [B, Hkv, H / Hkv * N, D]
    scores = (scale * rows @ own_k.mT).view(batch, heads, count, count)
    scores = scores.masked_fill(~relation[:, None], -torch.inf)
    # The whole prefix acts as one more key beside the nodes, with score lse and value out.
    weights = torch.cat((lse[..., None], scores), dim=-1).softmax(-1)  # [B, H, N, 1 + N]
    own = weights[..., 1:].reshape(batch, kv_heads, -1, count) @ own_v
    return (weights[..., :1] * out + own.view_as(out)).to(q.dtype)


def flash_prefix(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention over the first lengths[b] slots and its log-sum-exp: [B, H, n, D] and [B, H, n].

    lengths: [B] int32. A row of length 0 gives 0 and -inf.
    """
    from flash_attn import flash_attn_with_kvcache

    out, lse = flash_attn_with_kvcache(
        *(x.transpose(1, 2) for x in (q, k, v)),  # it wants [B, n, H, D]
        cache_seqlens=lengths,
        softmax_scale=scale,
        causal=False,
        return_softmax_lse=True,
    )
    # For a row without keys flash-attn returns 0 and, unless it splits the keys, a log-sum-exp of +inf.
    return out.transpose(1, 2), lse.masked_fill((lengths == 0)[:, None, None], -torch.inf)


def flash_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention of the last n of S slots, each over its own slot and all before it: [B, H, n, D]."""
    from flash_attn import flash_attn_func

    # Its causal mask is aligned to the bottom right: the last query sees all keys.
    mixed = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=True)
    return mixed.transpose(1, 2)
