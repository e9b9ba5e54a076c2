"""A run's process: the signals that stop it, its end among others, and the memory that it holds."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

from eagle_fsd.core.process.signals import ENDING

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


class Stoppable(Protocol):
    """A run that can be asked to stop."""

    stop: int  # the signal that asked for it; 0: none


@contextmanager
def stop_on_signals(run: Stoppable) -> Iterator[None]:
    """On SIGTERM, on Ctrl-C or when the terminal is closed, let the run finish its step, save it and end.

    A second signal has its usual effect again. One that the process ignores stays ignored: nohup leaves it
    so, and a script that starts a job in the background.
    """

    def request_stop(number: int, _frame: object) -> None:
        logger.warning("signal %d: writing a checkpoint after this step", number)
        run.stop = number
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)

    found = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, request_stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_together(accelerator: Accelerator) -> None:
    """End the training of all processes.

    A barrier and a pause come first: gloo's thread releases a gathered tensor only with the next call, for
    which it needs the interpreter's lock. The end of the process group joins that thread while it holds the
    lock, so that on a busy machine both could wait for each other for ever.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.5)
    accelerator.end_training()


def memory_in_use(device: torch.device) -> int:
    """Measure bytes in use: the process's memory on a CPU, tensors on CUDA."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
