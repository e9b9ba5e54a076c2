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

    def note(self, started: float, now: float) -> None:
        self.speed = 0.8 * self.speed + 0.2 * ROWS / (now - started)

    def turn(self, _texts: int, _now: float) -> int:
        return max(1, min(60, round(1 / self.speed))) if self.speed else 10


def give_up(line: Line | SameForAll, clients: int, seconds: float, before: int, seed: int) -> int:
    """Return how many of these clients, who come at once, find no place though they come again twice.

    seconds: that a text takes among seven others, give or take a half; alone a quarter of it. before: texts
    that were served alone, one after the other.
    """
    draw = random.Random(seed)

    def length() -> float:
        return seconds * draw.uniform(0.5, 1.5)

    now = 0.0
    for _ in range(before):
        began, now = now + 1, now + 1 + length() / 4
        line.note(began, now)
    order = count()
    asking: list[tuple[float, int, int]] = [(now, next(order), RETRIES) for _ in range(clients)]
    ending: list[tuple[float, float]] = []  # when a text ends, and when it began
    waiting = lost = 0
    while asking or ending:
        if ending and (not asking or ending[0][0] <= asking[0][0]):
            now, began = heapq.heappop(ending)
            line.note(began, now)
        else:
            now, _, left = heapq.heappop(asking)
            if len(ending) + waiting < ROWS + QUEUE:
                waiting += 1
            elif left:
                heapq.heappush(asking, (now + line.turn(1, now), next(order), left - 1))
            else:
                lost += 1
        while waiting and len(ending) < ROWS:
            waiting -= 1
            heapq.heappush(ending, (now + length(), now))
    return lost


@pytest.mark.parametrize("before", [0, 1, 30])
@pytest.mark.parametrize(("clients", "seconds"), [(100, 2.0), (100, 8.0), (100, 15.0), (200, 2.0)])
def test_far_fewer_clients_give_up_than_if_all_were_told_the_same(
    clients: int, seconds: float, before: int
) -> None:
    seeds = range(5)
    mine = [give_up(Line(ROWS, random.Random(seed).random), clients, seconds, before, seed) for seed in seeds]
    plain = [give_up(SameForAll(), clients, seconds, before, seed) for seed in seeds]
    assert max(mine) <= 4 and sum(mine) <= 10
    if before > 1:
        assert min(plain) >= 20


def line_of(gap: float, draw: Callable[[], float] = random.random) -> Line:
    """Return the line of a server whose texts end that far apart."""
    line = Line(8, draw)
    for place in range(20):
        line.note(place * gap - 3.0, place * gap + gap)
    return line


def test_turns_are_as_far_apart_as_texts_end() -> None:
    line = line_of(8 / MARGIN)
    assert [line.turn(1, 200.0) for _ in range(4)] == [8, 16, 24, 32]
    assert line.turn(3, 200.0) == 56  # three places
    assert line.turn(1, 240.0) == 24  # behind the others, who are still to come
    assert line.turn(1, 1000.0) == 8  # they have come


def test_nobody_is_told_to_wait_for_less_than_one_second_or_more_than_sixty() -> None:
    def turns(gap: float, draw: Callable[[], float]) -> list[int]:
        line = line_of(gap, draw)
        return [line.turn(1, 300.0) for _ in range(200)]

    assert set(turns(1e-6, random.random)) == {1}
    late = turns(10.0, random.Random(0).random)[10:]
    assert all(LONGEST / 2 <= one <= LONGEST for one in late)
    assert max(map(late.count, late)) <= len(late) / 8, "they must not all come back at once"


def test_a_line_begins_anew_once_its_turns_are_over() -> None:
    """However many were refused, nobody who comes a minute later pays for it."""
    line = line_of(0.1)
    for _ in range(10_000):
        line.turn(1, 100.0)
    assert line.turn(1, 100.0 + LONGEST) == 1


def test_texts_that_end_together_count_like_those_that_end_one_by_one() -> None:
    line = Line(8)
    for batch in range(1, 4):
        for _ in range(8):
            line.note(8 * batch - 8, 8 * batch)
    assert line.turn(4, 24.0) == 4 * MARGIN


def test_a_pause_is_no_time_of_a_text() -> None:
    line = Line(8)
    for hour in range(20):
        line.note(3600 * hour - 2, 3600 * hour)
    assert line.turn(2, 1e6) == 2 * 2 * MARGIN
