"""How long a call takes on a device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

REPEATS, ENOUGH = 5, 0.5  # calls that are timed, fewer where they and what comes before take more seconds


def timed(
    work: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None
) -> float:
    """Median seconds of a call, after an untimed one. before: run ahead of each, and not timed."""
    wait = synchronizer(device) or (lambda: None)
    seconds: list[float] = []
    end = time.perf_counter() + ENOUGH
    while len(seconds) <= REPEATS and (not seconds or time.perf_counter() < end):
        before()
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:] or seconds)


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """What waits for the device's queued work; None on a CPU, which queues none."""
    return None if device.type == "cpu" else functools.partial(torch.accelerator.synchronize, device)
