"""Points as tables: Markdown for the eye, with intervals; flat rows for CSV, with everything."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle_fsd.evaluation.analysis.bootstrap import Estimate
from eagle_fsd.evaluation.analysis.frontier import Quality, undominated
from eagle_fsd.evaluation.analysis.measures import SCORE, SPEED, TAU
from eagle_fsd.evaluation.analysis.points import Panel, Point
from eagle_fsd.evaluation.markdown_table import table_lines

Cell = Callable[[Point], str]


def flat_rows(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """A row for every point and measure: value, difference and ratio to lossless, with intervals.

    None stands for what is not known.
    """
    rows = []
    for panel in panels:
        models, task = panel.models, panel.task
        place = {
            "base_model": models.base_model,
            "ea_model": models.ea_model,
            "draft_vocab_size": models.draft_vocab_size,
            "dtype": models.dtype,
            "tree": str(models.tree),
            "task": task.name,
            "version": task.version,
            "temperature": task.sampling.temperature,
            "top_k": task.sampling.top_k,
            "top_p": task.sampling.top_p,
            "max_new_tokens": task.max_new_tokens,
        }
        for point in panel.points:
            named = {"rule": point.label, "family": point.family, "samples": point.samples}
            for measure in panel.measures:
                if measure not in point.values:
                    continue
                change = point.changes.get(measure)
                rows.append(
                    place
                    | named
                    | {"pairs": point.pairs, "measure": measure.removeprefix(SCORE)}
                    | columns("value", point.values[measure])
                    | columns("difference", change.difference if change else None)
                    | columns("ratio", change.ratio if change else None)
                )
    return rows


def columns(name: str, found: Estimate | None) -> dict[str, float | None]:
    ends = (None, None, None) if found is None else (found.value, found.low, found.high)
    finite = [None if end is None or not math.isfinite(end) else end for end in ends]
    return dict(zip((name, f"{name}_low", f"{name}_high"), finite, strict=True))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def speed_table(panel: Panel) -> str:
    """Markdown: how fast each rule is, and what becomes of the lengths."""
    return markdown(
        panel.points,
        {
            "rule": lambda point: point.label,
            "rows": lambda point: str(point.samples),
            "pairs": lambda point: str(point.pairs) if point.pairs else "",
            "tau": value(TAU, ".2f"),
            "tau / lossless": ratio(TAU),
            "tokens/s": value(SPEED, ".1f"),
            "tokens/s / lossless": ratio(SPEED),
            "fuzzy share": value("fuzzy_share", ".1%"),
            "length": value("length", ".0f"),
            "length / lossless": ratio("length"),
            "at the limit": value("limit_rate", ".0%"),
            "more at the limit": difference("limit_rate", "+.0%"),
        },
    )


def quality_table(panel: Panel, qualities: Sequence[Quality], speed: str) -> str:
    """Markdown: what each rule does to the text; the last column says on which qualities' frontier it is."""
    on: dict[str, list[str]] = {}
    for quality in qualities:
        for point in undominated([one for one in panel.points if one.family != "plain"], quality, speed):
            on.setdefault(point.label, []).append(quality.title)
    cells: dict[str, Cell] = {
        "rule": lambda point: point.label,
        "log p": value("log_p", ".3f"),
        "log p - lossless": difference("log_p", "+.3f"),
        "law TV": value("law_tv", ".4f"),
        "law KL": value("law_kl", ".4f"),
        "agreement": value("agreement", ".3f"),
        "agreement - lossless": difference("agreement", "+.3f"),
    }
    for name in panel.scores:
        cells[name] = value(SCORE + name, ".3f")
        cells[f"{name} - lossless"] = difference(SCORE + name, "+.3f")
    cells["on the frontier of"] = lambda point: ", ".join(on.get(point.label, ()))
    return markdown(panel.points, cells)


def markdown(points: Sequence[Point], cells: Mapping[str, Cell]) -> str:
    """A table of the points; columns that would be empty are left out."""
    lines = [{title: cell(point) for title, cell in cells.items()} for point in points]
    titles = [title for title in cells if any(line[title] for line in lines)]
    return "\n".join(table_lines(titles, ([line[title] for title in titles] for line in lines)))


def value(measure: str, form: str) -> Cell:
    return lambda point: spoken(point.values.get(measure), form)


def difference(measure: str, form: str) -> Cell:
    def cell(point: Point) -> str:
        change = point.changes.get(measure)
        return spoken(change.difference, form) if change else ""

    return cell


def ratio(measure: str) -> Cell:
    def cell(point: Point) -> str:
        change = point.changes.get(measure)
        return spoken(change.ratio, ".2f") if change else ""

    return cell


def spoken(found: Estimate | None, form: str) -> str:
    """Such as `1.15 (1.13 to 1.17)`; without a bracket where there is no interval."""
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"
