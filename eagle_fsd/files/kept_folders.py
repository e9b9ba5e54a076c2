"""Folders in the user's cache that hold what can be made again: found, bounded in size and deleted.

A folder that is whole has a certain file, its mark. Whoever reads a folder while it is deleted finds all of
it or nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.files.atomic import cache_folder, hidden_beside

OFF = "EAGLE_FSD_NO_WEIGHTS_CACHE"  # set to anything but 0, nothing is read or kept


def is_enabled() -> bool:
    """Return whether folders are kept, that is not turned off by EAGLE_FSD_NO_WEIGHTS_CACHE."""
    return os.environ.get(OFF, "0") in ("", "0")


def whole_folders(name: str, mark: str) -> list[Path]:
    """Return the whole folders below the cache's folder of this name, the least recently used first."""
    try:
        found = [path for path in (cache_folder() / name).iterdir() if (path / mark).is_file()]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)
    except (OSError, RuntimeError):  # nothing is kept yet, or there is no home folder
        return []


def shrink(folders: Sequence[Path], newest: Path, most: int) -> None:
    """Delete folders, the first ones first, until all take at most `most` bytes; the newest always stays."""
    kept = [folder for folder in folders if folder != newest]
    total = sum(map(folder_size, [*kept, newest]))
    for folder in kept:
        if total > most:
            total -= folder_size(folder)
            remove(folder)


def folder_size(folder: Path) -> int:
    """Return the total bytes of the files in a folder."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return 0


def remove(*folders: Path) -> None:
    """Delete folders. Each is renamed first, so that nobody finds half of it."""
    for folder in folders:
        with contextlib.suppress(OSError):
            hidden = folder.rename(hidden_beside(folder))
            shutil.rmtree(hidden, ignore_errors=True)
