"""What a rule gets for what it gives up: by hand, in pairs, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.synthetic_rows import LOSSLESS, Truth, cell_rows, fuzzy

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.points import Panel, panels
from eagle_fsd.evaluation.report.exchange_rate import Exchange, exchange_table
from eagle_fsd.evaluation.rows import Row

HOW = Bootstrap(resamples=500)
CHEAP, DEAR = fuzzy(0.1), fuzzy(0.3)
RULES = ((LOSSLESS, Truth()), (CHEAP, Truth(tau=2.4, tv=0.05)), (DEAR, Truth(tau=2.6, tv=0.2)))


def raw_rows(samples: int = 30) -> list[dict[str, Any]]:
    return [row for rule, truth in RULES for row in cell_rows(rule, truth, samples)]


def panel_of(rows: list[dict[str, Any]]) -> Panel:
    (panel,) = panels([Row.of(row) for row in rows], HOW)
    return panel


def by_hand(rows: list[dict[str, Any]], rule: dict[str, Any]) -> float:
    mine, base = ([row for row in rows if row["rule"] == one] for one in (rule, LOSSLESS))
    tokens, steps = (sum(row[name] for row in mine) for name in ("new_tokens", "steps"))
    lossless = sum(row["new_tokens"] for row in base) / sum(row["steps"] for row in base)
    return (tokens - steps * lossless) / sum(row["law"]["tv"] for row in mine)


def test_tokens_gained_for_tokens_given_up() -> None:
    rows = raw_rows()
    exchange = Exchange(panel_of(rows), HOW)
    cheap, dear = (exchange.of(f"js {threshold:g} hybrid") for threshold in (0.1, 0.3))
    assert cheap.value == pytest.approx(by_hand(rows, CHEAP))
    assert dear.value == pytest.approx(by_hand(rows, DEAR))
    assert cheap.value > dear.value and cheap.low < cheap.value < cheap.high
    difference = exchange.against("js 0.1 hybrid", "js 0.3 hybrid")
    assert difference.value == pytest.approx(cheap.value - dear.value)
    # In pairs: luck that both rules share cancels out of the difference.
    apart = math.hypot(cheap.high - cheap.low, dear.high - dear.low)
    assert difference.high - difference.low < apart


def test_rules_on_fewer_samples_and_of_no_distance_are_left_out() -> None:
    rows = raw_rows() + cell_rows(fuzzy(0.5), Truth(tau=3, tv=0.3), 10) + cell_rows(fuzzy(0.01), Truth(), 30)
    exchange = Exchange(panel_of(rows), HOW)
    assert set(exchange.points) == {"js 0.1 hybrid", "js 0.3 hybrid"}
    assert exchange.left_out == ["js 0.01 hybrid", "js 0.5 hybrid"]
    said = "(fewer samples than lossless, or a TV below 0.003): js 0.01 hybrid, js 0.5 hybrid."
    assert said in exchange_table(panel_of(rows), HOW)


def test_seeds_of_a_sample_are_one_sample() -> None:
    rows = [row for rule, truth in RULES for row in cell_rows(rule, truth, 1, seeds=(0, 1))]
    found = Exchange(panel_of(rows), HOW).of("js 0.3 hybrid")
    assert (found.low, found.high, found.samples) == (None, None, 1)


def test_a_table_line_by_line() -> None:
    panel = panel_of(raw_rows())
    exchange = Exchange(panel, HOW)
    title, _, about, _, titles, _, cheap, dear = exchange_table(panel, HOW, ["js 0.3 hybrid"]).splitlines()
    assert title == "## ifeval, temperature 0.6"
    assert about.startswith("SmolLM2-135M-Instruct, tree 16/5/8; version 1, top-p 0.9,")
    assert titles.endswith("| gained for a TV of 1 | more than js 0.3 hybrid |")
    assert cheap.startswith("| js 0.1 hybrid | 0.050 | 1.2")
    assert f"| {exchange.of('js 0.1 hybrid').value:.2f} (" in cheap
    assert dear.endswith("|  |")  # not against itself


def test_what_cannot_be_compared_is_refused() -> None:
    panel = panel_of(raw_rows())
    with pytest.raises(ValueError, match=r"against is 'js 9': it must be .* one of js 0.1 hybrid"):
        exchange_table(panel, HOW, ["js 9"])
    with pytest.raises(
        ValueError, match=r"ifeval, temperature 0.6 has no lossless rows: .* --rules lossless"
    ):
        Exchange(panel_of(cell_rows(CHEAP, Truth(tv=0.1), 5)), HOW)
