"""Ragged batches as padded tensors and back; knows token ids only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.messages import one_line


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, longest] of prompts, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def right_padded(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """[B, longest] of token lists, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], dtype=torch.int64)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """A list as an int64 tensor there, sent without waiting for the work that the device has queued."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def as_ids(input_ids: object) -> Tensor:
    """Token ids as an int64 tensor. ValueError for what holds no whole numbers."""
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = one_line(error)
        raise ValueError(
            f"input_ids is a {type(input_ids).__name__} and no tensor of token ids ({reason}): it must be "
            "[B, L]; tokenize a prompt"
        ) from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        if not ids.numel():
            return ids.to(torch.int64)
        raise ValueError(f"input_ids holds {ids.dtype}: token ids must be integers; tokenize a prompt")
    return ids.to(torch.int64)


def unpad(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> tuple[Tensor, list[int]]:
    """Right-padded tokens [B, longest] and the lengths of prompts that are padded on either side. ValueError
    if they are none."""
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}: it must be [B, L] with at least one token; "
            "tokenize a prompt"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab_size:
        raise ValueError(
            f"input_ids holds {int(input_ids.min())}..{int(input_ids.max())}: token ids must lie in "
            f"0..{vocab_size - 1}; use the target's own tokenizer"
        )
    if attention_mask is None:
        return input_ids, [input_ids.shape[1]] * len(input_ids)
    mask = torch.as_tensor(attention_mask).to(input_ids.device).bool()
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
    starts = mask.to(torch.uint8).argmax(1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    if not torch.equal(mask, (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])):
        raise ValueError(
            "attention_mask has holes: each row's prompt must be one run of tokens, padded on one side or "
            "both"
        )
    source = (starts[:, None] + columns[: int(lengths.max())]).clamp(max=mask.shape[1] - 1)
    return input_ids.gather(1, source), lengths.tolist()
