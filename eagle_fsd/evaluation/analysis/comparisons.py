"""Rules held against each other, not against lossless alone: the others' envelope, and what predicts a score.

Every number is taken inside each resample of the samples, with all rules on the same ones, so that luck which
they share cancels out. Shapes: R resamples and the data themselves in row 0; k rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_fsd.evaluation.analysis.bootstrap import Array, Bootstrap, Estimate, interval, resampled
from eagle_fsd.evaluation.analysis.points import (
    MEASURES,
    SCORE,
    TAU,
    Measure,
    Panel,
    Point,
    score,
    sums_of,
)

PREDICTORS = ("law_tv", "law_kl", "log_p", "length")
FEWEST = 4  # rules, below which a correlation over rules says nothing


def drawn_by_rule(points: Sequence[Point], measure: Measure, how: Bootstrap) -> Array | None:
    """Return a measure of all rules in the data and in every resample: [1 + R, k]; None if one has none.

    The points have the same samples and seeds.
    """
    rows = [{(row.sample, row.seed): row for row in point.rows} for point in points]
    keys = sorted(rows[-1])
    sums = sums_of(measure, [tuple(mine[key] for mine in rows) for key in keys])
    return resampled(sums, how) if all(one.known for one in sums) else None


def above_others(
    mine: Sequence[Point], others: Sequence[Point], lossless: Point, how: Bootstrap
) -> dict[str, Estimate]:
    """Return, by label, how far tau / lossless lies above the other rules' envelope at the rule's own TV.

    The envelope at a TV is the most that one of the others reaches with no more, or a mixture of two of them
    with as much; lossless is one of them. It is the largest of many noisy values, which raises it.
    """
    points = [*mine, *others, lossless]
    tau, tv = (drawn_by_rule(points, MEASURES[name], how) for name in (TAU, "law_tv"))
    if tau is None or tv is None:
        return {}
    ratio, count = tau / tau[:, -1:], len(mine)
    samples, found = len({row.sample for row in lossless.rows}), {}
    for place, point in enumerate(mine):
        height = envelope(tv[:, count:], ratio[:, count:], tv[:, place])
        found[point.label] = interval(ratio[:, place] - height, samples, how)
    return found


def envelope(tv: Array, ratio: Array, at: Array) -> Array:
    """Return the least concave function above all points (tv, ratio), each [R, k], at the TVs `at` [R].

    It does not fall behind its highest point.
    """
    best = np.where(tv <= at[:, None], ratio, -np.inf).max(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        for left in range(tv.shape[1]):
            start, base = tv[:, left, None], ratio[:, left, None]
            chord = base + (at[:, None] - start) / (tv - start) * (ratio - base)
            between = (start <= at[:, None]) & (tv > at[:, None])
            best = np.maximum(best, np.where(between, chord, -np.inf).max(1))
    return best


def score_predictors(panel: Panel, how: Bootstrap) -> dict[tuple[str, str], Estimate]:
    """Return the correlation over rules of what becomes of a score with each of PREDICTORS, by both names.

    Scores and measures are differences from lossless's. Empty where rules are few or have other samples.
    """
    lossless = panel.lossless
    points = [one for one in panel.points if lossless and one.pairs == lossless.samples == one.samples]
    if lossless is None or len(points) < FEWEST:
        return {}
    measures = {name: MEASURES[name] for name in PREDICTORS} | {name: score(name) for name in panel.scores}
    changed: dict[str, Array] = {}
    for name, measure in measures.items():
        drawn = drawn_by_rule([*points, lossless], measure, how)
        if drawn is not None:
            changed[name] = drawn[:, :-1] - drawn[:, -1:]
    samples, found = len({row.sample for row in lossless.rows}), {}
    for name in panel.scores:
        for other in PREDICTORS:
            if name in changed and other in changed:
                r = correlation(changed[name], changed[other])
                found[SCORE + name, other] = interval(r, samples, how)
    return found


def correlation(a: Array, b: Array) -> Array:
    """Return Pearson's correlation of the rows of a and b, [R, k]: [R]; NaN where values are all equal."""
    a, b = (side - side.mean(1, keepdims=True) for side in (a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
