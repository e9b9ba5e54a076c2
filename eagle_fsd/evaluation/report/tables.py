"""Points as Markdown tables, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_fsd.evaluation.analysis.bootstrap import Estimate
from eagle_fsd.evaluation.analysis.frontier import Quality, undominated
from eagle_fsd.evaluation.analysis.measures import SCORE, SPEED, TAU
from eagle_fsd.evaluation.analysis.points import Panel, Point
from eagle_fsd.evaluation.markdown_table import filled_columns


def speed_table(panel: Panel) -> str:
    """Write how fast each rule is, and what becomes of the lengths."""
    rows = [
        {
            "rule": point.label,
            "rows": str(point.samples),
            "pairs": str(point.pairs or ""),
            "tau": with_interval(point.values.get(TAU), ".2f"),
            "tau / lossless": ratio(point, TAU),
            "tokens/s": with_interval(point.values.get(SPEED), ".1f"),
            "tokens/s / lossless": ratio(point, SPEED),
            "fuzzy share": with_interval(point.values.get("fuzzy_share"), ".1%"),
            "length": with_interval(point.values.get("length"), ".0f"),
            "length / lossless": ratio(point, "length"),
            "at the limit": with_interval(point.values.get("limit_rate"), ".0%"),
            "more at the limit": difference(point, "limit_rate", "+.0%"),
        }
        for point in panel.points
    ]
    return filled_columns(rows[0], rows)


def quality_table(panel: Panel, qualities: Sequence[Quality], speed: str) -> str:
    """Write what each rule does to the text; the last column says on which qualities' frontier it is."""
    best = {quality.title: undominated(panel.points, quality, speed) for quality in qualities}
    rows = []
    for point in panel.points:
        row = {
            "rule": point.label,
            "log p": with_interval(point.values.get("log_p"), ".3f"),
            "log p - lossless": difference(point, "log_p", "+.3f"),
            "TV": with_interval(point.values.get("law_tv"), ".4f"),
            "KL": with_interval(point.values.get("law_kl"), ".4f"),
        }
        for name in panel.scores:
            row[name] = with_interval(point.values.get(SCORE + name), ".3f")
            row[f"{name} - lossless"] = difference(point, SCORE + name, "+.3f")
        row["on the frontier of"] = ", ".join(title for title, points in best.items() if point in points)
        rows.append(row)
    return filled_columns(rows[0], rows)


def difference(point: Point, measure: str, form: str) -> str:
    change = point.changes.get(measure)
    return with_interval(change and change.difference, form)


def ratio(point: Point, measure: str) -> str:
    change = point.changes.get(measure)
    return with_interval(change and change.ratio, ".2f")


def with_interval(found: Estimate | None, form: str) -> str:
    """Write an estimate such as `1.15 (1.13 to 1.17)`, without a bracket where there is no interval."""
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"
