"""What a rule gets for what it gives up: by hand, in pairs, and what is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_rows import LOSSLESS, Truth, cell_rows, fuzzy

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.points import Panel, panels
from eagle_fsd.evaluation.commands import exchange
from eagle_fsd.evaluation.commands.exchange import exchange_table
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


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", cell)]


def test_tokens_gained_for_tokens_given_up() -> None:
    rows = raw_rows()
    title, _, about, _, titles, _, *lines = exchange_table(
        panel_of(rows), HOW, ["js 0.3 hybrid"]
    ).splitlines()
    assert title == "## ifeval, temperature 0.6"
    assert about.startswith("SmolLM2-135M-Instruct, tree 16/5/8; version 1, top-p 0.9,")
    assert titles.endswith("| gained for a TV of 1 | more than js 0.3 hybrid |")
    cheap, dear = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert cheap[:2] == ["js 0.1 hybrid", "0.050"] and cheap[2].startswith("1.2")
    (value, low, high), (other, other_low, other_high) = numbers(cheap[3]), numbers(dear[3])
    assert (value, other) == pytest.approx((by_hand(rows, CHEAP), by_hand(rows, DEAR)), abs=0.005)
    assert value > other and low < value < high
    assert dear[4] == ""  # not against itself
    more, more_low, more_high = numbers(cheap[4])
    assert more == pytest.approx(value - other, abs=0.011)
    # In pairs: luck that both rules share cancels out of the difference.
    assert more_high - more_low < math.hypot(high - low, other_high - other_low)


def test_rules_on_fewer_samples_and_of_no_distance_are_left_out() -> None:
    rows = raw_rows() + cell_rows(fuzzy(0.5), Truth(tau=3, tv=0.3), 10) + cell_rows(fuzzy(0.01), Truth(), 30)
    table = exchange_table(panel_of(rows), HOW)
    assert "(fewer samples than lossless, or a TV below 0.003): js 0.01 hybrid, js 0.5 hybrid." in table
    assert "\n| js 0.1 hybrid |" in table and "\n| js 0.5 hybrid |" not in table


def test_seeds_of_a_sample_are_one_sample() -> None:
    rows = [row for rule, truth in RULES for row in cell_rows(rule, truth, 1, seeds=(0, 1))]
    last = exchange_table(panel_of(rows), HOW).splitlines()[-1].split("|")
    assert "(" not in last[4], "a lone sample has no interval"


def test_what_cannot_be_compared_is_refused() -> None:
    panel = panel_of(raw_rows())
    with pytest.raises(ValueError, match=r"against is 'js 9': it must be .* one of js 0.1 hybrid"):
        exchange_table(panel, HOW, ["js 9"])
    with pytest.raises(
        ValueError, match=r"ifeval, temperature 0.6 has no lossless rows: .* --rules lossless"
    ):
        exchange_table(panel_of(cell_rows(CHEAP, Truth(tv=0.1), 5)), HOW)


def test_the_command_writes_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra eval")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in raw_rows()))
    picture = tmp_path / "new" / "plot.png"
    exchange.main(f"--rows {rows} --resamples 100 --plot {picture}".split())
    assert capsys.readouterr().out.count("| js 0.") == 2
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG")
    exchange.main(f"--rows {rows} --resamples 100 --plot {picture}".split())
    assert picture.read_bytes() == first
