"""Folders in the user's cache that hold what can be made again: found, bounded in size and deleted.

A folder that is whole has a certain file, its mark. Whoever reads a folder while it is deleted finds all of
it or nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.files.atomic import cache_folder, hidden_beside

DAY = 86_400  # seconds
OFF = "EAGLE_FSD_NO_WEIGHTS_CACHE"  # any value but "" and "0" turns reading and keeping off


def is_enabled() -> bool:
    """Return whether folders are kept, that is not turned off by EAGLE_FSD_NO_WEIGHTS_CACHE."""
    return os.environ.get(OFF, "0") in ("", "0")


@dataclass(frozen=True)
class KeptFolders:
    """The folders of one kind. name: of the cache's folder that they are in. mark: the file's name."""

    name: str
    mark: str

    def root(self) -> Path:
        """Return the folder that they are in. Raises RuntimeError if there is no home folder."""
        return cache_folder() / self.name

    def whole(self) -> list[Path]:
        """Return the whole folders, the least recently used first.

        Hidden ones are being written or deleted, with or without their mark.
        """
        used = {}
        with contextlib.suppress(OSError, RuntimeError):  # nothing is kept yet, or there is no home folder
            for path in self.root().iterdir():
                with contextlib.suppress(OSError):  # it has just been deleted
                    if not path.name.startswith(".") and (path / self.mark).is_file():
                        used[path] = path.stat().st_mtime_ns
        return sorted(used, key=used.__getitem__)

    def shrink(self, spared: Collection[Path], most: int) -> None:
        """Delete the least recently used folders until all take at most `most` bytes, but for the spared."""
        sizes = {folder: folder_size(folder) for folder in (*self.whole(), *spared)}
        total = sum(sizes.values())
        for folder, size in sizes.items():
            if total > most and folder not in spared:
                total -= size
                remove(folder)

    def remove_leftovers(self) -> None:
        """Delete what processes that were killed have left half-written, a day ago or longer."""
        with contextlib.suppress(OSError):
            for path in self.root().glob(".*"):
                if path.is_dir() and time.time() - path.stat().st_mtime > DAY:
                    shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Delete everything, half-written folders too."""
        with contextlib.suppress(RuntimeError):
            remove(self.root())


def mark_used(folder: Path) -> None:
    """Let a folder be the one used last. Raises OSError if that cannot be noted."""
    os.utime(folder, ns=(time.time_ns(),) * 2)  # the default clock is too coarse to order folders


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


def format_gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
