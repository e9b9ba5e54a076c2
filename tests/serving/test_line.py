"""When refused clients come again: a simulation, beside the plain rule that tells all of them the same."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

import pytest

from eagle_fsd.serving.work.line import LONGEST, MARGIN, Line

ROWS, QUEUE, RETRIES = 8, 64, 2  # the server's defaults, and the openai client's


class SameForAll:
    """The plain rule: the time until one place is free, whoever else was told it."""

    def __init__(self) -> None:
        self.speed = 0.0

    def note(self, seconds: float) -> None:
        self.speed = 0.8 * self.speed + 0.2 * ROWS / seconds

    def turn(self, _texts: int, _now: float) -> int:
        return max(1, min(60, round(1 / self.speed))) if self.speed else 10


def give_up(line: Line | SameForAll, clients: int, seconds: float, known: bool, seed: int) -> int:
    """Return how many of these clients, who come at once, find no place though they come again twice.

    seconds: that a text takes, give or take a half. known: whether texts were served before.
    """
    draw = random.Random(seed)

    def length() -> float:
        return seconds * draw.uniform(0.5, 1.5)

    for _ in range(20 if known else 0):
        line.note(length())
    order = count()
    asking: list[tuple[float, int, int]] = [(0.0, next(order), RETRIES) for _ in range(clients)]
    ending: list[tuple[float, float]] = []  # when a text ends, and how long it took
    waiting = lost = 0
    while asking or ending:
        if ending and (not asking or ending[0] <= (asking[0][0], 0.0)):
            now, took = heapq.heappop(ending)
            line.note(took)
        else:
            now, _, left = heapq.heappop(asking)
            if len(ending) + waiting < ROWS + QUEUE:
                waiting += 1
            elif left:
                heapq.heappush(asking, (now + line.turn(1, now), next(order), left - 1))
            else:
                lost += 1
        while waiting and len(ending) < ROWS:
            waiting, took = waiting - 1, length()
            heapq.heappush(ending, (now + took, took))
    return lost


@pytest.mark.parametrize("known", [True, False], ids=["known speed", "no text yet"])
@pytest.mark.parametrize(("clients", "seconds"), [(100, 2.0), (100, 8.0), (100, 15.0), (200, 2.0)])
def test_far_fewer_clients_give_up_than_if_all_were_told_the_same(
    clients: int, seconds: float, known: bool
) -> None:
    seeds = range(5)
    mine = [give_up(Line(ROWS, random.Random(seed).random), clients, seconds, known, seed) for seed in seeds]
    plain = [give_up(SameForAll(), clients, seconds, known, seed) for seed in seeds]
    assert max(mine) <= 4 and sum(mine) <= 10
    if known:
        assert min(plain) >= 20


def test_turns_are_as_far_apart_as_texts_end() -> None:
    line = Line(2)
    line.note(16 / MARGIN)
    assert [line.turn(1, 100.0) for _ in range(4)] == [8, 16, 24, 32]
    assert line.turn(3, 100.0) == 56  # three places
    assert line.turn(1, 140.0) == 24  # behind the others, who are still to come
    assert line.turn(1, 1000.0) == 8  # they have come


def test_nobody_is_told_to_wait_for_less_than_one_second_or_more_than_sixty() -> None:
    def turns(seconds: float, draw: Callable[[], float]) -> list[int]:
        line = Line(8, draw)
        line.note(seconds)
        return [line.turn(1, 0.0) for _ in range(200)]

    assert set(turns(1e-6, random.random)) == {1}
    late = turns(100.0, random.Random(0).random)[10:]
    assert all(LONGEST / 2 <= one <= LONGEST for one in late)
    assert max(map(late.count, late)) <= len(late) / 8, "they must not all come back at once"


def test_a_line_begins_anew_once_its_turns_are_over() -> None:
    """However many were refused, nobody who comes a minute later pays for it."""
    line = Line(8)
    line.note(1.0)
    for _ in range(10_000):
        line.turn(1, 0.0)
    assert line.turn(1, LONGEST) == 1


def test_short_texts_that_were_left_do_not_hide_how_long_others_take() -> None:
    line = Line(1)
    for _ in range(10):
        line.note(0.001)
        line.note(8.0)
    assert 4 <= line.turn(1, 0.0) <= 8
