"""What a rule gets for what it gives up: tokens gained for a token's worth of the target's distribution.

In S steps a rule emits N tokens, and its own distribution lies V tokens from the target's (the sum of its
TV); as many steps of lossless decoding emit S tau_0. So (N - S tau_0) / V tokens are gained for a TV of 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_fsd.evaluation.analysis.bootstrap import Array, Bootstrap, Estimate, Sums, interval, resampled
from eagle_fsd.evaluation.analysis.measures import MEASURES, TAU, paired, sums_of
from eagle_fsd.evaluation.analysis.points import Panel, Point
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.report.tables import with_interval

LEAST = 0.003  # TV per token: what is gained for less is noise over nothing


class Exchange:
    """The rules of one panel against its lossless rows, on the samples and seeds that all of them have."""

    def __init__(self, panel: Panel, how: Bootstrap) -> None:
        if panel.lossless is None:
            raise ValueError(
                f"{panel.task.title} has no lossless rows: what is gained is counted from them; "
                "add them with --rules lossless"
            )
        self.lossless, self.how = panel.lossless, how
        drafting = [point for point in panel.points if not point.is_lossless]
        whole = len(self.lossless.rows)
        self.points = {p.label: p for p in drafting if p.pairs == whole and tv_of(p) >= LEAST}
        self.left_out = [p.label for p in drafting if p.label not in self.points]

    def of(self, label: str) -> Estimate:
        """Return the tokens gained for a TV of 1, with their interval."""
        value, drawn, samples = self._drawn(label)
        return interval(value, drawn, samples, self.how)

    def against(self, label: str, other: str) -> Estimate:
        """Return what one rule gains more than another, in pairs."""
        (value, drawn, samples), (base, of_base, _) = self._drawn(label), self._drawn(other)
        return interval(value - base, drawn - of_base, samples, self.how)

    def _drawn(self, label: str) -> tuple[float, Array, int]:
        """Return the value, that of every resample [R], and the number of samples.

        The same samples are drawn for every rule.
        """
        pairs = paired(self.points[label].rows, self.lossless.rows)
        tau, tau_lossless = sums_of(MEASURES[TAU], pairs)
        tv = sums_of(MEASURES["law_tv"], pairs)[0]
        tv_per_step = Sums(tv.numerator, tau.denominator)
        values, drawn = resampled([tau, tau_lossless, tv_per_step], self.how)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = (drawn[:, 0] - drawn[:, 1]) / drawn[:, 2]
            return (values[0] - values[1]) / values[2], drawn, tau.samples


def tv_of(point: Point) -> float:
    """Return the TV per token of a rule's own distribution; 0 where it is not known."""
    found = point.values.get("law_tv")
    return 0.0 if found is None else found.value


def exchange_table(panel: Panel, how: Bootstrap, against: Sequence[str] = ()) -> str:
    """Write a line per rule by its TV, with a column of differences for each rule of `against`.

    Says which rules are left out, having too few samples or next to no TV. Raises ValueError for an `against`
    that is among them.
    """
    exchange = Exchange(panel, how)
    for label in against:
        if label not in exchange.points:
            raise ValueError(
                f"against is {label!r}: it must be a rule on all samples of lossless, with a TV of at least "
                f"{LEAST:g}, in {panel.task.title}; one of {', '.join(exchange.points) or 'none'}"
            )
    titles = ["rule", "TV", "tau, times lossless", "gained for a TV of 1"]
    titles += [f"more than {label}" for label in against]
    lines = []
    for label, point in sorted(exchange.points.items(), key=lambda item: tv_of(item[1])):
        ratio = point.changes[TAU].ratio
        others = ("" if label == a else with_interval(exchange.against(label, a), ".2f") for a in against)
        times = "" if ratio is None else f"{ratio.value:.2f}"
        gained = with_interval(exchange.of(label), ".2f")
        lines.append((label, f"{tv_of(point):.3f}", times, gained, *others))
    models = panel.models
    title = [f"## {panel.task.title}", "", f"{models.base_model}, tree {models.tree}; {panel.task.details}."]
    if exchange.left_out:
        why = f"fewer samples than lossless, or a TV below {LEAST:g}"
        title.append(f"Left out ({why}): {', '.join(exchange.left_out)}.")
    return "\n".join([*title, "", markdown_table(titles, lines)])
