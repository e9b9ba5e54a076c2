"""What a long run on a CPU needs of the allocator."""

from __future__ import annotations

import ctypes
import sys


def release_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can.

    Batches of many shapes leave glibc's heap full of holes that it keeps: without this a run's memory grows
    for hundreds of steps (figures in train/EXPERIMENTS.md).
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
