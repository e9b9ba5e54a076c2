"""What acceptance rules get for what they give up, from raw rows: tokens gained for a TV of 1, by rule.

    python eval/exchange.py --rows runs/sweep.jsonl --against "js 0.6 hybrid"

In S steps a rule emits N tokens, and its own distribution lies V tokens from the target's (the sum of its
TV); as many steps of lossless decoding emit S tau_0. So (N - S tau_0) / V tokens are gained for a TV of 1.
A table for every task and sampling. --above shows whether rules lie above what all others reach at the same
TV, mixed with each other or with lossless decoding. Brackets are intervals of a bootstrap over samples. Rows
of `eval/sweep.py --same-trees` tell rules apart that lie close together. No model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eagle_fsd.evaluation.analysis.bootstrap import Array, Bootstrap, interval
from eagle_fsd.evaluation.analysis.frontier import QUALITIES
from eagle_fsd.evaluation.analysis.points import MEASURES, TAU, Panel, Point, drawn_by_rule, panels
from eagle_fsd.evaluation.cli import parsed, rows_parser, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.plots import plot_frontier, require_matplotlib
from eagle_fsd.evaluation.rows import read_raw_rows
from eagle_fsd.files.places import require_file

LEAST = 0.003  # TV per token: what is gained for less is noise over nothing


def main(argv: Sequence[str] | None = None) -> None:
    parser = rows_parser(__doc__)
    labels = "labels of the first column to compare with"
    parser.add_argument("--against", nargs="+", default=[], metavar="RULE", help=labels)
    families = "also hold the rules whose label begins so against the envelope of all others"
    parser.add_argument("--above", metavar="LABEL", help=families)
    picture = "draw TV against tau, times lossless, a line for each family of rules"
    parser.add_argument("--plot", type=Path, metavar="PNG", help=picture)
    with parsed(parser, argv) as arguments:
        if arguments.plot:
            require_matplotlib()
            require_file("--plot", arguments.plot)
        how = Bootstrap(arguments.resamples, seed=arguments.seed)
        rows = [row for rows in read_raw_rows(arguments.rows, expected=True).values() for row in rows]
        found = panels(rows, how)
        tables = [exchange_table(panel, how, arguments.against, arguments.above) for panel in found]
        if arguments.plot:
            arguments.plot.parent.mkdir(parents=True, exist_ok=True)
            plot_frontier(found, QUALITIES["law_tv"], TAU, arguments.plot)
    say("\n\n".join(tables))


def exchange_table(
    panel: Panel, how: Bootstrap, against: Sequence[str] = (), above: str | None = None
) -> str:
    """Write a line per rule by its TV, with a column of differences, in pairs, for each rule of `against`.

    above: how the labels of rules begin that are held against the envelope of the others, in a last column.
    Rules with fewer samples and seeds than lossless, or with next to no TV, are left out, and refused in
    `against`.
    """
    lossless = panel.lossless
    if lossless is None:
        raise ValueError(
            f"{panel.title} has no lossless rows: what is gained is counted from them; "
            "add them with --rules lossless"
        )
    drafting = [point for point in panel.points if not point.is_lossless]
    points = [p for p in drafting if p.pairs == lossless.samples and tv_of(p) >= LEAST]
    places = {point.label: place for place, point in enumerate(points)}
    for label in against:
        if label not in places:
            raise ValueError(
                f"against is {label!r}: it must be a rule on all samples of lossless, with a TV of at least "
                f"{LEAST:g}, in {panel.title}; one of {', '.join(places) or 'none'}"
            )
    named = [place for label, place in places.items() if above is not None and label.startswith(above)]
    if above is not None and not 0 < len(named) < len(points):
        raise ValueError(
            f"above is {above!r}: the labels of some rules, and not of all, must begin so, in "
            f"{panel.title}; they are {', '.join(places) or 'none'}"
        )
    tau, tv = (drawn_by_rule([*points, lossless], MEASURES[name], how) for name in (TAU, "law_tv"))
    with np.errstate(divide="ignore", invalid="ignore"):
        gained = (tau - tau[:, -1:]) / (tau * tv)  # [1 + R, k]: tau * tv is the TV of a step
    heights = above_others(tau / tau[:, -1:], tv, named)
    samples = len({row.sample for row in lossless.rows})
    titles = ["rule", "TV", "tau, times lossless", "gained for a TV of 1"]
    titles += [f"more than {label}" for label in against]
    titles += ["tau, times lossless, above the others' envelope"] if named else []
    lines = []
    for place, point in sorted(enumerate(points), key=lambda item: tv_of(item[1])):
        mine, ratio = gained[:, place], point.changes[TAU].ratio
        line = [point.label, f"{tv_of(point):.3f}", "" if ratio is None else f"{ratio.value:.2f}"]
        line.append(f"{interval(mine, samples, how):.2f}")
        for label in against:
            more = interval(mine - gained[:, places[label]], samples, how)
            line.append("" if label == point.label else f"{more:.2f}")
        if named:
            line.append(f"{interval(heights[place], samples, how):+.3f}" if place in heights else "")
        lines.append(line)
    row = panel.row
    title = [f"## {panel.title}", "", f"{row.base_model}, tree {row.tree}; {panel.details}."]
    left_out = [point.label for point in drafting if point not in points]
    if left_out:
        why = f"fewer samples than lossless, or a TV below {LEAST:g}"
        title.append(f"Left out ({why}): {', '.join(left_out)}.")
    return "\n".join([*title, "", markdown_table(titles, lines)])


def tv_of(point: Point) -> float:
    """Return the TV per token of a rule's own distribution; 0 where it is not known."""
    found = point.values.get("law_tv")
    return 0.0 if found is None else found.value


def above_others(ratio: Array, tv: Array, mine: Sequence[int]) -> dict[int, Array]:
    """Return, by place, how far these rules lie above the envelope of all others at their own TV: [1 + R].

    The envelope at a TV is the most that one of the others reaches with no more, or a mixture of two of them
    with as much. It is the largest of many noisy values, which raises it. ratio, tv: tau over lossless's, and
    TV, of all rules; lossless is one of them.
    """
    others = [place for place in range(ratio.shape[1]) if place not in mine]
    return {
        place: ratio[:, place] - envelope(tv[:, others], ratio[:, others], tv[:, place]) for place in mine
    }


def envelope(tv: Array, ratio: Array, at: Array) -> Array:
    """Return the least concave, never falling function above all points (tv, ratio), [R, k], at `at` [R]."""
    best = np.where(tv <= at[:, None], ratio, -np.inf).max(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        for left in range(tv.shape[1]):
            start, base = tv[:, left, None], ratio[:, left, None]
            chord = base + (at[:, None] - start) / (tv - start) * (ratio - base)
            between = (start <= at[:, None]) & (tv > at[:, None])
            best = np.maximum(best, np.where(between, chord, -np.inf).max(1))
    return best
