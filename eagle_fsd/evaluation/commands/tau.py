"""Measure tau (tokens per step) by prompt set, temperature and rule: JSONL of rows, and a table to stdout.

    python eval/measure_tau.py --prompts data/prompts_*.jsonl --output runs/tau.jsonl

A run that was stopped goes on at the first missing row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import CHILDREN, SamplingConfig, TreeConfig
from eagle_fsd.evaluation.cli import check_sizes, load_engine, mistakes_on_one_line, parser_of, say
from eagle_fsd.evaluation.measure.acceptance_length import run, table
from eagle_fsd.evaluation.prompt_sets import prompt_sets
from eagle_fsd.files.provenance import provenance


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, "float32")
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it")
    add("--batch-size", type=int, default=8, help="tau does not depend on it; default: %(default)s")
    add("--tree", default="16/5/8", help=f"{TreeConfig.FORM}; default: %(default)s")
    add("--temperature", type=float, nargs="+", default=[0.0, 0.6], help="default: %(default)s")
    add("--top-p", type=float, default=0.9, help="where temperature > 0; default: %(default)s")
    add("--top-k", type=int, default=50, help="where temperature > 0; default: %(default)s")
    several = "a divergence and its thresholds, e.g. --threshold js 0.1 0.3; may be repeated"
    add("--threshold", action="append", nargs="+", metavar="DIVERGENCE T", help=several)
    add("--mode", nargs="+", default=["hybrid"], choices=["hybrid", "paper"])
    add("--child", nargs="+", default=["draft"], choices=CHILDREN)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        check_sizes(arguments, arguments.batch_size)
        tree = TreeConfig.parse(arguments.tree)
        rules = [(0.0, None, None, None), *fuzzy_rules(arguments)]
        samplings = [
            SamplingConfig(temperature, arguments.top_k, arguments.top_p) if temperature else SamplingConfig()
            for temperature in arguments.temperature
        ]
        engine = load_engine(arguments)
        prompts = prompt_sets(arguments.prompts, engine.tokenizer, arguments.skip, arguments.limit)
        shared = {"max_new_tokens": arguments.max_new_tokens, "tree": asdict(tree)}
        shared |= {"seed": 0, "dtype": arguments.dtype}
        cells = [
            {"prompts": name, "prompt_count": len(ids), "sampling": asdict(sampling), **shared}
            | dict(zip(("threshold", "divergence", "mode", "child"), rule, strict=True))
            for sampling, rule, (name, ids) in product(samplings, rules, prompts.items())
        ]
        rows = run(engine, cells, prompts, arguments.output, arguments.batch_size, provenance(engine.device))
    say(table(rows))


def fuzzy_rules(arguments: argparse.Namespace) -> list[tuple[float, str, str, str]]:
    """Return the threshold, divergence, mode and child of every rule. Raises ValueError for a wrong one."""
    rules = []
    asked = product(arguments.threshold or [], arguments.mode, arguments.child)
    for (divergence, *thresholds), mode, child in asked:
        if not thresholds:
            raise ValueError(
                f"--threshold {divergence} has no number: give a divergence and thresholds, js 0.1 0.3"
            )
        for text in thresholds:
            try:
                threshold = float(text)
            except ValueError as error:
                raise ValueError(
                    f"threshold is {text!r}: it must be a number; --threshold js 0.1 0.3"
                ) from error
            Fuzzy(threshold, divergence, mode=mode, child=child)
            rules.append((threshold, divergence, mode, child))
    return rules
