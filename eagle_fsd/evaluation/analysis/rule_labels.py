"""What tables and plots call an acceptance rule, from its JSON object alone: label, family, and knobs.

A family is what one line of a plot joins: rules that differ in how far they relax (their knobs), not in how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.rule_names import describe

LOSSLESS = "lossless"
# By the rule's name: its label, its family, and the fields that say how far it goes, the main one first.
NAMINGS = {
    "fuzzy": ("{divergence} {threshold}", "{divergence}", ("threshold",)),
    "typical": ("typical {epsilon}/{delta}", "typical", ("epsilon", "delta")),
    "relaxed_topk": ("relaxed top-{candidates} margin {margin}", "relaxed top-k", ("margin", "candidates")),
    "sglang": ("sglang {single}/{acc}", "sglang", ("single", "acc")),
    "cactus": ("cactus {delta}", "cactus", ("delta",)),
    "ensemble": ("ensemble {weight}", "ensemble", ("weight",)),
    "fly": ("fly {entropy} window {window}", "fly", ("entropy", "window")),
}
# The same of a fuzzy rule that plans: its price is its main knob.
PLANNED = ("planned {price} {divergence} {threshold}", "planned {divergence}", ("price", "threshold"))
# What most rules do, and guards that are off: not worth a word.
DEFAULTS = {
    name: value for name, value in describe(Fuzzy()).items() if name not in ("threshold", "divergence")
}
# Further fields in a word. The values of mode and child need no name before them.
WORDS = {"mode": "", "child": "", "min_p": "min-p ", "max_overshoot": "overshoot ", "min_gain": "gain "}
WORDS |= {"price": "price ", "cost": "cost ", "max_consecutive": "run ", "exact_prefix": "prefix "}
KINDS = ("mode", "child", "min_gain", "cost")  # the further fields that set families apart


class RuleName(NamedTuple):
    """What a rule is called. knobs: how far it goes, the main one first: its place on its family's line."""

    label: str
    family: str
    knobs: tuple[float, ...]


def name_rule(rule: Mapping[str, Any]) -> RuleName:
    """Name a rule, such as `js 0.3 hybrid` or `typical 0.3/0.09` of the families `js hybrid` and `typical`.

    Guards are named where they are on, and all fields of a rule whose name or fields are not known here.
    """
    bare = rule["name"].replace("_", " ")
    label, family, knobs = PLANNED if rule.get("price") else NAMINGS.get(rule["name"], (bare, bare, ()))
    if not {*knobs} <= rule.keys():
        label, family, knobs = bare, bare, ()
    words = {name: f"{WORDS.get(name, f'{name} ')}{short(value)}" for name, value in rule.items()}
    said = {"name", *knobs, *(("divergence",) if "{divergence}" in label else ())}
    always = ("mode",) if rule["name"] == "fuzzy" else ()
    further = [n for n in rule if n not in said and (n in always or rule[n] != DEFAULTS.get(n, ...))]
    kinds = [name for name in KINDS if name in further]
    shown = {name: short(value) for name, value in rule.items()}
    return RuleName(
        " ".join([label.format(**shown), *(words[name] for name in further)]),
        " ".join([family.format(**shown), *(words[name] for name in kinds)]),
        tuple(float(rule[name]) for name in knobs if rule[name] is not None),
    )


def short(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)
