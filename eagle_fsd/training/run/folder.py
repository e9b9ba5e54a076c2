"""A run's folder: its checkpoint, its best head and its log. Each is written whole, by one process."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import atomic_path, partials_of, read_records, sole, write_atomically
from eagle_fsd.files.fingerprints import differences
from eagle_fsd.files.jsonl import read_jsonl, write_rows
from eagle_fsd.hub.resolve import CHECKPOINT_OF_RUN

CHECKPOINT = CHECKPOINT_OF_RUN
BEST = "best.pt"
LOG = "log.jsonl"
RECORD = "provenance.json"
CURVES = "curves.png"
# What torch.load raises for a file that is cut short or of another kind.
DAMAGE = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, LookupError, TypeError, ValueError)


@contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, until this process ends. Raises ValueError if one is at work there.

    A file that a killed run has not written to its end is deleted.
    """
    with sole(folder / ".lock", folder, "overwrite each other's checkpoints"):
        for name in (CHECKPOINT, BEST, LOG, RECORD, CURVES):
            for partial in partials_of(folder / name):
                partial.unlink(missing_ok=True)
        yield


def read_checkpoint(path: Path, *names: str) -> dict[str, Any]:
    """Read a file of save_atomically, with at least these entries.

    Raises ValueError if it is damaged or of another kind.
    """
    with path.open("rb") as file:
        try:
            state = dict(torch.load(file, map_location="cpu", weights_only=True))
        except DAMAGE as error:
            raise ValueError(
                f"{path} is not a whole checkpoint ({one_line(error, 80)}); remove it to start again"
            ) from error
    if missing := [name for name in names if name not in state]:
        raise ValueError(f"{path} is no checkpoint of a run: it has no {', '.join(missing)}; remove it")
    return state


def save_atomically(state: dict[str, Any], path: Path) -> None:
    # Python's own file says why it takes no more, and torch's does not.
    with atomic_path(path) as partial, partial.open("wb") as file:
        torch.save(state, file)


def write_record(folder: Path, record: dict[str, Any], trained: bool) -> None:
    """Write the record of a call. One that did no step leaves that of the call that finished the same run.

    It may be of another machine, commit and command than the training was. trained: whether it did a step.
    """
    known = read_records(folder / RECORD)
    same = all(known.get(name, record[name]) == record[name] for name in ("run", "steps"))
    if trained or not same or "finished" not in known:
        write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read the log's records. A last line that a killed run cut off is left out.

    Raises ValueError for a record without a step.
    """
    path = folder / LOG
    rows = list(read_jsonl(path, torn=True)) if path.is_file() else []
    for number, record in rows:
        if not isinstance(record.get("step"), int):
            raise ValueError(f"{path}:{number} has no step: every line of a run's log has one; delete it")
    return [record for _, record in rows]


def cut_log(folder: Path, step: int) -> None:
    """Drop what a killed run logged after its last checkpoint: those steps are done again."""
    if (folder / LOG).is_file():
        kept = [record for record in read_log(folder) if record["step"] <= step]
        write_rows(folder / LOG, kept)


@dataclass
class Report:
    """The result of a step.

    values: its loss, its gradient's norm and the cross-entropy of each drafting step. They stay on the device
    until they are read. memory: in bytes, if it was measured.
    """

    step: int  # steps before it
    rate: float
    values: Tensor  # [2 + depth]
    seconds: float = 0.0
    memory: int | None = None

    @cached_property
    def numbers(self) -> list[float]:
        """The values on the host; reading them waits for the device."""
        return self.values.tolist()

    @property
    def loss(self) -> float:
        return self.numbers[0]

    @property
    def norm(self) -> float:
        return self.numbers[1]

    def record(self) -> dict[str, Any]:
        """Return the step's record for the log."""
        return {
            "step": self.step + 1,
            "seconds": round(self.seconds, 1),
            "loss": self.loss,
            # None if no draft was that deep
            "cross_entropy": [None if math.isnan(value) else value for value in self.numbers[2:]],
            "norm": self.norm,
            "lr": self.rate,
            **({} if self.memory is None else {"memory": self.memory}),
        }


def stored_run(folder: Path) -> dict[str, Any] | None:
    """Return the identity of the run whose checkpoint is in the folder; None if there is none."""
    path = folder / CHECKPOINT
    return dict(read_checkpoint(path, "run")["run"]) if path.is_file() else None


# The flags behind those values of a run's identity that are digests, which tell a reader nothing.
FLAGS_OF_DIGESTS = {
    "start": "--init-head",
    "tokens": "--data, --text, --max-length, --held-out",
    "common": "--softmax-tokens",
    "embedding": "--base-model",
}


def refuse_other_run(path: Path, stored: dict[str, Any], run: dict[str, Any]) -> None:
    """Raise ValueError if a checkpoint's run differs in what a resumed run may not change."""
    old, new = fixed_part(stored), fixed_part(run)
    if changed := differences(old, new):
        flags = [flag for name, flag in FLAGS_OF_DIGESTS.items() if old.get(name) != new.get(name)]
        if "config.bfloat16" in changed:
            flags.append("--float32 or --no-float32")
        as_before = f", or give {', '.join(flags)} as before" if flags else ""
        raise ValueError(
            f"{path} is of another run ({changed}); name another --output, or remove it{as_before}"
        )


def fixed_part(run: dict[str, Any]) -> dict[str, Any]:
    """Return what a resumed run may not change of its identity: all but its length and its pauses."""
    free = ("epochs", "minutes", "eval_every", "checkpoint_every", "accumulate")  # see batches_per_step
    return run | {"config": {name: value for name, value in run["config"].items() if name not in free}}


def flatten(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten a record: its numbers by dotted names, for trackers."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            found |= flatten(
                {str(index): number for index, number in enumerate(value, 1)}, f"{prefix}{name}."
            )
        elif value is not None and name != "step":
            found[f"{prefix}{name}"] = value
    return found
