"""How long calls take on a device, and whether their repeats agree."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

REPEATS = 5  # how often a call is timed
ENOUGH = 0.5  # seconds after which a call is not timed again
RECORDED = 3  # untimed calls of work that records itself: the first runs plainly, the second records
BUSY = 0.25  # if the quartiles of a call's repeats differ by more, the machine is busy with other work

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]


@dataclass(frozen=True)
class Call:
    """Something to time. before: runs before each call and is not timed."""

    work: Work
    before: Work = lambda: None


def median_seconds(work: Work, device: torch.device, before: Work = lambda: None) -> float:
    """Return the median seconds of a call, after an untimed one."""
    return statistics.median(time_in_turn({None: Call(work, before)}, device)[None])


def time_in_turn(
    calls: Mapping[Key, Call],
    device: torch.device,
    untimed: int = 1,
    most: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
    agree: Callable[[tuple[float, float]], tuple[float, float]] = lambda seconds: seconds,
) -> dict[Key, list[float]]:
    """Time each call and return the seconds of its repeats.

    There are at most `most` of them, fewer once they took ENOUGH seconds, and at least one. The calls take
    turns, so that a disturbance hits a few repeats of every call instead of all repeats of one: the medians
    stay good, and `disagreement` shows it. untimed: how often each is called before the clock starts;
    RECORDED if the second call records it. If a single untimed call takes ENOUGH seconds, it counts as the
    only repeat. agree: returns the seconds that count, where several processes time the same calls.
    """
    wait = synchronizer(device) or (lambda: None)
    found: dict[Key, list[float]] = {key: [] for key in calls}

    def once(call: Call) -> tuple[float, float]:
        """Run a call; return its seconds without and with `before`."""
        begin = clock()
        call.before()
        wait()
        start = clock()
        call.work()
        wait()
        end = clock()
        return agree((end - start, end - begin))

    spent = dict.fromkeys(calls, 0.0)
    for key, call in calls.items():
        for _ in range(untimed):
            seconds, whole = once(call)
        if untimed == 1 and whole >= ENOUGH:
            found[key], spent[key] = [seconds], whole
    for _ in range(most):
        for key, call in calls.items():
            if spent[key] < ENOUGH:
                seconds, whole = once(call)
                found[key].append(seconds)
                spent[key] += whole
    return found


def disagreement(repeats: Sequence[float]) -> float:
    """Return how much longer a call's slower repeats took: the upper quartile over the lower one, minus 1."""
    ordered, quarter = sorted(repeats), len(repeats) // 4
    return ordered[-1 - quarter] / max(ordered[quarter], 1e-9) - 1


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for the device's queued work; None on a CPU, which queues none."""
    return None if device.type == "cpu" else functools.partial(torch.accelerator.synchronize, device)
