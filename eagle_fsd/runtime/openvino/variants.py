"""One graph compiled for several sizes: when to compile, and what to compile ahead."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from eagle_fsd.files.atomic import read_records, write_atomically

AGAIN, OFTEN = 3, 50  # how often sizes come before they get a graph of their own
# The same of a large graph that nobody expected, and how often they come before it is used: SmolLM2-135M's
# decoder takes 0.7 s to compile, in which 30 to 60 steps are decoded, and then saves 0.2 to 5 ms a step.
START, SWITCH = 100, 200
FIRST = "first.json"  # beside a kept graph: the sizes that were expected first in the last process


class Variants:
    """A graph compiled for open sizes, and for the sizes that come often.

    A graph whose sizes are open takes up to twice as long as one of known sizes. So sizes that come AGAIN get
    a graph of their own while there are fewer than `most`; later they must come OFTEN, and the one that was
    not used for longest goes. Expected sizes are compiled ahead in a thread: those that a caller names, and
    those that were named first in the last process. `choose` waits for them, so that no race decides which
    graph computes a text. Of a large graph, other sizes are compiled in a thread when they have come START
    times, and used when they have come SWITCH times: rows that leave a batch bring sizes that do not stay.
    compile_for: compiles for some sizes, or for all if it is given None. most: 0 means that all sizes are
    left to the graph whose sizes are open. folder: where the graph is kept, if it is. large: whether
    compiling takes as long as many steps.
    """

    def __init__(
        self,
        compile_for: Callable[[tuple[int, ...] | None], Any],
        most: int,
        folder: Path | None = None,
        large: bool = False,
    ) -> None:
        self.compile_for, self.most, self.folder, self.large = compile_for, most, folder, large
        self.open = compile_for(None)
        self.compiled: dict[tuple[int, ...], Future[Any]] = {}  # finished or under way
        self._seen: dict[tuple[int, ...], int] = {}
        self._used: dict[tuple[int, ...], float] = {}
        self._measured: set[tuple[int, ...]] = set()  # graphs that were made for a measurement only
        self._unexpected: set[tuple[int, ...]] = set()  # large graphs that are not used before SWITCH
        self._lock = threading.Lock()  # of these dictionaries; nobody compiles under it
        self._last_time = None if folder is None else read_first(folder)
        self._first: tuple[int, ...] | None = None
        if self._last_time is not None:
            self._compile_ahead(self._last_time)

    def choose(self, sizes: tuple[int, ...]) -> Any:
        """Return the compiled graph for these sizes, after compiling it if they came often enough."""
        if not self.most:
            return self.open
        self._used[sizes] = time.monotonic()
        known = self.compiled.get(sizes)
        if known is not None and known.done() and sizes not in self._unexpected:
            return known.result()  # nothing is left to be counted
        with self._lock:
            count = self._seen[sizes] = self._seen.get(sizes, 0) + 1
            if sizes not in self.compiled and count < self._enough():
                return self.open
            mine, graph = self._entry(sizes)
            if mine and self.large:
                self._unexpected.add(sizes)
            if count >= SWITCH:
                self._unexpected.discard(sizes)
            waits = sizes in self._unexpected
        if mine and self.large:
            self._compile_beside(sizes, graph)
        elif mine:
            self._compile(sizes, graph)
        return self.open if waits else graph.result()

    def _enough(self) -> int:
        """Return how often sizes that nobody expected must have come to get a graph now."""
        return START if self.large else AGAIN if len(self.compiled) < self.most else OFTEN

    def expect(self, sizes: tuple[int, ...], again: bool = True) -> None:
        """Compile ahead for sizes that are about to come often.

        again: whether they may come later too, also in the next process. False: they are only measured. A
        graph for these is always compiled, and where there are `most` graphs, it gives way to others.
        """
        if again:
            self._remember(sizes)
        self._compile_ahead(sizes, again)

    def _compile_ahead(self, sizes: tuple[int, ...], again: bool = True) -> None:
        if not self.most:
            return
        with self._lock:
            self._used[sizes] = time.monotonic()
            self._unexpected.discard(sizes)
            if again:
                self._measured.discard(sizes)
            full = len(self.compiled) >= self.most and not self._measured
            if sizes in self.compiled or (again and full):
                return
            _, graph = self._entry(sizes)
            if not again:
                self._measured.add(sizes)
        self._compile_beside(sizes, graph)

    def _entry(self, sizes: tuple[int, ...]) -> tuple[bool, Future[Any]]:
        """Return whether an entry for sizes is new, so that the caller has to compile it, and the entry.

        The lock is held.
        """
        if sizes in self.compiled:
            return False, self.compiled[sizes]
        if len(self.compiled) >= self.most:
            latest = max(self.compiled, key=self._used.__getitem__)  # two are measured in turn: both stay
            oldest = min(
                self.compiled, key=lambda one: (one == latest, one not in self._measured, self._used[one])
            )
            self._drop(oldest)
        graph = self.compiled[sizes] = Future()
        return True, graph

    def _drop(self, sizes: tuple[int, ...]) -> None:
        """Drop the graph of sizes, and begin to count them anew. The lock is held.

        Whether they are unexpected is said when they get a graph again.
        """
        del self.compiled[sizes]
        self._measured.discard(sizes)
        self._seen.pop(sizes, None)

    def _compile_beside(self, sizes: tuple[int, ...], graph: Future[Any]) -> None:
        """Compile in a thread. No daemon: the interpreter must not end while a graph is compiled."""
        threading.Thread(target=self._compile, args=(sizes, graph), name="compile ahead").start()

    def _compile(self, sizes: tuple[int, ...], graph: Future[Any]) -> None:
        """Compile for sizes. An error is raised where the result is asked for; later calls try again."""
        try:
            graph.set_result(self.compile_for(sizes))
        except BaseException as error:  # noqa: BLE001 (nobody may wait for ever)
            with self._lock:
                if self.compiled.get(sizes) is graph:
                    self._drop(sizes)
            graph.set_exception(error)

    def _remember(self, sizes: tuple[int, ...]) -> None:
        """Note the sizes that are expected first, for the next process."""
        if self._first is None:
            self._first = sizes
            if self.folder is not None and sizes != self._last_time:
                with contextlib.suppress(OSError):
                    write_atomically(self.folder / FIRST, f'{{"sizes": {list(sizes)}}}\n')


def read_first(folder: Path) -> tuple[int, ...] | None:
    """Return the sizes that were expected first in the last process; None if none are known."""
    with contextlib.suppress(OSError):
        sizes = read_records(folder / FIRST).get("sizes")
        if isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes):
            return tuple(sizes)
    return None
