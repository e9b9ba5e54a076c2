"""Places that a run will write to, tried before it begins: at its end it would be too late.

Nothing is left there. `option` is how the user named the place.
"""

from __future__ import annotations

import tempfile
from pathlib import Path


def require_file(option: str, path: Path) -> None:
    """Raise ValueError unless a file can be written there; its folder need not exist yet."""
    if path.suffix == ".gz":
        raise ValueError(f"{option} names {path}: rows are written uncompressed; name a file without .gz")
    if is_folder(path):
        raise ValueError(f"{option} names {path}, which is a folder: it must be a file; name one inside it")
    if is_special(path):  # which a finished file would replace
        raise ValueError(
            f"{option} names {path}, which is a device or a pipe: it must be a file; name another one"
        )
    require_room(option, path, path.parent)


def require_folder(option: str, folder: Path) -> None:
    """Raise ValueError unless files can be written into this folder, which need not exist yet."""
    require_room(option, folder, folder)


def require_new_folder(option: str, folder: Path) -> None:
    """Raise ValueError unless this folder is not there and can be made."""
    require_room(option, folder, folder.parent)
    if folder.exists():
        raise ValueError(f"{option} names {folder}, which exists: name a new folder")


def require_room(option: str, named: Path, folder: Path) -> None:
    """Raise ValueError unless something can be written into the folder, or where it would be made."""
    try:
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise ValueError(
            f"{option} names {named}, where nothing can be written ({error.strerror}): name another place"
        ) from error


def is_folder(path: Path) -> bool:
    """Return whether there is a folder of this path; False where that cannot be seen."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_special(path: Path) -> bool:
    """Return whether there is a device, a pipe or a socket of this path; False where that cannot be seen."""
    try:
        return path.exists() and not (path.is_file() or path.is_dir())
    except OSError:
        return False
