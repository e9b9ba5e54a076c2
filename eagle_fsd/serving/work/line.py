"""When clients that find no room may come again: one after the other, as places become free."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

UNKNOWN = 10.0  # seconds of the first wait while nothing is known about the speed
LONGEST = 60.0  # clients do not wait for longer: the openai client comes at once if it is told to
MARGIN = 1.25  # texts take longer than others did: whoever comes a little late finds a place
NEWS = 0.2  # how much the last text counts


class Line:
    """Gives each client that is refused a turn of its own.

    rows: texts that are decoded together. draw: gives random numbers in [0, 1).
    """

    def __init__(self, rows: int, draw: Callable[[], float] = random.random) -> None:
        self._rows, self._draw = rows, draw
        self._seconds: float | None = None  # that a text took, lately
        self._end = 0.0  # the time up to which turns are given

    def note(self, seconds: float) -> None:
        """Take in that a text took this long from its place on."""
        self._seconds = seconds if self._seconds is None else (1 - NEWS) * self._seconds + NEWS * seconds

    def turn(self, texts: int, now: float) -> int:
        """Return after how many seconds a client may come again with this many texts, from 1 to 60.

        Turns are as far apart as texts end. Those beyond the longest wait are spread over its second half,
        and then they try again.
        """
        apart, begin = 1.0, max(now + UNKNOWN, self._end)
        if self._seconds is not None:
            apart, begin = MARGIN * self._seconds / self._rows, max(now, self._end)
        wait = begin + apart * texts - now
        self._end = now + min(wait, LONGEST)
        if wait > LONGEST:
            wait = LONGEST * (1 + self._draw()) / 2
        return max(1, math.ceil(wait))
