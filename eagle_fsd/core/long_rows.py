"""The largest entries of long rows, such as logits over a vocabulary, and the log of their sum.

torch's argmax and topk read a row number by number. amax reads many numbers at once, so it comes first here:
over parts of the row, and only the parts with the largest entries are read again. torch's logsumexp writes
what lies between its passes to memory, which a part of a row does not leave the processor for. The results
are torch's, but for the order of equal entries in `topk`, and the last bits of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64  # numbers in a part
_SHORT = 1024  # rows up to this length are not worth a second pass
_FEW = 20_000  # numbers of all rows, up to which torch's own topk is the fastest
_SUMMED = 8192  # numbers of a row whose exponentials are summed at once


def first_largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry of rows [..., V] and its first place, both [...]; NaN counts as largest."""
    length = rows.shape[-1]
    if length <= _SHORT:
        place = rows.argmax(-1, keepdim=True)
        return rows.gather(-1, place).squeeze(-1), place.squeeze(-1)
    whole = length - length % _BLOCK
    parts = rows if whole == length else rows[..., :whole]
    largest = parts.reshape(*rows.shape[:-1], whole // _BLOCK, _BLOCK).amax(-1)  # [..., V / 64]
    if whole < length:
        largest = torch.cat((largest, rows[..., whole:].amax(-1, keepdim=True)), dim=-1)
    part = largest.argmax(-1, keepdim=True)  # the first part that has the largest entry
    # The last part may be short. It is read with entries before it, which are smaller if it is the first.
    start = (part * _BLOCK).clamp(max=length - _BLOCK)
    inside = rows.gather(-1, start + torch.arange(_BLOCK, device=rows.device)).argmax(-1, keepdim=True)
    return largest.gather(-1, part).squeeze(-1), (start + inside).squeeze(-1)


def topk(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of rows [..., V], descending, and their places: [..., k] each.

    NaN counts as largest. Of entries that tie with the k-th, any may be taken.
    """
    length = rows.shape[-1]
    height = min(_BLOCK, length // (8 * k))
    if length <= _SHORT or rows.numel() <= _FEW or height < 2:
        values, places = rows.topk(k, dim=-1)
        return values, places
    # A part is a column of the row folded into `height` lines: amax over lines is the fastest of all.
    width = length // height
    whole = width * height
    parts = rows if whole == length else rows[..., :whole]
    parts = parts.reshape(*rows.shape[:-1], height, width)
    # The k largest entries are in the k parts whose largest entries are largest, ties aside.
    _, columns = parts.amax(-2).topk(k, dim=-1)  # [..., k]
    few = parts.gather(-1, columns[..., None, :].expand(*parts.shape[:-1], k)).flatten(-2)
    if whole == length:
        values, found = topk(few, k)
    else:  # what does not fill a line comes last in any case
        values, found = topk(torch.cat((few, rows[..., whole:]), dim=-1), k)
    places = found.div(k, rounding_mode="floor") * width + columns.gather(-1, found % k)
    if whole < length:
        places = torch.where(found < height * k, places, found + (whole - height * k))
    return values, places


def logsumexp(rows: Tensor) -> Tensor:
    """Return the log of the sum of the exponentials of rows [..., V]: [..., 1]."""
    length = rows.shape[-1]
    if length <= _SUMMED or rows.device.type != "cpu" or rows.dtype.itemsize < 4:  # else it rounds
        return rows.logsumexp(-1, keepdim=True)
    largest = rows.amax(-1, keepdim=True)
    shift = largest.masked_fill(largest.isinf(), 0.0)  # infinity less infinity would be NaN
    total = torch.zeros_like(largest)
    for start in range(0, length, _SUMMED):
        total += (rows[..., start : start + _SUMMED] - shift).exp_().sum(-1, keepdim=True)
    return total.log_().add_(shift)
