"""Score generated rows without a model: the same rows with their scores, and a table to stdout.

    python eval/score.py --rows runs/quality.jsonl --data data

Where --output names another file, a run that was stopped goes on at the first row that it lacks. HumanEval's
rows are programs, and are run: in a sandbox, on Linux alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from eagle_fsd.core.checks import one_line
from eagle_fsd.evaluation.analysis.scoring import score_file, table
from eagle_fsd.files.jsonl import read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=Path, required=True, help="JSONL of rows, or .jsonl.gz")
    add("--output", type=Path, help="JSONL of scored rows (default: --rows itself, replaced as a whole)")
    add("--data", type=Path, help="folder of the tasks' files (default: $EAGLE_FSD_DATA, else the Hub)")
    arguments = parser.parse_args()
    try:
        count = sum(1 for _ in read_jsonl(arguments.rows, torn=True))
        scored = score_file(arguments.rows, arguments.output or arguments.rows, arguments.data)
        rows = list(tqdm(scored, total=count, desc="scoring", unit="row"))
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    print(table(rows))


if __name__ == "__main__":
    main()
