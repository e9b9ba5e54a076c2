"""Draw a run's curves: loss, held-out accuracy and chain length over the steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import atomic_path
from eagle_fsd.training.run.folder import CURVES, LOG, read_log

logger = logging.getLogger(__name__)

SMOOTHED = 0.02  # share of the run's steps that are averaged into a point of a loss curve


def plot_curves(folder: Path) -> Path | None:
    """Draw the folder's log. Returns None, with a warning, if matplotlib is missing or the log is damaged."""
    if find_spec("matplotlib") is None:
        logger.warning("no %s: matplotlib is missing; pip install 'eagle-fsd[train]'", CURVES)
        return None
    try:
        return draw(folder)
    except (OSError, ValueError, TypeError, LookupError) as error:  # the head must still be exported
        logger.warning("no %s: %s cannot be drawn (%s)", CURVES, folder / LOG, one_line(error, 200))
        return None


def draw(folder: Path) -> Path:
    """Draw the folder's log, and return the picture's path."""
    from matplotlib.figure import Figure  # optional, and slow to import

    records = read_log(folder)
    steps = [record for record in records if "loss" in record]
    held = [record for record in records if "held_out" in record]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loss, accuracy, chain = figure.subplots(1, 3)
    for axes, name in (
        (loss, "soft cross-entropy"),
        (accuracy, "held-out top-1"),
        (chain, "held-out chain tau"),
    ):
        axes.set(xlabel="step", ylabel=name)
        axes.grid(alpha=0.3)
    depth = max((len(record["cross_entropy"]) for record in steps), default=0)
    width = max(1, round(SMOOTHED * len(steps)))
    for level in range(depth):
        points = [
            (record["step"], record["cross_entropy"][level])
            for record in steps
            if len(record["cross_entropy"]) > level and record["cross_entropy"][level] is not None
        ]
        loss.plot(*averaged(points, width), label=f"drafting step {level + 1}", **style(level))
    for level in range(len(held[0]["held_out"]["top1"]) if held else 0):
        values = [record["held_out"]["top1"][level] for record in held]
        accuracy.plot([record["step"] for record in held], values, label=f"depth {level + 1}", **style(level))
    chain.plot(
        [record["step"] for record in held], [record["held_out"]["chain_tau"] for record in held], "k.-"
    )
    for axes in (loss, accuracy):
        if axes.lines:
            axes.legend(fontsize="small")
    with atomic_path(folder / CURVES) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return folder / CURVES


def averaged(points: Sequence[tuple[float, float]], width: int) -> tuple[list[float], list[float]]:
    """Return the points' coordinates, with every `width` neighbours averaged."""
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    means = [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in groups]
    return [step for step, _ in means], [value for _, value in means]


def style(level: int) -> dict[str, Any]:
    """Return a line style of its own for every level, to be told apart without colour too."""
    return {"linestyle": ["-", "--", "-.", ":", (0, (5, 1, 1, 1))][level % 5], "color": f"C{level}"}
