"""The largest entries of long rows, such as logits over a vocabulary.

torch's argmax and topk read a row number by number. amax reads many numbers at once, so it comes first here:
over parts of the row, and only the parts with the largest entries are read again. The results are torch's,
but for the order of equal entries in `topk`.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

_BLOCK = 64  # numbers in a part
_SHORT = 1024  # rows up to this length are not worth a second pass


def first_largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry of rows [..., V] and its first place, both [...]; NaN counts as largest."""
    if rows.shape[-1] <= _SHORT:
        place = rows.argmax(-1, keepdim=True)
        return rows.gather(-1, place)[..., 0], place[..., 0]
    parts = pad_to(rows, _BLOCK).unflatten(-1, (-1, _BLOCK))  # [..., V / 64, 64]
    largest = parts.amax(-1)
    part = largest.argmax(-1, keepdim=True)  # the first part that has the largest entry
    inside = parts.gather(-2, part[..., None].expand(*part.shape, _BLOCK))[..., 0, :].argmax(-1, keepdim=True)
    return largest.gather(-1, part)[..., 0], (part * _BLOCK + inside)[..., 0]


def topk(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of rows [..., V], descending, and their places: [..., k] each.

    NaN counts as largest. Of entries that tie with the k-th, any may be taken. Where fewer than k entries are
    above -inf, a place may be past the row.
    """
    length = rows.shape[-1]
    height = min(_BLOCK, length // (8 * k))
    if length <= _SHORT or height < 2:
        values, places = rows.topk(k, dim=-1)
        return values, places
    # A part is a column of the row folded into `height` lines: amax over lines is the fastest of all.
    parts = pad_to(rows, height).unflatten(-1, (height, -1))  # [..., height, V / height]
    # The k largest entries are in the k parts whose largest entries are largest, ties aside.
    _, columns = parts.amax(-2).topk(k, dim=-1)  # [..., k]
    few = parts.gather(-1, columns[..., None, :].expand(*parts.shape[:-1], k))  # [..., height, k]
    values, places = topk(few.flatten(-2), k)
    line = places // k
    return values, line * parts.shape[-1] + columns.gather(-1, places - line * k)


def pad_to(rows: Tensor, multiple: int, filler: float = -math.inf) -> Tensor:
    """Return rows [..., V] whose length is a multiple of this, filled up where it is not."""
    missing = -rows.shape[-1] % multiple
    return F.pad(rows, (0, missing), value=filler) if missing else rows
