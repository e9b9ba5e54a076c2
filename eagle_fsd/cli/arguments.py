"""What the command line's flags mean: a rule, a tree, the options of a generation. Needs no model."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from eagle_fsd.cli.flags import AUTO
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import AutoThreshold, AutoTree, SamplingConfig, TreeConfig

if TYPE_CHECKING:
    from eagle_fsd.acceptance.accept import AcceptanceRule

# Flags of the rules' own fields; None where not given, so that the rules' defaults hold.
RULE_FLAGS = (
    "threshold", "quality_budget", "divergence", "mode", "child", "min_p", "max_overshoot", "min_gain",
    "max_consecutive", "exact_prefix", "epsilon", "delta", "candidates", "margin", "single", "acc", "weight",
)  # fmt: skip


def make_rule(args: argparse.Namespace) -> AcceptanceRule | AutoThreshold:
    """The rule that the flags name, with its defaults (threshold 0); a flag of another rule is refused."""
    from eagle_fsd.acceptance.rule_names import RULES, build_rule

    given = {name: getattr(args, name) for name in RULE_FLAGS if getattr(args, name) is not None}
    auto = args.rule == "fuzzy" and args.threshold == AUTO
    takes = {field.name for field in dataclasses.fields(AutoThreshold if auto else RULES[args.rule])}
    for name, value in given.items():
        if name not in takes | ({"threshold"} if auto else set()):
            flag = "--" + name.replace("_", "-")
            whose = "--threshold auto" if auto else f"--rule {args.rule}"
            if name == "quality_budget":
                raise ValueError(f"{flag} is {value}: it is what --threshold auto may cost; give both")
            raise ValueError(f"{flag} is {value} with {whose}: that rule has none; drop the flag")
    if auto:
        del given["threshold"]
        return AutoThreshold(**given)
    if args.rule == "fuzzy":
        given.setdefault("threshold", 0.0)
    return build_rule(args.rule, **given)


def make_tree(args: argparse.Namespace) -> TreeConfig | AutoTree:
    """The tree that the flags name; what they leave open is measured with auto, and the default without."""
    if args.total_tokens == AUTO:
        return AutoTree(args.depth, args.tree_top_k, args.min_confidence)
    usual = TreeConfig()
    return TreeConfig(
        args.total_tokens,
        usual.depth if args.depth is None else args.depth,
        usual.top_k if args.tree_top_k is None else args.tree_top_k,
        usual.min_confidence if args.min_confidence is None else args.min_confidence,
    )


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of EagleFSD.stream but for the prompt; all are checked here, before a model is loaded."""
    require_integer("max_new_tokens", args.max_new_tokens, 1, "256 is usual")
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p)
    return {
        "max_new_tokens": args.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": None if args.seed is None else parse_stream(args.seed),
        "tree": make_tree(args),
        "rule": make_rule(args),
    }


def parse_stream(text: str) -> tuple[int, int]:
    """The (seed, row) pair written S or S/N."""
    seed, slash, row = text.partition("/")
    parts = (seed, row if slash else "0")
    if not all(part.isascii() and part.isdecimal() and int(part) < 2**63 for part in parts):
        raise ValueError(f"seed is {text}: it must be S or S/N, whole numbers from 0 below 2**63; choose one")
    return int(parts[0]), int(parts[1])
