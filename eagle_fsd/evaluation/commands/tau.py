"""Measure tau (tokens per step) by prompt set, temperature and rule: JSONL of rows, and a table to stdout.

    python eval/measure_tau.py --prompts data/prompts_*.jsonl --output runs/tau.jsonl

It is a sweep over files of prompts, one set each. A run that was stopped goes on at the first missing row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.config import CHILDREN, SamplingConfig, TreeConfig
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.cli import check_sizes, load_engine, parsed, parser_of, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.tasks import PROMPTS
from eagle_fsd.files.places import require_file
from eagle_fsd.files.provenance import provenance
from eagle_fsd.hub.head_checkpoint import find_head_file
from eagle_fsd.hub.head_digest import head_digests

COUNTS = ("steps", "new_tokens", "fuzzy_accepts")
Row = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
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
    with parsed(parser, argv) as arguments:
        check_sizes(arguments, arguments.batch_size)
        require_file("--output", arguments.output)
        tree, rules = TreeConfig.parse(arguments.tree), [Lossless()]
        for (name, *numbers), *how in product(arguments.threshold, arguments.mode, arguments.child):
            if not numbers:
                raise ValueError(
                    f"--threshold {name} has no number: give a divergence and thresholds, js 0.1 0.3"
                )
            rules += [parse_rule(":".join([name, number, *how])) for number in numbers]
        warm = (arguments.top_k, arguments.top_p)
        samplings = [SamplingConfig(t, *warm) if t else SamplingConfig() for t in arguments.temperature]
        engine, most = load_engine(arguments), arguments.max_new_tokens
        sets = [
            Questions.of_prompts([path], engine, arguments.limit, arguments.skip, most)
            for path in arguments.prompts
        ]
        cells = [Cell(one, rule, how, tree, most) for how, rule, one in product(samplings, rules, sets)]
        about = provenance(engine.device) | head_of(engine)
        rows = run(engine, cells, arguments.output, arguments.batch_size, about)
        answers = [row for mine in rows for row in mine]
    say(table(summed_up(answers)))


def head_of(engine: EagleFSD) -> dict[str, Any]:
    """Return what rows say of the head: the digests of its files, by which `train publish` knows it."""
    network = None if engine.drafter is None else engine.drafter.network
    if not isinstance(network, DraftHead | Eagle3Head):
        return {"head": None}
    if engine.head_folder is None:  # it was made in memory
        return {}
    named = Path(engine.ea_model)
    file = named if named.is_file() else find_head_file(engine.head_folder, engine.ea_model)
    return {"head": head_digests(file)}


def summed_up(answers: Iterable[Row]) -> list[dict[str, Any]]:
    """Sum the answers of each cell: a set of prompts under one rule, sampling and tree.

    skipped: the prompts of the set before the first one that was answered.
    """
    cells: dict[str, dict[str, Any]] = {}
    for row in answers:
        rule = {name: row["rule"].get(name) for name in ("divergence", "mode", "child")}
        start = {**row, **rule, **dict.fromkeys(COUNTS, 0), "threshold": row["rule"].get("threshold", 0.0)}
        number = int(sample) if (sample := str(row.get("sample"))).isdecimal() else 0
        start |= {"prompts": row["task"].removeprefix(PROMPTS), "prompt_count": 0, "skipped": number}
        cell = cells.setdefault(row["key"], start)
        cell["prompt_count"] += 1
        cell["skipped"] = min(cell["skipped"], number)
        for name in COUNTS:
            cell[name] += row[name]
    return list(cells.values())


def table(cells: Sequence[Row]) -> str:
    """Write a Markdown table of tau: a line per tree, temperature and rule, by prompt set and over all.

    cells: see `summed_up`. "vs lossless" compares with the lossless line of the same tree and temperature.
    """
    sets = list(dict.fromkeys(row["prompts"] for row in cells))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in cells:
        rule = [row["divergence"] or "lossless", row["mode"] or "", row["child"] or ""]
        where = (str(TreeConfig(**row["tree"])), f"{row['sampling']['temperature']:g}")
        groups.setdefault((*where, *rule, f"{float(row['threshold']):g}"), []).append(row)
    lossless: dict[tuple[str, ...], float] = {}
    lines = []
    for setting, members in groups.items():
        steps, tokens, fuzzy = (sum(row[name] for row in members) for name in COUNTS)
        if setting[2] == "lossless":
            lossless[setting[:2]] = tokens / steps
        base = lossless.get(setting[:2])
        ratio = f"{tokens / steps / base - 1:+.0%}" if base else ""
        by_set = {row["prompts"]: f"{row['new_tokens'] / row['steps']:.2f}" for row in members}
        taus = [*(by_set.get(name, "") for name in sets), f"{tokens / steps:.2f}"]
        lines.append([*setting, *taus, ratio, f"{fuzzy / steps:.2f}"])
    titles = ["tree", "temperature", "divergence", "mode", "child", "T", *sets]
    return markdown_table([*titles, "all", "vs lossless", "fuzzy / step"], lines)
