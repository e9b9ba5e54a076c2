"""Ragged batches as padded tensors, and back. Knows token ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.core.checks import one_line, plain


class Array(Protocol):
    """An array of another library, such as numpy's."""

    def tolist(self) -> Any: ...


# Numbers of every prompt as callers give them: a tensor or array [B, L], or a list for each.
Rows = Tensor | Array | Sequence[Sequence[int] | Array]


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return input_ids and attention_mask [B, longest] of prompts, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device="cpu")
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device="cpu")
    return ids, mask


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Return token lists as one tensor [B, longest], padded on the right."""
    width = max(map(len, rows))
    padded = [list(row) + [pad] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device="cpu")


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return a list, or lists of one length, as an int64 tensor on a device.

    The host does not wait for the device's queued work.
    """
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def as_ids(input_ids: object) -> Tensor:
    """Return token ids as an int64 tensor. Raises ValueError if they are not integers."""
    if isinstance(input_ids, Mapping):
        raise ValueError(
            f"input_ids is a {type(input_ids).__name__}, not a tensor of token ids: it must be [B, L]; pass "
            'what a tokenizer returns as **encoded, or its encoded["input_ids"]'
        )
    rows = plain_rows(input_ids)
    if len(widths := dict.fromkeys(len(row) for row in rows if isinstance(row, list | tuple))) > 1:
        raise ValueError(
            f"input_ids has rows of {' and '.join(map(str, list(widths)[:2]))} tokens: all must have one "
            "length; pad them, and say with attention_mask which tokens are text"
        )
    try:
        # Lists go to the CPU, whatever torch's default device is.
        ids = input_ids if isinstance(input_ids, Tensor) else torch.as_tensor(rows or input_ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        reason = one_line(error)
        raise ValueError(
            f"input_ids is a {type(input_ids).__name__}, not a tensor of token ids ({reason}): it must be "
            "[B, L]; tokenize a prompt"
        ) from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        if not ids.numel():
            return ids.to(torch.int64)
        raise ValueError(f"input_ids holds {ids.dtype}: token ids must be integers; tokenize a prompt")
    if ids.ndim == 1 and ids.numel():
        raise ValueError(
            f"input_ids has shape {list(ids.shape)}: it must be [B, L], a row for every prompt; write [ids] "
            "for one prompt"
        )
    return ids.to(torch.int64)


def plain_rows(input_ids: object) -> list[object]:
    """Return the rows of lists with a list in place of each tensor or array; none for anything else.

    torch refuses a list of tensors, and warns that a list of arrays is slow.
    """
    if not isinstance(input_ids, list | tuple):
        return []
    return list(map(plain, input_ids))


def as_mask(attention_mask: object, device: torch.device | None = None) -> Tensor:
    """Return an attention_mask [B, L] as truth values. Raises ValueError if it holds anything but 0 and 1."""
    remedy = "it must be [B, L], 1 where a token is text and 0 where it is padding; fix it"
    try:
        given = plain_rows(attention_mask) or attention_mask
        mask = torch.as_tensor(given, device=device or getattr(attention_mask, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}, not a tensor ({one_line(error)}): {remedy}"
        ) from error
    if bool((wrong := (mask != 0) & (mask != 1)).any()):
        raise ValueError(f"attention_mask holds {mask[wrong][0].item()}: {remedy}")
    return mask.bool()


def infer_mask(input_ids: Tensor, pad: int | None, end_tokens: Sequence[int]) -> Tensor | None:
    """Return the attention_mask [B, L] that Hugging Face's `generate` assumes if it is given none.

    Pad tokens count as padding, unless the model has no pad token or uses it to end texts too. None means
    that nothing is padding.
    """
    if pad is None or pad in end_tokens or input_ids.ndim != 2 or not bool((input_ids == pad).any()):
        return None
    return input_ids != pad


def unpad(input_ids: Tensor, attention_mask: Rows | None, vocab_size: int) -> tuple[Tensor, list[int]]:
    """Return right-padded tokens [B, longest] and each prompt's length, without masked tokens.

    Masked tokens may be anywhere in a row. Raises ValueError if the ids or the mask are no valid prompts.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}: it must be [B, L] with at least one token; "
            "tokenize a prompt"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab_size:
        raise ValueError(
            f"input_ids holds {int(input_ids.min())}..{int(input_ids.max())}: token ids must be in "
            f"0..{vocab_size - 1}; use the target's own tokenizer"
        )
    if attention_mask is None:
        return input_ids, [input_ids.shape[1]] * len(input_ids)
    mask = as_mask(attention_mask, input_ids.device)
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}: it must be that of input_ids, "
            f"{list(input_ids.shape)}"
        )
    lengths = mask.sum(1)
    if not bool(lengths.all()):
        raise ValueError(
            f"row {int(lengths.argmin())} of the batch is empty: every prompt needs at least one token; drop "
            "the row"
        )
    # Nothing sees masked tokens and they take up no position, so the text is the same without them.
    kept = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, : int(lengths.max())]
    return input_ids.gather(1, kept), lengths.tolist()
