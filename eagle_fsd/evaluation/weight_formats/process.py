"""A process of its own for a part of a measurement, and the memory of the process that asks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import torch

from eagle_fsd.evaluation.measure.hardware_limits import resident_memory
from eagle_fsd.evaluation.measure.speed import peak_memory

Result = TypeVar("Result")
STATUS = Path("/proc/self/status")


def in_own_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function of a module in a fresh process, and return its result or raise its error.

    Raises ValueError if the process ends before the function does.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"the process of {work.__name__} was ended from outside, perhaps for want of memory: it must "
                "run to its end; free some memory and start again, which keeps the rows that there are"
            ) from error


def memory() -> dict[str, int]:
    """Return the bytes of this process that are in memory now, and the most that there have been.

    On Linux they are the process's own. What `getrusage` calls its peak begins with that of its parent.
    """
    resident = resident_memory(torch.device("cpu"))
    if not STATUS.exists():
        return {"resident": resident, "peak": peak_memory(torch.device("cpu"))}
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return {"resident": resident, "peak": 1024 * int(kilobytes)}
