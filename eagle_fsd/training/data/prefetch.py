"""Work on the next items while the present one is used: what a GPU needs in order not to wait on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetched(
    make: Callable[[Item], Made], items: Iterable[Item], ahead: int
) -> Generator[Made, None, None]:
    """make(item) of every item, in their order; up to `ahead` of them are made before they are asked for.

    One thread makes them one after another, so `make` need not be thread-safe. What it raises is raised here,
    at its item. Closing the iterator ends the thread, after the item that it is at. 0 ahead needs no thread.
    """
    if not ahead:
        yield from map(make, items)
        return
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()
