"""A draft vocabulary: a head drafts a few frequent tokens instead of the target's whole vocabulary.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856): most of a draft's time goes into lm_head, and a few tokens make
up most of any text, so the draft scores only the K most frequent ones. q is zero elsewhere; p is untouched.
This module knows tensors and token ids, and neither files nor the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_fsd.files.fingerprints import is_plain
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.packed_linear import PackedLinear, take_rows


class TargetVocabulary(Protocol):
    """The parts of a target that a draft vocabulary uses: its embeddings, its lm_head, and its logits."""

    lm_head: nn.Module
    device: torch.device

    def embed(self, tokens: Tensor) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...

    def raw_logits(self, features: Tensor) -> Tensor: ...

    def transform_logits(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class OwnTokens:
    """The tokens that the texts of a batch have drafted beside a list, as text_tokens finds them.

    drafted: [K + E] int64, those of the list and behind them the E others. missing: [B, E] bool, which of
    them a row has not; None if every row has all. weight: [E, d], their rows of lm_head, and bias: [E]; None
    if lm_head is not a product with its rows.
    """

    drafted: Tensor
    missing: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class DraftVocabulary:
    """A target's embeddings and lm_head for a head that drafts only the tokens token_ids [K].

    dtype: the head's; None means the target's. The K rows of lm_head are copied once, to the device that
    holds the features, so that each draft forward reads one block of memory. runtime: multiplies with them.
    """

    def __init__(
        self,
        target: TargetVocabulary,
        token_ids: Tensor,
        dtype: torch.dtype | None = None,
        runtime: OpenVINO | None = None,
    ) -> None:
        self.target, self.dtype = target, dtype
        self.token_ids = token_ids
        self.lm_head: Callable[[Tensor], Tensor] | None = None
        # Rows are copied only from a plain linear layer. Any other lm_head (quantised, adapted) may compute
        # more than a product with its rows, so it runs whole and its logits are indexed.
        if has_plain_rows(target.lm_head):
            rows = take_rows(target.lm_head, token_ids, target.device, dtype)
            self.lm_head = (
                rows if runtime is None else runtime.product("draft_lm_head", rows.weight, rows.bias)
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [..., d] of tokens [...] of the whole vocabulary: the head reads all of them."""
        return self.target.embed(tokens)

    def logits(self, features: Tensor, own: OwnTokens | None = None) -> Tensor:
        """Return the target's logits [..., K] float32 of features [..., d], in the order of token_ids.

        own: tokens that are drafted beside these; then features are [B, n, d], and the result [B, n, K + E]
        is in the order of own.drafted, -inf at tokens that a row has not.
        """
        if own is None:
            if self.lm_head is None:
                return self.target.logits(features)[..., self.token_ids]
            return self.target.transform_logits(self.lm_head(features).float())
        if self.lm_head is None or own.weight is None:
            logits = self.target.logits(features)[..., own.drafted]
        else:
            more = F.linear(features.to(own.weight.dtype), own.weight, own.bias).float()
            logits = torch.cat((self.lm_head(features).float(), more), dim=-1)
            logits = self.target.transform_logits(logits)
        if own.missing is not None:
            logits[..., len(self.token_ids) :].masked_fill_(own.missing[:, None], -torch.inf)
        return logits

    @cached_property
    def listed(self) -> frozenset[int]:
        return frozenset(self.token_ids.tolist())

    @property
    def split(self) -> bool:
        """Whether ranks hold parts of lm_head: then its rows cannot be had one by one."""
        return any(hasattr(weight, "full_tensor") for weight in self.target.lm_head.parameters())

    def rows_of(self, token_ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows [E, d] of lm_head for a few other tokens [E], and their biases [E] or None.

        Both are None if lm_head is not a product with its rows.
        """
        lm_head = self.target.lm_head
        if not has_plain_rows(lm_head):
            return None, None
        bias = None if lm_head.bias is None else self._rows(lm_head.bias, token_ids)
        return self._rows(lm_head.weight, token_ids), bias

    def _rows(self, weight: Tensor, token_ids: Tensor) -> Tensor:
        return weight.detach()[token_ids.to(weight.device)].to(self.target.device, self.dtype)


def has_plain_rows(lm_head: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether an lm_head is a product with its rows, and no more."""
    return type(lm_head) in (nn.Linear, PackedLinear) and is_plain(lm_head.weight)


def check_draft_tokens(token_ids: Tensor, vocab_size: int, name: str, remedy: str) -> None:
    """Raise ValueError unless token_ids are [K >= 1] int64, distinct, and in a vocabulary of this size."""
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
