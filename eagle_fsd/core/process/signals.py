"""What Ctrl-C and the signals that end a program do, and the exit codes of programs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from eagle_fsd.core.process.streams import tell

# Exit codes of a user's mistake, of what Ctrl-C has ended, and of what wrote to a reader that is gone. Shells
# give the last two.
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


def report_interrupt() -> int:
    """Say on one line that Ctrl-C has ended the program, and return its exit code."""
    tell("interrupted")
    return EXIT_INTERRUPTED


# SIGTERM, and the signal of a terminal that is closed, which Windows does not have.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def on_ending_signals(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Let SIGTERM and a terminal that is closed call this. A handler that one of them has already stays.

    With `signal.default_int_handler` they do what Ctrl-C does, so that what is made is kept.
    """
    mine = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def leave(number: int, _frame: object) -> None:
    """End the program for a signal, by way of all `finally` blocks."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def defer_interrupt(patient: bool = False) -> Iterator[threading.Event]:
    """Let a first Ctrl-C only set the event, so that the step is finished; a second one interrupts.

    Signals that do the same count as well, see `on_ending_signals`. patient: no second one interrupts: it
    would leave the other ranks in the middle of a step.
    """
    event = threading.Event()

    def counts(number: int, handler: object) -> bool:
        if number == signal.SIGINT:  # which a job in the background ignores: it is meant for another process
            return handler is not signal.SIG_IGN
        return handler is signal.default_int_handler

    found = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    usual = {number: handler for number, handler in found.items() if counts(number, handler)}

    def set_handlers(own: Callable[[int, object], None] | None) -> None:
        for number, handler in usual.items():
            signal.signal(number, own or handler)

    def note(_signal: int, _frame: object) -> None:
        event.set()
        if not patient:
            set_handlers(None)

    set_handlers(note)
    try:
        yield event
    finally:
        set_handlers(None)
