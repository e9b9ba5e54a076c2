"""JSON Lines, one object a line: the one reader of all data, prompts and rows, and what adds rows to a file
that a killed run may have left. Knows no model."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read_jsonl(path: Path, torn: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers, from 1; empty lines are passed over.

    A name that ends in .gz is read through gzip. torn: pass over a last line without its end, which a run
    that was stopped left half-written. ValueError, one line, for a file that cannot be read, and for any
    other line that is no object.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (line.endswith(b"\n") or not torn):
                    encoding = "utf-8-sig" if number == 1 else "utf-8"
                    yield number, parse_line(line, f"{path}:{number}", encoding)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: is not a whole gzip file ({error}); compress it again") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a JSONL file") from error


def parse_line(line: bytes, place: str, encoding: str) -> dict[str, Any]:
    """The object of a line; ValueError, by its place, for what is none."""
    try:
        found = json.loads(line.decode(encoding))
    except ValueError as error:  # of JSON, or of UTF-8
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "no UTF-8"
        raise ValueError(
            f"{place}: is not JSON ({reason}): each line must be one object; repair or delete it"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{place}: is no object but {line[:40]!r}; repair or delete it")
    return found


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to the file, whole in one write, and make the file's folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def drop_torn_line(path: Path) -> None:
    """Make a file ready to be added to: cut off the half line that a killed run left at its end, if there is
    one.

    ValueError for a file to which no row should be added: a compressed one, and one with another end than a
    row's beginning.
    """
    if path.suffix == ".gz":
        raise ValueError(f"{path}: rows are written as they are, uncompressed; name an output without .gz")
    if not path.exists():
        return
    data = path.read_bytes()
    whole, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    if tail and not tail.startswith(b"{"):
        raise ValueError(f"{path}: ends in {tail[:40]!r}, which is no row; name another output")
    if tail:
        os.truncate(path, len(whole))
