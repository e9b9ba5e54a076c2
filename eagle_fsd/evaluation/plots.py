"""Plots of what was measured. matplotlib is an extra: it is imported when a plot is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_fsd.evaluation.head import HeadReport

INK, FAINT = "#0550ae", "#6e7781"


def require_matplotlib() -> None:
    """ValueError that names the extra, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install eagle-fsd[eval]"
        ) from error


def plot_calibration(report: HeadReport, path: Path) -> None:
    """The share of drafted tokens that the target takes against the draft's confidence in them, to a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.2), layout="constrained")
    shares, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence, taken, nodes = zip(*report.bins, strict=True)
    shares.plot((0, 1), (0, 1), color=FAINT, linestyle="--", linewidth=1, label="as confident as right")
    shares.plot(confidence, taken, color=INK, marker="o", label="this head")
    shares.set(xlim=(0, 1), ylim=(0, 1), ylabel="share that the target takes")
    shares.set_title(f"Calibration of drafted tokens (error {report.error:.3f})", fontsize=11)
    shares.legend(loc="upper left", frameon=False)
    counts.bar(confidence, nodes, width=0.06, color=INK)
    counts.set(xlabel="the draft's confidence, q(token | path)", ylabel="nodes")
    counts.ticklabel_format(axis="y", style="sci", scilimits=(0, 4))
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=150)
    partial.replace(path)
