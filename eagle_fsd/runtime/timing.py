"""How long calls take on a device, and whether other work slowed them down."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

REPEATS = 5  # how often a call is timed
ENOUGH = 0.5  # seconds after which a call is not timed again
RECORDED = 3  # untimed calls of work that records itself: the first runs plainly, the second records
BUSY = 0.25  # if the quartiles of a call's repeats differ by more, or threads wait for a core for a larger
# share of the time that they run, the machine is busy with other work

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]


@dataclass(frozen=True)
class Call:
    """Something to time. before: runs before each call and is not timed."""

    work: Work
    before: Work = lambda: None


class CoreWait:
    """How long this process's threads waited for a core while calls were timed, over how long they ran.

    On two cores that another program keeps busy too, the repeats of a call may agree, and each take twice as
    long as alone. Only Linux tells; elsewhere nothing waited.
    """

    def __init__(self) -> None:
        self._ran = self._waited = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what the threads do within."""
        before = thread_times()
        yield
        for thread, (ran, waited) in thread_times().items():
            ran_before, waited_before = before.get(thread, (0, 0))
            self._ran += ran - ran_before
            self._waited += waited - waited_before

    @property
    def share(self) -> float:
        return self._waited / max(self._ran, 1)


def thread_times() -> dict[str, tuple[int, int]]:
    """Return for each thread of this process the nanoseconds that it ran, and that it waited for a core."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):  # it has just ended, or the kernel does not count
            ran, waited, _turns = map(int, (thread / "schedstat").read_text().split())
            found[thread.name] = ran, waited
    return found


def median_seconds(work: Work, device: torch.device) -> float:
    """Return the median seconds of a call, after an untimed one."""
    return statistics.median(time_in_turn({None: Call(work)}, device)[None])


def time_in_turn(
    calls: Mapping[Key, Call],
    device: torch.device,
    untimed: int = 1,
    most: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
    agree: Callable[[tuple[float, float]], tuple[float, float]] = lambda seconds: seconds,
    waiting: CoreWait | None = None,
) -> dict[Key, list[float]]:
    """Time each call and return the seconds of its repeats.

    There are at most `most` of them, fewer once they took ENOUGH seconds, and at least one. The calls take
    turns, so that a disturbance hits a few repeats of every call instead of all repeats of one: the medians
    stay good, and `disagreement` shows it. untimed: how often each is called before the clock starts;
    RECORDED if the second call records it. If a single untimed call takes ENOUGH seconds, it counts as the
    only repeat. agree: returns the seconds that count, where several processes time the same calls. waiting:
    counts the repeats.
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
    with (waiting or CoreWait()).counted():
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
