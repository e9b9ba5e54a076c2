"""Covering arrays: a few cases of a grid in which all combinations of few of its values come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def covering(cases: Sequence[Sequence[str]], strength: int) -> list[int]:
    """Return which cases cover every combination of `strength` values that comes in any of them.

    cases: the values of each case, one for each parameter. With strength 1 every value comes, with 2 every
    pair of values of two parameters. Chosen greedily, the case with the most of what is missing first.
    """
    combined = [set(combinations(enumerate(case), min(strength, len(case)))) for case in cases]
    missing: set[tuple[tuple[int, str], ...]] = set().union(*combined)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(combined[place] & missing))
        missing -= combined[best]
        chosen.append(best)
    return sorted(chosen)
