"""A user's mistakes: what counts as one, and how a program reports it, in one line."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TextIO, TypeVar

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.process.signals import EXIT_BROKEN_PIPE, EXIT_USAGE
from eagle_fsd.core.process.streams import discard_stdout, tell

Result = TypeVar("Result")
CLOSED = "stdout is closed: the text needs it; open it"


class UserError(Exception):
    """A user's mistake, shown as one line on stderr; the exit code is 2."""


@contextlib.contextmanager
def raise_user_errors() -> Iterator[None]:
    """Raise UserError for a ValueError or OSError within, or for lack of memory.

    Other exceptions keep their tracebacks.
    """
    try:
        with explain_lack_of_memory():
            yield
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from error


@contextlib.contextmanager
def explain_lack_of_memory() -> Iterator[None]:
    """Raise UserError if memory ends within: a GPU's often does."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        from eagle_fsd.core.devices import ran_out_of_memory

        if not ran_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory ({one_line(error, 120)}): models, texts and trees must fit on the device; free "
            "some there, ask for less, or use a smaller dtype or model"
        ) from error


def explain_steps(steps: Iterator[Result]) -> Iterator[Result]:
    """Yield what an engine's steps give. An error in the first one is the user's mistake."""
    with raise_user_errors():
        first = list(islice(steps, 1))
    yield from first
    with explain_lack_of_memory():
        yield from steps


@contextlib.contextmanager
def end_line(out: TextIO, is_open: Callable[[], bool]) -> Iterator[None]:
    """End the line of a text that an error breaks off, so that the error is told on a line of its own."""
    try:
        yield
    except OSError:  # perhaps of `out` itself
        raise
    except Exception:
        if is_open():
            out.write("\n")
            out.flush()
        raise


def run_on_stdout(work: Callable[[TextIO], int], program: str, verbose: bool) -> int:
    """Run a program's work, which writes text to stdout, and return the exit code.

    A stdout that is closed, full or no longer read is reported, and so is a UserError.
    """
    out = sys.stdout
    if out is None:
        return report_mistake(program, CLOSED)
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # a character that the terminal lacks must not end the program
    try:
        return work(out)
    except UserError as error:
        return report_mistake(program, error, verbose)
    except BrokenPipeError:
        discard_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return report_stdout(program, error)


def report_mistake(program: str, error: object, verbose: bool = False) -> int:
    """Write a mistake as one line, below the traceback if that is wanted, and return the exit code."""
    if verbose:
        traceback.print_exc()
    tell(f"{program}: error: {one_line(error)}")
    return EXIT_USAGE


def report_stdout(program: str, error: OSError) -> int:
    """Report a full stdout and return the exit code. Raises any other error anew."""
    if error.errno != errno.ENOSPC:
        raise error
    discard_stdout()
    return report_mistake(program, f"stdout takes no more ({error.strerror}): make room")
