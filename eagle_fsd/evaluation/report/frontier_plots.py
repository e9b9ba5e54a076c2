"""Quality against speed as a picture: a panel for each task and temperature, a line for each family of rules.

Up is better and right is faster. Families differ in marker and line as well as in colour, so that the picture
reads in black and white. matplotlib is an extra: it is imported when a plot is asked for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.evaluation.analysis.bootstrap import Estimate
from eagle_fsd.evaluation.analysis.frontier import Quality, speed_title, speedup, undominated
from eagle_fsd.evaluation.analysis.points import Panel, Point
from eagle_fsd.evaluation.report.plots import FAINT, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# Okabe and Ito's colours, which the colour-blind can tell apart, without their yellow, which paper swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
MARKERS = "os^Dv<>Ph*Xd8"
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
PANEL = (4.8, 3.9)  # inches
COLUMNS = 3
LABEL_SIZE, GAP, MARKER_SIZE = 7, 3.5, 5  # points
# Where a label may stand beside its marker, right and up; the first that is free.
SIDES = ((1, 1), (-1, -1), (1, -1), (-1, 1), (1, 0), (-1, 0), (0, 1), (0, -1))
FILLED = "filled: no other is both faster and better"
Style = Mapping[str, Any]


@dataclass(frozen=True)
class Placed:
    """A point with both its coordinates; the loss is in percent where it is relative."""

    point: Point
    fast: Estimate
    loss: Estimate

    @property
    def xy(self) -> tuple[float, float]:
        return self.fast.value, self.loss.value


def placed(panel: Panel, quality: Quality, speed: str) -> list[Placed]:
    """Return the panel's points that have a place."""
    found = []
    for point in panel.points:
        loss, fast = quality.loss(point), speedup(point, speed)
        if loss is not None and fast is not None:
            found.append(Placed(point, fast, loss.scaled(100) if quality.relative else loss))
    return found


def plot_frontier(panels: Sequence[Panel], quality: Quality, speed: str, path: Path) -> bool:
    """Draw the panels that know quality and speed; returns False where none does."""
    from matplotlib.figure import Figure

    drawn = [(panel, placed(panel, quality, speed)) for panel in panels]
    drawn = [(panel, points) for panel, points in drawn if any(not one.point.is_lossless for one in points)]
    if not drawn:
        return False
    samplings = len({panel.task.sampling for panel, _ in drawn})
    columns = min(COLUMNS, len(drawn), max(samplings, 1 + (len(drawn) > 1)))
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(columns * PANEL[0], lines * PANEL[1] + 0.9), layout="constrained")
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    rules = {one.family for panel, _ in drawn for one in panel.points if not one.is_lossless}
    styles = {family: style(number) for number, family in enumerate(sorted(rules))}
    for axes, (panel, points) in zip(places, drawn, strict=False):
        best = undominated([one.point for one in points], quality, speed)
        draw_panel(axes, panel, points, best, styles)
    for axes in places[len(drawn) :]:
        axes.set_axis_off()
    for axes in places[::columns]:
        axes.set_ylabel(loss_title(quality), fontsize=10)
    for axes in places[: len(drawn)][-columns:]:
        axes.set_xlabel(speed_title(speed), fontsize=10)
    handles: dict[str, Any] = {}
    for axes in places:
        shown, titles = axes.get_legend_handles_labels()
        handles |= dict(zip(titles, shown, strict=True))
    names = [*sorted(handles.keys() & styles.keys()), *sorted(handles.keys() - styles.keys())]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(2 * columns, len(names)),
        frameon=False,
        fontsize=8,
        handlelength=3.5,
    )
    figure.draw_without_rendering()  # where things are is known only now
    figure.set_layout_engine("none")
    for axes, (_, points) in zip(places, drawn, strict=False):
        label_knobs(axes, [one for one in points if not one.point.is_lossless], styles)
    save(figure, path)
    return True


def style(number: int) -> Style:
    """Return colour, marker and line of a family: no two of the first 65 share marker and line."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


def loss_title(quality: Quality) -> str:
    """Return what the axis says: of a distance lossless has none, so that the loss is the distance."""
    if quality.is_distance:
        return f"{quality.title} (up is better)"
    return f"{quality.title}, {'% ' if quality.relative else ''}lost (up is better)"


def draw_panel(
    axes: Axes, panel: Panel, points: Sequence[Placed], best: Sequence[Point], styles: Mapping[str, Style]
) -> None:
    """Draw a line for each family with its intervals, and fill the markers of the best points."""
    # A set of several files has a long name; breaks may only come between its parts.
    title = "\n".join(textwrap.wrap(panel.task.title.replace("+", " + "), 48, break_long_words=False))
    axes.set_title(title.replace(" + ", "+").replace(" +", "+"), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.axhline(0, color=FAINT, linestyle="--", linewidth=0.9, zorder=0, label="lossless")
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=0.9, zorder=0)
    for family, look in styles.items():
        members = [one for one in points if one.point.family == family]
        if members:
            axes.errorbar(
                *zip(*(one.xy for one in members), strict=True),
                xerr=arms([one.fast for one in members]),
                yerr=arms([one.loss for one in members]),
                markersize=MARKER_SIZE,
                linewidth=1.1,
                elinewidth=0.6,
                ecolor=(look["color"], 0.4),
                markerfacecolor="white",
                label=family,
                **look,
            )
    for one in points:
        if one.point in best and not one.point.is_lossless:
            look = {**styles[one.point.family], "linestyle": ""}
            axes.plot(*one.xy, markersize=MARKER_SIZE, zorder=4, **look)
    axes.plot([], [], color=FAINT, marker="o", markersize=MARKER_SIZE, linestyle="", label=FILLED)
    axes.invert_yaxis()
    axes.margins(x=0.06, y=0.06)


def arms(found: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the error bars, below and above; none where there is no interval."""
    below = [0.0 if one.low is None else max(0.0, one.value - one.low) for one in found]
    above = [0.0 if one.high is None else max(0.0, one.high - one.value) for one in found]
    return [below, above]


def label_knobs(axes: Axes, points: Sequence[Placed], styles: Mapping[str, Style]) -> None:
    """Write each point's knobs beside it where there is room: ends of lines first, which may cross a line."""
    scale = axes.figure.dpi / 72  # pixels to a point
    at = [axes.transData.transform(one.xy) for one in points]
    taken = [square(*place, MARKER_SIZE / 2 * scale) for place in at]
    lines = [
        square(*(first + share / 40 * (second - first)), scale)
        for family in styles
        for first, second in pairwise(
            place for one, place in zip(points, at, strict=True) if one.point.family == family
        )
        for share in range(41)
    ]
    everyone = [one.point for one in points]
    for one in sorted(points, key=lambda one: not is_end(one.point, everyone)):
        end, colour = is_end(one.point, everyone), styles[one.point.family]["color"]
        text = axes.annotate(
            varying_knobs(one.point, everyone),
            one.xy,
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=LABEL_SIZE,
            color=colour,
        )
        free = {}
        for right, up in SIDES:
            beside(text, right, up)
            box = text.get_window_extent()
            if inside(box, axes.bbox) and not any(map(box.overlaps, taken)):
                free[right, up] = box
        clear = [side for side, box in free.items() if not any(map(box.overlaps, lines))]
        side = next(iter(clear or (free if end else ())), None)
        if side is None:
            text.remove()
            continue
        beside(text, *side)
        taken.append(free[side])


def beside(text: Annotation, right: int, up: int) -> None:
    """Move a label to one side of its marker; -1, 0 and 1 are left, centre and right, or down and up."""
    text.set_position((right * GAP, up * GAP))
    text.set(ha=("center", "left", "right")[right], va=("center", "bottom", "top")[up])


def square(x: float, y: float, half: float) -> Bbox:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def varying_knobs(point: Point, points: Sequence[Point]) -> str:
    """Write the knobs that differ along the point's line; all of them where it stands alone."""
    members = [one.knobs for one in points if one.family == point.family]
    changing = [len(set(values)) > 1 for values in zip(*members, strict=False)]
    shown = [knob for knob, changes in zip(point.knobs, changing, strict=False) if changes]
    return "/".join(f"{knob:g}" for knob in shown or point.knobs)


def is_end(point: Point, points: Sequence[Point]) -> bool:
    """Return whether it is the first or last of its family's line."""
    members = [one for one in points if one.family == point.family]
    return point in (members[0], members[-1])


def inside(box: Bbox, frame: Bbox) -> bool:
    return box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
