"""A run's folder: its checkpoint, its best head and its log, none of them ever half written or shared."""

from __future__ import annotations

import json
import logging
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout

from eagle_fsd.files import whole_file, write_atomically
from eagle_fsd.jsonl import read_jsonl
from eagle_fsd.messages import one_line

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
    with whole_file(path) as partial:
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
