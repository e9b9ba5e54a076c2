"""A stand-in for flash-attn 2 on the CPU: its two functions as documented, as loops over rows and heads.

Signatures, layouts ([B, n, H, D]) and errors are those of flash_attn 2.7 (flash_attn_interface.py and
csrc/flash_attn/flash_api.cpp). As there, a row without keys gives 0 and a log-sum-exp of +inf.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


class FakeFlash(types.ModuleType):
    """The stand-in's module.

    calls: the functions called, in order, with q and k as given. dtypes: the accepted dtypes; the real module
    takes only HALVES, which are too coarse to compare digits.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...] = HALVES) -> None:
        super().__init__("flash_attn")
        self.dtypes = dtypes
        self.calls: list[tuple[str, Tensor, Tensor]] = []

    @property
    def called(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        self._check(q, k, v)
        assert (dropout_p, window_size, softcap, alibi_slopes, return_attn_probs) == (
            0,
            (-1, -1),
            0,
            None,
            False,
        )
        self.calls.append(("causal" if causal else "full", q, k))
        return attend(q, k, v, [k.shape[1]] * len(q), softmax_scale, causal)[0]

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._check(q, k_cache, v_cache)
        unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes)
        assert all(value is None for value in unused)
        assert (window_size, softcap, num_splits) == ((-1, -1), 0, 0)
        assert isinstance(cache_seqlens, Tensor) and cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == q.shape[:1] and cache_seqlens.is_contiguous()
        assert cache_seqlens.device == q.device and int(cache_seqlens.max()) <= k_cache.shape[1]
        self.calls.append(("prefix", q, k_cache))
        out, lse = attend(q, k_cache, v_cache, cache_seqlens.tolist(), softmax_scale, causal)
        return (out, lse) if return_softmax_lse else out

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        assert q.dtype in self.dtypes and q.dtype == k.dtype == v.dtype
        assert q.device == k.device == v.device
        assert q.ndim == k.ndim == 4 and k.shape == v.shape
        assert q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] <= 256
        assert q.shape[2] % k.shape[2] == 0
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return out [B, n, H, D] and log-sum-exp [B, H, n] float32 over the first keys of each row."""
    batch, count, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    out, lse = torch.zeros_like(q), torch.full((batch, heads, count), torch.inf)
    for row, length in enumerate(lengths):
        for head in range(heads if length else 0):
            own = head // (heads // k.shape[2])
            keys, values = k[row, :length, own].double(), v[row, :length, own].double()
            scores = scale * q[row, :, head].double() @ keys.T
            if causal:
                seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
                scores = scores.masked_fill(~seen, -torch.inf)
            out[row, :, head] = (scores.softmax(-1) @ values).to(q.dtype)
            lse[row, head] = scores.logsumexp(-1).float()
    return out, lse


def plain_prefix(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention over the first lengths[b] slots [B, H, n, D] and its log-sum-exp [B, H, n].

    They are 0 and -inf if a row has no slot. This is the slow twin of `flash_prefix`.
    """
    batch, heads, count, width = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.reshape(batch, k.shape[1], -1, width).to(wide)  # [B, Hkv, H / Hkv * n, D]
    scores = scale * rows @ k.to(wide).mT
    beyond = torch.arange(k.shape[2], device=k.device) >= lengths[:, None]  # [B, S]
    scores = scores.masked_fill(beyond[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(wide).min)[..., None]).exp()
    out = (weights @ v.to(wide)).view(batch, heads, count, v.shape[-1])
    return out.to(q.dtype), lse.view(batch, heads, count)
