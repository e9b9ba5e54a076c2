"""The draft tree of a server's texts: a usual one at first, whose size is measured while nobody asks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import TreeConfig

logger = logging.getLogger(__name__)
PAUSE = 2.0  # seconds without a text after which it is measured
LONG_PAUSE = 300.0  # the same, after other programs kept the machine busy
PUTS_IT_OFF = "a request puts it off"


class Chosen(Protocol):
    """What a measurement found."""

    @property
    def tree(self) -> TreeConfig: ...


# Returns None if the machine is busy, or once the function that it is given says that it is not to go on.
Measure = Callable[[Callable[[], bool], str], Chosen | None]


class ServedTree:
    """The tree of every text's steps. measure: chooses its size; None for a size that stays."""

    def __init__(self, size: TreeConfig, measure: Measure | None = None) -> None:
        self.size, self._measure, self._pause = size, measure, PAUSE

    @property
    def pause(self) -> float | None:
        """Return after how many seconds without a text it is measured; None for never."""
        return None if self._measure is None else self._pause

    def measure(self, asked: Callable[[], bool]) -> bool:
        """Measure it until somebody asks for a text, and return whether there is another tree now.

        A measurement that fails ends the measuring and nothing else.
        """
        if self._measure is None:
            return False
        try:
            chosen = self._measure(lambda: not asked(), PUTS_IT_OFF)
        except Exception as error:
            logger.exception("the tree stays %s, since it cannot be measured: %s", self.size, one_line(error))
            self._measure = None
            return False
        if chosen is None:
            self._pause = PAUSE if asked() else LONG_PAUSE
            return False
        self._measure = None
        before, self.size = self.size, chosen.tree
        return self.size != before
