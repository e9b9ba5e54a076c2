"""Checks of users' values, and errors that are read on one line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol, TypeVar

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


def plain(value: Any) -> Any:
    """Return a tensor's or an array's numbers as lists, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def require_integer(name: str, value: object, minimum: int, remedy: str, maximum: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer in [minimum, maximum]; numpy's too, but no bool."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        span = f"of at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} is {format_value(value)}: it must be an integer {span}; {remedy}")


def plain_numbers(config: Dataclass) -> None:
    """Put plain numbers in place of others, such as numpy's, in a frozen dataclass whose values are checked.

    JSON has no others, and they are shown as np.int64(3).
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Real) and not isinstance(value, bool):
            number = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(config, field.name, number)


def require_different_texts(count: int, greedy: bool, name: str = "num_return_sequences") -> None:
    """Raise ValueError if several texts of a prompt would be the same. name: what the user calls `count`."""
    if count > 1 and greedy:
        raise ValueError(
            f"{name} is {count} at temperature 0: all would be the same text; give a temperature, or leave "
            "it out"
        )


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


def require_boolean(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False: anything else, such as "no", would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {format_value(value)}: it must be True or False; choose one")


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
