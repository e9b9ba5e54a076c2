"""A sweep's second pass: of a cheap first one, the cells that may still turn out to be on the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.frontier import Quality, quality_named, speedup
from eagle_fsd.evaluation.analysis.measures import SCORE, TAU
from eagle_fsd.evaluation.analysis.points import Panel, Point, panels
from eagle_fsd.evaluation.measure.sweep import Cell
from eagle_fsd.evaluation.rows import read_raw_rows

QUALITIES = ("law_tv", "log_p")  # and the task's own scores
HOW = Bootstrap(2000, 0.9)


def near_frontier(panel: Panel, qualities: Sequence[Quality], speed: str = TAU) -> list[Point]:
    """Lossless, and the points that nothing surely beats, by one of these qualities.

    A point is surely beaten where another's speed lies above its own and its loss below, by intervals. A
    quality that is the same for all points has no say.
    """
    kept: list[Point] = []
    for quality in qualities:
        known = [
            (fast, loss, point)
            for point in panel.points
            if (fast := speedup(point, speed)) is not None and (loss := quality.loss(point)) is not None
        ]
        if len(known) > 1 and len({loss.value for _, loss, _ in known}) == 1:
            continue  # it tells nothing apart: by it, nothing is ever beaten
        for fast, loss, point in known:
            beaten = any(
                None not in (other_fast.low, fast.high, lost.high, loss.low)
                and other_fast.low > fast.high  # type: ignore[operator]
                and lost.high < loss.low  # type: ignore[operator]
                for other_fast, lost, _ in known
            )
            if not beaten and point not in kept:
                kept.append(point)
    return [point for point in panel.points if point.family == "lossless" or point in kept]


def refined(engine: EagleFSD, cells: Sequence[Cell], output: Path) -> list[Cell]:
    """The cells whose rows in `output` leave them a place near the frontier of their panel."""
    models = engine.identity()
    mine = {cell.key(engine, models): cell for cell in cells}
    (rows,) = read_raw_rows([output]).values()
    kept: list[Cell] = []
    for panel in panels([row for row in rows if row.key in mine], HOW):
        names = [*QUALITIES, *(name.removeprefix(SCORE) for name in panel.scores)]
        points = near_frontier(panel, [quality_named(name, [panel]) for name in names])
        kept += [mine[point.rows[0].key] for point in points]
    return kept
