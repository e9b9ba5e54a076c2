"""The target's own earlier lists of next tokens, by the tokens that they followed.

Token recycling (Luo et al., arXiv 2408.08696) remembers the target's best next tokens at every node that was
verified, rejected nodes included, and proposes them when the same token comes again. Here a list is found by
the last two tokens if such a pair was verified, else by the last one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LENGTH = 8  # tokens in a list


class NextList(NamedTuple):
    """The target's best next tokens after a token, and their probabilities at temperature 1."""

    ids: list[int]
    probs: list[float]


class FoundList(NamedTuple):
    """A list by its tokens. order: how many tokens before it are the same, 2 or 1."""

    probs: dict[int, float]
    order: int

    @property
    def rest(self) -> float:
        """The probability of all tokens that are not in the list."""
        return max(1.0 - sum(self.probs.values()), 0.0)


class RecycledLists:
    """The latest list after each token and after each pair of tokens, of one text."""

    def __init__(self) -> None:
        self.after_token: dict[int, NextList] = {}
        self.after_pair: dict[tuple[int, int], NextList] = {}

    def add(self, before: int, token: int, found: NextList) -> None:
        """Remember the list that followed a token. before: the token before it, -1 at a text's start."""
        self.after_token[token] = found
        self.after_pair[before, token] = found

    def find(self, before: int, token: int) -> FoundList | None:
        """Return the list for the token after these two, if there is one."""
        found, order = self.after_pair.get((before, token)), 2
        if found is None:
            found, order = self.after_token.get(token), 1
        return None if found is None else FoundList(dict(zip(*found, strict=True)), order)

    def copy(self) -> RecycledLists:
        """Return the same lists, to be changed on their own."""
        other = RecycledLists()
        other.after_token, other.after_pair = dict(self.after_token), dict(self.after_pair)
        return other


def next_lists(ids: NDArray[np.int64], log_p: NDArray[np.float32]) -> list[NextList]:
    """Return lists from ids and log-probabilities [X, k]; tokens of probability zero are left out."""
    probs = np.exp(log_p.astype(np.float64))
    whole = bool((probs > 0).all())
    rows = zip(ids.tolist(), probs.tolist(), strict=True)
    if whole:
        return [NextList(*row) for row in rows]
    return [NextList(*_drop_impossible(*row)) for row in rows]


def _drop_impossible(ids: list[int], probs: list[float]) -> tuple[list[int], list[float]]:
    kept = [place for place, prob in enumerate(probs) if prob > 0]
    return [ids[place] for place in kept], [probs[place] for place in kept]
