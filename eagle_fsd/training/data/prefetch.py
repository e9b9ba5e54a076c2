"""Prepare the next items while the present one is used, so that a GPU does not wait for the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetch(make: Callable[[Item], Made], items: Iterable[Item], ahead: int) -> Generator[Made, None, None]:
    """Yield make(item) of every item in order, with up to `ahead` of them made in advance.

    One thread makes them one after another, so `make` need not be thread-safe. An exception of `make` is
    raised here, at its item. Closing the generator ends the thread after its current item. With `ahead` 0
    there is no thread.
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
