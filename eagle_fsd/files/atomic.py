"""Files that several processes and threads use at once.

A reader sees such a file whole or not at all, and no writer loses what another one wrote. Nothing is flushed
to the disk (fsync): that costs time and helps against power cuts alone, after which a file may be empty.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError

from eagle_fsd.core.checks import one_line

PATIENCE = 10.0  # seconds to wait for another writer of a small file


def cache_folder() -> Path:
    """Where the package keeps what it measured and converted: EAGLE_FSD_CACHE, else XDG's cache."""
    root = os.environ.get("EAGLE_FSD_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is written there then takes the place of `path`.

    Raises OSError where the disk does not take it. The name of the partial file is random, so that any number
    of threads and processes can write the same file: the last one to finish wins. It ends in `.partial`.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
    except (RuntimeError, SafetensorError) as error:  # torch's and safetensors' word for a full disk
        raise OSError(
            f"{path} cannot be written ({one_line(error, 80)}): free some space and start again"
        ) from error
    else:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader never sees half of it."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def hold_lock(path: Path, patience: float | None = None) -> Iterator[None]:
    """Keep other threads and processes out of a file or folder; the lock is a file beside it.

    Raises OSError if it is not to be had within `patience` seconds (None: PATIENCE), or not at all: in a
    read-only folder, or on a file system without locks.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=PATIENCE if patience is None else patience)
    try:
        lock.acquire()
    except (NotImplementedError, RuntimeError) as error:
        raise OSError(f"{path} cannot be locked ({one_line(error, 80)})") from error
    try:
        yield
    finally:
        lock.release()


def read_records(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file, or none that is an object.

    Raises OSError for a file that is there and cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def update_records(path: Path, update: Callable[[dict[str, Any]], object]) -> None:
    """Let `update` change the JSON object in a file, alone of all writers; make the file where there is none.

    Raises OSError where the file cannot be locked, read or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path):
        records = read_records(path)
        update(records)
        write_atomically(path, json.dumps(records, separators=(",", ":")) + "\n")
