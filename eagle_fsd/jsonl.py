"""JSON Lines, one object a line: the one reader of all data, prompts and rows. Knows no model."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
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
                    yield number, object_of(line, f"{path}:{number}", "utf-8-sig" if number == 1 else "utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: is not a whole gzip file ({error}); compress it again") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a JSONL file") from error


def object_of(line: bytes, place: str, encoding: str) -> dict[str, Any]:
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
