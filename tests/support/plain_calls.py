"""A slow plain twin of what reads function calls, which sees the whole text at once, and of schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"')

Calls = list[tuple[str, object]]  # names and arguments


def read_plainly(
    text: str, names: Sequence[str], tagged: bool, forced: bool, several: bool, cut: bool
) -> tuple[str, Calls]:
    """Return what of a text is shown, and its calls. cut: a limit or a stop string ended it."""
    parts: list[str | tuple[str, object]] = []
    rest = text
    while tagged and OPEN in rest:
        between, after = rest.split(OPEN, 1)
        if (end := closing_tag(after, names, cut)) is None:
            break
        inner, rest = after[:end], after[end + len(CLOSE) :]
        parts += [between, as_call(inner, names) or f"{OPEN}{inner}{CLOSE}"]
    parts += last_parts(rest, names, tagged, forced, cut)
    shown, calls, after_call = "", [], False
    for part in parts:
        if isinstance(part, tuple):
            calls.append(part)
            after_call = True
        elif not after_call or part.strip():  # white space alone after a call is no text
            shown += part
            after_call = after_call and not part
    return shown, calls if several else calls[:1]


def last_parts(
    rest: str, names: Sequence[str], tagged: bool, forced: bool, cut: bool
) -> list[str | tuple[str, object]]:
    """Return the parts of what is left behind the last closing tag."""
    if not tagged and not cut:
        return [as_call(rest, names) or rest]
    if not cut:
        return [rest]
    between, tag, begun = rest.partition(OPEN) if tagged else ("", "", rest)
    if not tag and not forced:
        return [rest]
    name = NAMED.match(begun)
    if not forced and (begun.strip()[:1] not in ("", "{") or (name is not None and name[1] not in names)):
        return [rest]
    endings = [begun.removesuffix(CLOSE[:length]) for length in range(len(CLOSE))]
    call = next(filter(None, (as_call(ending, names) for ending in endings)), "")
    return [between if tag else "", call]


def closing_tag(text: str, names: Sequence[str], cut: bool) -> int | None:
    """Return where the tag is that closes a call: the one that makes it one, else the first."""
    places = [found.start() for found in re.finditer(CLOSE, text)]
    if found := [place for place in places if as_call(text[:place], names)]:
        return found[0]
    in_strings = [place for place in places if is_in_string(text[:place])]
    return None if cut and in_strings == places else next(iter(places), None)


def is_in_string(text: str) -> bool:
    """Return whether this is JSON that breaks off inside a string."""
    try:
        json.loads(text)
    except ValueError as error:
        return str(error).startswith("Unterminated string")
    return False


def as_call(text: str, names: Sequence[str]) -> tuple[str, object] | None:
    """Return the call that a text is; None if it is none."""
    try:
        found = json.loads(text, parse_constant=refuse)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("name") not in names:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return (found["name"], arguments) if isinstance(arguments, dict) else None


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def fits(schema: Mapping[str, Any], value: object) -> bool:
    """Return whether a value is of a JSON schema of few words."""
    if "anyOf" in schema:
        return any(fits(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            fields = schema.get("properties", {})
            return isinstance(value, dict) and (
                value.keys() >= set(schema.get("required", ()))
                and (value.keys() <= fields.keys() or "additionalProperties" not in schema)
                and all(fits(fields[name], one) for name, one in value.items() if name in fields)
            )
        case "array":
            if not isinstance(value, list) or len(value) > schema["maxItems"]:
                return False
            return all(fits(schema["items"], one) for one in value)
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "boolean" | "null":
            return isinstance(value, bool) if schema["type"] == "boolean" else value is None
        case kind:
            least, most = schema.get("minimum", value), schema.get("maximum", value)
            kinds = int if kind == "integer" else int | float
            return isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
