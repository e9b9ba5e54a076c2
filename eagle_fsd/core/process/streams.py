"""What is written to stdout and stderr, where they may be closed, full, or read by nobody."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def tell(text: str) -> None:
    """Write a line to stderr, if there is one that takes it: a full disk must not end what is under way."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{text}\n")


def discard_stdout() -> None:
    """Send the rest of stdout nowhere, since the interpreter flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class EnduringStderr:
    """What stderr shows, for bars and libraries: where it takes nothing, the work goes on without."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def outlive_stderr() -> Iterator[None]:
    """Let nothing within end because stderr takes no more: of a full disk, or of a reader that is gone."""
    if sys.stderr is None:
        yield
        return
    with contextlib.redirect_stderr(EnduringStderr(sys.stderr)):
        yield
