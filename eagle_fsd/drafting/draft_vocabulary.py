"""The tokens that a head drafts: a few frequent ones in place of the target's whole vocabulary.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856): most of a draft's time goes into lm_head, and most of text is
made of few tokens, so the draft scores the K most frequent ones alone. q is zero elsewhere; p is untouched.
Knows tensors and token ids, no files and no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from eagle_fsd.core.checks import require_integer
from eagle_fsd.runtime.packed_linear import PackedLinear, take_rows


class Ends(Protocol):
    """What is needed of a target: its embeddings, its lm_head, and what it does to lm_head's output."""

    lm_head: nn.Module
    device: torch.device

    def embed(self, tokens: Tensor) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...

    def transform_logits(self, logits: Tensor) -> Tensor: ...


class DraftVocabulary:
    """A target's two ends for a head that drafts the tokens token_ids [K] alone.

    dtype: the head's; None is the target's. The K rows of lm_head are copied once, to the device where
    features come out, so that each draft forward reads one block of memory.
    """

    def __init__(self, target: Ends, token_ids: Tensor, dtype: torch.dtype | None = None) -> None:
        self.target = target
        self.token_ids = token_ids
        self.lm_head: nn.Linear | None = None
        # Any other kind of lm_head (quantised, adapted) may compute more than a product with its rows.
        whole = target.lm_head
        if isinstance(whole, nn.Linear) and type(whole) in (nn.Linear, PackedLinear):
            self.lm_head = take_rows(whole, token_ids, target.device, dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [..., d] of any of the target's tokens [...]: not only drafted ones are read."""
        return self.target.embed(tokens)

    def logits(self, features: Tensor) -> Tensor:
        """Return the target's logits [..., K] float32 of features [..., d], in the order of token_ids."""
        if self.lm_head is None:
            return self.target.logits(features)[..., self.token_ids]
        return self.target.transform_logits(self.lm_head(features).float())


def ranked_tokens(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Return the `size` most frequent tokens, most frequent first, ties by the lower id: [size] int64.

    counts: [V], how often each token of the vocabulary occurs. always: tokens that must be inside whatever
    their count (end tokens); they stand at their own rank. Where fewer tokens occur, others fill up in the
    order of their ids. Raises ValueError for counts that are none, for `always` outside the vocabulary, and
    for a size below 1, below the number of `always` or above V.
    """
    if counts.ndim != 1 or not (counts >= 0).all():
        shape = f"{list(counts.shape)} with a minimum of {float(counts.min()) if counts.numel() else None}"
        raise ValueError(f"counts are {shape}: they must be [V] and at least 0; count each token of the text")
    vocab_size = len(counts)
    for token in always:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"always holds {token}: it must be in the vocabulary, 0..{vocab_size - 1}; drop it"
            )
    least = max(1, len(set(always)))
    require_integer("the draft vocabulary's size", size, least, "raise it, or require fewer tokens")
    if size > vocab_size:
        raise ValueError(
            f"the draft vocabulary's size is {size}: the vocabulary has {vocab_size} tokens; lower it"
        )
    order = counts.argsort(descending=True, stable=True)  # [V]
    required = torch.isin(order, torch.tensor(sorted(set(always)), dtype=torch.int64, device=order.device))
    room = size - required.sum()
    return order[required | ((~required).cumsum(0) <= room)]


def check_draft_tokens(token_ids: Tensor, vocab_size: int, name: str, remedy: str) -> None:
    """Raise ValueError unless token_ids are [K >= 1] int64, distinct, and of a vocabulary of this size."""
    if token_ids.dtype != torch.int64:
        raise ValueError(f"{name} is {token_ids.dtype}: token ids must be torch.int64; {remedy}")
    if token_ids.ndim != 1 or not len(token_ids):
        raise ValueError(
            f"{name} has shape {list(token_ids.shape)}: it must be [K] with at least one token id; {remedy}"
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} holds {low}..{high}: token ids must be in the target's vocabulary, 0..{vocab_size - 1}; "
            f"{remedy}"
        )
    values, times = token_ids.unique(return_counts=True)
    if len(values) < len(token_ids):
        twice = int(values[times > 1][0])
        raise ValueError(f"{name} holds {twice} more than once: token ids must be distinct; {remedy}")
