"""GenerationStats keeps its invariants; Stopwatch adds up and reads no device unless told to."""

from __future__ import annotations

import json
import random

import pytest

from eagle_fsd.core.stats import PHASES, GenerationStats, Stopwatch


def check_invariants(stats: GenerationStats) -> None:
    histogram = stats.accept_histogram
    assert sum(histogram) == stats.steps
    assert sum(k * count for k, count in enumerate(histogram)) == stats.new_tokens
    assert stats.exact_accepts + stats.fuzzy_accepts <= stats.new_tokens
    if stats.steps:
        assert stats.tau == stats.new_tokens / stats.steps


def random_run(seed: int, steps: int) -> GenerationStats:
    rng = random.Random(seed)
    stats = GenerationStats()
    for _ in range(steps):
        emitted = rng.randint(1, 7)
        exact = rng.randint(0, emitted - 1)
        stats.record(emitted, exact, rng.randint(0, emitted - exact))
        check_invariants(stats)
    return stats


def test_empty() -> None:
    stats = GenerationStats()
    assert (stats.tau, stats.tokens_per_second) == (0.0, 0.0)
    assert stats.accept_histogram == []
    assert stats.finish_reason is None
    check_invariants(stats)


def test_record() -> None:
    stats = GenerationStats()
    stats.record(emitted=3, exact=1, fuzzy=1)
    stats.record(emitted=1, exact=0, fuzzy=0)
    stats.record(emitted=3, exact=2, fuzzy=0)
    assert (stats.steps, stats.new_tokens, stats.exact_accepts, stats.fuzzy_accepts) == (3, 7, 3, 1)
    assert stats.accept_histogram == [0, 1, 0, 2]
    assert stats.tau == 7 / 3


@pytest.mark.parametrize("seed", range(5))
def test_histogram_invariants(seed: int) -> None:
    random_run(seed, 40)


def test_trap_17_tau_counts_the_targets_own_token() -> None:
    plain, all_rejected = GenerationStats(), GenerationStats()
    for _ in range(10):
        plain.record(emitted=1, exact=0, fuzzy=0)
        all_rejected.record(emitted=1, exact=0, fuzzy=0)
    assert plain.tau == all_rejected.tau == 1.0
    full_path = GenerationStats()
    full_path.record(emitted=6, exact=5, fuzzy=0)  # five drafted tokens and the target's own
    assert full_path.tau == 6.0


def test_step_truncated_at_an_end_token_may_hold_drafted_tokens_alone() -> None:
    stats = GenerationStats()
    stats.record(emitted=2, exact=2, fuzzy=0)
    check_invariants(stats)


@pytest.mark.parametrize("step", [(0, 0, 0), (-1, 0, 0), (2, -1, 0), (2, 0, -1), (2, 2, 1)], ids=str)
def test_impossible_step(step: tuple[int, int, int]) -> None:
    emitted, exact, fuzzy = step
    stats = GenerationStats()
    with pytest.raises(ValueError, match=f"emitted={emitted}"):
        stats.record(emitted, exact, fuzzy)
    assert stats == GenerationStats()


def test_to_dict_is_json_and_complete() -> None:
    stats = random_run(1, 5)
    stats.seconds, stats.finish_reason = 2.0, "stop"
    data = json.loads(json.dumps(stats.to_dict()))
    assert set(data) == {
        "steps", "new_tokens", "tau", "exact_accepts", "fuzzy_accepts", "accept_histogram", "seconds",
        "prefill_seconds", "draft_seconds", "verify_seconds", "accept_seconds", "keep_seconds",
        "tokens_per_second", "finish_reason", "sources", "reused_tokens",
    }  # fmt: skip
    assert data["tokens_per_second"] == stats.new_tokens / 2.0
    assert data["tau"] == stats.tau
    data["accept_histogram"].append(9)
    stats.to_dict()["accept_histogram"].append(9)  # a copy: the caller cannot break the record
    check_invariants(stats)


def test_total() -> None:
    parts = [random_run(seed, 3 + 5 * seed) for seed in range(4)]
    for i, part in enumerate(parts):
        part.seconds, part.draft_seconds, part.finish_reason = 1.0 + i, 0.25, "length"
        part.reused_tokens = 10**i
    whole = GenerationStats.total(parts)
    check_invariants(whole)
    assert whole.steps == sum(part.steps for part in parts)
    assert whole.new_tokens == sum(part.new_tokens for part in parts)
    assert whole.exact_accepts == sum(part.exact_accepts for part in parts)
    assert whole.fuzzy_accepts == sum(part.fuzzy_accepts for part in parts)
    assert whole.reused_tokens == 1111
    assert (whole.seconds, whole.draft_seconds, whole.finish_reason) == (10.0, 1.0, "length")
    together = GenerationStats.total(parts, concurrent=True)
    assert (together.seconds, together.draft_seconds, together.steps) == (4.0, 0.25, whole.steps)
    parts[0].finish_reason = "stop"
    assert GenerationStats.total(parts).finish_reason is None


def test_total_of_none_and_of_one() -> None:
    assert GenerationStats.total([]) == GenerationStats()
    one = random_run(3, 4)
    one.finish_reason = "stop"
    whole = GenerationStats.total([one])
    assert whole == one
    whole.record(1, 0, 0)  # shares nothing with its part
    check_invariants(one)
    check_invariants(whole)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("eagle_fsd.core.stats.time.perf_counter", clock)
    return clock


def test_stopwatch_adds_up_per_phase(clock: Clock) -> None:
    watch = Stopwatch()
    for seconds in (1.0, 2.0):
        with watch("draft"):
            clock.now += seconds
        clock.now += 100
        with watch("verify"):
            clock.now += 10 * seconds
    assert watch.seconds == {"draft": 3.0, "verify": 30.0}


def test_stopwatch_counts_a_phase_that_was_interrupted(clock: Clock) -> None:
    watch = Stopwatch()
    with pytest.raises(KeyboardInterrupt), watch("verify"):
        clock.now += 4.0
        raise KeyboardInterrupt
    assert watch.seconds == {"verify": 4.0}


def test_stopwatch_nests(clock: Clock) -> None:
    watch = Stopwatch()
    with watch("prefill"):
        clock.now += 1.0
        with watch("draft"):
            clock.now += 2.0
    assert watch.seconds == {"prefill": 3.0, "draft": 2.0}


def test_stopwatch_synchronizes_at_both_ends_of_a_phase(clock: Clock) -> None:
    queued = [0.0, 0.0]  # seconds of queued work that a synchronize waits for: before, within

    def synchronize() -> None:
        clock.now += queued.pop(0)

    queued[:] = [5.0, 3.0]
    watch = Stopwatch(synchronize)
    with watch("draft"):
        pass
    assert watch.seconds == {"draft": 3.0}  # the 5 seconds belong to what came before


def test_set_times(clock: Clock) -> None:
    watch, stats = Stopwatch(), GenerationStats()
    for i, phase in enumerate(PHASES):
        with watch(phase):
            clock.now += i + 1.0
    stats.set_times(watch, 20.0)
    assert [getattr(stats, f"{phase}_seconds") for phase in PHASES] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (stats.prefill_seconds, stats.keep_seconds) == (1.0, 5.0)
    assert stats.seconds == 20.0
    stats.set_times(Stopwatch(), 1.0)
    assert stats.prefill_seconds == 0.0


def test_real_clock() -> None:
    watch = Stopwatch()
    with watch("draft"):
        sum(range(1000))
    assert 0.0 < watch.seconds["draft"] < 10.0
