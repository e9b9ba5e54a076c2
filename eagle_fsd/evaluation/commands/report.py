"""Report on raw rows: quality against speed, with intervals, winners, plots. No model is loaded.

    python eval/report.py --rows runs/sweep/*.jsonl --output runs/report --quality log_p law_tv strict

Writes report.md and frontier_*.png to the folder; the same rows give the same files. Rows of several models
or trees become sections of one report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.measures import SPEED, TAU
from eagle_fsd.evaluation.cli import mistakes_on_one_line, plain_parser, say
from eagle_fsd.evaluation.report.plots import require_matplotlib
from eagle_fsd.evaluation.report.report import QUALITIES, Report, write_report
from eagle_fsd.evaluation.rows import read_raw_rows


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=Path, nargs="+", required=True, help="JSONL files of raw rows, or .jsonl.gz")
    add("--output", type=Path, required=True, help="folder of the report")
    known = f"log_p, law_tv, law_kl or a task's score; default: {' '.join(QUALITIES)}"
    add("--quality", nargs="+", default=list(QUALITIES), help=known)
    add("--tau", action="store_true", help="speed is tokens per step, not tokens per second")
    add("--resamples", type=int, default=10_000, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the resamples; default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        require_matplotlib()
        how = Bootstrap(resamples=arguments.resamples, seed=arguments.seed)
        asked = Report(arguments.quality, TAU if arguments.tau else SPEED, how=how)
        files = read_raw_rows(arguments.rows)
        alone = len({path.name for path in files}) == len(files)
        sources = {path.name if alone else str(path): len(rows) for path, rows in files.items()}
        rows = [row for rows in files.values() for row in rows]
        say(write_report(rows, asked, arguments.output, sources))
