"""What tables and plots call an acceptance rule, from its JSON object alone: label, family, and knobs.

A family is what one line of a plot joins: rules that differ in how far they relax (their knobs), not in how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def rule_label(rule: Mapping[str, Any]) -> str:
    """Return a rule in a few words, such as `js 0.3 hybrid` or `typical 0.3/0.09`; other rules, other words.

    Guards are named where they are on, and all fields of a rule that is not known here.
    """
    label, _, knobs = naming_of(rule)
    said = {"name", *knobs, *(("divergence",) if "{divergence}" in label else ())}
    first = label.format(**{name: short(value) for name, value in rule.items()})
    return " ".join([first, *further_words(rule, [name for name in rule if name not in said])])


def rule_family(rule: Mapping[str, Any]) -> str:
    """Return the rule without its knobs and most guards: name, divergence, mode, child and least gain."""
    family = naming_of(rule)[1].format(**rule)
    return " ".join([family, *further_words(rule, [name for name in KINDS if name in rule])])


def rule_knobs(rule: Mapping[str, Any]) -> tuple[float, ...]:
    """Return how far the rule goes, the main knob first: its place along its family's line."""
    return tuple(float(rule[name]) for name in naming_of(rule)[2] if rule[name] is not None)


def naming_of(rule: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """Return the naming of a rule; of one whose name or fields are not known here, its bare name."""
    naming = NAMINGS.get(rule["name"])
    if rule.get("price"):
        naming = PLANNED
    if naming is not None and {*naming[2]} <= rule.keys():
        return naming
    bare = rule["name"].replace("_", " ")
    return bare, bare, ()


def further_words(rule: Mapping[str, Any], names: list[str]) -> list[str]:
    """Return those of a rule's fields that are worth a word; the mode of a fuzzy rule always is."""
    always = ("mode",) if rule["name"] == "fuzzy" else ()
    worth = [name for name in names if name in always or rule[name] != DEFAULTS.get(name, ...)]
    return [f"{WORDS.get(name, f'{name} ')}{short(rule[name])}" for name in worth]


def short(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)
