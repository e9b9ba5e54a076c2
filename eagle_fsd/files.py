"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from eagle_fsd.messages import one_line


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what then takes the place of `path`; OSError where the disk does not take it."""
    partial = path.with_suffix(f"{path.suffix}.{os.getpid()}.partial")  # two processes may write the same
    try:
        yield partial
    except (RuntimeError, SafetensorError) as error:  # torch's and safetensors' word for a full disk
        raise OSError(
            f"{path} cannot be written ({one_line(error, 80)}): free some space and start again"
        ) from error
    else:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader never sees half of it."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
