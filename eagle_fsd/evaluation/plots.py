"""Quality against speed as a picture: a panel for each task and temperature, a line for each family of rules.

Up is better and right is faster. Families differ in marker and line as well as in colour, so that the picture
reads in black and white. matplotlib is an extra: it is imported when a plot is asked for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.evaluation.analysis.bootstrap import Estimate
from eagle_fsd.evaluation.analysis.frontier import Placed, Quality, placed, speed_title, undominated
from eagle_fsd.evaluation.analysis.points import Panel, Point, titles_apart
from eagle_fsd.files.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#0550ae", "#6e7781"
# Okabe and Ito's colours, which the colour-blind can tell apart, without their yellow, which paper swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
MARKERS = "os^Dv<>Ph*Xd8"
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
COLUMNS = 3
LEGEND = 5.6  # inches: of two columns of names
FILLED = "filled: no other is both faster and better"


def require_matplotlib() -> None:
    """Raise ValueError naming the extra, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib, which is not installed: pip install eagle-fsd[eval]")


def plot_frontier(panels: Sequence[Panel], quality: Quality, speed: str, path: Path) -> bool:
    """Draw the panels that know quality and speed; returns False where none does."""
    from matplotlib.figure import Figure

    percent = 100 if quality.relative else 1
    lost = "" if quality.is_distance else ", % lost" if quality.relative else ", lost"
    known = ((panel, placed(panel.points, quality, speed)) for panel in panels)
    drawn = [
        (panel, [(one, fast, loss.scaled(percent)) for one, fast, loss in points])
        for panel, points in known
        if not all(point.is_lossless for point, *_ in points)
    ]
    if not drawn:
        return False
    columns = min(COLUMNS, len(drawn))
    lines = -(-len(drawn) // columns)
    size = max(columns * 4.8, LEGEND), lines * 3.9 + 0.9
    figure = Figure(figsize=size, layout="constrained")
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    families = sorted({one.family for panel, _ in drawn for one in panel.points if not one.is_lossless})
    handles: dict[str, Any] = {}
    titled = titles_apart([panel for panel, _ in drawn])
    for axes, title, (_, points) in zip(places, titled, drawn, strict=False):
        best = undominated([point for point, _, _ in points], quality, speed)
        draw_panel(axes, title, points, best, families)
        axes.set(ylabel=f"{quality.title}{lost} (up is better)", xlabel=speed_title(speed))
        shown, titles = axes.get_legend_handles_labels()
        handles |= dict(zip(titles, shown, strict=True))
    for axes in places[len(drawn) :]:
        axes.set_axis_off()
    names = sorted(handles, key=lambda name: (name not in families, name))
    look = {"ncols": min(2 * columns, len(names)), "frameon": False, "fontsize": 8, "handlelength": 3.5}
    figure.legend([handles[name] for name in names], names, loc="outside lower center", **look)
    save(figure, path)
    return True


def style(number: int) -> Mapping[str, Any]:
    """Return colour, marker and line of a family: no two of the first 65 share marker and line."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


def draw_panel(
    axes: Axes, title: str, points: Sequence[Placed], best: Sequence[Point], families: Sequence[str]
) -> None:
    """Draw a line for each family with its intervals, fill the best markers, name the last rule of each."""
    # A set of several files has a long name; breaks may only come between its parts.
    title = "\n".join(textwrap.wrap(title.replace("+", " + "), 48, break_long_words=False))
    axes.set_title(title.replace(" + ", "+").replace(" +", "+"), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.axhline(0, color=FAINT, linestyle="--", linewidth=0.9, zorder=0, label="lossless")
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=0.9, zorder=0)
    for number, family in enumerate(families):
        look, members = style(number), [one for one in points if one[0].family == family]
        if not members:
            continue
        rules, fast, loss = zip(*members, strict=True)
        lines = {"linewidth": 1.1, "elinewidth": 0.6, "ecolor": (look["color"], 0.4), "xerr": arms(fast)}
        lines |= {"markersize": 5, "markerfacecolor": "white", "label": family, "yerr": arms(loss), **look}
        axes.errorbar([one.value for one in fast], [one.value for one in loss], **lines)
        for point, x, y in members:
            if point in best:
                axes.plot(x.value, y.value, markersize=5, zorder=4, **{**look, "linestyle": ""})
        last, x, y = members[-1]
        place = {"xy": (x.value, y.value), "xytext": (4, 3), "textcoords": "offset points"}
        axes.annotate(varying_knobs(last, rules), **place, fontsize=7, color=look["color"])
    axes.plot([], [], color=FAINT, marker="o", markersize=5, linestyle="", label=FILLED)
    axes.invert_yaxis()
    axes.margins(x=0.06, y=0.06)


def arms(found: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the error bars, below and above; none where there is no interval."""
    below = [0.0 if one.low is None else max(0.0, one.value - one.low) for one in found]
    above = [0.0 if one.high is None else max(0.0, one.high - one.value) for one in found]
    return [below, above]


def varying_knobs(point: Point, members: Sequence[Point]) -> str:
    """Write the knobs that differ along the point's line; all of them where it stands alone."""
    knobs = zip(point.knobs, *(one.knobs for one in members), strict=False)
    shown = [mine for mine, *all_of_them in knobs if len(set(all_of_them)) > 1]
    return "/".join(f"{knob:g}" for knob in shown or point.knobs)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG: the same bytes for the same figure."""
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
