"""What acceptance rules get for what they give up, from raw rows: tokens gained for a TV of 1, by rule.

    python eval/exchange.py --rows runs/sweep.jsonl --against "js 0.6 hybrid"

A table for every task and sampling. Brackets are intervals of a bootstrap over samples. No model is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.points import panels
from eagle_fsd.evaluation.cli import mistakes_on_one_line, plain_parser, say
from eagle_fsd.evaluation.report.exchange_rate import exchange_table
from eagle_fsd.evaluation.rows import read_raw_rows


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=Path, nargs="+", required=True, help="JSONL files of raw rows, or .jsonl.gz")
    add("--against", nargs="+", default=[], metavar="RULE", help="labels of the first column to compare with")
    add("--resamples", type=int, default=10_000, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the resamples; default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        how = Bootstrap(resamples=arguments.resamples, seed=arguments.seed)
        rows = [row for rows in read_raw_rows(arguments.rows).values() for row in rows]
        if not rows:
            raise ValueError("no rows: a table needs raw rows; run eval/sweep.py first")
        tables = [exchange_table(panel, how, arguments.against) for panel in panels(rows, how)]
    say("\n\n".join(tables))
