"""Score generated rows without a model: the same rows with their scores, and a table to stdout.

    python eval/score.py --rows runs/quality.jsonl --data data

The file changes only when all rows are scored. HumanEval's rows are programs, and are run: in a sandbox, on
Linux alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.evaluation.analysis.scoring import score_file, table
from eagle_fsd.evaluation.cli import mistakes_on_one_line, plain_parser, say


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=Path, required=True, help="JSONL of rows, or .jsonl.gz")
    add("--output", type=Path, help="JSONL of scored rows (default: --rows itself, replaced as a whole)")
    add("--data", type=Path, help="folder of the tasks' files (default: $EAGLE_FSD_DATA, else the Hub)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        rows = score_file(arguments.rows, arguments.output or arguments.rows, arguments.data)
    say(table(rows))
