"""Plots of what was measured. matplotlib is an extra: it is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_fsd.files.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle_fsd.evaluation.measure.head_quality import HeadReport
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


def calibration_figure(report: HeadReport, head: str, target: str, setting: str = "") -> Figure:
    """Draw the share of drafted tokens that the target accepts against the draft's confidence in them.

    Above, each bin at its mean confidence, and the diagonal of a head that is exactly as confident as right;
    below, how many drafted tokens each bin holds, on a logarithmic axis, since most drafts are unlikely ones.
    setting: prompts, tree, whatever the points hold for. To be read without colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    from eagle_fsd.evaluation.measure.head_quality import BINS

    figure = Figure(figsize=(6.2, 6.6), layout="constrained")
    shares, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence, taken, nodes = zip(*report.bins, strict=True)
    shares.plot((0, 1), (0, 1), color=FAINT, linestyle="--", linewidth=1.2, label="perfectly calibrated")
    error = f"this head, expected calibration error {report.error:.3f}"
    shares.plot(confidence, taken, color=INK, marker="o", clip_on=False, label=error)
    ticks = [place / 10 for place in range(0, 11, 2)]
    shares.set(xlim=(0, 1), ylim=(0, 1), xticks=ticks, yticks=ticks)
    shares.set_ylabel("share that the target accepts")
    shares.grid(color=FAINT, alpha=0.25, linewidth=0.6)
    shares.legend(loc="upper left", fontsize=9)
    shares.text(0.97, 0.04, "overconfident", ha="right", style="italic", color=FAINT)
    shares.text(0.03, 0.8, "underconfident", ha="left", style="italic", color=FAINT)
    figure.suptitle("Are the draft's tokens accepted as often as it expects?", fontsize=11)
    lines = [f"head {head}, target {target}", setting]
    shares.set_title("\n".join(filter(None, lines)), fontsize=8, loc="left")
    places = [(min(int(mean * BINS), BINS - 1) + 0.5) / BINS for mean in confidence]
    bars = counts.bar(places, nodes, width=0.9 / BINS, color=INK)
    counts.bar_label(bars, labels=[f"{count:,}" for count in nodes], fontsize=7, padding=1)
    counts.set(yscale="log", ylim=(0.5, 8 * max(nodes)))
    counts.yaxis.set_minor_locator(NullLocator())
    counts.set(xlabel="the draft's confidence, q(token | path)", ylabel="drafted tokens")
    for panel in (shares, counts):
        panel.spines[["top", "right"]].set_visible(False)
    return figure


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
