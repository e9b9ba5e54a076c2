"""Reads the body of every request as JSON, without numbers that are none of JSON's or too long for Python."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.process.collector import without_collector
from eagle_fsd.serving.errors import ApiError, wrong_value
from eagle_fsd.serving.tools.fields import DEEPEST

LONGEST_PLACE, LONGEST_NUMBER = 200, 60  # characters of a message


@dataclass(frozen=True)
class WrongNumber:
    """A number that is not taken. text: as the body has it. rule: what it breaks."""

    text: str
    rule: str


def read_json(body: bytes) -> Any:
    """Return what a body holds.

    Raises ValueError for what is no JSON, and ApiError for what is no Unicode text, has too many levels or a
    WrongNumber.
    """
    wrong: list[WrongNumber] = []

    def note(text: str, rule: str = "a number must be finite") -> WrongNumber:
        wrong.append(WrongNumber(text, rule))
        return wrong[-1]

    def number(text: str) -> float | WrongNumber:
        value = float(text)
        return value if math.isfinite(value) else note(text)

    def integer(text: str) -> int | WrongNumber:
        try:
            return int(text)
        except ValueError:
            return note(text, f"an integer may have at most {sys.get_int_max_str_digits()} digits")

    def read(parse_int: Callable[[str], Any]) -> Any:
        return json.loads(body, parse_constant=note, parse_float=number, parse_int=parse_int)

    try:
        with without_collector():  # it would look at very many parts again and again
            try:
                found = read(int)
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise
            except ValueError:  # an integer is too long; to look at each in Python takes time, with many ids
                wrong.clear()
                found = read(integer)
    except UnicodeDecodeError as error:
        message = f"the body is not {error.encoding.upper()} at byte {error.start}: send it as UTF-8"
        raise ApiError(400, message, code="invalid_json") from error
    except RecursionError as error:
        message = f"the body is nested too deeply: a field may have {DEEPEST} levels of JSON; send fewer"
        raise ApiError(400, message, code="invalid_json") from error
    if wrong:
        raise of_number(wrong[0], place_of(wrong[0], found))
    return found


def of_number(wrong: WrongNumber, place: str | None) -> ApiError:
    """Return the error of a number that is not taken. place: None if it is no field's."""
    text = one_line(wrong.text, LONGEST_NUMBER)
    said = f"{place} is {text}" if place else f"the body has {text}"
    remedy = 'send another, "inf" or "auto"' if place == "threshold" else "send another"
    return wrong_value(f"{said}: {wrong.rule}; {remedy}", place)


@dataclass(frozen=True)
class Part:
    """A part of a body: its name there, which is a place in a list, and what it is a part of."""

    value: Any
    name: str | int = ""
    whole: Part | None = None


def place_of(wrong: WrongNumber, found: Any) -> str | None:
    """Return where a value stands in a body, as fields and places in lists; None: in no field that counts."""
    left = [Part(found)]
    while left:
        part = left.pop()
        if part.value is wrong:
            names = []
            while part.whole is not None:
                names.append(str(part.name))
                part = part.whole
            return one_line(".".join(reversed(names)), LONGEST_PLACE) or None
        if isinstance(part.value, dict):
            left += [Part(value, name, part) for name, value in part.value.items()]
        elif isinstance(part.value, list):
            left += [Part(value, place, part) for place, value in enumerate(part.value)]
    return None  # the same field came again behind it, and that one counts


class JsonRequest(Request):
    """A request whose body is read by `read_json`."""

    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose requests are JsonRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
