"""Points as Markdown tables, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from eagle_fsd.evaluation.analysis.bootstrap import Estimate
from eagle_fsd.evaluation.analysis.frontier import Quality, undominated
from eagle_fsd.evaluation.analysis.measures import SCORE, SPEED, TAU
from eagle_fsd.evaluation.analysis.points import Panel, Point
from eagle_fsd.evaluation.markdown_table import filled_columns

Cell = Callable[[Point], str]


def speed_table(panel: Panel) -> str:
    """Write how fast each rule is, and what becomes of the lengths."""
    return point_table(
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
    """Write what each rule does to the text; the last column says on which qualities' frontier it is."""
    on: dict[str, list[str]] = {}
    for quality in qualities:
        for point in undominated(panel.points, quality, speed):
            on.setdefault(point.label, []).append(quality.title)
    cells: dict[str, Cell] = {
        "rule": lambda point: point.label,
        "log p": value("log_p", ".3f"),
        "log p - lossless": difference("log_p", "+.3f"),
        "TV": value("law_tv", ".4f"),
        "KL": value("law_kl", ".4f"),
    }
    for name in panel.scores:
        cells[name] = value(SCORE + name, ".3f")
        cells[f"{name} - lossless"] = difference(SCORE + name, "+.3f")
    cells["on the frontier of"] = lambda point: ", ".join(on.get(point.label, ()))
    return point_table(panel.points, cells)


def point_table(points: Sequence[Point], cells: Mapping[str, Cell]) -> str:
    """Write a table of the points; columns that would be empty are left out."""
    return filled_columns(cells, [{title: cell(point) for title, cell in cells.items()} for point in points])


def value(measure: str, form: str) -> Cell:
    return lambda point: with_interval(point.values.get(measure), form)


def difference(measure: str, form: str) -> Cell:
    def cell(point: Point) -> str:
        change = point.changes.get(measure)
        return with_interval(change and change.difference, form)

    return cell


def ratio(measure: str) -> Cell:
    def cell(point: Point) -> str:
        change = point.changes.get(measure)
        return with_interval(change and change.ratio, ".2f")

    return cell


def with_interval(found: Estimate | None, form: str) -> str:
    """Write an estimate such as `1.15 (1.13 to 1.17)`, without a bracket where there is no interval."""
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"
