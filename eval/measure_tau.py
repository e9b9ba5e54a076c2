"""Measure tau (tokens per step) by prompt set, temperature and rule: JSONL of rows, and a table to stdout.

    python eval/measure_tau.py --prompts data/prompts_*.jsonl --output runs/tau.jsonl

A run that was stopped goes on at the first missing row.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from eagle_fsd import Fuzzy, SamplingConfig, TreeConfig
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import CHILDREN
from eagle_fsd.evaluation.cli import check_sizes, load_engine, parser_of
from eagle_fsd.evaluation.measure.acceptance_length import Cell, run, table
from eagle_fsd.evaluation.prompt_sets import prompt_sets
from eagle_fsd.files.provenance import provenance


def main() -> None:
    parser = parser_of(__doc__, "float32")
    parser.add_argument(
        "--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="tau does not depend on it; default: %(default)s"
    )
    parser.add_argument("--tree", default="16/5/8", help=f"{TreeConfig.FORM}; default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.6], help="default: %(default)s"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.9, help="where temperature > 0; default: %(default)s"
    )
    parser.add_argument("--top-k", type=int, default=50, help="where temperature > 0; default: %(default)s")
    parser.add_argument(
        "--threshold",
        action="append",
        nargs="+",
        metavar="DIVERGENCE T",
        help="a divergence and its thresholds, e.g. --threshold js 0.1 0.3; may be repeated",
    )
    parser.add_argument("--mode", nargs="+", default=["hybrid"], choices=["hybrid", "paper"])
    parser.add_argument("--child", nargs="+", default=["draft"], choices=CHILDREN)
    arguments = parser.parse_args()

    try:
        check_sizes(arguments, arguments.batch_size)
        tree = TreeConfig.parse(arguments.tree)
        rules = [{}, *fuzzy_rules(arguments)]
        samplings = [
            SamplingConfig(temperature, arguments.top_k, arguments.top_p) if temperature else SamplingConfig()
            for temperature in arguments.temperature
        ]
        engine = load_engine(arguments)
        prompts = prompt_sets(arguments.prompts, engine.tokenizer, arguments.skip, arguments.limit)
        cells = [
            Cell(name, len(ids), arguments.max_new_tokens, sampling, tree, dtype=arguments.dtype, **rule)
            for sampling, rule, (name, ids) in product(samplings, rules, prompts.items())
        ]
        rows = run(engine, cells, prompts, arguments.output, arguments.batch_size, provenance(engine.device))
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    print(table(rows))


def fuzzy_rules(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The fields of a cell for every fuzzy rule asked for. ValueError for one that cannot be."""
    rules = []
    for (divergence, *thresholds), mode, child in product(
        arguments.threshold or [], arguments.mode, arguments.child
    ):
        if not thresholds:
            raise ValueError(
                f"--threshold {divergence} has no number: give a divergence and thresholds, js 0.1 0.3"
            )
        for threshold in thresholds:
            rules.append(
                {"divergence": divergence, "threshold": number(threshold), "mode": mode, "child": child}
            )
            Fuzzy(**rules[-1])
    return rules


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"threshold is {text!r}: it must be a number; --threshold js 0.1 0.3") from error


if __name__ == "__main__":
    main()
