"""A cache of converted GGUF weights: folders that load like any model's folder.

Reading a GGUF file takes transformers many times longer than reading the same weights from safetensors. So
the converted weights are saved in the user's cache, in `weights/`, one folder per GGUF file, named by the
digest of the file's content. A folder appears whole or not at all. It is used only with the same file, the
same files beside it and the same release of transformers, and only if its own files have not changed.

A file has not changed if its stamp (size, times and inode) is the same, as in git; if the stamp differs, its
digest decides. Nothing here is an error for the user: without a usable folder the GGUF file is read again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from eagle_fsd.files.atomic import hidden_beside, hold_lock, read_records, write_atomically
from eagle_fsd.files.kept_folders import (
    KeptFolders,
    format_gigabytes,
    is_enabled,
    mark_used,
    remove,
)

logger = logging.getLogger(__name__)

RECORD = "source.json"
WEIGHTS = KeptFolders("weights", RECORD)
VERSION = 3  # of the folders; earlier ones lacked scaled positions, windows or biases
# Bytes of all folders together, unless the latest alone has more; the least recently used go.
MOST = 16 * 2**30
SETTLED = 2 * 10**9  # nanoseconds after which a file's times show a change: some systems count whole seconds

READ_ERRORS = (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Origin:
    """The state of a GGUF file before its weights were read.

    digest: of its content. stamp: see `read_stamp`. made: what else the converted weights depend on.
    """

    gguf: Path
    digest: str
    stamp: list[int]
    made: dict[str, Any]

    @property
    def seen(self) -> dict[str, list[int]]:
        """The stamp by path; empty for a file so new that a change might not show in its times."""
        return {str(self.gguf.resolve()): self.stamp} if is_settled(self.stamp) else {}


def find_origin(gguf: Path, beside: Iterable[Path], made_by: str) -> Origin | None:
    """Return the Origin of a GGUF file; None if the cache is turned off or cannot be used.

    beside: files that are read with it. made_by: the program that converts it.
    """
    if not is_enabled():
        return None
    try:
        WEIGHTS.root()  # raises RuntimeError if there is no home folder
        stamp = read_stamp(gguf)
        digest = recall_digest(gguf, stamp) or digest_once(gguf, stamp)
        others = {path.name: digest_file(path) for path in sorted(beside) if path.is_file()}
        return Origin(gguf, digest, stamp, {"version": VERSION, "by": made_by, "beside": others})
    except (OSError, RuntimeError) as error:
        logger.info("%s cannot be kept in the weights cache: %s", gguf.name, error)
        return None


def find(origin: Origin, dtypes: Collection[str] = ()) -> Path | None:
    """Return the kept folder of a GGUF file, if it is whole; None if there is none.

    dtypes: the usable ones; empty allows all.
    """
    try:
        folder = WEIGHTS.root() / origin.digest
        record = read_records(folder / RECORD)
        fits = record.get("made") == origin.made and (not dtypes or record.get("dtype") in dtypes)
        if not fits or not (files := unchanged_files(folder, record["files"])):
            return None
        with contextlib.suppress(OSError):  # what is noted only saves time
            noted = record | {"seen": record["seen"] | origin.seen, "files": files}
            if noted != record:
                write_record(folder, noted)
            mark_used(folder)
        return folder
    except READ_ERRORS as error:
        logger.info("the converted weights of %s are not read: %s", origin.gguf.name, error)
        return None


def keep(origin: Origin, dtype: str, size: int, save: Callable[[Path], None]) -> Path | None:
    """Keep converted weights and return their folder; None if that is not possible.

    They replace what was kept of the same file. size: in bytes. save: writes all files into an empty folder.
    """
    try:
        folder = WEIGHTS.root() / origin.digest
        folder.parent.mkdir(parents=True, exist_ok=True)
        if 2 * size > (free := shutil.disk_usage(folder.parent).free):
            raise OSError(
                f"{format_gigabytes(size)} are more than half of the disk's free {format_gigabytes(free)}"
            )
        if read_stamp(origin.gguf) != origin.stamp:
            raise OSError("the file changed while it was read")
        WEIGHTS.remove_leftovers()
        with hold_lock(folder, patience=0.0):
            remove(*folder.parent.glob(f".{folder.name}-*"))  # left by processes that were killed
            partial = hidden_beside(folder)
            try:
                partial.mkdir()
                save(partial)
                files = {
                    path.name: [read_stamp(path), digest_file(path)] for path in sorted(partial.iterdir())
                }
                record = {"gguf": origin.gguf.name, "dtype": dtype, "made": origin.made}
                record |= {"seen": origin.seen, "files": files}
                write_record(partial, record)
                remove(folder)
                partial.rename(folder)
            finally:
                remove(partial)
        WEIGHTS.shrink([folder], MOST)
        return folder
    except READ_ERRORS as error:  # these include what `save` raises on a full disk
        logger.info("the converted weights of %s are not kept: %s", origin.gguf.name, error)
        return None


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")


def unchanged_files(folder: Path, files: dict[str, Any]) -> dict[str, Any] | None:
    """Return the files of a kept folder with the stamps that they have now; None if one has changed.

    Raises OSError if one is not there. One that was copied or moved has another stamp and the same content.
    """
    found = {}
    for name, (known, content) in files.items():
        now = read_stamp(folder / name)
        if now != known and (now[0] != known[0] or digest_file(folder / name) != content):
            return None
        found[name] = [now, content]
    return found


# -- whether a file changed ----------------------------------------


def recall_digest(gguf: Path, stamp: list[int]) -> str | None:
    """Return the digest of a file's content from a kept folder that has recorded this stamp, else None."""
    for folder in WEIGHTS.whole():
        seen = read_records(folder / RECORD).get("seen")
        if isinstance(seen, dict) and seen.get(str(gguf.resolve())) == stamp:
            return folder.name
    return None


def digest_once(gguf: Path, stamp: list[int]) -> str:
    """Return the digest of a file's content, computed once per process if its stamp can be trusted."""
    return digest_stamped(gguf.resolve(), tuple(stamp)) if is_settled(stamp) else digest_file(gguf)


@functools.lru_cache(maxsize=8)
def digest_stamped(path: Path, _stamp: tuple[int, ...]) -> str:
    return digest_file(path)


def read_stamp(path: Path) -> list[int]:
    """Return what changes whenever a file's content does: size, times in nanoseconds, inode."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def is_settled(stamp: list[int]) -> bool:
    """Return whether a file is so old that a change would show in its stamp."""
    return time.time_ns() - max(stamp[1:3]) > SETTLED


def digest_file(path: Path) -> str:
    """Return half the SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()[:32]
