"""All acceptance rules by name: from text to a rule, and from a rule to JSON values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.divergence import DIVERGENCES
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, PublishedFSD, RelaxedTopK, SGLang, Typical
from eagle_fsd.core.checks import format_value, plain

RULES: dict[str, type[Any]] = {
    "lossless": Lossless,
    "fuzzy": Fuzzy,
    "typical": Typical,
    "relaxed_topk": RelaxedTopK,
    "sglang": SGLang,
    "cactus": Cactus,
    "ensemble": Ensemble,
    "fly": FLy,
    "fsd_paper": PublishedFSD,
}


def build_rule(name: str, **parameters: Any) -> AcceptanceRule:
    """Build the rule of this name. Raises ValueError if RULES has no such name, or the rule no such field."""
    if name not in RULES:
        raise ValueError(
            f"rule is {name!r}: it must be one of {', '.join(RULES)}; choose one, or a divergence with "
            "its threshold, such as js:0.3"
        )
    takes = [field.name for field in dataclasses.fields(RULES[name])]
    for key, value in parameters.items():
        if key not in takes:
            has = f"it has {', '.join(takes)}" if takes else "it has no parameters"
            raise ValueError(f"{key} is {value!r} for the rule {name}: {has}; leave {key} out")
    return RULES[name](**parameters)


def describe(rule: AcceptanceRule) -> dict[str, Any]:
    """Return a rule's name and fields as JSON values; an infinite number becomes "inf".

    A rule that is not in RULES has the name of its class. A `Lossless` rule with its default fields is its
    name alone.
    """
    name = next((name for name, kind in RULES.items() if kind is type(rule)), type(rule).__name__)
    if rule == Lossless():
        return {"name": name}
    own = [field.name for field in fields_of(rule)] or getattr(rule, "__dict__", {})
    return {"name": name} | {key: json_value(getattr(rule, key)) for key in own}


def fields_of(rule: AcceptanceRule) -> Sequence[dataclasses.Field[Any]]:
    """Return the fields of a rule; a rule of a user's own may be no dataclass, and has none then."""
    return dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ()


def json_value(value: object) -> Any:
    """Return a field's value as JSON holds it: numpy's numbers as Python's, and "inf" for an infinite one.

    Anything that JSON has no value for becomes its repr.
    """
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return list(map(json_value, value)) if isinstance(value, (list, tuple)) else format_value(value)


def rule_fields(rule: AcceptanceRule) -> dict[str, Any]:
    """Return what answers say of their rule, as JSON values: enough to make the same text again.

    These are its name, and its threshold, divergence and mode, None if it has none. A plan's price and its
    cost follow, and every field that differs from its default. A rule that follows nothing but the target's
    own draws, such as fuzzy at threshold 0, is lossless, with threshold 0.
    """
    if getattr(rule, "exact", False) and not isinstance(rule, Lossless):
        rule = Lossless()
    described = describe(rule)
    usual = {field.name: json_value(field.default) for field in fields_of(rule)}
    fields = {"rule": described.pop("name")}
    fields |= {key: described.pop(key, None) for key in ("threshold", "divergence", "mode")}
    if isinstance(rule, Lossless):
        fields["threshold"] = 0.0
    plan = ("price", "cost") if described.get("price") else ()
    changed = {key for key, value in described.items() if key not in usual or value != usual[key]}
    return fields | {key: value for key, value in described.items() if key in plan or key in changed}


def parse_rule(text: str) -> AcceptanceRule:
    """Parse a rule written NAME[:VALUE]..., with values in the order of its fields or as field=value.

    A divergence's name means the fuzzy rule with that divergence. Examples: js:0.3, js:0.3:paper:likeliest,
    js:0.3:min_p=0.1, cactus:0.1, typical:0.3:0.09:paper, lossless. Raises ValueError for anything else.
    """
    name, *values = text.split(":")
    fixed: dict[str, Any] = {}
    if name in DIVERGENCES:
        name, fixed = "fuzzy", {"divergence": name}
    if name not in RULES:
        raise ValueError(
            f"rule is {text!r}: it must begin with one of {', '.join(RULES)}, or be a divergence with its "
            "threshold, such as js:0.3"
        )
    fields = {field.name: field for field in dataclasses.fields(RULES[name]) if field.name not in fixed}
    free = iter(fields)
    for value in values:
        key, equals, given = value.partition("=")
        if not equals and name == "lossless":
            raise ValueError(
                f"rule is {text!r}: lossless text has no value {value!r}; leave it out, or name a divergence "
                "with its threshold, such as js:0.3"
            )
        if not equals:
            key, given = next(free, ""), value
        if key not in fields or key in fixed:
            raise ValueError(
                f"rule is {text!r}: {value!r} fits no field of it; it has {', '.join(fields) or 'none'}; "
                "leave it out, or write field=value"
            )
        fixed[key] = read_value(text, key, given, fields[key].default)
    if "divergence" in fixed and "threshold" not in fixed:
        raise ValueError(f"rule is {text!r}: a divergence needs its threshold, as in {text}:0.3")
    if "cost" in fixed and not fixed.get("price"):
        raise ValueError(
            f"rule is {text!r}: its cost has no effect without a price above 0; add a price, or leave it out"
        )
    return RULES[name](**fixed)


def read_value(text: str, key: str, given: str, default: object) -> object:
    """Parse a field's value; the field's default tells its type."""
    kinds: dict[type, tuple[Any, str]] = {
        bool: ({"true": True, "false": False}.__getitem__, "true or false"),
        int: (int, "a whole number"),
        float: (float, "a number"),
        str: (str, "a word"),
        type(None): (int, "a whole number"),  # the fields that are None by default count something
    }
    read, what = kinds[type(default)]
    try:
        return read(given)
    except (KeyError, ValueError) as error:
        raise ValueError(f"rule is {text!r}: {key} is {given!r}: it must be {what}; correct it") from error
