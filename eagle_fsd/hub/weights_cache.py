"""Weights of GGUF files, converted once and kept: folders that load as any model's folder does.

Reading a GGUF file takes transformers many times longer than reading the same weights from safetensors. So
what was read is saved in the user's cache, in `weights/`, one folder for each GGUF file, under the digest of
the file's content. A folder appears whole or not at all. It is used only for the same file, the same files
beside it and the same release of transformers, and only if its own files are as they were written.

Whether a file is as it was is told by its stamp (size, times and inode), as git does; where the stamp is
another one, by its digest. Nothing here is an error for the user: what cannot be kept is read from the GGUF
file again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from eagle_fsd.files.atomic import cache_folder, hold_lock, read_records, write_atomically

logger = logging.getLogger(__name__)

FOLDER, RECORD = "weights", "source.json"
VERSION = 1  # of the folders
MOST = 16 * 2**30  # bytes of all folders together; the least recently used go first
SETTLED = 2_000_000_000  # nanoseconds after which a file's times tell a change: some systems count in seconds
OFF = "EAGLE_FSD_NO_WEIGHTS_CACHE"  # set to anything but 0: neither read nor write

READ_ERRORS = (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Origin:
    """A GGUF file as it was when it was looked at, before anything was read of it.

    digest: of its content. stamp: see `read_stamp`. made: what else decides what is made of it.
    """

    gguf: Path
    digest: str
    stamp: list[int]
    made: dict[str, Any]

    @property
    def seen(self) -> dict[str, list[int]]:
        """The stamp by path; nothing for a file so new that a change might leave its times as they are."""
        settled = time.time_ns() - max(self.stamp[1:3]) > SETTLED
        return {str(self.gguf.resolve()): self.stamp} if settled else {}


def is_enabled() -> bool:
    """Whether the user has not turned the cache off by EAGLE_FSD_NO_WEIGHTS_CACHE."""
    return os.environ.get(OFF, "0") in ("", "0")


def root_folder() -> Path:
    return cache_folder() / FOLDER


def folders() -> list[Path]:
    """All kept folders, the least recently used first."""
    try:
        found = [path for path in root_folder().iterdir() if (path / RECORD).is_file()]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)
    except (OSError, RuntimeError):  # there is none yet; no home folder
        return []


def find_origin(gguf: Path, beside: Iterable[Path], made_by: str) -> Origin | None:
    """What is to be converted, or was; None where the cache is turned off, or cannot be.

    beside: files that are read with it. made_by: what converts it.
    """
    if not is_enabled():
        return None
    try:
        root_folder()  # RuntimeError where there is no home
        stamp = read_stamp(gguf)
        digest = recall_digest(gguf, stamp) or digest_file(gguf)
        others = {path.name: digest_file(path) for path in sorted(beside) if path.is_file()}
        return Origin(gguf, digest, stamp, {"version": VERSION, "by": made_by, "beside": others})
    except (OSError, RuntimeError) as error:
        logger.info("%s has no place in the weights cache: %s", gguf.name, error)
        return None


def find(origin: Origin, dtypes: Collection[str] = ()) -> Path | None:
    """The folder that holds what the GGUF file holds, whole; None where there is none.

    dtypes: those that will do, all if there are none.
    """
    try:
        folder = root_folder() / origin.digest
        record = read_records(folder / RECORD)
        fits = record.get("made") == origin.made and (not dtypes or record.get("dtype") in dtypes)
        if not fits or not is_whole(folder):
            return None
        update_record(folder, lambda record: record["seen"].update(origin.seen))
        with contextlib.suppress(OSError):
            os.utime(folder, ns=(time.time_ns(),) * 2)  # the kernel's own clock ticks too seldom
        return folder
    except READ_ERRORS as error:
        logger.info("the converted weights of %s are not read: %s", origin.gguf.name, error)
        return None


def keep(origin: Origin, dtype: str, size: int, save: Callable[[Path], None]) -> Path | None:
    """Keep what was converted in place of what was kept of the same file; None where that cannot be.

    size: bytes that it takes. save: writes all files into an empty folder.
    """
    try:
        folder = root_folder() / origin.digest
        folder.parent.mkdir(parents=True, exist_ok=True)
        if size > MOST:
            raise OSError(
                f"{format_gigabytes(size)} are more than the {format_gigabytes(MOST)} that are kept"
            )
        if 2 * size > (free := shutil.disk_usage(folder.parent).free):
            raise OSError(
                f"{format_gigabytes(size)} are much for the {format_gigabytes(free)} that the disk has left"
            )
        if read_stamp(origin.gguf) != origin.stamp:
            raise OSError("the file changed while it was read")
        with hold_lock(folder, patience=0.0):
            remove(*folder.parent.glob(f".{folder.name}-*"))  # of processes that were killed
            partial = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
            try:
                partial.mkdir()
                save(partial)
                files = {
                    path.name: [read_stamp(path), digest_file(path)] for path in sorted(partial.iterdir())
                }
                record = {"gguf": origin.gguf.name, "dtype": dtype, "made": origin.made}
                record |= {"seen": origin.seen, "files": files}
                write_atomically(partial / RECORD, json.dumps(record, indent=1) + "\n")
                remove(folder)
                partial.rename(folder)
            finally:
                remove(partial)
        make_room(folder)
        return folder
    except READ_ERRORS as error:  # whatever `save` raises on a full disk is one of them
        logger.info("the converted weights of %s are not kept: %s", origin.gguf.name, error)
        return None


def is_whole(folder: Path) -> bool:
    """Whether all files of a kept folder are as they were written."""
    files = read_records(folder / RECORD).get("files") or {}
    changed = {}
    for name, (known, content) in files.items():
        if not (folder / name).is_file():
            return False
        if (now := read_stamp(folder / name)) != known:
            if now[0] != known[0] or digest_file(folder / name) != content:
                return False
            changed[name] = [now, content]  # copied or moved: next time the stamp will do
    if changed:
        update_record(folder, lambda record: record["files"].update(changed))
    return bool(files)


def clear() -> None:
    """Drop all that is kept. A process that is reading it goes on with the GGUF file itself."""
    with contextlib.suppress(RuntimeError):
        remove(root_folder())


def make_room(newest: Path) -> None:
    """Drop the least recently used folders until the rest, the newest always, is within MOST."""
    kept = [folder for folder in folders() if folder != newest]
    total = sum(map(folder_size, [*kept, newest]))
    for folder in kept:
        if total > MOST:
            total -= folder_size(folder)
            remove(folder)


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def remove(*folders: Path) -> None:
    """Delete folders, each out of sight at once, so that nobody finds half of it."""
    for folder in folders:
        with contextlib.suppress(OSError):
            hidden = folder.with_name(f".{folder.name.lstrip('.')}-{secrets.token_hex(4)}")
            folder.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def format_gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


# -- which file, and whether it changed ----------------------------------------


def recall_digest(gguf: Path, stamp: list[int]) -> str | None:
    """The digest of a file's content, from a kept folder that has seen the file with this very stamp."""
    for folder in folders():
        seen = read_records(folder / RECORD).get("seen")
        if isinstance(seen, dict) and seen.get(str(gguf.resolve())) == stamp:
            return folder.name
    return None


def read_stamp(path: Path) -> list[int]:
    """What changes whenever a file's content does: size, times of change in nanoseconds, inode."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def digest_file(path: Path) -> str:
    """Half the SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()[:32]


def update_record(folder: Path, update: Callable[[dict[str, Any]], object]) -> None:
    """Change a folder's record where that changes anything and can be; it only saves time."""
    with contextlib.suppress(*READ_ERRORS):
        record = read_records(folder / RECORD)
        before = json.dumps(record)
        update(record)
        if json.dumps(record) != before:
            write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")
