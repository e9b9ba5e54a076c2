"""From raw rows to points, frontiers and winners, on rows of a known truth; and the checks of rows."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_rows import LOSSLESS, TREE, Truth, cell_rows, fuzzy, typical, write_rows

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Change, Estimate
from eagle_fsd.evaluation.analysis.frontier import (
    LOSSES,
    QUALITIES,
    quality_named,
    speedup,
    undominated,
    winners,
)
from eagle_fsd.evaluation.analysis.points import MEASURES, Panel, Point, drawn_by_rule, panels
from eagle_fsd.evaluation.analysis.rule_labels import name_rule
from eagle_fsd.evaluation.rows import Row, read_raw_rows, read_rows
from eagle_fsd.files.jsonl import append_row, drop_torn_line

HOW = Bootstrap(resamples=500)
JS = fuzzy(0.3)
UNGUARDED = fuzzy(0.3, min_gain=0.0, price=0.0, cost="tokens")
SPEED, TAU = "tokens_per_second", "tau"


def rows_of(*cells: list[dict[str, Any]]) -> list[Row]:
    return [Row.of(row) for row in itertools.chain(*cells)]


def only_panel(*cells: list[dict[str, Any]]) -> Panel:
    (panel,) = panels(rows_of(*cells), HOW)
    return panel


def point(panel: Panel, label: str) -> Point:
    (found,) = [point for point in panel.points if point.label == label]
    return found


# --- labels ---


@pytest.mark.parametrize(
    ("rule", "label", "family"),
    [
        (LOSSLESS, "lossless", "lossless"),
        (fuzzy(0.3), "js 0.3 hybrid", "js hybrid"),
        (fuzzy("inf"), "js inf hybrid", "js hybrid"),
        (fuzzy(2, divergence="reverse_kl", mode="paper"), "reverse_kl 2 paper", "reverse_kl paper"),
        (fuzzy(0.3, mode="paper", child="likeliest"), "js 0.3 paper likeliest", "js paper likeliest"),
        (fuzzy(0.3, min_p=0.1, exact_prefix=8), "js 0.3 hybrid min-p 0.1 prefix 8", "js hybrid"),
        (fuzzy(0.3, max_overshoot=2.0, max_consecutive=1), "js 0.3 hybrid overshoot 2 run 1", "js hybrid"),
        (fuzzy(0.3, min_gain=0.7), "js 0.3 hybrid gain 0.7", "js hybrid gain 0.7"),
        (typical(0.3, 0.09), "typical 0.3/0.09", "typical"),
        ({**typical(0.3, 0.09), "mode": "paper"}, "typical 0.3/0.09 paper", "typical paper"),
        (
            {"name": "relaxed_topk", "candidates": 3, "margin": 0.1, "mode": "hybrid"},
            "relaxed top-3 margin 0.1",
            "relaxed top-k",
        ),
        ({"name": "sglang", "single": 0.5, "acc": 1.0, "exact_eos": True}, "sglang 0.5/1", "sglang"),
        ({"name": "cactus", "delta": 0.05}, "cactus 0.05", "cactus"),
        ({"name": "ensemble", "weight": 0.7, "exact_eos": False}, "ensemble 0.7 exact_eos False", "ensemble"),
        ({"name": "fly", "entropy": 0.3, "window": 2}, "fly 0.3 window 2", "fly"),
        ({"name": "own_rule", "strength": 3}, "own rule strength 3", "own rule"),
        ({"name": "cactus", "bonus": 3}, "cactus bonus 3", "cactus"),
    ],
)
def test_a_rule_is_called(rule: dict[str, Any], label: str, family: str) -> None:
    assert name_rule(rule)[:2] == (label, family)
    assert name_rule(json.loads(json.dumps(rule))).label == label


def test_knobs_order_a_family() -> None:
    rules = (typical(0.3, 0.09), fuzzy("inf"), LOSSLESS, {"name": "own", "a": 1})
    assert [name_rule(rule).knobs for rule in rules] == [(0.3, 0.09), (float("inf"),), (), ()]


# --- points ---


def test_points_tell_the_truth() -> None:
    """A rule of tau 2.6 against 2, whose log p is 0.03 lower and whose law is 0.04 away."""
    truth = Truth(tau=2.6, log_p=-0.63, tv=0.04, fuzzy_share=0.2)
    panel = only_panel(cell_rows(LOSSLESS, Truth(), 150), cell_rows(JS, truth, 150))
    found = point(panel, "js 0.3 hybrid")
    assert (found.samples, found.pairs, found.family) == (150, 150, "js hybrid")
    assert found.changes[TAU].ratio.value == pytest.approx(1.3, rel=0.02)
    assert speedup(found, SPEED).low < 1.3 < speedup(found, SPEED).high
    log_p = found.changes["log_p"].difference
    assert log_p.low < -0.03 < log_p.high < 0 and log_p.high - log_p.low < 0.02
    own = found.values["log_p"]
    assert own.high - own.low > 3 * (log_p.high - log_p.low)  # pairs share what makes a sample hard
    assert found.values["law_tv"].value == pytest.approx(0.04)
    assert found.values["law_kl"].value == pytest.approx(0.064)
    assert found.values["fuzzy_share"].value == pytest.approx(0.2, abs=0.01)
    assert found.values["limit_rate"].value < 0.05
    assert point(panel, "lossless").changes == {} and point(panel, "lossless").values["law_tv"].value == 0


def test_sums_not_means_of_rows() -> None:
    rows = cell_rows(JS, Truth(), 2)
    rows[0] |= {
        "new_tokens": 90,
        "steps": 30,
        "seconds": 9.0,
        "log_p": -1.0,
        "scores": {"a": 1},
    }
    rows[1] |= {
        "new_tokens": 10,
        "steps": 10,
        "seconds": 1.0,
        "log_p": -2.0,
        "scores": {"a": 0},
    }
    rows[0] |= {"law": {"kl": 9.0, "tv": 3.0}, "finish_reason": "length", "fuzzy_accepts": 20}
    rows[0] |= {"token_ids": [1] * 90, "fuzzy_at": [0, 1, 4]}
    rows[1] |= {"token_ids": [*range(10)], "fuzzy_at": []}
    rows[1] |= {"law": {"kl": 1.0, "tv": 2.0}, "finish_reason": "stop", "fuzzy_accepts": 0}
    values = {name: one.value for name, one in only_panel(rows).points[0].values.items()}
    wanted = {TAU: 2.5, SPEED: 10.0, "log_p": -1.1, "score:a": 0.5, "law_kl": 0.1}
    wanted |= {"law_tv": 0.05, "limit_rate": 0.5, "length": 50.0, "fuzzy_share": 0.2}
    wanted |= {"repeated": 0.82, "loops": 0.5, "fuzzy_run": 1.5}
    assert values == pytest.approx(wanted)


def test_the_order_of_rows_says_nothing() -> None:
    """Pairs are found by sample and seed, wherever in the files they are."""
    cells = [*cell_rows(LOSSLESS, Truth(), 20), *cell_rows(JS, Truth(tau=2.4), 20)]
    mixed = list(cells)
    random.Random(0).shuffle(mixed)
    assert panels(rows_of(mixed), HOW) == panels(rows_of(cells), HOW)


def test_rows_that_swap_their_samples_lose_their_partners() -> None:
    truth, lossless = Truth(log_p=-0.65), cell_rows(LOSSLESS, Truth(), 40)
    right = cell_rows(JS, truth, 40)
    names = [row["sample"] for row in right]
    swapped = [row | {"sample": name, "seed": 0} for row, name in zip(right, names[::-1], strict=True)]
    base = [row | {"seed": 0} for row in lossless]
    good = point(only_panel(lossless, right), "js 0.3 hybrid").changes["log_p"].difference
    bad = point(only_panel(base, swapped), "js 0.3 hybrid").changes["log_p"].difference
    assert good.high < 0 and bad.high - bad.low > 5 * (good.high - good.low)


def test_a_sweep_that_is_not_done_is_compared_on_what_both_have() -> None:
    lossless = cell_rows(LOSSLESS, Truth(), range(30))
    part = cell_rows(JS, Truth(log_p=-0.7), range(20, 45))
    found = point(only_panel(lossless, part), "js 0.3 hybrid")
    assert (found.samples, found.pairs) == (25, 10)
    same = point(only_panel(lossless[20:], part[:10]), "js 0.3 hybrid")
    assert found.changes == same.changes and found.values != same.values
    drawn = [
        drawn_by_rule(only_panel(*cells).points, MEASURES[TAU], HOW)
        for cells in ((lossless, part), (lossless[20:], part[:10]))
    ]
    assert drawn[0].shape == (501, 2) and (drawn[0] == drawn[1]).all()


def test_other_seeds_are_no_pairs_and_seeds_of_a_sample_go_together() -> None:
    lossless, other = cell_rows(LOSSLESS, Truth(), 12), cell_rows(JS, Truth(), 12, seeds=(100,))
    assert point(only_panel(lossless, other), "js 0.3 hybrid").pairs == 0
    twice = only_panel(
        cell_rows(LOSSLESS, Truth(), 12, seeds=(0, 50)), cell_rows(JS, Truth(), 12, seeds=(0, 50))
    )
    found = point(twice, "js 0.3 hybrid")
    assert (found.samples, found.pairs, found.changes[TAU].difference.samples) == (24, 24, 12)
    tokens, steps = (sum(getattr(row, name) for row in found.rows) for name in ("new_tokens", "steps"))
    assert found.values[TAU].value == pytest.approx(tokens / steps)


def test_scores_are_weighted_as_their_task_says() -> None:
    """IFEval's share of instructions: of two prompts with 1 and 3 of them, all of the second's are kept."""
    rows = cell_rows(LOSSLESS, Truth(), 2)
    for row, kept, instructions in zip(rows, (0.0, 1.0), (1.0, 3.0), strict=True):
        row["scores"] = {"strict": kept, "instruction_strict": kept, "instructions": instructions}
    (panel,) = panels([Row.of(row) for row in rows], HOW)
    assert panel.scores == ("strict", "instruction_strict")
    values = panel.points[0].values
    assert (values["score:strict"].value, values["score:instruction_strict"].value) == (0.5, 0.75)


def test_rows_of_before_a_guard_are_of_the_rule_without_it() -> None:
    old, new = cell_rows(fuzzy(0.3), Truth(), 1)[0], cell_rows(UNGUARDED, Truth(), 1)[0]
    assert "min_gain" not in old["rule"] and Row.of(old).rule == Row.of(new).rule
    planned = cell_rows(fuzzy(0.3, price=1.0, cost="kl"), Truth(), 1)[0]
    assert Row.of(planned).rule == {**planned["rule"], "min_gain": 0.0}


def test_without_lossless_there_is_nothing_to_compare_with() -> None:
    panel = only_panel(cell_rows(JS, Truth(), 5))
    assert panel.lossless is None and panel.points[0].changes == {} and panel.points[0].pairs == 0
    assert winners(panel.points, QUALITIES["log_p"], TAU) == []
    assert undominated(panel.points, QUALITIES["log_p"], TAU) == []


def test_an_infinite_distance_is_unknown_not_left_out_of_the_mean() -> None:
    rows = cell_rows(JS, Truth(tv=0.1), 6)
    rows[2]["law"]["kl"] = None
    panel = only_panel(cell_rows(LOSSLESS, Truth(), 6), rows)
    found = panel.points[1]
    assert "law_kl" not in found.values and "law_kl" not in found.changes and "law_tv" in found.changes
    assert winners(panel.points, QUALITIES["law_kl"], TAU) == []  # lossless alone is known
    rows[2]["law"] = None
    assert "law_tv" not in only_panel(rows).points[0].values


def test_answers_without_tokens_have_no_likelihood() -> None:
    rows = cell_rows(JS, Truth(), 6)
    rows[0] |= {"log_p": None, "new_tokens": 0, "steps": 0, "law": {"kl": 0.0, "tv": 0.0}}
    found = only_panel(cell_rows(LOSSLESS, Truth(), 6), rows).points[1]
    assert found.values["log_p"].samples == 5 and found.changes["log_p"].difference.samples == 5
    assert found.values["length"].samples == 6


def test_seconds_of_other_machines_are_not_compared() -> None:
    lossless, here = cell_rows(LOSSLESS, Truth(), 8), cell_rows(JS, Truth(), 8)
    for fields in ({"device": "GPU"}, {"threads": 16}, {"batch_size": 4}, {"runtime": "openvino"}):
        away = [row | fields for row in here]
        found = only_panel(lossless, away).points[1]
        assert SPEED in found.values and SPEED not in found.changes and TAU in found.changes
        mixed = only_panel(lossless, [*here[:4], *away[4:]]).points[1]
        assert SPEED not in mixed.values and TAU in mixed.values
        alone = only_panel([*lossless[:4], *(row | fields for row in lossless[4:])]).points[0]
        assert speedup(alone, SPEED) is None and speedup(alone, TAU).value == 1


def test_rows_of_a_batch_share_its_seconds() -> None:
    rows = [row | {"batch_size": 4, "seconds": 2.0, "new_tokens": 10} for row in cell_rows(JS, Truth(), 4)]
    assert only_panel(rows).points[0].values[SPEED].value == pytest.approx(5.0)


@pytest.mark.parametrize(
    "other",
    [
        {"ea_model": "other"},
        {"base_model": "other"},
        {"draft_vocab_size": 8192},
        {"dtype": "bfloat16"},
        {"tree": {**TREE, "depth": 6}},
        {"task": "gsm8k"},
        {"version": 2},
        {"max_new_tokens": 64},
        {"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}},
    ],
)
def test_what_cannot_be_compared_is_kept_apart(other: dict[str, Any]) -> None:
    lossless, away = cell_rows(LOSSLESS, Truth(), 4), [row | other for row in cell_rows(JS, Truth(), 4)]
    found = panels(rows_of(lossless, away), HOW)
    assert len(found) == 2 and {len(panel.points) for panel in found} == {1}


def test_weights_that_changed_under_a_name_are_refused() -> None:
    rows = cell_rows(JS, Truth(), 4)
    rows[3]["key"] = "f" * 16
    with pytest.raises(
        ValueError, match=r"js 0.3 hybrid on ifeval, temperature 0.6 has rows of two cells, .* and ffff"
    ):
        panels(rows_of(rows), HOW)


# --- frontier and winners, on points whose numbers are given ---


def given(label: str, fast: float, loss: float, spread: float = 0.001) -> Point:
    """A point that is `fast` times lossless in tau and loses `loss` of its log p of -2."""

    def about(value: float) -> Estimate:
        return Estimate(value, value - spread, value + spread, 10)

    changes = {
        TAU: Change(about(fast - 1), about(fast)),
        "log_p": Change(about(-2 * loss), about(1 + loss)),
        "score:strict": Change(about(-loss), None),
    }
    values = {TAU: about(fast), "log_p": about(-2 - 2 * loss)}
    return Point(label, label.split()[0], (), 10, 10, values, changes, ())


def brute_frontier(points: list[tuple[float, float]]) -> set[int]:
    kept = set()
    for i, (fast, loss) in enumerate(points):
        better = [
            j
            for j, (f, lost) in enumerate(points)
            if (f >= fast and lost <= loss) and (f, lost) != (fast, loss)
        ]
        if not better:
            kept.add(i)
    return kept


def test_the_frontier_is_what_nothing_dominates() -> None:
    chance = random.Random(5)
    for _ in range(30):
        places = [(1 + chance.randint(0, 8) / 10, chance.randint(-2, 8) / 100) for _ in range(9)]
        points = [given(f"rule{i}", *place) for i, place in enumerate(places)]
        found = undominated(points, QUALITIES["log_p"], TAU)
        assert {one.label for one in found} == {f"rule{i}" for i in brute_frontier(places)}
        speeds = [one.changes[TAU].ratio.value for one in found]
        assert speeds == sorted(speeds)


def test_a_loss_is_worse_in_every_measure() -> None:
    one = given("a 1", 1.2, 0.02, spread=0.005)
    for quality in (QUALITIES["log_p"], quality_named("strict", [panel_with(one)])):
        loss = quality.loss(one)
        assert (loss.value, loss.low, loss.high) == pytest.approx((0.02, 0.015, 0.025))


def panel_with(*points: Point) -> Panel:
    blank = only_panel(cell_rows(LOSSLESS, Truth(), 3), cell_rows(JS, Truth(), 3))
    return Panel(blank.row, (blank.lossless, *points), ("strict",))


def test_winners_are_the_fastest_within_the_loss() -> None:
    panel = panel_with(
        given("slow 1", 1.10, 0.001),
        given("fast 1", 1.20, 0.0095),
        given("fast 2", 1.50, 0.03),
        given("bad 1", 1.05, 0.001),
        given("worse 1", 0.9, -0.1),
    )
    found = winners(panel.points, QUALITIES["log_p"], TAU)
    assert LOSSES == (0.005, 0.01, 0.02, 0.05)
    assert [point.label for point in found] == ["slow 1", "fast 1", "fast 1", "fast 2"]
    at_levels = panel_with(given("at 1", 1.1, 0.01), given("at 2", 1.2, 0.02))
    found = winners(at_levels.points, quality_named("strict", [at_levels]), TAU)
    assert [point.label for point in found] == ["lossless", "at 1", "at 2", "at 2"]
    only_slower = panel_with(given("worse 1", 0.9, -0.1))
    assert {point.label for point in winners(only_slower.points, QUALITIES["log_p"], TAU)} == {"lossless"}


def test_a_quality_must_be_known() -> None:
    panel = panel_with()
    assert quality_named("strict", [panel]).measure == "score:strict"
    with pytest.raises(ValueError, match="quality is 'beauty': it must be one of log_p, law_tv, law_kl, str"):
        quality_named("beauty", [panel])


# --- rows ---


def test_rows_are_read_back_and_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    assert read_rows(path) == []
    append_row(path, {"a": 1})
    append_row(path, {"a": "\u2028 ü"})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"a": 3')
    assert read_rows(path) == [{"a": 1}, {"a": "\u2028 ü"}]
    assert path.read_bytes() != whole  # reading changes nothing
    drop_torn_line(path)
    assert path.read_bytes() == whole
    drop_torn_line(path)
    drop_torn_line(tmp_path / "none")
    assert path.read_bytes() == whole and not (tmp_path / "none").exists()
    path.write_bytes(whole + b'{"a": 3}')  # an editor may leave out the last line's end
    assert read_rows(path)[2:] == [{"a": 3}]
    drop_torn_line(path)
    assert path.read_bytes() == whole + b'{"a": 3}\n'


def test_no_row_is_added_to_a_compressed_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: rows are written uncompressed.*without \.gz"):
        drop_torn_line(tmp_path / "rows.jsonl.gz")


def test_compressed_rows_are_read_and_damaged_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % number for number in range(1000)), mtime=0)
    path.write_bytes(whole)
    assert [row["a"] for row in read_rows(path)] == list(range(1000))
    block = whole[:10] + b"\xff" * 20 + whole[30:]  # no deflate block begins so
    for broken in (whole[:-20], whole[:-8] + bytes(8), block, b"{}\n"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"jsonl\.gz: is not a whole gzip file \(.+\); compress it"):
            read_rows(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"half', r"rows.jsonl:2: is not JSON \(.*\): each line must be one object; repair or delete it"),
        (b"\xff\xfe", r"rows.jsonl:2: is not JSON"),
        (b"[1]", r"rows.jsonl:2: is .*, not an object"),
    ],
)
def test_a_broken_line_is_named(line: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(ValueError, match=complaint):
        read_rows(path)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        *(
            ({name: ...}, f"rows.jsonl:2: has no '{name}': a raw row needs it")
            for name in ("key", "rule", "steps", "law", "log_p", "ea_model", "batch_size", "scores")
        ),
        ({"steps": "7"}, "rows.jsonl:2: steps is '7': a raw row has int, not below 0"),
        ({"steps": True}, "rows.jsonl:2: steps is True: a raw row has int"),
        ({"steps": -1}, "rows.jsonl:2: steps is -1: a raw row has int"),
        ({"seconds": -0.5}, "rows.jsonl:2: seconds is -0.5: a raw row has"),
        ({"rule": {"threshold": 1}}, "rows.jsonl:2: rule is .*: it needs a name"),
        (
            {"tree": {"depth": 3, "width": 2}},
            "rows.jsonl:2: tree is .*: its fields are total_tokens, depth, top_k, min_confidence",
        ),
        ({"sampling": {"temperature": -1}}, "rows.jsonl:2: temperature is -1"),
        ({"log_p": float("nan")}, "rows.jsonl:2: log_p is nan: a raw row has"),
        ({"scores": {"strict": "yes"}}, "rows.jsonl:2: strict is 'yes': a raw row has"),
    ],
)
def test_a_row_that_cannot_be_is_named(wrong: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    good, bad = cell_rows(JS, Truth(), 2)
    bad = {name: value for name, value in (bad | wrong).items() if value is not ...}
    with pytest.raises(ValueError, match=complaint):
        read_raw_rows([write_rows(tmp_path / "rows.jsonl", [good, bad])])


def test_rows_that_would_count_twice_are_refused(tmp_path: Path) -> None:
    rows = cell_rows(JS, Truth(), 3)
    first, second = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", rows[2:])
    assert [len(found) for found in read_raw_rows([first]).values()] == [3]
    seeds = write_rows(tmp_path / "seeds.jsonl", [rows[0], rows[0] | {"seed": 50}])
    assert [len(found) for found in read_raw_rows([seeds]).values()] == [2]
    with pytest.raises(ValueError, match=r"b.jsonl:1: is the cell, sample and seed of .*a.jsonl:3 again"):
        read_raw_rows([first, second])
    with pytest.raises(ValueError, match=r"a.jsonl is given twice"):
        read_raw_rows([first, first])
