"""Measure tau (tokens per step) by prompt set, temperature and rule: JSONL of rows, and a table to stdout.

    python eval/measure_tau.py --prompts data/prompts_*.jsonl --output runs/tau.jsonl

It is a sweep over files of prompts, one set each. A run that was stopped goes on at the first missing row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.config import CHILDREN, SamplingConfig, TreeConfig
from eagle_fsd.evaluation.cli import check_sizes, load_engine, mistakes_on_one_line, parser_of, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.tasks import PROMPTS
from eagle_fsd.files.provenance import provenance

COUNTS = ("steps", "new_tokens", "fuzzy_accepts")
Row = Mapping[str, Any]


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
    add("--threshold", action="append", nargs="+", default=[], metavar="DIVERGENCE T", help=several)
    add("--mode", nargs="+", default=["hybrid"], choices=["hybrid", "paper"])
    add("--child", nargs="+", default=["draft"], choices=CHILDREN)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        check_sizes(arguments, arguments.batch_size)
        tree, rules = TreeConfig.parse(arguments.tree), [Lossless(), *fuzzy_rules(arguments)]
        samplings = [
            SamplingConfig(temperature, arguments.top_k, arguments.top_p) if temperature else SamplingConfig()
            for temperature in arguments.temperature
        ]
        engine, most = load_engine(arguments), arguments.max_new_tokens
        sets = [
            Questions.of_prompts([path], engine, arguments.limit, arguments.skip, most)
            for path in arguments.prompts
        ]
        cells = [Cell(one, rule, how, tree, most) for how, rule, one in product(samplings, rules, sets)]
        rows = run(engine, cells, arguments.output, arguments.batch_size, provenance(engine.device))
        answers = [row for cell in cells for row in cell.rows(engine, rows)]
    say(table(summed_up(answers)))


def fuzzy_rules(arguments: argparse.Namespace) -> list[AcceptanceRule]:
    """Return the rules that are asked for. Raises ValueError for a wrong one."""
    rules = []
    for (divergence, *thresholds), mode, child in product(
        arguments.threshold, arguments.mode, arguments.child
    ):
        if not thresholds:
            raise ValueError(
                f"--threshold {divergence} has no number: give a divergence and thresholds, js 0.1 0.3"
            )
        rules += [parse_rule(f"{divergence}:{threshold}:{mode}:{child}") for threshold in thresholds]
    return rules


def summed_up(answers: Iterable[Row]) -> list[dict[str, Any]]:
    """Sum the answers of each cell: a set of prompts under one rule, sampling and tree."""
    cells: dict[str, list[Row]] = {}
    for row in answers:
        cells.setdefault(row["key"], []).append(row)
    made = []
    for first, *others in cells.values():
        rule = {name: first["rule"].get(name) for name in ("divergence", "mode", "child")}
        sums = {
            name: sum(row[name] for row in (first, *others))
            for name in ("steps", "new_tokens", "fuzzy_accepts")
        }
        about = {"prompts": first["task"].removeprefix(PROMPTS), "prompt_count": 1 + len(others)}
        made.append({**first, **rule, "threshold": first["rule"].get("threshold", 0.0), **sums, **about})
    return made


def table(cells: Sequence[Row]) -> str:
    """Write a Markdown table of tau: a line per tree, temperature and rule, by prompt set and over all.

    cells: see `summed_up`. "vs lossless" compares with the lossless line of the same tree and temperature.
    """
    sets = list(dict.fromkeys(row["prompts"] for row in cells))
    titles = ["tree", "temperature", "divergence", "mode", "child", "T", *sets]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in cells:
        rule = (
            row["divergence"] or "lossless",
            row["mode"] or "",
            row["child"] or "",
            f"{row['threshold']:g}",
        )
        setting = (str(TreeConfig(**row["tree"])), f"{row['sampling']['temperature']:g}", *rule)
        groups.setdefault(setting, []).append(row)
    lossless: dict[tuple[str, ...], float] = {}
    lines = []
    for setting, members in groups.items():
        steps = sum(row["steps"] for row in members)
        tau = sum(row["new_tokens"] for row in members) / steps
        if setting[2] == "lossless":
            lossless[setting[:2]] = tau
        base = lossless.get(setting[:2])
        fuzzy = sum(row["fuzzy_accepts"] for row in members) / steps
        by_set = {row["prompts"]: f"{row['new_tokens'] / row['steps']:.2f}" for row in members}
        cells_of_sets = [by_set.get(name, "") for name in sets]
        ratio = f"{tau / base - 1:+.0%}" if base else ""
        lines.append([*setting, *cells_of_sets, f"{tau:.2f}", ratio, f"{fuzzy:.2f}"])
    return markdown_table([*titles, "all", "vs lossless", "fuzzy / step"], lines)
