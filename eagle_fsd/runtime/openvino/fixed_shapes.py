"""How the parts of a step are run beside OpenVINO: in few shapes, and with few of torch's threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from eagle_fsd.runtime.step_recorder import VIEW, Eager

FEW_ROWS = 2  # up to this many rows, one thread is enough for torch's work beside the graphs


class FixedShapes(Eager):
    """A stepper for a runtime that does extra work whenever shapes change.

    It records nothing. `records` is True all the same, so that callers keep to a few recurring shapes.
    The runtime has threads of its own. After each parallel piece of torch's work, torch's threads wait busily
    for the next one and take the processor from them. So torch gets one thread where it has little to do.
    """

    view, records = VIEW, True

    def running(self, rows: int) -> AbstractContextManager[None]:
        return one_thread() if rows <= FEW_ROWS else nullcontext()


_usual: dict[int, int] = {}  # the usual number of threads of each thread inside `one_thread`, by its id
_counting = threading.Lock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread here, in the thread that calls.

    A new thread begins with the number that was set last, which may be the 1 of another thread in here. It
    then leaves with the usual number of that thread.
    """
    mine = threading.get_ident()
    if mine in _usual:
        yield
        return
    with _counting:
        usual = torch.get_num_threads()
        if usual == 1:
            usual = max(_usual.values(), default=1)
        _usual[mine] = usual
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _counting:
            del _usual[mine]
            torch.set_num_threads(usual)
