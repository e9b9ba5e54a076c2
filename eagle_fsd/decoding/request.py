"""What a caller asks of a target, checked: prompts as one batch, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.padding import infer_mask, unpad
from eagle_fsd.target.model import TargetModel


@dataclass(frozen=True)
class Prompts:
    """tokens: [B, longest], right-padded. lengths: of the prompts. limits: the most new tokens of each."""

    tokens: Tensor
    lengths: list[int]
    limits: list[int]

    @classmethod
    def of(
        cls, target: TargetModel, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
    ) -> Prompts:
        """Prompts [B, L] as attention_mask [B, L] pads them; texts end where the target's positions do.

        Without a mask the model's pad tokens are padding, as in Hugging Face's `generate`. ValueError for
        what are none, or leave no position for an answer.
        """
        require_integer("max_new_tokens", max_new_tokens, 1, "ask for at least one token")
        if attention_mask is None:
            attention_mask = infer_mask(input_ids, target.pad_token_id, target.eos_token_ids)
        tokens, lengths = unpad(input_ids, attention_mask, target.vocab_size)
        limits = [min(max_new_tokens, room(target, row, length)) for row, length in enumerate(lengths)]
        return cls(tokens, lengths, limits)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> list[list[int]]:
        """Each prompt's token ids."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths, strict=True)]

    @property
    def longest_text(self) -> int:
        """The most tokens that a text may come to, its prompt included."""
        return max(length + limit for length, limit in zip(self.lengths, self.limits, strict=True))

    @property
    def context(self) -> int:
        """About how many tokens a step of the longest text has behind it."""
        return max(self.lengths) + max(self.limits) // 2


def room(target: TargetModel, row: int, length: int) -> int:
    """How many tokens a prompt of this length leaves room for."""
    positions = target.max_positions
    if length >= positions:
        raise ValueError(
            f"row {row} of the batch has {length} tokens: the target has {positions} positions, and one "
            "must be left for the answer; shorten the prompt"
        )
    return positions - length


def end_token_ids(target: TargetModel, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a text: the caller's, or else the model's own."""
    if eos_token_id is None:
        return target.eos_token_ids
    ids = tuple(eos_token_id) if isinstance(eos_token_id, (list, tuple, set)) else (eos_token_id,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < target.vocab_size:
            raise ValueError(
                f"eos_token_id is {eos_token_id!r}: it must be one token id or a list of them, in "
                f"0..{target.vocab_size - 1}; None takes the model's own"
            )
    return tuple(int(token) for token in ids)


class Observer(Protocol):
    """Looks at every step of a batch and changes nothing.

    emitted: how many tokens each row of the tree, by its place in the request, got of the verdict's. Where
    steps are recorded (see graphs.py) the next one overwrites all these tensors: copy what is kept.
    """

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None: ...


@dataclass(frozen=True)
class Request:
    """One batch to decode.

    tokens: [B, L] right-padded prompts; lengths: each at least 1; limits: most new tokens per row.
    observer: is shown every step.
    """

    tokens: Tensor
    lengths: Sequence[int]
    limits: Sequence[int]
    eos_token_ids: Sequence[int]
    rule: AcceptanceRule
    tree: TreeConfig
    sampling: SamplingConfig
    observer: Observer | None = None
