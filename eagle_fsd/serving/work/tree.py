"""The draft tree of a server's texts: a usual one at first, whose size is measured while nobody asks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        self._found: Chosen | None = None
        self._held, self._holding = 0, threading.Lock()  # held: requests for which it stays

    @property
    def pause(self) -> float | None:
        """Return after how many seconds without a text it is measured; None for never."""
        return None if self._measure is None else self._pause

    @contextmanager
    def stays(self) -> Iterator[None]:
        """Keep the size, and measure nothing, while a request is read: its rule may hold for this size."""
        with self._holding:
            self._held += 1
        try:
            yield
        finally:
            with self._holding:
                self._held -= 1

    def measure(self, asked: Callable[[], bool]) -> bool:
        """Measure it until somebody asks for a text, and return whether there is another tree now.

        A measurement that fails ends the measuring and nothing else.
        """
        if self._measure is None:
            return False
        put_off = False

        def goes_on() -> bool:
            nonlocal put_off
            put_off = put_off or self._held > 0 or asked()
            return not put_off

        try:
            if self._found is None:
                self._found = self._measure(goes_on, PUTS_IT_OFF)
        except Exception as error:
            logger.exception("the tree stays %s, since it cannot be measured: %s", self.size, one_line(error))
            self._measure = None
            return False
        with self._holding:
            if self._found is None or self._held or asked():  # texts that wait may have rules for this size
                self._pause = PAUSE if put_off or self._found is not None else LONG_PAUSE
                return False
            self._measure = None
            before, self.size = self.size, self._found.tree
        return self.size != before
