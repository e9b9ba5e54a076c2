"""How a text repeats itself, and how fuzzy accepts cluster, from token ids and places alone."""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 8  # tokens that stood together before: by chance, a template or a loop, not by grammar
LONGEST_PERIOD = 64
LEAST_ROUNDS, LEAST_TOKENS = 3, 24  # what counts as a loop at the end of a text


def repeated_tokens(ids: Sequence[int], size: int = GRAM) -> int:
    """Count the tokens that end a group of `size` tokens which stood in the text before."""
    seen: set[tuple[int, ...]] = set()
    count = 0
    for end in range(size, len(ids) + 1):
        gram = tuple(ids[end - size : end])
        count += gram in seen
        seen.add(gram)
    return count


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Return whether the text ends in the same tokens over and over, at least LEAST_ROUNDS times."""
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(period * LEAST_ROUNDS, LEAST_TOKENS)
        if span <= len(ids) and all(
            ids[-place] == ids[-place - period] for place in range(1, span - period + 1)
        ):
            return True
    return False


def runs(places: Sequence[int]) -> int:
    """Count the groups of places that follow each other without a gap."""
    return sum(here != before + 1 for before, here in zip([-2, *places], places, strict=False))
