"""JSON Lines, one object per line: reads data, prompts and rows, and writes rows or appends them to a file.

A file may end in half a line, left by a run that was killed. Knows no model.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle_fsd.files.atomic import name_full_disk, no_room, write_atomically

LIST_REMEDY = "if the file is one list, `jq -c '.[]'` writes its objects one in a line"


def read_jsonl(path: Path, torn: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with their line numbers, counted from 1; empty lines are skipped.

    A name that ends in .gz is read through gzip. torn: skip a last line that a stopped run left half-written.
    Raises ValueError if the file cannot be read, or any other line is not an object.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (line.endswith(b"\n") or not torn or is_whole(line)):
                    encoding = "utf-8-sig" if number == 1 else "utf-8"
                    yield number, parse_line(line, f"{path}:{number}", encoding)
                if not line.endswith(b"\n"):
                    return  # more of it may come while a run goes on, and would be read as another line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: is not a whole gzip file ({error}); compress it again") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a JSONL file") from error


def is_whole(line: bytes) -> bool:
    """Return whether a line is a complete JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def parse_line(line: bytes, place: str, encoding: str) -> dict[str, Any]:
    """Parse one JSONL line. Raises ValueError naming `place` unless it is a JSON object."""
    try:
        found = json.loads(line.decode(encoding))
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = error.msg
        elif isinstance(error, UnicodeDecodeError):
            reason = "not UTF-8"
        raise ValueError(
            f"{place}: is not JSON ({reason}): each line must be one object; {remedy_for(line)}"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{place}: is {line[:40]!r}, not an object; {remedy_for(line)}")
    return found


def remedy_for(line: bytes) -> str:
    """Return what helps where a line is no row. Many data sets are published as one list of rows."""
    return LIST_REMEDY if begins_list(line) else "repair or delete it"


def begins_list(data: bytes) -> bool:
    """Return whether a file or its first line begins as one JSON list of objects does."""
    return re.match(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|$)", data) is not None


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file as a whole by these rows; its folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line to the file in a single write; the file's folder is created if it is missing.

    Raises OSError if the disk does not take all of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row).encode() + b"\n"
    with name_full_disk(path), path.open("ab", buffering=0) as file:
        if file.write(line) < len(line):  # of a disk with less room than a line
            raise no_room(path, "half a line fitted")


def drop_torn_line(path: Path) -> None:
    """Prepare a file for appending: cut off the half line that a killed run may have left at its end.

    A last row that lacks only its line's end, as editors leave it, gets that.

    Raises ValueError for a file that must not be appended to: a compressed one, or one whose last, unfinished
    line is not the beginning of a row.
    """
    if path.suffix == ".gz":
        raise ValueError(f"{path}: rows are written uncompressed; name an output without .gz")
    if not path.exists():
        return
    data = path.read_bytes()
    whole, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    if tail and not tail.startswith(b"{"):
        raise ValueError(f"{path}: ends in {tail[:40]!r}, which is not a row; name another output")
    if is_whole(tail):
        with path.open("ab", buffering=0) as file:
            file.write(b"\n")
    elif tail:
        os.truncate(path, len(whole))
