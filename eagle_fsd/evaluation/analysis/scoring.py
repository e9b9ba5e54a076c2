"""Scores of raw rows from their text alone: no model is loaded, and a row may be scored again and again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.markdown_table import table_lines
from eagle_fsd.evaluation.tasks import PROMPTS, Sample, Task, task_named
from eagle_fsd.files.atomic import atomic_path
from eagle_fsd.files.jsonl import append_row, drop_torn_line, read_jsonl

Row = dict[str, Any]


def score_rows(
    rows: Iterable[Mapping[str, Any]], path: Path | None = None, origin: str = "rows", first: int = 1
) -> Iterator[Row]:
    """The rows with `scores`, made anew from `text`; answers to mere prompts have none.

    path: where the tasks' files are, as for Task.load. ValueError names the row, by `origin` and a number
    counted from `first`, where task or sample are unknown, the version is another, or there is no text.
    """
    loaded: dict[str, dict[str, Sample]] = {}
    for number, row in enumerate(rows, first):
        if str(row.get("task")).startswith(PROMPTS):
            yield {**row, "scores": {}}
            continue
        try:
            task = task_of(row)
        except ValueError as error:
            raise ValueError(f"{origin}:{number}: {error}") from error
        if task.name not in loaded:
            loaded[task.name] = {sample.id: sample for sample in task.load(path)}
        sample = loaded[task.name].get(str(row.get("sample")))
        if sample is None:
            raise ValueError(
                f"{origin}:{number}: sample is {row.get('sample')!r}: {task.name} has no such sample where "
                "it was looked for; give the file that the rows were made from"
            )
        yield {**row, "scores": task.score(sample.reference, row["text"])}


def task_of(row: Mapping[str, Any]) -> Task:
    """The task of a row that can be scored; ValueError says what keeps it from that."""
    task = task_named(row.get("task"))
    task.require_version(row.get("version"))
    if not isinstance(row.get("text"), str):
        raise ValueError(f"text is {row.get('text')!r}: a row needs its generated text; generate it again")
    return task


def score_file(source: Path, output: Path, path: Path | None = None) -> Iterator[Row]:
    """Score a file of rows into another, one by one; rows that `output` has already are not scored again, so
    that a run that was stopped goes on where it was. The same file twice: all rows are scored, and it is
    replaced as a whole. ValueError for an `output` of other rows, and for a source that grows meanwhile.
    """
    if output.suffix == ".gz":
        raise ValueError(f"{output}: scored rows are written uncompressed; name an output without .gz")
    rows = [row for _, row in read_jsonl(source, torn=True)]
    if source.resolve() == output.resolve():
        yield from replace_scores(source, rows, path)
        return
    done = [row for _, row in read_jsonl(output, torn=True)] if output.exists() else []
    remedy = "choose another output, or delete it"
    for number, (new, old) in enumerate(zip(rows, done, strict=False), 1):
        if "scores" not in old or fingerprint(new) != fingerprint(old):
            raise ValueError(f"{output}:{number}: is not the scored row of {source}; {remedy}")
    if len(done) > len(rows):
        raise ValueError(f"{output}:{len(rows) + 1}: is a row that {source} has not; {remedy}")
    yield from done
    drop_torn_line(output)
    for row in score_rows(rows[len(done) :], path, str(source), len(done) + 1):
        append_row(output, row)
        yield row


def replace_scores(source: Path, rows: Sequence[Row], path: Path | None) -> Iterator[Row]:
    """Score the rows of a file into its place, which changes only when all are scored."""
    size = source.stat().st_size
    with atomic_path(source) as partial:
        with partial.open("w", encoding="utf-8") as file:
            for row in score_rows(rows, path, str(source)):
                file.write(json.dumps(row) + "\n")
                yield row
        if source.stat().st_size != size:
            raise ValueError(f"{source}: has grown meanwhile; score it when its run has ended, or elsewhere")


def fingerprint(row: Mapping[str, Any]) -> str:
    """A row but for its scores."""
    rest = {name: value for name, value in row.items() if name != "scores"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def means(task: Task, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every metric over the rows of one cell; see Task.weights."""
    found = {}
    for metric in task.metrics:
        weights = [row["scores"][task.weights[metric]] if metric in task.weights else 1.0 for row in rows]
        values = [row["scores"][metric] for row in rows]
        found[metric] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line per cell: its task's means, tokens per answer, the share cut off at the limit."""
    cells: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        rule = row.get("rule", {})
        words = " ".join(str(value) for value in rule.values() if value is not None) or "?"
        temperature = row.get("sampling", {}).get("temperature", "")
        cells.setdefault((row["task"], words, str(temperature), str(row.get("key"))), []).append(row)
    lines = []
    for (name, words, temperature, _), members in cells.items():
        found = {} if name.startswith(PROMPTS) else means(task_named(name), members)
        scores = ", ".join(f"{metric} {value:.3f}" for metric, value in found.items())
        lengths = [row["new_tokens"] for row in members if "new_tokens" in row]
        tokens = f"{sum(lengths) / len(lengths):.0f}" if lengths else ""
        capped = sum(row.get("finish_reason") == "length" for row in members) / len(members)
        values = (name, words, temperature, str(len(members)), scores, tokens, f"{capped:.0%}")
        lines.append(values)
    titles = ("task", "rule", "temperature", "answers", "scores", "tokens", "cut off")
    return "\n".join(table_lines(titles, lines))
