"""What tables and plots call an acceptance rule, from its JSON object alone: label, family, and knobs.

A family is what one line of a plot joins: rules that differ in how far they relax (their knobs), not in how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOSSLESS = "lossless"


@dataclass(frozen=True)
class Naming:
    """How rules of one name are written.

    knobs: the fields that say how far, the main one first; label: of knobs and other fields; family: without
    the knobs; always: fields said whatever their value.
    """

    knobs: tuple[str, ...]
    label: str
    family: str
    always: tuple[str, ...] = ()


NAMINGS = {
    "fuzzy": Naming(("threshold",), "{divergence} {threshold}", "{divergence}", ("mode",)),
    "typical": Naming(("epsilon", "delta"), "typical {epsilon}/{delta}", "typical"),
    "relaxed_topk": Naming(
        ("margin", "candidates"), "relaxed top-{candidates} margin {margin}", "relaxed top-k"
    ),
    "sglang": Naming(("single", "acc"), "sglang {single}/{acc}", "sglang"),
    "cactus": Naming(("delta",), "cactus {delta}", "cactus"),
    "ensemble": Naming(("weight",), "ensemble {weight}", "ensemble"),
}
# What most rules do, and guards that are off: not worth a word.
DEFAULTS: dict[str, Any] = {
    "mode": "hybrid",
    "child": "draft",
    "min_p": 0,
    "max_overshoot": "inf",
    "min_gain": 0,
    "max_consecutive": None,
    "exact_eos": True,
    "exact_prefix": 0,
}
OWN_WORDS = ("mode", "child")  # their values need no name before them
KINDS = (*OWN_WORDS, "min_gain")  # what sets families apart
WORDS = {
    "min_p": "min-p",
    "max_overshoot": "overshoot",
    "min_gain": "gain",
    "max_consecutive": "run",
    "exact_prefix": "prefix",
}


def rule_label(rule: Mapping[str, Any]) -> str:
    """Return a rule in a few words, such as `js 0.3 hybrid` or `typical 0.3/0.09`; other rules, other words.

    Guards are named where they are on, and all fields of a rule that is not known here.
    """
    naming = naming_of(rule)
    said = {name for name in rule if f"{{{name}}}" in naming.label}
    first = naming.label.format(**{name: short(rule[name]) for name in said})
    return " ".join([first, *further_words(rule, naming, said)])


def rule_family(rule: Mapping[str, Any]) -> str:
    """Return the rule without its knobs and most guards: name, divergence, mode, child and least gain."""
    naming = naming_of(rule)
    first = naming.family.format(**rule)
    return " ".join([first, *further_words({k: rule[k] for k in KINDS if k in rule}, naming, set())])


def rule_knobs(rule: Mapping[str, Any]) -> tuple[float, ...]:
    """Return how far the rule goes, the main knob first: its place along its family's line."""
    return tuple(float(rule[name]) for name in naming_of(rule).knobs if rule[name] is not None)


def naming_of(rule: Mapping[str, Any]) -> Naming:
    """Return the naming of a rule; of one whose name or fields are not known here, its bare name."""
    naming = NAMINGS.get(rule["name"])
    if naming is not None:
        wanted = {*naming.knobs, *(("divergence",) if "{divergence}" in naming.label else ())}
        if wanted <= rule.keys():
            return naming
    bare = rule["name"].replace("_", " ").replace("{", "").replace("}", "")
    return Naming((), bare, bare)


def further_words(rule: Mapping[str, Any], naming: Naming, said: set[str]) -> list[str]:
    """Return the fields that a label has not said and that are worth a word."""
    words = []
    for name, value in rule.items():
        spoken = name == "name" or name in said
        if not spoken and (name in naming.always or name not in DEFAULTS or value != DEFAULTS[name]):
            words.append(str(value) if name in OWN_WORDS else f"{WORDS.get(name, name)} {short(value)}")
    return words


def short(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)
