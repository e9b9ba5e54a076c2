"""Where a task's rows come from: a local JSONL file, or the Hub through `datasets`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.jsonl import read_jsonl

FOLDER = "EAGLE_FSD_DATA"
EXTRA = "pip install 'eagle-fsd[eval]'"


@dataclass(frozen=True)
class Source:
    """files: names that a data folder may give the task's file; hub: the data set's id, its configuration and
    its split; fields: what a row needs, in words for an error.
    """

    files: tuple[str, ...]
    fields: str
    hub: tuple[str, str | None, str] | None = None


def rows_of(name: str, source: Source, path: Path | None) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    """Find a task's rows; returns where, in words, and the rows with their line numbers, from 1."""
    found = path or (Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None)
    if found is None:
        return hub_rows(name, source)
    if found.is_dir():
        files = [found / file for file in source.files if (found / file).is_file()]
        if not files:
            raise ValueError(
                f"{found}: has no {' or '.join(source.files)}, the file of {name}; put it there, name the "
                f"file itself, or unset {FOLDER} to take the Hub's"
            )
        found = files[0]
    return str(found), read_jsonl(found)


def hub_rows(name: str, source: Source) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    """Load the rows of the data set on the Hub; its id stands for the path in errors."""
    local = f"give a JSONL file, or set {FOLDER} to a folder with {' or '.join(source.files)}"
    if source.hub is None:
        raise ValueError(f"{name} has no data set on the Hub: {local}")
    repository, subset, split = source.hub
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{name} comes from the Hub through datasets: {EXTRA}; or {local}") from error
    try:
        rows = datasets.load_dataset(repository, subset, split=split)
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded from the Hub ({one_line(error, 300)}): {local}") from error
    return repository, ((number, dict(row)) for number, row in enumerate(rows, 1))
