"""A run's folder: its checkpoint, its best head and its log, none of them ever half written or shared."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import atomic_path, write_atomically
from eagle_fsd.files.jsonl import read_jsonl

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
LOG = "log.jsonl"
# What torch.load raises for a file that is cut short or another's.
DAMAGE = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, LookupError, TypeError, ValueError)


@contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; a killed process lets go of it. ValueError where one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{folder} is in use: two runs would overwrite each other's checkpoints; wait for the other one, "
            "or name another --output"
        ) from error
    try:
        yield
    finally:
        lock.release()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A file of save_atomically; ValueError for what is none."""
    with path.open("rb") as file:
        try:
            return dict(torch.load(file, map_location="cpu", weights_only=True))
        except DAMAGE as error:
            raise ValueError(
                f"{path} is not a whole checkpoint ({one_line(error, 80)}); remove it to start again"
            ) from error


def save_atomically(state: dict[str, Any], path: Path) -> None:
    with atomic_path(path) as partial:
        torch.save(state, partial)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The log's records; a last line that a killed run tore is left out."""
    path = folder / LOG
    return [record for _, record in read_jsonl(path, torn=True)] if path.is_file() else []


def cut_log(folder: Path, step: int) -> None:
    """Drop what a run that was killed logged after its last checkpoint: those steps are taken again."""
    if (folder / LOG).is_file():
        kept = [record for record in read_log(folder) if record["step"] <= step]
        write_atomically(folder / LOG, "".join(json.dumps(record) + "\n" for record in kept))


@dataclass
class Report:
    """What came of a step. values: its loss, its gradient's norm and the cross-entropy of each drafting step,
    on the device until they are asked for. memory: bytes, where they were measured.
    """

    step: int  # steps before it
    rate: float
    values: Tensor  # [2 + depth]
    seconds: float = 0.0
    memory: int | None = None

    @cached_property
    def numbers(self) -> list[float]:
        """The values; this waits for the device."""
        return self.values.tolist()

    @property
    def loss(self) -> float:
        return self.numbers[0]

    @property
    def norm(self) -> float:
        return self.numbers[1]

    def record(self) -> dict[str, Any]:
        """What the log says of the step."""
        return {
            "step": self.step + 1,
            "seconds": round(self.seconds, 1),
            "loss": self.loss,
            # None where no draft was so deep
            "cross_entropy": [None if math.isnan(value) else value for value in self.numbers[2:]],
            "norm": self.norm,
            "lr": self.rate,
            **({} if self.memory is None else {"memory": self.memory}),
        }


def fixed(run: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's identity that a resumed run may not change; its length and its pauses it may."""
    free = ("epochs", "minutes", "eval_every", "checkpoint_every", "accumulate")  # see batches_per_step
    return run | {"config": {name: value for name, value in run["config"].items() if name not in free}}


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """A record's numbers by dotted names, for trackers."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            found |= flat({str(index): number for index, number in enumerate(value, 1)}, f"{prefix}{name}.")
        elif value is not None and name != "step":
            found[f"{prefix}{name}"] = value
    return found


class Stoppable(Protocol):
    stop: int  # the signal that asked for it; 0: none


@contextmanager
def stop_on_signals(run: Stoppable) -> Iterator[None]:
    """SIGTERM and Ctrl-C let the step finish, and the run writes its checkpoint and ends.

    A second one is the system's again.
    """

    def request_stop(number: int, _frame: object) -> None:
        logger.warning("signal %d: writing a checkpoint after this step", number)
        run.stop = number
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, request_stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
