"""Rules held against each other, not against lossless alone: the others' envelope, and what predicts a score.

Every number is taken inside each resample of the samples, with all rules on the same ones, so that luck which
they share cancels out. Shapes: R resamples and the data themselves in row 0; k rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_fsd.evaluation.analysis.bootstrap import Array, Bootstrap, Estimate, interval, resampled
from eagle_fsd.evaluation.analysis.points import MEASURES, Measure, Panel, Point, paired, score, sums_of

PREDICTORS = ("law_tv", "law_kl", "log_p", "length")
FEWEST = 4  # rules, below which a correlation over rules says nothing


def drawn_by_rule(points: Sequence[Point], measure: Measure, how: Bootstrap) -> Array:
    """Return a measure of all rules on the samples and seeds of all: [1 + R, k]; NaN if one has none."""
    return resampled(sums_of(measure, paired(*(point.rows for point in points))), how)


def above_others(ratio: Array, tv: Array, mine: Sequence[int]) -> dict[int, Array]:
    """Return, by place, how far these rules lie above the envelope of all others at their own TV: [1 + R].

    The envelope at a TV is the most that one of the others reaches with no more, or a mixture of two of them
    with as much. It is the largest of many noisy values, which raises it.

    ratio, tv: tau over lossless's, and TV, of all rules; lossless is one of them.
    """
    others = [place for place in range(ratio.shape[1]) if place not in mine]
    return {
        place: ratio[:, place] - envelope(tv[:, others], ratio[:, others], tv[:, place]) for place in mine
    }


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


def score_predictors(panel: Panel, how: Bootstrap) -> dict[str, dict[str, Estimate]]:
    """Return the correlation over rules of what becomes of each score with each of PREDICTORS.

    Scores and measures are differences from lossless's. Empty where rules are few or have other samples.
    """
    lossless = panel.lossless
    points = [one for one in panel.points if lossless and one.pairs == lossless.samples == one.samples]
    if lossless is None or len(points) < FEWEST:
        return {}
    measures = {name: MEASURES[name] for name in PREDICTORS} | {name: score(name) for name in panel.scores}
    drawn = {name: drawn_by_rule([*points, lossless], measure, how) for name, measure in measures.items()}
    changed = {name: one[:, :-1] - one[:, -1:] for name, one in drawn.items() if not np.isnan(one[0]).any()}
    samples, known = len({row.sample for row in lossless.rows}), changed.keys() & PREDICTORS
    return {
        name: {
            other: interval(correlation(changed[name], changed[other]), samples, how)
            for other in PREDICTORS
            if other in known
        }
        for name in panel.scores
        if name in changed and known
    }


def correlation(a: Array, b: Array) -> Array:
    """Return Pearson's correlation of the rows of a and b, [R, k]: [R]; NaN where values are all equal."""
    a, b = (side - side.mean(1, keepdims=True) for side in (a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
