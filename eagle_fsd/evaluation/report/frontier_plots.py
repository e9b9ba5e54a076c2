"""Quality against speed as a picture: a panel for each task and temperature, a line for each family of rules.

Up is better and right is faster. Families differ in marker and line as well as in colour, so that the picture
reads in black and white. matplotlib is an extra: it is imported when a plot is asked for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.evaluation.analysis.bootstrap import Estimate
from eagle_fsd.evaluation.analysis.frontier import Quality, speed_title, speedup, undominated
from eagle_fsd.evaluation.analysis.points import Panel, Point
from eagle_fsd.evaluation.report.plots import FAINT, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

# Okabe and Ito's colours, which the colour-blind can tell apart, without their yellow, which paper swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
MARKERS = "os^Dv<>Ph*Xd8"
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
PANEL = (4.8, 3.9)  # inches
COLUMNS = 3
LABEL_SIZE, GAP, MARKER_SIZE = 7, 3.5, 5  # points
FAR = 0.25  # of the points' span: plain decoding further off is written, not drawn
# Where a label may stand beside its marker, in GAPs right and up; the first that is free.
SIDES = ((1, 1), (-1, -1), (1, -1), (-1, 1), (1.5, 0), (-1.5, 0), (0, 1.5), (0, -1.5))
FILLED = "filled: no other is both faster and better"


def plot_frontier(panels: Sequence[Panel], quality: Quality, speed: str, paths: Sequence[Path]) -> bool:
    """Draw the panels that know quality and speed, to a PNG or SVG for each path; False where none does."""
    from matplotlib.figure import Figure

    known = [
        panel for panel in panels if any(not point.is_reference for point in plotted(panel, quality, speed))
    ]
    if not known:
        return False
    columns = min(
        COLUMNS, len(known), max(len({panel.task.sampling for panel in known}), 1 + (len(known) > 1))
    )
    lines = -(-len(known) // columns)
    figure = Figure(figsize=(columns * PANEL[0], lines * PANEL[1] + 0.9), layout="constrained")
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    families = dict.fromkeys(
        point.family for panel in known for point in panel.points if not point.is_reference
    )
    styles = {family: style(number) for number, family in enumerate(sorted(families))}
    for axes, panel in zip(places, known, strict=False):
        draw_panel(axes, panel, quality, speed, styles)
    for axes in places[len(known) :]:
        axes.set_axis_off()
    for axes in places[::columns]:
        axes.set_ylabel(loss_title(quality), fontsize=10)
    for axes in places[: len(known)][-columns:]:
        axes.set_xlabel(speed_title(speed), fontsize=10)
    handles = {}
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
    for axes, panel in zip(places, known, strict=False):
        label_knobs(axes, panel, quality, speed, styles)
    for path in paths:
        save(figure, path)
    return True


def style(number: int) -> dict[str, Any]:
    """Colour, marker and line of a family: no two of the first 65 share marker and line."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


def loss_title(quality: Quality) -> str:
    """What the axis says: of the law's distances lossless has none, so that the loss is the distance."""
    if quality.measure.startswith("law"):
        return f"{quality.title} (up is better)"
    return f"{quality.title}, {'% ' if quality.relative else ''}lost (up is better)"


def plotted(panel: Panel, quality: Quality, speed: str) -> list[Point]:
    """The panel's points that have a place, both coordinates known. Plain decoding is a line, not a point."""
    return [
        point
        for point in panel.points
        if point.family != "plain" and quality.loss(point) is not None and speedup(point, speed) is not None
    ]


def place(point: Point, quality: Quality, speed: str) -> tuple[Estimate, Estimate]:
    """Speed and loss, the loss in percent where it is relative."""
    loss, fast = quality.loss(point), speedup(point, speed)
    assert loss is not None and fast is not None
    scale = 100 if quality.relative else 1
    ends = [None if end is None else scale * end for end in (loss.low, loss.high)]
    return fast, Estimate(scale * loss.value, *ends, loss.samples)


def draw_panel(axes: Axes, panel: Panel, quality: Quality, speed: str, styles: dict[str, Any]) -> None:
    points = plotted(panel, quality, speed)
    # A set of several files has a long name; breaks may only come between its parts.
    title = "\n".join(textwrap.wrap(panel.task.title.replace("+", " + "), 48, break_long_words=False))
    axes.set_title(title.replace(" + ", "+").replace(" +", "+"), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.axhline(0, color=FAINT, linestyle="--", linewidth=0.9, zorder=0, label="lossless")
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=0.9, zorder=0)
    for family, look in styles.items():
        members = [place(point, quality, speed) for point in points if point.family == family]
        if members:
            axes.errorbar(
                [fast.value for fast, _ in members],
                [loss.value for _, loss in members],
                xerr=arms([fast for fast, _ in members]),
                yerr=arms([loss for _, loss in members]),
                markersize=MARKER_SIZE,
                linewidth=1.1,
                elinewidth=0.6,
                ecolor=(*rgb(look["color"]), 0.4),
                markerfacecolor="white",
                label=family,
                **look,
            )
    best = [point for point in undominated(points, quality, speed) if not point.is_reference]
    for point in best:
        fast, loss = place(point, quality, speed)
        look = styles[point.family]
        axes.plot(
            fast.value,
            loss.value,
            color=look["color"],
            marker=look["marker"],
            markersize=MARKER_SIZE,
            zorder=4,
        )
    axes.plot([], [], color=FAINT, marker="o", markersize=MARKER_SIZE, linestyle="", label=FILLED)
    axes.invert_yaxis()
    axes.margins(x=0.06, y=0.06)
    draw_plain(axes, panel, speed)


def draw_plain(axes: Axes, panel: Panel, speed: str) -> None:
    """Plain decoding as a line across; far off, where it would press the points together, as a word."""
    fast = speedup(panel.plain, speed) if panel.plain else None
    if fast is None:
        return
    low, high = axes.get_xlim()
    if low - FAR * (high - low) <= fast.value <= high + FAR * (high - low):
        axes.axvline(fast.value, color=FAINT, linestyle=":", linewidth=1.4, zorder=0, label="plain decoding")
    else:
        axes.set_title(f"plain decoding {fast.value:.2f}", fontsize=8, loc="right", color=FAINT)


def rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))


def arms(found: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of the error bars, below and above; none where there is no interval."""
    below = [0.0 if one.low is None else max(0.0, one.value - one.low) for one in found]
    above = [0.0 if one.high is None else max(0.0, one.high - one.value) for one in found]
    return [below, above]


def label_knobs(axes: Axes, panel: Panel, quality: Quality, speed: str, styles: dict[str, Any]) -> None:
    """Write each point's knobs beside it where there is room: ends of lines first, which may cross a line."""
    from matplotlib.transforms import Bbox

    points = [point for point in plotted(panel, quality, speed) if not point.is_reference]
    scale = axes.figure.dpi / 72  # pixels to a point
    at = {}
    for point in points:
        fast, loss = place(point, quality, speed)
        at[point.label] = axes.transData.transform((fast.value, loss.value))
    taken = [square(x, y, MARKER_SIZE / 2 * scale) for x, y in at.values()]
    lines = [
        square(*(first + share * (second - first)), scale)
        for family in styles
        for first, second in pairwise([at[point.label] for point in points if point.family == family])
        for share in [step / 40 for step in range(41)]
    ]
    for point in sorted(points, key=lambda point: not is_end(point, points)):
        text = axes.annotate(
            varying_knobs(point, points),
            (0, 0),
            xycoords="figure pixels",
            ha="center",
            va="center",
            fontsize=LABEL_SIZE,
            color=styles[point.family]["color"],
        )
        size = text.get_window_extent()
        width, height = size.width / 2, 0.8 * size.height / 2  # digits have no tails
        boxes = []
        for right, up in SIDES:
            x, y = at[point.label]
            x += right * GAP * scale + (width if right > 0 else -width if right < 0 else 0)
            y += up * GAP * scale + (height if up > 0 else -height if up < 0 else 0)
            boxes.append(Bbox.from_extents(x - width, y - height, x + width, y + height))
        free = [box for box in boxes if inside(box, axes.bbox) and not any(map(box.overlaps, taken))]
        clear = [box for box in free if not any(map(box.overlaps, lines))]
        if not clear and not (free and is_end(point, points)):
            text.remove()
            continue
        box = (clear or free)[0]
        taken.append(box)
        text.remove()
        axes.annotate(
            text.get_text(),
            axes.transData.inverted().transform(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)),
            ha="center",
            va="center",
            fontsize=LABEL_SIZE,
            color=styles[point.family]["color"],
        )


def square(x: float, y: float, half: float) -> Bbox:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def varying_knobs(point: Point, points: Sequence[Point]) -> str:
    """The knobs that differ along the point's line; all of them where it stands alone."""
    members = [one.knobs for one in points if one.family == point.family]
    changing = [len(set(values)) > 1 for values in zip(*members, strict=False)]
    shown = [knob for knob, changes in zip(point.knobs, changing, strict=False) if changes]
    return "/".join(f"{knob:g}" for knob in shown or point.knobs)


def is_end(point: Point, points: Sequence[Point]) -> bool:
    """Whether it is the first or last of its family's line."""
    members = [one for one in points if one.family == point.family]
    return point in (members[0], members[-1])


def inside(box: Bbox, frame: Bbox) -> bool:
    return box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
