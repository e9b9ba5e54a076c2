"""What a long run on a CPU needs of the allocator."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch


def release_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can.

    Batches of many shapes leave glibc's heap full of holes that it keeps: without this a run's memory grows
    for hundreds of steps (figures in train/EXPERIMENTS.md).
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def memory_in_use(device: torch.device) -> int | None:
    """Bytes: the process's resident memory on a CPU, what tensors take on CUDA; None where it is not told."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
