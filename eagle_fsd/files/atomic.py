"""Files that several processes and threads use at once.

A reader sees a whole file or none, and no writer loses what another one wrote. Nothing is flushed to the disk
(fsync): that costs time and only helps against power cuts, after which a file may be empty.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError

from eagle_fsd.core.checks import one_line

PATIENCE = 10.0  # seconds to wait for another writer of a small file
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, of the user's part of it, of one file
OS_ERROR = re.compile(r"\(os error (\d+)\)")


def cache_folder() -> Path:
    """Return the folder for measurements and converted weights: EAGLE_FSD_CACHE, else in XDG's cache."""
    root = os.environ.get("EAGLE_FSD_CACHE")
    if root:
        return Path(root).expanduser()  # no shell has seen what a file of settings says
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd"


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Name a file in the system's errors while it is written, since those of a full disk name none."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise no_room(path, error.strerror) from error
        raise
    except (RuntimeError, SafetensorError) as error:
        system = error.__context__  # over which torch raises its own; safetensors names its number
        numbers = [system.errno] if isinstance(system, OSError) else OS_ERROR.findall(str(error))
        if any(int(number or 0) in FULL for number in numbers):
            raise no_room(path, one_line(error, 80)) from error
        if numbers:
            raise OSError(f"{path} cannot be written ({one_line(error, 200)})") from error
        raise


def no_room(path: Path, reason: str) -> OSError:
    """Return the error of a file that its disk does not take."""
    return OSError(f"{path} cannot be written ({reason}): free some space and start again")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file written there then replaces `path`.

    Raises OSError if the file cannot be written. The partial file's name is random and ends in `.partial`, so
    any number of threads and processes can write the same file: the last one to finish wins.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with name_full_disk(path):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def partials_of(path: Path) -> list[Path]:
    """Return the partial files of a path, which are another writer's, or of one that was killed."""
    named = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.partial")
    return [one for one in path.parent.glob("*.partial") if named.fullmatch(one.name) and one.is_file()]


def hidden_beside(path: Path) -> Path:
    """Return a path beside this one, with a hidden name that no other process has."""
    return path.with_name(f".{path.name.lstrip('.')}-{secrets.token_hex(4)}")


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader never sees a part of it."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def hold_lock(path: Path, patience: float | None = None) -> Iterator[None]:
    """Lock a file or folder against other threads and processes; the lock is a file beside it.

    Raises OSError if the lock is not free within `patience` seconds (None: PATIENCE), or if it cannot be
    made: in a read-only folder, or on a file system without locks.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=PATIENCE if patience is None else patience)
    with acquire(lock, path):
        yield


def acquire(lock: BaseFileLock, path: Path) -> AcquireReturnProxy:
    """Take the lock of a path, and return what releases it.

    Raises Timeout, an OSError, if another holds it, and other OSErrors if it cannot be made.
    """
    try:
        return lock.acquire()
    except (NotImplementedError, RuntimeError) as error:  # releases of filelock differ
        raise OSError(
            f"{path} cannot be locked ({one_line(error, 80)}): it must be on a file system with locks; name "
            "another place"
        ) from error


@contextmanager
def sole(lock: Path, named: Path, harm: str) -> Iterator[None]:
    """Hold a lock file, in a folder that is made if needed.

    named: what a command's --output names. harm: what two runs would do there. Raises ValueError if another
    process has it, and OSError if it cannot be made.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = acquire(FileLock(lock, blocking=False), named)
    except Timeout as error:
        raise ValueError(
            f"{named} is in use: two runs would {harm}; wait for the other one, or name another --output"
        ) from error
    with held:
        yield


def read_records(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file is missing or holds no JSON object.

    Raises OSError if the file exists but cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def update_records(path: Path, update: Callable[[dict[str, Any]], object]) -> None:
    """Let `update` change the JSON object in a file while other writers are locked out.

    The file is created if it is missing. Raises OSError if it cannot be locked, read or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path):
        records = read_records(path)
        update(records)
        write_atomically(path, json.dumps(records, separators=(",", ":")) + "\n")
