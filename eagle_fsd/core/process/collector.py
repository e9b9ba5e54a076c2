"""Blocks in which the garbage collector looks for no reference cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Look for no reference cycles inside the block.

    For what makes hundreds of thousands of objects that stay, such as imports: going through them again and
    again takes an eighth of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
