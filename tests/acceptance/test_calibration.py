"""Calibration: what a lossless pass records, what it predicts, what is chosen, and who may read it."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product, starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import Letters, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified
from eagle_fsd.acceptance.calibration import (
    FILE,
    CalibratedThreshold,
    Calibration,
    find_calibration,
    read_calibrations,
    with_calibration,
    write_calibrations,
)
from eagle_fsd.core.config import AutoThreshold, AutoTree, Kind
from eagle_fsd.evaluation.commands import calibrate as script
from eagle_fsd.evaluation.measure import sweep
from eagle_fsd.evaluation.measure.observers import expected_step
from eagle_fsd.evaluation.measure.sweep import Cell, Questions
from eagle_fsd.evaluation.measure.threshold_search import (
    LADDER,
    Search,
    Setting,
    Work,
    bound,
    calibrate,
    calibration_table,
    dials_of,
    trial_table,
    tv_of,
)
from eagle_fsd.evaluation.rows import read_rows
from eagle_fsd.evaluation.tasks import Sample, Task
from eagle_fsd.hub.resolve import shipped_head
from eagle_fsd.target.model import TargetModel

WARM = SamplingConfig(0.9, 20, 0.95)
TREE = TreeConfig(8, 3, 3)
JS = Kind()
(DIAL,) = dials_of([JS])
APART = Lossless(share_noise=False)
LEAST = 0.05  # the least gain where one is asked for
SETTINGS = [(JS, 0.3), (Kind("tv", "paper", "target"), 0.2), (Kind("js", "swap", price=1.0), math.inf)]


def engine(head_seed: int = 0) -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head(head_seed), Letters())  # type: ignore[arg-type]


def work(folder: Path, count: int = 6, model: EagleFSD | None = None) -> Work:
    task = Task("prompts/toy", 1, lambda row, place: (str(place), [], {}), 12, ("toy.jsonl",))
    samples = [Sample(str(place), (), {}) for place in range(count)]
    asked = Questions(task, samples, prompts_of([4 + place % 3 for place in range(count)]), range(count))
    cell = Cell(asked, APART, WARM, TREE, 12)
    return Work(model or engine(), cell, folder, 2, 0.8, {"commit": "abc"})


# --- the lossless pass ---


def test_records_are_the_rules_expected_steps(tmp_path: Path) -> None:
    """Of every setting, summed over the steps of every lossless text."""
    job, model = work(tmp_path, 2), engine()
    records = job.record(SETTINGS)
    for place in range(2):
        sums = np.zeros((len(SETTINGS) + 1, 2))

        def watch(verified: Verified, verdict: Verdict, emitted: Mapping[int, int], sums: Any = sums) -> None:
            rules = [Lossless(), *(Fuzzy(threshold, **kind._asdict()) for kind, threshold in SETTINGS)]
            steps = [expected_step(rule, verified) for rule in rules]
            sums += np.array([(float(one.tokens), float(one.tv)) for one in steps])

        prompt = job.cell.questions.prompts[place]
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            tree=TREE,
            temperature=0.9,
            top_k=20,
            top_p=0.95,
            seed=[(0, place)],
            rule=APART,
            observer=watch,
        )
        table = [records.expected[setting][place] for setting in SETTINGS]
        np.testing.assert_allclose(table, sums[1:], rtol=1e-4, atol=1e-4)
        assert records.lossless[place] == pytest.approx(sums[0, 0], rel=1e-4)


def test_what_is_predicted_are_the_sums_of_the_prompts(tmp_path: Path) -> None:
    records = work(tmp_path).record(SETTINGS)
    for kind, threshold in SETTINGS:
        sums, table = records.predicted(kind, threshold, [1, 4]), records.expected[kind, threshold]
        for n, place in enumerate([1, 4]):
            assert tuple(sums[n, 0]) == tuple(table[place, ::-1])
        ratio = (table[1, 0] + table[4, 0]) / (records.lossless[1] + records.lossless[4])
        found = records.measured(kind, threshold, [1, 4])
        assert found.tau_ratio == pytest.approx(ratio) and ratio >= 1
    ladder = work(tmp_path).record(DIAL)
    mean = [float(ladder.predicted(*one, range(6))[..., 0].sum()) for one in DIAL]
    assert mean == sorted(mean) and mean[-1] > mean[0]


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    job = work(tmp_path)
    other = replace(job, cell=replace(job.cell, seed=100))
    first, second = job.record(SETTINGS), other.record(SETTINGS)
    assert len(read_rows(tmp_path / "records.jsonl")) == 12
    assert not all(np.array_equal(first.expected[one], second.expected[one]) for one in SETTINGS)
    again = job.record(SETTINGS)
    assert again.rows == first.rows and len(read_rows(tmp_path / "records.jsonl")) == 12
    assert {row["seed"] for row in job.run(JS, 0.3)} == set(range(6))
    assert {row["seed"] for row in other.run(JS, 0.3)} == set(range(100, 106))
    assert {row["seed"] for row in job.run(JS, 0.3)} == set(range(6))


def test_the_lossless_pass_goes_on_where_it_was(tmp_path: Path) -> None:
    first = work(tmp_path / "a").record(SETTINGS)
    lines = (tmp_path / "a" / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "records.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    again = work(tmp_path / "b").record(SETTINGS)
    assert len(read_rows(tmp_path / "b" / "records.jsonl")) == 6
    for one in SETTINGS:
        np.testing.assert_allclose(first.expected[one], again.expected[one], atol=1e-5)
    assert [row["token_ids"] for row in first.rows] == [row["token_ids"] for row in again.rows]


# --- the choice ---


def made_records(count: int = 40, seed: int = 0) -> Search:
    """Prompts of fifty tokens: the contexts' divergences and what each moves are drawn."""
    random = np.random.default_rng(seed)
    drawn = [(random.random(50) * 0.6, random.random(50) * 0.3) for _ in range(count)]
    moved = [[float(tv[divergence <= t].sum()) for _, t in DIAL] for divergence, tv in drawn]
    tables = [np.stack([np.full(len(DIAL), 50.0), np.array(row)], axis=1) for row in moved]
    return records_of(DIAL, tables)


def records_of(dial: Sequence[Setting], tables: Sequence[Any]) -> Search:
    rows = [{"new_tokens": 50, "steps": 25}] * len(tables)
    expected = dict(zip(dial, np.array(tables).swapaxes(0, 1), strict=True))
    return Search(rows, expected, np.full(len(tables), 40.0), lambda *_: [], 0.9)


def runs_like(records: Search, factor: float, asked: list[float]) -> Any:
    """Runs whose TV is `factor` times what was predicted."""

    def run(kind: Kind, threshold: float) -> list[dict[str, Any]]:
        asked.append(threshold)
        sums = records.predicted(kind, threshold, range(len(records.rows)))
        return [{"law": {"tv": factor * float(tv)}, "new_tokens": 50, "steps": 20} for tv in sums[:, 0, 0]]

    return run


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7, 3.0])
@pytest.mark.parametrize("budget", [0.005, 0.02, 0.06])
def test_the_largest_threshold_inside_the_budget(factor: float, budget: float) -> None:
    """As by running the whole ladder: never beyond the budget, at most one step of it below the best."""
    records, asked = made_records(), []
    run = runs_like(records, factor, asked)
    found = replace(records, run=run).boldest(DIAL, budget, range(40))
    ladder = [t for _, t in DIAL]
    tvs = {t: bound(tv_of(run(JS, t)), 0.9)[1] for t in ladder}
    best = max((t for t in ladder if tvs[t] <= budget), default=None)
    assert found is not None and found.bound <= budget and best is not None
    assert found.bound == pytest.approx(tvs[found.threshold])
    assert LADDER.index(best) - LADDER.index(found.threshold) <= 1
    assert found.tau == 2.5 and found.lossless_tau == 2.0 and found.tau_ratio == 1.25
    assert len(asked) - len(ladder) <= 8  # minutes, not hours: few are run


def test_a_budget_that_nothing_meets_has_no_threshold() -> None:
    records = records_of(DIAL, [np.tile([50.0, 25.0], (len(DIAL), 1))] * 8)
    assert replace(records, run=runs_like(records, 1.0, [])).boldest(DIAL, 0.01, range(8)) is None


def test_a_budget_that_everything_meets_takes_the_last_step() -> None:
    records = records_of(DIAL, [np.tile([50.0, 0.0], (len(DIAL), 1))] * 8)
    found = replace(records, run=runs_like(records, 1.0, [])).boldest(DIAL, 0.01, range(8))
    assert found is not None and found.threshold == DIAL[-1][1] and found.bound == 0


def steps_of(predicted: Sequence[int], ran: Sequence[float], budget: int) -> tuple[list[int], int | None]:
    """Search a dial whose TV is predicted and run as so many 64ths, of every prompt alike.

    Returns the steps that are run, in turn, and the one that is found.
    """
    dial, asked = DIAL[: len(ran)], []
    records = records_of(dial, [np.array([(64.0, tv) for tv in predicted])] * 8)

    def run(kind: Kind, threshold: float) -> list[dict[str, Any]]:
        asked.append(dial.index((kind, threshold)))
        return [{"law": {"tv": float(ran[asked[-1]])}, "new_tokens": 64, "steps": 20}] * 8

    found = replace(records, run=run).boldest(dial, budget / 64, range(8))
    return asked, None if found is None else dial.index((found.kind, found.threshold))


def test_a_setting_just_at_the_budget_is_inside() -> None:
    assert steps_of([1, 2, 4], [1, 2, 4], 2) == ([1], 1)


def test_the_search_goes_down_to_the_mildest_setting_and_not_beyond() -> None:
    assert steps_of([1, 2, 3, 4], [5, 5, 6, 6], 4) == ([3, 1, 0], None)
    # Each correction goes one step down, and too little: further ones are tried one by one.
    slow = [7.0, 8.4, 8.5, 8.6, 8.7, 8.8, 8.9, 9.0]
    assert steps_of(range(1, 9), slow, 8) == ([7, 6, 5, 4, 3, 2, 1, 0], 0)


def test_a_run_that_moves_nothing_ends_the_search() -> None:
    assert steps_of([1, 2, 4], [0, 0, 0], 2) == ([1], 1)


def test_the_ladder_has_three_settings_within_a_doubling_from_the_least_to_the_most() -> None:
    assert LADDER[0] == 1e-4 and LADDER[-1] == 82.0 and len(LADDER) == 72
    assert all(1.1 < bolder / one < 1.3 for one, bolder in pairwise(LADDER))


@pytest.mark.parametrize(
    ("divergence", "boldest"), [("js", 0.82), ("js_top10", 0.82), ("tv", 1.0), ("reverse_kl", 82.0)]
)
def test_thresholds_end_at_the_first_that_lets_everything_through(divergence: str, boldest: float) -> None:
    (dial,) = dials_of([Kind(divergence)])
    assert [threshold for _, threshold in dial] == [t for t in LADDER if t <= boldest]


def test_bounds_hold_as_often_as_they_say() -> None:
    """Samples of a known distribution: the true mean is under the bound nearly as often as promised."""
    random, held = np.random.default_rng(1), 0
    for _ in range(300):
        _, upper = bound(np.stack((random.gamma(2.0, 0.5, 40), np.full(40, 50.0)), axis=1)[:, None], 0.9)
        held += upper >= 1.0 / 50
    assert 0.84 * 300 <= held <= 0.97 * 300


@pytest.mark.parametrize(("confidence", "z"), [(0.9, 1.2816), (0.975, 1.96)])
def test_bounds_are_one_sided(confidence: float, z: float) -> None:
    tv = np.random.default_rng(2).gamma(2.0, 0.5, 400)
    value, upper = bound(np.stack((tv, np.full(400, 50.0)), axis=1)[:, None], confidence)
    assert value == pytest.approx(tv.mean() / 50)
    assert (upper - value) * 50 == pytest.approx(z * tv.std() / 400**0.5, rel=0.1)


def test_a_lone_prompt_has_no_bound_unless_nothing_is_moved() -> None:
    assert bound(np.array([[[0.5, 50.0]]]), 0.9) == (0.01, math.inf)
    assert bound(np.array([[[0.0, 50.0]]]), 0.9) == (0.0, 0.0)


def test_a_plan_is_a_dial_of_falling_prices() -> None:
    swaps = [Kind("js", "swap", price=price) for price in (1.0, 3.0, 2.0)]
    ladder, prices = dials_of([JS, *swaps])
    assert ladder == DIAL and {kind for kind, _ in ladder} == {JS}
    assert [(kind.price, threshold) for kind, threshold in prices] == [
        (price, math.inf) for price in (3, 2, 1)
    ]
    costs = [Kind("js", "hybrid", price=price, cost=cost) for price, cost in ((1.0, "tokens"), (2.0, "kl"))]
    assert dials_of(costs) == [[(costs[1], math.inf)], [(costs[0], math.inf)]]  # their prices do not compare
    moved = {3.0: 0.01, 2.0: 0.02, 1.0: 0.05}  # by price, in every context
    table = np.array([(50.0, 50 * moved[kind.price]) for kind, _ in prices])
    records, asked = records_of(prices, [table] * 8), []

    def run(kind: Kind, threshold: float) -> list[dict[str, Any]]:
        asked.append((kind.price, threshold))
        return [{"law": {"tv": 50 * moved[kind.price]}, "new_tokens": 50, "steps": 20}] * 8

    found = replace(records, run=run).boldest(prices, 0.03, range(8))
    assert found is not None and found.price == 2 and found.threshold == math.inf
    assert asked == [(2.0, math.inf)]


def test_the_fastest_is_the_one_with_the_best_trees_not_with_the_luckiest_texts() -> None:
    """Two dials inside the budget: the first run has the larger tau, the other more tokens of each tree."""
    dials = dials_of([JS, Kind("js", "swap", price=1.0)])
    settings = [one for dial in dials for one in dial]
    table = np.array([(52.0 if kind.price else 50.0, 0.5) for kind, _ in settings])
    records = records_of(settings, [table] * 8)

    def run(kind: Kind, threshold: float) -> list[dict[str, Any]]:
        return [{"law": {"tv": 0.5}, "new_tokens": 50, "steps": 20 if kind.price else 15}] * 8

    (trial,) = replace(records, run=run).splits(dials, 0.02, 1)
    assert [trial["chosen"][name] for name in ("price", "tau", "tau_ratio")] == [1, 2.5, 1.3]


def test_splits_try_what_they_have_not_seen() -> None:
    records, asked = made_records(), []
    trials = replace(records, run=runs_like(records, 1.3, asked)).splits([DIAL], 0.03, 6)
    assert [trial["split"] for trial in trials] == list(range(6))
    assert sum(bool(trial["inside"]) for trial in trials) >= 5
    assert len({trial["tv"] for trial in trials}) > 1  # halves differ
    assert "6 of 6" in trial_table(trials) or "5 of 6" in trial_table(trials)
    for trial in trials:  # what was chosen on one half is tried on all of the other, and on nothing else
        chosen = trial["chosen"]
        whole = bound(tv_of(runs_like(records, 1.3, [])(JS, chosen["threshold"])), 0.9)[0]
        assert (chosen["tv"] + trial["tv"]) / 2 == pytest.approx(whole) and chosen["tv"] != trial["tv"]


def test_the_table_of_splits_counts_those_that_found_a_setting() -> None:
    chosen = {"price": 0.0, "threshold": 0.3}
    trial = {"form": "js", "budget": 0.02, "chosen": chosen, "tv": 0.01, "inside": True}
    nothing = trial | {"chosen": None, "tv": None, "inside": None}
    plan = trial | {"chosen": {"price": 2.5, "threshold": math.inf}, "tv": 0.03, "inside": False}
    lines = trial_table([trial, plan, trial | {"budget": 0.05}, nothing | {"budget": 0.05}]).splitlines()
    assert lines[2:] == [
        "| js | 0.02 | 1 of 2 | T 0.3, price 2.5 | 0.0100, 0.0300 |",
        "| js | 0.05 | 1 of 1 (of 2 splits) | T 0.3 | 0.0100 |",
    ]


def test_an_unseen_half_just_at_the_budget_is_inside() -> None:
    records = records_of(DIAL, [np.tile([50.0, 0.5], (len(DIAL), 1))] * 8)
    (trial,) = replace(records, run=runs_like(records, 1.0, [])).splits([DIAL], 0.01, 1)
    assert trial["tv"] == 0.01 and trial["inside"] is True


WAYS = list(starmap(Kind, product(["js", "tv"], ["hybrid", "paper"], ["draft"], [0.0, LEAST])))


@pytest.mark.parametrize(
    "kinds", [pytest.param(WAYS, marks=pytest.mark.slow), [WAYS[0], WAYS[3], WAYS[5], WAYS[6]]]
)
def test_calibrate_end_to_end(kinds: list[Kind], tmp_path: Path) -> None:
    """On a tiny model: what is written is what was run, and the same from rows alone when run again."""
    job = work(tmp_path, 8)
    kinds = [*kinds, *(Kind("js", "swap", price=price) for price in (0.5, 2.0, 1.0))]
    calibration, trials = calibrate(job, kinds, [0.05, 0.2], 2)
    assert {one.kind for one in calibration.thresholds} <= set(kinds) and calibration.thresholds
    for one in calibration.thresholds:
        rows = job.run(one.kind, one.threshold)
        tv = sum(row["law"]["tv"] for row in rows) / sum(row["new_tokens"] for row in rows)
        assert one.tv == pytest.approx(tv) and one.tv <= one.bound <= 0.2
    assert {one.kind.mode for one in calibration.thresholds} > {"swap"}
    warm = job.rows_of(replace(job.cell, rule=Lossless()), "rows.jsonl")
    taus = [
        sum(row["new_tokens"] for row in rows) / sum(row["steps"] for row in rows)
        for rows in (warm, job.record([]).rows)
    ]
    assert calibration.shared_ratio == pytest.approx(taus[0] / taus[1]) and taus[0] != taus[1]
    assert (calibration.confidence, calibration.prompts) == (job.confidence, 8)
    assert calibration.made["new_tokens"] == sum(row["new_tokens"] for row in job.record([]).rows)
    before = (tmp_path / "rows.jsonl").read_bytes()
    again, _ = calibrate(work(tmp_path, 8), kinds, [0.05, 0.2], 2)
    assert again == calibration and (tmp_path / "rows.jsonl").read_bytes() == before
    assert calibration_table(calibration).count("\n") == len(calibration.thresholds) + 1 and len(trials) == 16


# --- the file ---


def a_calibration(model: EagleFSD, **changes: Any) -> Calibration:
    thresholds = [
        CalibratedThreshold("js", "hybrid", "draft", t, t / 10, t / 8, 2.5, 2.2) for t in (0.1, 0.3, 0.8)
    ]
    models = model.identity()
    return replace(Calibration(models, WARM, TREE, 0.9, 40, tuple(thresholds), {"commit": "abc"}), **changes)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = a_calibration(engine())
    plan = replace(first.thresholds[0], threshold=math.inf, mode="swap", price=1.5)
    both = [first, a_calibration(engine(), sampling=SamplingConfig(), thresholds=(plan,))]
    write_calibrations(tmp_path / FILE, both)
    assert read_calibrations(tmp_path / FILE) == both
    text = (tmp_path / FILE).read_text()
    assert '"threshold": "inf"' in text and "Infinity" not in text  # which no other reader of JSON knows


def test_each_sampling_has_its_own(tmp_path: Path) -> None:
    model = engine()
    greedy, warm = a_calibration(model, sampling=SamplingConfig(), prompts=7), a_calibration(model)
    other = a_calibration(engine(head_seed=9), prompts=8)
    write_calibrations(tmp_path / FILE, [other, greedy, warm])
    model.settler.folder = tmp_path
    assert model.calibration(SamplingConfig()) == greedy and model.calibration(WARM) == warm
    with pytest.raises(ValueError, match=r"at 0/0/1, 0.9/20/0.95, none of which is as warm as 1/0/1; sample"):
        model.calibration(SamplingConfig(1.0))


def test_a_sampling_that_was_not_measured_takes_the_next_warmer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = engine()
    greedy, warm, hot = (
        a_calibration(model, sampling=one) for one in (SamplingConfig(), WARM, SamplingConfig(1.0))
    )
    write_calibrations(tmp_path / FILE, [hot, warm, greedy])
    model.settler.folder = tmp_path
    for sampling, found in (
        (SamplingConfig(0.0, 50, 0.9), greedy),  # greedy is greedy, whatever else is said
        (SamplingConfig(0.6, 20, 0.9), warm),
        (SamplingConfig(0.6, 20, 0.9, 0.1), warm),
        (SamplingConfig(0.6, 50, 0.9), hot),  # more tokens than the warm one leaves
        (SamplingConfig(0.9, 20, 0.99), hot),
        (SamplingConfig(0.95, 20, 0.95), hot),
    ):
        caplog.clear()
        assert model.calibration(sampling) == found
        assert "the next warmer sampling that was measured" in caplog.text
        measures = re.search(r"--sampling (\S+) measures", caplog.text)
        assert measures is not None and SamplingConfig.parse(measures[1]) == sampling
    caplog.clear()
    assert model.calibration(WARM) == warm and not caplog.text
    narrow, pruned = (
        a_calibration(model, sampling=one)
        for one in (SamplingConfig(1.0, 50), SamplingConfig(1.0, 50, min_p=0.05))
    )
    for order in ([hot, narrow, pruned], [pruned, narrow, hot]):  # whichever was made first
        write_calibrations(tmp_path / FILE, order)
        assert model.calibration(SamplingConfig(1.0, 20)) == narrow
        assert model.calibration(SamplingConfig(1.0, 20, min_p=0.1)) == pruned
    write_calibrations(tmp_path / FILE, [hot, warm, greedy])
    with pytest.raises(ValueError, match="none of which is as warm"):
        model.calibration(SamplingConfig(1.2, 1))
    write_calibrations(tmp_path / FILE, [hot, warm])
    with pytest.raises(ValueError, match="and not for greedy text, where it may move more"):
        model.calibration(SamplingConfig(0.0, 20, 0.9))


def test_a_budget_takes_the_fastest_plan_unless_one_is_named() -> None:
    calibration = a_calibration(engine())
    plans = [
        replace(calibration.thresholds[1], tau=tau, price=price, cost=cost)
        for tau, price, cost in ((2.7, 1.0, "tokens"), (2.9, 2.0, "tokens"), (2.8, 1.0, "kl"))
    ]
    both = replace(calibration, thresholds=[*calibration.thresholds, *plans])
    slow = replace(plans[1], threshold=0.2, tau=3.5, tau_ratio=1.1)  # lucky texts, and no better trees
    ratios = replace(both, thresholds=[slow, *(replace(one, tau_ratio=1.2) for one in plans)])
    assert Fuzzy.from_calibration(ratios, 0.04) == Fuzzy(0.3, price=2.0)
    found = partial(Fuzzy.from_calibration, both, 0.04)
    assert found() == Fuzzy(0.3, price=2.0) and found(price=0.0) == Fuzzy(0.3)
    assert found(price=1.0) == Fuzzy(0.3, price=1.0, cost="kl")
    assert found(cost="kl") == Fuzzy(0.3, price=1.0, cost="kl")
    assert found(price=1.0, cost="tokens") == Fuzzy(0.3, price=1.0)
    assert Fuzzy.from_calibration(both, 0.02) == Fuzzy(0.1)  # the plans' bound is 0.0375
    with pytest.raises(ValueError, match=r"is 0\.04 for js, any mode, draft, price 4 of any cost: it was"):
        found(price=4.0)
    with pytest.raises(
        ValueError, match="draft, any price of kl: it was calibrated for js, hybrid, draft; ask"
    ):
        Fuzzy.from_calibration(calibration, 0.04, cost="kl")
    unplanned = replace(calibration, thresholds=plans)
    with pytest.raises(ValueError, match="for js, any mode, draft, price 0: it was calibrated for js"):
        Fuzzy.from_calibration(unplanned, 0.04, price=0.0)


def test_the_largest_threshold_of_a_budget(tmp_path: Path) -> None:
    calibration = a_calibration(engine())
    for budget, threshold in ((0.0125, 0.1), (0.03, 0.1), (0.0375, 0.3), (0.5, 0.8)):
        assert Fuzzy.from_calibration(calibration, budget) == Fuzzy(threshold)
    with pytest.raises(ValueError, match=r"quality_budget is 0\.01: the smallest bound .* is 0\.0125; raise"):
        Fuzzy.from_calibration(calibration, 0.01)
    with pytest.raises(
        ValueError,
        match="for tv, any mode, draft: it was calibrated for js, hybrid, draft; ask for that, cal",
    ):
        Fuzzy.from_calibration(calibration, 0.05, "tv")
    with pytest.raises(ValueError, match="for js, paper, draft"):
        Fuzzy.from_calibration(calibration, 0.05, mode="paper")
    with pytest.raises(ValueError, match=r"for js, any mode, draft, min_gain 0\.5: it was calibrated for js"):
        Fuzzy.from_calibration(calibration, 0.05, min_gain=0.5)
    guarded = replace(calibration.thresholds[0], threshold=0.7, min_gain=0.5)
    both = replace(calibration, thresholds=[*calibration.thresholds, guarded])
    assert Fuzzy.from_calibration(both, 0.03, min_gain=0.5) == Fuzzy(0.7, min_gain=0.5)
    assert Fuzzy.from_calibration(both, 0.03) == Fuzzy(0.1)


def test_generate_reads_it_and_says_what_it_chose(tmp_path: Path) -> None:
    model = engine()
    model.settler.folder = tmp_path
    write_calibrations(tmp_path / FILE, [a_calibration(model)])
    prompt = torch.tensor(prompts_of([5]))
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": 8, "seed": 3}
    output = model.generate(prompt, rule=AutoThreshold(0.04), tree=AutoTree(), **sampling)
    assert output.rule == Fuzzy(0.3) and output.tree == TREE
    plain = model.generate(prompt, rule=Fuzzy(0.3), tree=TREE, **sampling)
    assert output.new_tokens == plain.new_tokens
    assert model.generate(prompt, rule=AutoThreshold(0.04), **sampling).tree == TREE
    named = model.generate(prompt, rule=AutoThreshold(0.04), tree=TreeConfig(4, 3, 2), **sampling)
    assert named.tree == TreeConfig(4, 3, 2)
    stream = model.stream(prompt, rule=AutoThreshold(0.04), tree=AutoTree(), **sampling)
    assert stream.rule == Fuzzy(0.3) and [t for chunk in stream for t in chunk] == output.new_tokens[0]


def test_sizes_of_a_tree_that_are_given_are_kept_beside_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = engine(), []
    model.settler.folder = tmp_path
    write_calibrations(tmp_path / FILE, [a_calibration(model)])

    def measure(wanted: AutoTree, rule: AcceptanceRule, *_: object) -> SimpleNamespace:
        asked.append((wanted, rule))
        return SimpleNamespace(tree=TreeConfig(3, 2, 1))

    monkeypatch.setattr(model.settler, "choose_tree", measure)
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": 4}
    for wanted, found in ((AutoTree(depth=2), TreeConfig(3, 2, 1)), (AutoTree(), TREE)):
        output = model.generate(prompts_of([5]), rule=AutoThreshold(0.04), tree=wanted, **sampling)
        assert output.tree == found and output.rule == Fuzzy(0.3)
    assert asked == [(AutoTree(depth=2), Fuzzy(0.3))]


def plans_of(calibration: Calibration, price: float, **changes: Any) -> Calibration:
    """Return the calibration with a plan of this price in place of each threshold."""
    plans = (replace(one, mode="swap", price=price) for one in calibration.thresholds)
    return replace(calibration, thresholds=tuple(plans), **changes)


def test_a_budget_holds_for_the_tree_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan up to the tree it was measured with, and a rule without a plan from there on; else it warns."""
    model, large = engine(), TreeConfig(20, 5, 4)
    model.settler.folder = tmp_path
    found = a_calibration(model)
    small_plan, large_plan = plans_of(found, 2.0), plans_of(found, 3.0, tree=large, device="cuda")
    plan, larger_plan, rule = (
        Fuzzy(0.3, mode="swap", price=2.0),
        Fuzzy(0.3, mode="swap", price=3.0),
        Fuzzy(0.3),
    )
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": 2}

    def rule_with(tree: TreeConfig | AutoTree | None, *known: Calibration) -> AcceptanceRule:
        caplog.clear()
        write_calibrations(tmp_path / FILE, known)
        model.settler._told.clear()
        return model.generate(prompts_of([5]), rule=AutoThreshold(0.04), tree=tree, **sampling).rule

    warned = "a text may change more"
    for tree, known, taken in (
        *((one, [small_plan, large_plan], plan) for one in (None, TREE, TreeConfig(4, 2, 3))),
        *(
            (one, [small_plan, large_plan], larger_plan)
            for one in (large, TreeConfig(8, 4, 3), TreeConfig(8, 3, 4))
        ),
        *((one, [found], rule) for one in (None, TREE, TreeConfig(9, 2, 8), TreeConfig(30, 5, 4))),
        (TreeConfig(30, 5, 4), [small_plan, large_plan, found], rule),  # whose plans are smaller
        (TreeConfig(4, 3, 2), [small_plan, found], plan),
    ):
        assert rule_with(tree, *known) == taken and warned not in caplog.text
    for tree, known, taken in (
        (TreeConfig(30, 5, 4), [small_plan], plan),
        (TreeConfig(8, 3, 2), [found], rule),
        (TreeConfig(8, 2, 4), [found], rule),
        (TreeConfig(7, 3, 3), [found], rule),
    ):
        assert rule_with(tree, *known) == taken and warned in caplog.text
    assert "measured with trees of 8/3/3: with 7/3/3 a text" in caplog.text and "--tree 7/3/3" in caplog.text
    sure = plans_of(found, 2.0, tree=replace(TREE, min_confidence=0.1))
    for least, holds in ((0.1, True), (0.2, True), (0.05, False), (0.0, False)):
        assert rule_with(replace(TREE, min_confidence=least), sure) == plan
        assert (warned not in caplog.text) == holds, "with a lower confidence a tree has more nodes"
    assert rule_with(TREE, sure, found) == rule and warned not in caplog.text
    sure = replace(found, tree=replace(TREE, min_confidence=0.1))
    for tree, holds in ((sure.tree, True), (TREE, False), (replace(TREE, total_tokens=9), True)):
        assert rule_with(tree, sure) == rule
        assert (warned not in caplog.text) == holds, "more nodes make up for a lower confidence"
    faster = plans_of(found, 2.0, shared_ratio=99.0)  # lossless text is, and changes with no tree
    assert rule_with(TreeConfig(30, 5, 4), faster) == Lossless() and warned not in caplog.text

    def measure(*_: object) -> SimpleNamespace:
        return SimpleNamespace(tree=large)

    monkeypatch.setattr(model.settler, "choose_tree", measure)
    assert rule_with(AutoTree(depth=5), small_plan, large_plan) == larger_plan and warned not in caplog.text
    sure = replace(large_plan, tree=replace(large, min_confidence=0.1))
    assert rule_with(AutoTree(depth=5), sure) == larger_plan and warned in caplog.text


def test_what_differs_from_a_budgets_texts_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = engine()
    model.settler.folder = tmp_path
    write_calibrations(tmp_path / FILE, [a_calibration(model)])
    asked = {"rule": AutoThreshold(0.04), "top_k": 20, "top_p": 0.95, "max_new_tokens": 2}
    for nodes, temperature, warnings in ((7, 0.9, 1), (7, 0.9, 1), (6, 0.9, 2), (7, 0.8, 3), (6, 0.8, 3)):
        model.generate(prompts_of([5]), tree=TreeConfig(nodes, 3, 3), temperature=temperature, **asked)
        assert len(caplog.records) == warnings


def test_a_tree_takes_the_rule_with_the_nearest_tree() -> None:
    """Not one of another kind or a colder sampling, nor one whose gain on a larger tree is larger."""
    model, tree = engine(), TreeConfig(16, 5, 8)
    rules = a_calibration(model)
    exact, large, larger = (
        replace(
            rules,
            tree=size,
            thresholds=(replace(rules.thresholds[0], mode="swap", price=2.0, tau_ratio=ratio),),
        )
        for size, ratio in ((tree, 1.1), (TreeConfig(20, 5, 8), 1.2), (TreeConfig(60, 6, 10), 1.3))
    )
    find = partial(find_calibration, models=model.identity(), sampling=WARM, device="cpu", tree=tree)
    free = AutoThreshold()
    assert find([rules, larger, large, exact], wanted=free) is exact
    assert find([rules, larger, large], wanted=free) is large
    assert find([rules, larger, large], wanted=AutoThreshold(price=0.0)) is rules
    hot, cold = (replace(large, sampling=one) for one in (SamplingConfig(1.0), SamplingConfig(0.6, 20, 0.9)))
    small = plans_of(rules, 2.0)
    assert find([cold, small, hot], wanted=free) is hot and find([cold, small], wanted=free) is small
    bold = replace(large, thresholds=(replace(large.thresholds[0], bound=0.5),))
    assert find([bold, hot], wanted=free) is hot and find([bold, small], wanted=free) is bold
    greedy = replace(large, sampling=SamplingConfig())
    assert find([greedy, small], sampling=SamplingConfig(), wanted=free) is greedy


SHIPPED = read_calibrations(shipped_head("smollm2-135m") / FILE)


@pytest.mark.parametrize(
    "one", SHIPPED, ids=lambda one: f"{one.sampling.temperature}-{one.tree}-{one.device}"
)
def test_a_named_tree_takes_what_was_calibrated_with_it(one: Calibration) -> None:
    """Whatever other trees the shipped head has: the chat and the server name the calibration's own."""
    for budget in (0.02, 0.05):
        for kind in ({}, {"price": 0.0}):
            wanted = AutoThreshold(budget, **kind)
            if any(each.bound <= budget for each in one.fitting(wanted, None)):
                found = find_calibration(SHIPPED, one.models, one.sampling, "cpu", wanted, one.tree)
                assert found.for_tree(wanted, one.tree).find(wanted) == one.find(wanted)


def test_a_budget_takes_lossless_text_where_that_is_fastest(tmp_path: Path) -> None:
    """But not where a rule is asked for, nor at a colder sampling, whose drafts do not know the noise."""
    model = engine()
    model.settler.folder = tmp_path
    found = a_calibration(model)
    ratios = (1.05, 1.1, 1.3)  # the last one's bound is outside the budget
    rules = tuple(replace(one, tau_ratio=ratio) for one, ratio in zip(found.thresholds, ratios, strict=True))
    asked = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": 4, "tree": AutoTree()}
    for ratio, wanted, changes, rule in (
        (1.2, AutoThreshold(0.04), {}, Lossless()),
        (1.1, AutoThreshold(0.04), {}, Fuzzy(0.3)),
        (1.2, AutoThreshold(0.04, mode="hybrid"), {}, Fuzzy(0.3)),
        (1.2, AutoThreshold(0.04), {"temperature": 0.7}, Fuzzy(0.3)),
        (1.2, AutoThreshold(0.04), {"top_p": 0.9}, Fuzzy(0.3)),  # of the calibration of a warmer one
        (0.0, AutoThreshold(0.04), {}, Fuzzy(0.3)),
        (1.2, AutoThreshold(0.001), {}, Lossless()),  # which no rule keeps
    ):
        write_calibrations(tmp_path / FILE, [replace(found, thresholds=rules, shared_ratio=ratio)])
        if rule == Lossless():  # whose tree is not the calibration's
            changes = {"tree": TREE}
        made = model.generate(torch.tensor(prompts_of([5])), rule=wanted, **{**asked, **changes})
        assert made.rule == rule and made.tree == TREE


def test_text_without_a_draft_is_inside_every_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = engine(), {"tree": TreeConfig(1), "max_new_tokens": 4}
    own = model.generate(prompts_of([5]), **asked)
    for folder, wanted in ((tmp_path, AutoThreshold(0.04, mode="paper")), (None, AutoThreshold(0.0))):
        model.settler.folder = folder
        made = model.generate(prompts_of([5]), rule=wanted, **asked)
        assert made.rule == Lossless() and made.new_tokens == own.new_tokens
    model.settler.folder = tmp_path
    write_calibrations(tmp_path / FILE, [a_calibration(model)])
    measured = SimpleNamespace(tree=TreeConfig(1))  # where no draft pays
    monkeypatch.setattr(model.settler, "choose_tree", lambda *_: measured)
    asked |= {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "tree": AutoTree(depth=2)}
    made = model.generate(prompts_of([5]), rule=AutoThreshold(0.04), **asked)
    assert made.rule == Lossless() and made.tree == TreeConfig(1)


def test_a_warmer_sampling_than_all_is_lossless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which keeps every budget; unless it is cool, or a rule is asked for by name."""
    model = engine()
    model.settler.folder = tmp_path
    write_calibrations(tmp_path / FILE, [a_calibration(model)])
    prompt = torch.tensor(prompts_of([5]))
    made = model.generate(prompt, rule=AutoThreshold(0.04), temperature=1.3, max_new_tokens=4, tree=TREE)
    assert made.rule == Lossless()
    assert "no calibration is as warm as 1.3/0/1" in caplog.text and "inside every budget" in caplog.text
    for temperature, wanted in ((1.3, AutoThreshold(0.04, mode="hybrid")), (0.7, AutoThreshold(0.04))):
        with pytest.raises(ValueError, match="none of which is as warm as"):
            model.generate(prompt, rule=wanted, temperature=temperature, max_new_tokens=4, tree=TREE)


def test_it_says_when_the_weights_were_in_another_format(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = engine()
    model.settler.folder = tmp_path
    caplog.set_level(logging.INFO, "eagle_fsd")
    for made, said in (({}, 0), ({"weight_format": "float32"}, 0), ({"weight_format": "packed"}, 1)):
        caplog.clear()
        write_calibrations(tmp_path / FILE, [a_calibration(model, made=made)])
        model.generate(
            [[1, 2]], rule=AutoThreshold(0.04), temperature=0.9, top_k=20, top_p=0.95, max_new_tokens=1
        )
        lines = [line for line in caplog.messages if "measured with weights" in line]
        assert len(lines) == said and all(record.levelname != "WARNING" for record in caplog.records)
        assert all("measured with weights in packed, and these are in float32" in line for line in lines)


def test_another_name_is_the_same_target(tmp_path: Path) -> None:
    model = engine()
    models = a_calibration(model).models
    other = {**models, "target": {**models["target"], "name": "elsewhere"}}
    assert find_calibration([a_calibration(model, models=other)], models, WARM, "cpu")


def test_each_kind_of_device_has_its_own_if_there_is_one(tmp_path: Path) -> None:
    """A GPU has larger trees. What it has no calibration of is as on a CPU, and the other way round."""
    model = engine()
    small, large = (a_calibration(model, device=device) for device in ("cpu", "cuda"))
    hot = a_calibration(model, sampling=SamplingConfig(1.0))
    models, both = model.identity(), [hot, large, small]
    for device, mine in (("cpu", small), ("cuda", large)):
        assert find_calibration(both, models, WARM, device) is mine
        assert find_calibration(both, models, SamplingConfig(0.6, 20, 0.9), device) is mine
        assert find_calibration(both, models, SamplingConfig(1.0), device) is hot
        assert find_calibration([mine], models, WARM, "cuda" if device == "cpu" else "cpu") is mine
    plan = replace(large, thresholds=(replace(large.thresholds[0], mode="swap", price=2.0),))
    for asked, mine in ((AutoThreshold(price=0.0), small), (AutoThreshold(mode="swap"), plan)):
        assert find_calibration([plan, small], models, WARM, "cuda", asked) is mine
    assert with_calibration(both, replace(large, prompts=7)) == [hot, small, replace(large, prompts=7)]
    write_calibrations(tmp_path / FILE, both)
    assert [one.device for one in read_calibrations(tmp_path / FILE)] == ["cpu", "cuda", "cpu"]
    with pytest.raises(ValueError, match="device is 'tpu': it must be one of cpu, cuda; choose one"):
        a_calibration(model, device="tpu")


def test_an_engine_asks_for_its_own_kind_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine()
    small, large = (a_calibration(model, device=device) for device in ("cpu", "cuda"))
    model.settler.folder = tmp_path
    write_calibrations(tmp_path / FILE, [large, small])
    for kind, found in (("cpu", small), ("cuda", large), ("mps", large)):
        monkeypatch.setattr(model.target, "device", torch.device(kind))
        assert model.calibration(WARM) == found


def test_float16_says_what_serves_instead() -> None:
    half = EagleFSD(TargetModel(tiny_model().half()), tiny_head().half())
    with pytest.raises(ValueError, match=r"target.weights was .* float16 rounds weights in another way"):
        find_calibration([a_calibration(engine())], half.identity(), WARM, "cpu")


def test_it_serves_the_same_weights_in_another_dtype() -> None:
    """In bfloat16, which is the default on a GPU, budgets are those of float32; other weights have none."""

    def of_dtype(dtype: torch.dtype, head_seed: int = 0) -> EagleFSD:
        return EagleFSD(TargetModel(tiny_model().to(dtype)), tiny_head(head_seed).to(dtype))

    found, half = a_calibration(of_dtype(torch.float32)), of_dtype(torch.bfloat16)
    assert found.models != half.identity(), "rows of a sweep are of one dtype"
    assert find_calibration([found], half.identity(), WARM, "cpu") is found
    mixed = EagleFSD(TargetModel(tiny_model()), tiny_head(), head_dtype=torch.bfloat16)
    assert find_calibration([found], mixed.identity(), WARM, "cpu") is found
    assert mixed.identity() not in (found.models, half.identity())
    with pytest.raises(ValueError, match=r"made for another target or head .head was"):
        find_calibration([found], of_dtype(torch.bfloat16, head_seed=9).identity(), WARM, "cpu")


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        ("no file", f"there is no {FILE} beside the head"),
        ("no folder", "and no head was loaded from one"),
        ("head", "was made for another target or head"),
        ("target", "was made for another target or head"),
        ("sampling", "it was calibrated at 0.9/20/0.95, none of which is as warm as 0.6/50/0.9"),
        ("broken", "is not a calibration .*; delete it, then calibrate it with eval/calibrate.py, or "),
        ("old", "is not a calibration .its version is 2: it must be 3.; delete it, then calibrate it "),
        ("fields", "is not a calibration"),
    ],
)
def test_what_does_not_fit_is_refused(spoil: str, line: str, tmp_path: Path) -> None:
    model, maker = engine(), engine(head_seed=9) if spoil == "head" else engine()
    if spoil == "target":
        next(iter(maker.target.model.parameters())).data += 0.1
    model.settler.folder = None if spoil == "no folder" else tmp_path
    file = tmp_path / FILE
    if spoil != "no file":
        write_calibrations(file, [a_calibration(maker)])
    data = json.loads(file.read_text()) if file.exists() else {}
    if spoil == "broken":
        file.write_text(file.read_text()[:90])
    if spoil == "old":
        file.write_text(json.dumps({**data, "version": 2}))
    if spoil == "fields":
        file.write_text(json.dumps({**data, "calibrations": [{"thresholds": [{"threshold": 0.3}]}]}))
    sampling = SamplingConfig(0.6, 50, 0.9) if spoil == "sampling" else WARM
    with pytest.raises(ValueError, match=line):
        model.generate(
            torch.tensor(prompts_of([5])),
            rule=AutoThreshold(),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )


# --- the script ---


def test_the_script_writes_and_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = engine()
    model.settler.folder = tmp_path / "head"
    model.head_folder.mkdir()
    for name in "ab":
        lines = [json.dumps({"prompt": f"say {n} {name}"}) + "\n" for n in range(4)]
        (tmp_path / f"prompts_{name}.jsonl").write_text("".join(lines))
    monkeypatch.setattr(sweep, "encode_as_trained", lambda _, messages: [len(messages[0]["content"]), 7, 8])
    monkeypatch.setattr(script, "load_engine", lambda _: model)
    argv = f"--prompts {tmp_path}/prompts_a.jsonl {tmp_path}/prompts_b.jsonl --limit 3"
    argv += " --quality-budget 0.3 0.1 0.3 --price 0 1 --cost kl --child draft target"
    argv += f" --divergence js --tree 6/2/3 --max-new-tokens 6 --splits 2 --install --output {tmp_path}/out"
    script.main(argv.split())
    printed = capsys.readouterr().out
    assert "| js, hybrid, draft, price 1 of kl |" in printed
    assert "| js, hybrid, target |" in printed
    assert "| js, hybrid, draft |" in printed and "of 2" in printed
    (found,) = read_calibrations(tmp_path / "head" / FILE)
    assert [found] == read_calibrations(tmp_path / "out" / FILE) and found.prompts == 6
    assert str(tmp_path) not in json.dumps({k: v for k, v in found.made.items() if k != "command"})
    assert len(json.loads((tmp_path / "out" / "splits.json").read_text())) == 8  # by child and budget
    output = model.generate(
        torch.tensor([[5, 7, 8]]),
        rule=AutoThreshold(0.3),
        temperature=0.6,
        top_k=50,
        top_p=0.9,
        max_new_tokens=4,
    )
    assert isinstance(output.rule, Fuzzy) and output.rule.threshold in LADDER
    script.main(f"{argv} --splits 0".split())  # those of an earlier run would pass for its own
    assert not (tmp_path / "out" / "splits.json").exists()


def test_a_calibration_without_thresholds_replaces_none(tmp_path: Path) -> None:
    calibration = a_calibration(engine())
    write_calibrations(tmp_path / FILE, [calibration])
    with pytest.raises(ValueError, match="install: no threshold stays inside the budget"):
        script.install(tmp_path, replace(calibration, thresholds=()))
    assert read_calibrations(tmp_path / FILE) == [calibration]


def test_install_replaces_the_same_setting_and_keeps_the_others(tmp_path: Path) -> None:
    model = engine()
    first, greedy = a_calibration(model), a_calibration(model, sampling=SamplingConfig())
    other = a_calibration(engine(head_seed=9))
    for one in (first, greedy, other):
        script.install(tmp_path, one)
    again = replace(first, prompts=41)
    script.install(tmp_path, again)
    assert read_calibrations(tmp_path / FILE) == [greedy, other, again]
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="is not a calibration"):
        script.install(tmp_path, first)
    assert (tmp_path / FILE).read_text() == "{"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--divergence hellinger", "divergence is 'hellinger': it must be one of"),
        ("--quality-budget 2", "quality_budget is 2.0"),
        ("--confidence 1", "confidence is 1.0"),
        ("--sampling hot", "sampling is 'hot'"),
        ("--splits -1", "splits is -1"),
        ("--splits 3", "splits is 3: one prompt cannot be halved"),
        ("--confidence 0.5", "confidence is 0.5"),
        ("--limit 0", "limit is 0"),
        ("--skip -1", "skip is -1"),
        ("--prompts /nowhere.jsonl", "/nowhere.jsonl"),
    ],
)
def test_mistakes_are_one_line(
    arguments: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "load_engine", lambda _: engine())
    monkeypatch.setattr(sweep, "encode_as_trained", lambda *_: [5, 7, 8])
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi"}\n')
    argv = f"--prompts {tmp_path}/a.jsonl --output {tmp_path}/out {arguments}"
    with pytest.raises(SystemExit) as ending:
        script.main(argv.split())
    assert ending.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("field", ["divergence", "mode", "child", "cost"])
def test_a_name_that_no_rule_has_is_refused_at_once_as_by_a_rule(field: str) -> None:
    lines = []
    for kind in (AutoThreshold, Fuzzy):
        with pytest.raises(ValueError, match=f"^{field} is 'hybrd': it must be one of ") as error:
            kind(**{field: "hybrd"})
        lines.append(str(error.value))
    assert lines[0] == lines[1]
