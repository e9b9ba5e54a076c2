"""Score generated rows without a model: the same rows with their scores, for eval/report.py.

    python eval/score.py --rows runs/quality.jsonl --data data

Scores come from the texts alone, and a row may be scored again and again. The file changes only when all rows
are scored. HumanEval's rows are programs, and are run: in a sandbox, on Linux alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.evaluation.cli import parsed, plain_parser, say
from eagle_fsd.evaluation.tasks import PROMPTS, Sample, task_named
from eagle_fsd.files.jsonl import read_jsonl, write_rows

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=Path, required=True, help="JSONL of rows, or .jsonl.gz")
    add("--output", type=Path, help="JSONL of scored rows (default: --rows itself, replaced as a whole)")
    add("--data", type=Path, help="folder of the tasks' files (default: $EAGLE_FSD_DATA, else the Hub)")
    with parsed(parser, argv) as arguments:
        rows = score_file(arguments.rows, arguments.output or arguments.rows, arguments.data)
    say(f"{len(rows)} rows scored: {arguments.output or arguments.rows}")


def score_rows(rows: Iterable[Row], path: Path | None = None, origin: str = "rows") -> Iterator[Row]:
    """Yield the rows with `scores`, made anew from `text`; answers to mere prompts have none.

    path: where the tasks' files are, as for Task.load. Raises ValueError naming the row, by `origin` and its
    number, where task or sample are unknown, the version is another, or there is no text.
    """
    loaded: dict[str, dict[str, Sample]] = {}
    for number, row in enumerate(rows, 1):
        if str(row.get("task")).startswith(PROMPTS):
            yield {**row, "scores": {}}
            continue
        try:
            task, text = task_named(row.get("task")), row.get("text")
            task.require_version(row.get("version"))
            if not isinstance(text, str):
                raise ValueError(f"text is {text!r}: a row needs its generated text; generate it again")
            if task.name not in loaded:
                loaded[task.name] = {sample.id: sample for sample in task.load(path)}
            sample = loaded[task.name].get(str(row.get("sample")))
            if sample is None:
                raise ValueError(
                    f"sample is {row.get('sample')!r}: {task.name} has no such sample where it was looked "
                    "for; give the file that the rows were made from"
                )
        except ValueError as error:
            raise ValueError(f"{origin}:{number}: {error}") from error
        yield {**row, "scores": task.score(sample.reference, text)}


def score_file(source: Path, output: Path, path: Path | None = None) -> list[Row]:
    """Score a file into another, or itself, as a whole. Raises ValueError for one that grows meanwhile."""
    if output.suffix == ".gz":
        raise ValueError(f"{output}: scored rows are written uncompressed; name an output without .gz")
    size = source.stat().st_size if source.is_file() else 0  # first: a row may come while they are read
    rows = [row for _, row in read_jsonl(source, torn=True)]
    scored = list(tqdm(score_rows(rows, path, str(source)), total=len(rows), desc="scoring", unit="row"))
    if source.stat().st_size != size:
        raise ValueError(f"{source}: has grown meanwhile; score it when its run has ended")
    write_rows(output, scored)
    return scored
