"""Bootstrap intervals: against a plain twin, coverage of a known truth, what pairing is worth, edge cases."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from eagle_fsd.evaluation.analysis import bootstrap
from eagle_fsd.evaluation.analysis.bootstrap import (
    Array,
    Bootstrap,
    Change,
    Estimate,
    changes,
    estimates,
    expanded_tail,
    student_t,
)

QUICK = Bootstrap(resamples=1000)


def ratio_of(numerator: np.ndarray, denominator: np.ndarray) -> Array:
    return np.stack((numerator, denominator), axis=-1)[:, None]


def mean_of(values: np.ndarray) -> Array:
    return ratio_of(np.asarray(values, float), np.ones(len(values)))


def change(mine: Array, base: Array, how: Bootstrap = QUICK) -> Change:
    return changes({"x": np.hstack((mine, base))}, how)["x"]


def width(found: Estimate) -> float:
    assert found.low is not None and found.high is not None
    return found.high - found.low


# --- against the plain twin ---


def plain_interval(statistic: list[float], samples: int, confidence: float) -> tuple[float, float]:
    """Expanded percentiles, by sorting a list."""
    known = sorted(value for value in statistic if not math.isnan(value))
    below = int(expanded_tail((1 - confidence) / 2, samples) * (len(known) - 1))
    return known[below], known[-1 - below]


def test_the_intervals_are_the_plain_twins() -> None:
    """One resample after the other, one sample after the other, without counts or matrices."""
    random = np.random.default_rng(3)
    tokens, steps = random.integers(5, 90, 11), random.integers(3, 40, 11)
    base_tokens, base_steps = random.integers(5, 90, 11), random.integers(3, 40, 11)
    how = Bootstrap(resamples=300, confidence=0.8, seed=5)
    own, difference, ratio = [], [], []
    for drawn in np.random.default_rng(5).integers(0, 11, (300, 11)):
        mine = sum(int(tokens[i]) for i in drawn) / sum(int(steps[i]) for i in drawn)
        base = sum(int(base_tokens[i]) for i in drawn) / sum(int(base_steps[i]) for i in drawn)
        own, difference, ratio = [*own, mine], [*difference, mine - base], [*ratio, mine / base]
    mine_sums, base_sums = ratio_of(tokens * 1.0, steps * 1.0), ratio_of(base_tokens * 1.0, base_steps * 1.0)
    alone = estimates({"tau": mine_sums}, how)["tau"]
    found = change(mine_sums, base_sums, how)
    whole, base_whole = tokens.sum() / steps.sum(), base_tokens.sum() / base_steps.sum()
    assert found.ratio is not None
    for estimate, value, statistic in (
        (alone, whole, own),
        (found.difference, whole - base_whole, difference),
        (found.ratio, whole / base_whole, ratio),
    ):
        assert estimate.value == pytest.approx(value) and estimate.samples == 11
        assert (estimate.low, estimate.high) == pytest.approx(plain_interval(statistic, 11, 0.8))


def test_a_quantity_does_not_depend_on_those_beside_it() -> None:
    random = np.random.default_rng(0)
    one, other = mean_of(random.random(20)), mean_of(random.random(20))
    assert estimates({"a": one, "b": other}, QUICK)["b"] == estimates({"b": other}, QUICK)["b"]


def test_the_seed_is_all_the_chance_there_is() -> None:
    values = mean_of(np.random.default_rng(0).random(25))
    first = estimates({"x": values}, Bootstrap(1000, seed=1))
    assert first == estimates({"x": values}, Bootstrap(1000, seed=1))
    assert first != estimates({"x": values}, Bootstrap(1000, seed=2))


# --- coverage ---


def coverage(truth: float, found: list[Estimate]) -> float:
    return float(np.mean([one.low <= truth <= one.high for one in found]))


@pytest.mark.parametrize(("samples", "plain"), [(8, 0.9), (60, 0.95)])
def test_intervals_of_a_mean_cover_it_as_often_as_promised(
    samples: int, plain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Percentiles that are not expanded cover too little, at few samples far too little."""
    random = np.random.default_rng(7)
    values = {str(trial): mean_of(random.normal(1.5, 2, samples)) for trial in range(1500)}
    found = coverage(1.5, list(estimates(values, QUICK).values()))
    assert 0.92 <= found <= 0.97
    monkeypatch.setattr(bootstrap, "expanded_tail", lambda tail, _: tail)
    assert coverage(1.5, list(estimates(values, QUICK).values())) < min(found, plain)


def test_intervals_of_a_ratio_of_sums_cover_it() -> None:
    """Heavy-tailed lengths, and steps that go with them: the ratio of expectations is what is covered."""
    random = np.random.default_rng(11)
    columns = {}
    for trial in range(1500):
        steps = random.lognormal(3, 0.6, 60)
        columns[str(trial)] = ratio_of(steps * random.normal(2.4, 0.5, 60), steps)
    assert 0.92 <= coverage(2.4, list(estimates(columns, QUICK).values())) <= 0.97


def test_intervals_of_paired_changes_cover_them() -> None:
    """What a sample has of its own is large, and the same on both sides."""
    random = np.random.default_rng(13)
    pairs = {}
    for trial in range(800):
        tokens, own = random.lognormal(4, 0.5, 50), random.normal(-0.6, 0.3, 50)
        base = ratio_of(tokens * own, tokens)
        mine = ratio_of(tokens * (own - 0.05 + random.normal(0, 0.02, 50)), tokens)
        pairs[str(trial)] = np.hstack((mine, base))
    found = changes(pairs, QUICK)
    assert 0.92 <= coverage(-0.05, [one.difference for one in found.values()]) <= 0.975
    assert np.mean([one.difference.high < 0 for one in found.values()]) > 0.99  # and the loss is seen


# --- pairing ---


def test_pairs_that_are_shuffled_lose_what_pairing_gains() -> None:
    random = np.random.default_rng(17)
    hard = random.normal(0, 1, 80)
    mine, base = hard + 0.1 + random.normal(0, 0.05, 80), hard
    paired = change(mean_of(mine), mean_of(base))
    shuffled = change(mean_of(mine), mean_of(random.permutation(base)))
    assert paired.difference.value == pytest.approx(shuffled.difference.value)
    assert width(paired.difference) < 0.1 * width(shuffled.difference)
    assert paired.difference.low > 0 > shuffled.difference.low


def test_a_ratio_is_of_sums_not_a_mean_of_ratios() -> None:
    mine, base = ratio_of(np.array([90.0, 10.0]), np.array([30.0, 10.0])), mean_of(np.array([1.0, 1.0]))
    assert change(mine, base).ratio.value == 2.5


# --- edges ---


def test_one_sample_has_a_value_and_no_interval() -> None:
    found = change(mean_of(np.array([3.0])), mean_of(np.array([2.0])))
    assert found.difference == Estimate(1.0, None, None, 1) and found.ratio == Estimate(1.5, None, None, 1)


def test_samples_that_are_all_equal_have_an_interval_of_one_point() -> None:
    found = change(mean_of(np.full(9, 3.0)), mean_of(np.full(9, 2.0)))
    assert found.difference == Estimate(1.0, 1.0, 1.0, 9) and found.ratio == Estimate(1.5, 1.5, 1.5, 9)


def test_a_ratio_to_nothing_is_not_given() -> None:
    found = change(mean_of(np.arange(5)), mean_of(np.zeros(5)))
    assert found.ratio is None and found.difference.value == 2.0


def test_no_sample_no_estimate() -> None:
    nothing = ratio_of(np.zeros(4), np.zeros(4))
    assert estimates({"x": nothing}, QUICK) == {} and estimates({}, QUICK) == {}
    known = mean_of(np.ones(4))
    pairs = {"x": np.hstack((nothing, known)), "y": np.hstack((known, nothing))}
    assert changes(pairs, QUICK) == {} == changes({}, QUICK)


def test_samples_without_a_part_do_not_count() -> None:
    """A quantity that half of the samples lack is as sure as over the other half alone."""
    values = np.random.default_rng(19).normal(0, 1, 40)
    gaps = ratio_of(np.concatenate([values, np.zeros(40)]), np.repeat([1.0, 0.0], 40))
    known, whole = estimates({"x": gaps}, QUICK)["x"], estimates({"x": mean_of(values)}, QUICK)["x"]
    assert known.samples == 40 and known.value == pytest.approx(whole.value)
    assert width(known) == pytest.approx(width(whole), rel=0.15)


def test_a_resample_that_draws_nothing_is_left_out() -> None:
    rare = ratio_of(np.array([4.0, 6.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0, 0.0]))
    found = estimates({"x": rare}, QUICK)["x"]
    assert (found.value, found.low, found.high, found.samples) == (5.0, 4.0, 6.0, 2)


def test_fewer_samples_cut_off_less() -> None:
    tails = [expanded_tail(0.025, samples) for samples in (3, 5, 20, 100, 10_000)]
    assert tails[1] == pytest.approx(0.00095, rel=0.05)  # t of 4 degrees is -2.776, times sqrt(5 / 4)
    assert tails == sorted(tails) and tails[0] < 0.001 and tails[-1] == pytest.approx(0.025, rel=0.01)


@pytest.mark.parametrize("freedom", [2, 3, 7, 30, 500])
def test_students_t_is_scipys(freedom: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    for tail in (0.005, 0.025, 0.1):
        assert student_t(tail, freedom) == pytest.approx(stats.t.ppf(tail, freedom), rel=0.06)
    assert student_t(0.025, freedom) == pytest.approx(stats.t.ppf(0.025, freedom), rel=0.01)


def test_a_scaled_estimate_keeps_its_interval_in_order() -> None:
    assert Estimate(1.0, 0.0, 2.0, 5).scaled(-2) == Estimate(-2.0, -4.0, 0.0, 5)
    assert Estimate(1.0, 0.0, 2.0, 5).scaled(1, shift=-1.0) == Estimate(0.0, -1.0, 1.0, 5)
    assert Estimate(3.0, 2.0, 5.0, 5).scaled(-2, shift=-1.0) == Estimate(-4.0, -8.0, -2.0, 5)
    assert Estimate(1.0, None, None, 1).scaled(-1) == Estimate(-1.0, None, None, 1)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"resamples": 10}, "resamples is 10: it must be an integer of at least 100"),
        ({"confidence": 1.0}, "confidence is 1.0"),
    ],
)
def test_intervals_that_cannot_be(wrong: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Bootstrap(**wrong)


def test_memory_does_not_grow_with_what_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many samples the counts are kept, of two bytes each, and a part of them is multiplied at a time."""
    sums = mean_of(np.random.default_rng(0).random(3000))
    whole = estimates({"x": sums}, QUICK)["x"]
    monkeypatch.setattr(bootstrap, "COUNTS", 2**16)
    bootstrap.draw_counts.cache_clear()
    tracemalloc.start()
    parts = estimates({"x": sums}, QUICK)["x"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * bootstrap.draw_counts(3000, QUICK.resamples, QUICK.seed).nbytes
    for name in ("value", "low", "high"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)
