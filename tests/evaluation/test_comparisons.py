"""Rules against each other: the envelope against a plain search of mixtures, correlations against numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.synthetic_rows import LOSSLESS, Truth, cell_rows, fuzzy

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, interval
from eagle_fsd.evaluation.analysis.points import MEASURES, Panel, drawn_by_rule, panels
from eagle_fsd.evaluation.commands.exchange import above_others, envelope, exchange_table
from eagle_fsd.evaluation.commands.report import correlation, predictors_table, score_predictors
from eagle_fsd.evaluation.rows import Row

HOW = Bootstrap(resamples=400)


def panel_of(*cells: list[dict[str, Any]]) -> Panel:
    (panel,) = panels([Row.of(row) for rows in cells for row in rows], HOW)
    return panel


def test_the_envelope_is_the_best_mixture_of_two_rules() -> None:
    random = np.random.default_rng(3)
    tv, ratio = random.random((20, 6)), 1 + random.random((20, 6))
    tv[:, 0], ratio[:, 0] = 0.0, 1.0  # lossless
    at = random.random(20)
    found = envelope(tv, ratio, at)
    weights = np.linspace(0, 1, 2001)
    for place in range(20):
        best = 1.0
        for a in range(6):
            for b in range(6):
                costs = weights * tv[place, a] + (1 - weights) * tv[place, b]
                reached = weights * ratio[place, a] + (1 - weights) * ratio[place, b]
                best = max(best, reached[costs <= at[place]].max(initial=1.0))
        assert found[place] == pytest.approx(best, abs=2e-3)


def test_how_far_a_rule_lies_above_the_others() -> None:
    """One other rule: the envelope is the line from lossless to it, and then its height."""
    cells = [
        cell_rows(LOSSLESS, Truth(), 60),
        cell_rows(fuzzy(0.1), Truth(tau=2.4, tv=0.05), 60),
        cell_rows(fuzzy(0.9), Truth(tau=2.4, tv=0.3), 60),
        cell_rows(fuzzy(0.5, price=1.0, cost="tokens"), Truth(tau=2.6, tv=0.2), 60),
    ]
    panel = panel_of(*cells)
    lossless, other = panel.lossless, next(one for one in panel.points if one.label.startswith("planned"))
    cheap, dear = (point for point in panel.points if point.label.startswith("js"))
    assert lossless is not None
    points = [cheap, dear, other, lossless]
    tau, tv = (drawn_by_rule(points, MEASURES[name], HOW) for name in ("tau", "law_tv"))
    above = above_others(tau / tau[:, -1:], tv, [0, 1])
    found = {points[place].label: interval(one, 60, HOW) for place, one in above.items()}
    height = {one.label: one.changes["tau"].ratio.value for one in (cheap, dear, other)}  # type: ignore[union-attr]
    line = 1 + (height[other.label] - 1) * 0.05 / 0.2
    assert found[cheap.label].value == pytest.approx(height[cheap.label] - line, abs=1e-6)
    assert found[dear.label].value == pytest.approx(height[dear.label] - height[other.label], abs=1e-6)
    assert found[cheap.label].low > 0 > found[dear.label].high  # type: ignore[operator]
    table = exchange_table(panel, HOW, above="js").splitlines()
    assert table[4].endswith("| tau, times lossless, above the others' envelope |")
    shown = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in table[6:]}
    assert shown[cheap.label] == f"{found[cheap.label]:+.3f}" and shown[other.label] == ""
    for wrong in ("nothing", ""):
        with pytest.raises(ValueError, match=f"above is '{wrong}': the labels of some rules, and not of all"):
            exchange_table(panel, HOW, above=wrong)


def test_correlations_are_numpys() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 5, 7))
    plain = [np.corrcoef(one, other)[0, 1] for one, other in zip(a, b, strict=True)]
    assert correlation(a, b) == pytest.approx(np.array(plain))
    assert np.isnan(correlation(a, np.ones((5, 7)))).all()


def test_what_predicts_a_score_is_found() -> None:
    """Scores fall with TV and not with length: so says the table, and few rules say nothing."""
    truths = [(0.05, 1.1), (0.1, 0.9), (0.2, 1.15), (0.3, 0.95), (0.4, 1.0)]
    rules = [
        cell_rows(fuzzy(tv), Truth(tv=tv, score=0.7 - tv, longer=longer), 200, limit=10_000)
        for tv, longer in truths
    ]
    base = cell_rows(LOSSLESS, Truth(score=0.7), 200, limit=10_000)
    found = score_predictors(panel_of(base, *rules), HOW)
    by_tv, by_length = (found["strict"][name] for name in ("law_tv", "length"))
    assert by_tv.value < -0.95 and by_tv.high is not None and by_tv.high < -0.8
    assert abs(by_length.value) < 0.5
    *_, strict, loose = predictors_table(panel_of(base, *rules), HOW)[1].splitlines()
    assert strict.startswith("| strict | -") and loose.startswith("| loose | -")
    assert score_predictors(panel_of(base, *rules[:3]), HOW) == {}
    assert predictors_table(panel_of(base, *rules[:3]), HOW) == []
    assert score_predictors(panel_of(*rules), HOW) == {}


def test_a_weighted_score_is_weighted_where_it_is_predicted() -> None:
    """As in the table of quality: the correlation is that of the differences which stand there."""
    random = np.random.default_rng(0)
    cells = [cell_rows(LOSSLESS, Truth(), 20)]
    cells += [cell_rows(fuzzy(tv), Truth(tv=tv), 20) for tv in (0.05, 0.1, 0.2, 0.3)]
    for cell in cells:
        for row in cell:
            row["scores"] = {
                "instruction_strict": random.random(),
                "instructions": 1.0 + int(row["sample"]) % 3,
            }
    panel = panel_of(*cells)
    changes = [[point.changes[name].difference.value for point in panel.points[1:]] for name in
               ("score:instruction_strict", "law_tv")]  # fmt: skip
    found = score_predictors(panel, HOW)
    assert list(found) == ["instruction_strict"]
    assert found["instruction_strict"]["law_tv"].value == pytest.approx(np.corrcoef(*changes)[0, 1])
