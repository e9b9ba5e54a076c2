"""Choose the tokens of a draft vocabulary: count those that a head learns, and rank them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Vocabulary(Protocol):
    """What counting needs to know of a target: a TargetModel, or a TargetText, which has no weights."""

    vocab_size: int

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class LearnedTokens:
    """How often each token is learned.

    counts: [V] int64. always: the tokens that every draft vocabulary must have. They are the target's end
    tokens and its tokenizer's special tokens, which a row's text seldom holds.
    """

    counts: Tensor
    always: tuple[int, ...]

    def best(self, size: int) -> Tensor:
        """Return the `size` most frequent tokens, `always` among them, most frequent first: [size] int64.

        Raises ValueError for a size that require_size refuses.
        """
        return rank_tokens(self.counts, size, self.always)

    def coverage(self, token_ids: Tensor) -> float:
        """Return the share of all learned tokens that these make up."""
        return float(self.counts[token_ids].sum()) / max(int(self.counts.sum()), 1)


def learned_tokens(
    texts: Iterable[tuple[Tensor, Tensor]], target: Vocabulary, tokenizer: Any = None
) -> LearnedTokens:
    """Count the tokens that a head learns to draft on these texts.

    texts: of each example its tokens [n] and its mask [n] of the positions that are learned. What is drafted
    after such a position is the next token: that one is counted. tokenizer: where special tokens are named.
    ValueError for a text that holds tokens which the target has not.
    """
    after = [tokens[1:][learn[:-1]] for tokens, learn in texts]
    counts = torch.bincount(torch.cat(after), minlength=target.vocab_size)
    if len(counts) > target.vocab_size:
        raise ValueError(
            f"the text holds token {len(counts) - 1}: the target's are 0..{target.vocab_size - 1}; name the "
            "target that the text was made for (--base-model)"
        )
    return LearnedTokens(counts, always_drafted(target, tokenizer))


def always_drafted(target: Vocabulary, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the tokens that every draft vocabulary must have; see LearnedTokens."""
    named = {*target.eos_token_ids, *(getattr(tokenizer, "all_special_ids", None) or ())}
    # A token beyond lm_head's rows, or -1 for none, has no logit: nobody can draft it.
    return tuple(sorted(token for token in named if 0 <= token < target.vocab_size))


def require_size(size: int, always: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless a draft vocabulary of this size holds `always`, within the target's tokens."""
    least = max(1, len(always))
    if not least <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size is {size}: it must be in {least}..{vocab_size}, from the target's special and "
            "end tokens, which are always inside, to all of its tokens; change --draft-vocab-size"
        )


def rank_tokens(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Return the `size` most frequent tokens [size] int64, most frequent first; ties go to the lower id.

    counts: [V], how often each token of the vocabulary occurs. always: tokens to include whatever their
    count, such as end tokens; they keep their own rank. If too few tokens occur, tokens of count 0 fill the
    list in the order of their ids. Raises ValueError unless counts are [V] and at least 0, `always` is in the
    vocabulary, and require_size takes the size.
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
    needed = sorted(set(always))
    require_size(size, needed, vocab_size)
    order = counts.argsort(descending=True, stable=True)  # [V]
    required = torch.isin(order, torch.tensor(needed, dtype=torch.int64, device=order.device))
    room = size - required.sum()
    return order[required | ((~required).cumsum(0) <= room)]
