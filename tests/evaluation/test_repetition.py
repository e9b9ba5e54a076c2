"""Repetition and runs against plain definitions of them."""

from __future__ import annotations

import random

import pytest

from eagle_fsd.evaluation.analysis.repetition import ends_in_loop, repeated_tokens, runs


def test_repeated_tokens_are_those_that_end_a_group_seen_before() -> None:
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(3) for _ in range(60)]
        plain = sum(
            any(ids[end - 4 : end] == ids[other - 4 : other] for other in range(4, end))
            for end in range(4, 61)
        )
        assert repeated_tokens(ids, 4) == plain > 0
    assert repeated_tokens(list(range(100))) == 0 and repeated_tokens([]) == 0
    assert repeated_tokens([*range(20), *range(20)]) == 20 - 7  # the first seven end a group across the seam


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([], False),
        ([5] * 24, True),
        ([5] * 23, False),  # too short to say
        ([9, *[5] * 23], False),
        ([*range(40), *[1, 2, 3, 4, 5] * 5], True),  # 25 tokens, five rounds
        ([*range(40), *[1, 2, 3, 4, 5] * 4], False),  # 20 tokens
        ([*range(40), *[1, 2, 3, 4, 5] * 5, 9], False),  # it got out
        ([*range(30)] * 3, True),
        ([*range(30)] * 2, False),
        ([*range(64)] * 3, True),
        ([*range(65)] * 3, False),  # longer than a loop is looked for
    ],
)
def test_a_loop_is_the_same_tokens_over_and_over_at_the_end(ids: list[int], loops: bool) -> None:
    assert ends_in_loop(ids) == loops


def test_runs_are_places_without_a_gap() -> None:
    assert [runs(places) for places in ([], [0], [0, 1, 2], [0, 2, 4], [3, 4, 8, 9, 10])] == [0, 1, 1, 3, 2]
