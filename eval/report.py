"""Report on raw rows: quality against speed, with intervals, winners, plots. No model is loaded.

    python eval/report.py --rows runs/sweep/*.jsonl --output runs/report --quality log_p law_tv strict

Writes report.md, table.csv and frontier_*.png and .svg to the folder; the same rows give the same files. Rows
of several models or trees become sections of one report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_fsd.core.checks import one_line
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.frontier import LOSSES
from eagle_fsd.evaluation.analysis.measures import SPEED, TAU
from eagle_fsd.evaluation.report.plots import require_matplotlib
from eagle_fsd.evaluation.report.report import QUALITIES, Report, write_report
from eagle_fsd.evaluation.rows import read_raw_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=Path, nargs="+", required=True, help="JSONL files of raw rows, or .jsonl.gz")
    add("--output", type=Path, required=True, help="folder of the report")
    add(
        "--quality",
        nargs="+",
        default=list(QUALITIES),
        help=f"log_p, law_tv, law_kl, agreement or a task's score; default: {' '.join(QUALITIES)}",
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--tokens-per-second", dest="speed", action="store_const", const=SPEED, default=SPEED)
    speed.add_argument(
        "--tau", dest="speed", action="store_const", const=TAU, help="speed is tokens per step"
    )
    add(
        "--losses",
        type=float,
        nargs="+",
        default=list(LOSSES),
        help="levels of loss to name winners at, of log p a share; default: %(default)s",
    )
    add("--resamples", type=int, default=10_000, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the resamples; default: %(default)s")
    arguments = parser.parse_args()
    try:
        require_matplotlib()
        how = Bootstrap(resamples=arguments.resamples, seed=arguments.seed)
        asked = Report(arguments.quality, arguments.speed, arguments.losses, how)
        files = read_raw_rows(arguments.rows)
        alone = len({path.name for path in files}) == len(files)
        sources = {path.name if alone else str(path): len(rows) for path, rows in files.items()}
        print(
            write_report([row for rows in files.values() for row in rows], asked, arguments.output, sources)
        )
    except (ValueError, OSError) as error:
        parser.error(one_line(error))


if __name__ == "__main__":
    main()
