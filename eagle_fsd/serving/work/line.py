"""When clients that find no room may come again: one after the other, as places become free."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

UNKNOWN = 10.0  # seconds of the first wait while nothing is known about the speed
LONGEST = 60.0  # clients do not wait for longer: the openai client comes at once if it is told to
MARGIN = 1.5  # texts may take longer than others did, and whoever comes a little late finds a place


class Line:
    """Gives each client that is refused a turn of its own.

    rows: texts that are decoded together. draw: gives random numbers in [0, 1).
    """

    def __init__(self, rows: int, draw: Callable[[], float] = random.random) -> None:
        self._gaps: deque[float] = deque(maxlen=2 * rows)  # seconds from the end of a text to the next one's
        self._draw = draw
        self._last = 0.0  # when a text ended
        self._end = 0.0  # the time up to which turns are given

    def note(self, started: float, now: float) -> None:
        """Take in that a text has ended that had its place since then. Where no other had one, it took that
        long; a pause before it does not count."""
        self._gaps.append(now - max(self._last, started))
        self._last = now

    def turn(self, texts: int, now: float) -> int:
        """Return after how many seconds a client may come again with this many texts, from 1 to 60.

        Turns are as far apart as texts end. Those beyond the longest wait are spread over its second half,
        and then they try again.
        """
        apart, begin = 1.0, max(now + UNKNOWN, self._end)
        if self._gaps:
            apart, begin = MARGIN * sum(self._gaps) / len(self._gaps), max(now, self._end)
        wait = begin + apart * texts - now
        self._end = now + min(wait, LONGEST)
        if wait > LONGEST:
            wait = LONGEST * (1 + self._draw()) / 2
        return max(1, math.ceil(wait))
