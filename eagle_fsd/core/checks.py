"""Checks of users' values, errors of one line, what Ctrl-C does, and blocks without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol, TextIO, TypeVar

# Exit codes of a user's mistake, of what Ctrl-C has ended, and of what wrote to a reader that is gone. Shells
# give the last two.
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
MOST_LOGPROBS = 100  # likeliest tokens at each place
LEAST_LIKENESS = 0.5  # of a wrong name to the one that is meant; max_length has it to max_new_tokens
# Hugging Face's names that are like another option than the one that does the same; "": no option does.
MEANT = {"stopping_criteria": "stop_strings"}
MEANT |= dict.fromkeys(("pad_token_id", "use_cache", "generation_config", "streamer"), "")


class Dataclass(Protocol):
    """What all dataclasses have."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Options = TypeVar("Options", bound=Dataclass)


def one_line(error: object, limit: int | None = None) -> str:
    """Return an error or a text on one line, cut at `limit` characters.

    An error without a message is shown by its type's name.
    """
    text = " ".join(str(error).split())
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."


def flag_of(name: str) -> str:
    """Return the command line's spelling of a setting."""
    return "--" + name.replace("_", "-")


def find_half_character(text: str) -> int | None:
    """Return the place of the first half of a character, which UTF-8 cannot hold; None: all are whole."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def require_utf8(name: str, text: str) -> None:
    """Raise ValueError for text that UTF-8 cannot hold: half a character of a broken file or terminal."""
    if (place := find_half_character(text)) is not None:
        raise ValueError(f"{name} is not UTF-8 at character {place}: retype it, or give a file of UTF-8 text")


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


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Look for no reference cycles inside the block.

    For what makes hundreds of thousands of objects that stay, such as imports: going through them again and
    again takes an eighth of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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


def plain(value: Any) -> Any:
    """Return a tensor's or an array's numbers as lists, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def require_integer(name: str, value: object, minimum: int, remedy: str, maximum: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer in [minimum, maximum]; numpy's too, but no bool."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        span = f"of at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} is {format_value(value)}: it must be an integer {span}; {remedy}")


def require_texts(
    max_new_tokens: int,
    num_return_sequences: object,
    min_new_tokens: object = None,
    logprobs: object = None,
    stops: Iterable[object] = (),
) -> None:
    """Raise ValueError unless these say how long texts are, how many, and what is told of them.

    See GenerationOptions. None: it is not said.
    """
    require_integer("max_new_tokens", max_new_tokens, 1, "ask for at least one token")
    require_integer("num_return_sequences", num_return_sequences, 1, "1 is one text of each prompt")
    if min_new_tokens is not None:
        remedy = "lower it, or raise max_new_tokens above it"
        require_integer("min_new_tokens", min_new_tokens, 0, remedy, max_new_tokens)
    if logprobs is not None:
        require_integer("logprobs", logprobs, 0, "None returns none", MOST_LOGPROBS)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"stop_strings has {stop!r}: each must be a non-empty string; fix it")


def require_number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    """Raise ValueError unless `value` is a real number in [low, high]; NaN never is."""
    try:
        inside = isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high
    except OverflowError:  # JSON may hold an integer that is larger than any float
        inside = False
    if not inside:
        span = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {format_value(value)}: it must be a number {span}; {remedy}")


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"{name} is {format_value(value)}: it must be one of {', '.join(choices)}; choose one"
        )


def override(
    kind: type[Options], options: Options | None, keywords: Mapping[str, Any], others: Sequence[str] = ()
) -> Options:
    """Return options of a frozen dataclass with these keywords in place of their own; None: the defaults.

    others: the further arguments of the function that is called. Raises ValueError for options of another
    kind, and for a keyword that is no field, with the name that may have been meant.
    """
    if not isinstance(options, kind | None):
        raise ValueError(
            f"options is a {type(options).__name__}: it must be {kind.__name__}; give its entries as keywords"
        )
    known = [field.name for field in fields(kind)]
    for name in keywords:
        if name not in known:
            meant = MEANT.get(name)
            if meant not in ("", *known):
                meant = next(iter(get_close_matches(name, [*known, *others], 1, LEAST_LIKENESS)), "")
            remedy = f"write {meant}, or leave it out" if meant else "leave it out"
            raise ValueError(
                f"{name} is not an option: the keywords are the fields of {kind.__name__}; {remedy}"
            )
    return replace(options or kind(), **keywords)


def format_value(value: object, limit: int = 60) -> str:
    """Return repr(value), cut at `limit` characters: a value from a file may be very long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
