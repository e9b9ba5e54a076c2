"""Plots of what was measured. matplotlib is an extra: it is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_fsd.files.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle_fsd.evaluation.report.speed_ratios import Result

INK, FAINT = "#0550ae", "#6e7781"


def require_matplotlib() -> None:
    """Raise ValueError naming the extra, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install eagle-fsd[eval]"
        ) from error


def plot_speed(found: Sequence[Result], path: Path) -> None:
    """Draw tokens per second by method, a panel for each context and batch size, to a PNG."""
    from matplotlib.figure import Figure

    from eagle_fsd.evaluation.measure.speed import PEERS

    groups: dict[str, list[Result]] = {}
    for one in found:
        where = "" if one.context is None else f", context {one.context}"
        groups.setdefault(f"batch {one.batch_size}{where}", []).append(one)
    most = max(map(len, groups.values()))
    figure = Figure(figsize=(7, len(groups) * (0.8 + 0.36 * most)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for panel, (title, members) in zip(panels, groups.items(), strict=True):
        mine = members[::-1]
        bars = panel.barh(
            [one.method for one in mine],
            [one.tokens_per_second for one in mine],
            color=[FAINT if one.method in PEERS else INK for one in mine],
            height=0.6,
        )
        panel.bar_label(bars, labels=[label(one) for one in mine], padding=3, fontsize=9)
        panel.margins(x=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlabel("delivered tokens per second")
    save(figure, path)


def label(one: Result) -> str:
    first = None if one.method == "hf" else next(iter(one.ratios.items()), None)
    return f"{one.tokens_per_second:.1f}" + (f"  ({first[1][0]:.2f} x {first[0]})" if first else "")


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG: the same bytes for the same figure."""
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
