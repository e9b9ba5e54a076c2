"""How long calls take: on a clock of the test's own, where a capture is dear and a replay is cheap."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_head, tiny_model

from eagle_fsd import EagleFSD
from eagle_fsd.autotune import step_costs
from eagle_fsd.autotune.step_costs import WIDTHS
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.runtime import timing
from eagle_fsd.runtime.step_recorder import Graphs
from eagle_fsd.runtime.timing import (
    BUSY,
    ENOUGH,
    RECORDED,
    REPEATS,
    Call,
    disagreement,
    median_seconds,
    thread_times,
    time_in_turn,
)
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

CPU = torch.device("cpu")


# --- threads that wait for a core ---


def test_what_threads_waited_is_counted_over_what_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread begins within, and another one ends."""
    told = iter(({"1": (100, 50), "2": (10, 10)}, {"1": (160, 80), "3": (40, 10)}, {}, {}))
    monkeypatch.setattr(timing, "thread_times", lambda: next(told))
    waiting = timing.CoreWait()
    assert waiting.share == 0
    for _ in range(2):
        with waiting.counted():
            pass
        assert waiting.share == pytest.approx((30 + 10) / (60 + 40))


def test_only_repeats_are_counted_and_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untimed call may compile with more threads than there are cores."""
    ran: list[str] = []
    monkeypatch.setattr(timing, "thread_times", lambda: ran.append("read") or {})
    monkeypatch.setattr(timing, "synchronizer", lambda _: lambda: ran.append("wait"))
    time_in_turn({"a": Call(lambda: ran.append("call"))}, CPU, most=2, waiting=timing.CoreWait())
    once = ["wait", "call", "wait"]
    assert ran == [*once, "read", *once, *once, "read"]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system tells no waiting times")
def test_this_thread_is_seen_to_run() -> None:
    thread = str(threading.get_native_id())
    before, end = thread_times()[thread], time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    ran, waited = (now - then for now, then in zip(thread_times()[thread], before, strict=True))
    assert ran > 0.03e9 and waited >= 0


# --- calls ---


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float) -> Callable[[], None]:
        """A call that takes so long at first, then so long ..., at last always the last of these."""
        left = list(seconds)

        def work() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


EAGER, CAPTURE, REPLAY = 0.004, 5.0, 0.001


def test_a_recorded_call_is_timed_as_it_is_replayed() -> None:
    """However long its first call and its capture take."""
    clock = Clock()
    for before in (lambda: None, clock.takes(0.1)):
        call = Call(clock.takes(EAGER, CAPTURE, REPLAY), before)
        repeats = time_in_turn({"call": call}, CPU, untimed=RECORDED, clock=clock)["call"]
        assert repeats == pytest.approx([REPLAY] * len(repeats)) and len(repeats) == REPEATS


class Recorder:
    """A stand-in for a device that records: a capture takes seconds on its clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.captures = clock, 0

    def __call__(self, work: Callable[[], object], repeatable: bool) -> tuple[Callable[[], None], object]:
        result = work()
        self.clock.now += CAPTURE
        self.captures += 1

        def replay() -> None:
            self.clock.now += REPLAY

        return replay, result


def test_the_cost_of_a_step_is_that_of_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    recorder = Recorder(clock)
    model = EagleFSD(TargetModel(tiny_model(), Graphs(recorder)), tiny_head(), base_model="tiny")
    monkeypatch.setattr(
        step_costs, "time_in_turn", lambda *parts, **more: timing.time_in_turn(*parts, clock=clock, **more)
    )
    found, spread = step_costs.measure_forwards(model.target, model.drafter, [1, 4], 1, 64)
    assert recorder.captures >= len(found.verify)
    assert max(found.verify.values()) < 10 * REPLAY, "a capture was timed"
    assert max(first for first, _ in found.draft.values()) < 10 * REPLAY
    assert spread < BUSY


def test_every_width_is_timed_with_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = EagleFSD(TargetModel(tiny_model()), tiny_head(), base_model="tiny"), []

    def expect(target: TargetModel, rows: int, nodes: int, again: bool = True) -> None:
        expected.append((rows, nodes, again))

    monkeypatch.setattr(TargetModel, "expect", expect)
    found, _ = step_costs.measure_forwards(model.target, model.drafter, [1], 2, 64)
    assert expected == [(2, nodes, False) for width in WIDTHS for nodes in (1, width)], "only measured"
    assert set(found.verify) == {1, *WIDTHS}


@pytest.mark.parametrize(("slow", "is_busy"), [(3, False), (4, True)])
def test_slow_seconds_of_the_machine_change_no_time(
    slow: int, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All repeats of a call fall into them, and so do those of the forward over one node beside it."""
    clock, found, pace = Clock(), {}, 1.0
    monkeypatch.setattr(step_costs, "time_in_turn", functools.partial(timing.time_in_turn, clock=clock))

    def takes(seconds: float) -> Call:
        def work() -> None:
            clock.now += pace * seconds

        return Call(work)

    times = step_costs.BesideOneNode(takes(0.01), TargetModel(tiny_model()))
    for width in range(12):
        pace = 2.5 if width < slow else 1.0
        found |= times({width: takes(0.01 + 0.001 * width)})
    assert found == pytest.approx({width: 1 + 0.1 * width for width in range(12)})
    assert times.one_node_seconds == pytest.approx(0.01)
    assert (times.spread > BUSY) == is_busy


@pytest.mark.parametrize("call", range(6))
def test_a_round_ends_before_its_next_call_once_it_is_not_to_go_on(call: int) -> None:
    """Whoever asks for a text waits for one call, and not for all repeats of all calls."""
    made: list[str] = []

    def check(spread: float) -> None:
        if len(made) == call:
            raise InterruptedError

    def notes(name: str) -> Call:
        return Call(lambda: made.append(name))

    times = step_costs.BesideOneNode(notes("one node"), TargetModel(tiny_model()), check)
    with pytest.raises(InterruptedError):
        times({2: notes("2"), 3: notes("3")})
    assert made == ["one node", "2", "3", "one node", "2", "3"][:call]


@pytest.mark.parametrize("slow", [False, True])
def test_a_forward_is_timed_right_after_the_same_one_unless_that_takes_long(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, model = Clock(), EagleFSD(TargetModel(tiny_model()), tiny_head(), base_model="tiny")
    widths: list[int] = []
    real = TargetSession.verify

    def verify(session: TargetSession, tree: DraftTree) -> object:
        widths.append(tree.tokens.shape[1])
        clock.now += 2 * step_costs.SLOW if slow else 0.001
        return real(session, tree)

    monkeypatch.setattr(TargetSession, "verify", verify)
    monkeypatch.setattr(step_costs, "time_in_turn", functools.partial(timing.time_in_turn, clock=clock))
    found, _ = step_costs.measure_forwards(model.target, model.drafter, [1], 1, 64)
    assert found.verify == pytest.approx(dict.fromkeys(found.verify, 2 * step_costs.SLOW if slow else 0.001))
    last = max(at for at, width in enumerate(widths) if width > 1) + 1
    pairs = list(zip(widths[:last:2], widths[1:last:2], strict=True))
    if slow:
        assert 1 not in widths[widths.index(3) : last], "one node was timed with the first width only"
    else:
        assert all(before == timed for before, timed in pairs)
        assert [pair[0] for pair in pairs[-2:]] == [1, 64], "in turn"


def test_a_call_that_takes_long_is_made_once() -> None:
    clock = Clock()
    made = []

    def work() -> None:
        made.append(1)
        clock.now += 2 * ENOUGH

    assert time_in_turn({"call": Call(work)}, CPU, clock=clock) == {"call": [2 * ENOUGH]} and len(made) == 1
    led = time_in_turn({"call": Call(work)}, CPU, clock=clock, agree=lambda _: (7.0, 7.0))
    assert led == {"call": [7.0]}, "what another process measured counts"
    clock = Clock()
    after = time_in_turn({"call": Call(clock.takes(0.01), before=clock.takes(ENOUGH))}, CPU, clock=clock)
    assert after["call"] == pytest.approx([0.01]) and clock.now == pytest.approx(ENOUGH + 0.01)


def test_what_comes_before_is_not_timed_and_bounds_the_repeats() -> None:
    clock = Clock()
    call = Call(clock.takes(0.01), before=clock.takes(ENOUGH / 2))
    repeats = time_in_turn({"call": call}, CPU, clock=clock)["call"]
    assert repeats == pytest.approx([0.01, 0.01])


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {name: Call(lambda name=name: order.append(name)) for name in "ab"}
    time_in_turn(calls, CPU)
    assert "".join(order) == "ab" * (1 + REPEATS)
    assert median_seconds(lambda: None, CPU) >= 0


def test_a_disturbance_meets_a_few_repeats_of_every_call() -> None:
    """The medians bear it, and it shows; of calls one after the other it would have spoilt one, unseen."""
    clock, turn = Clock(), [0]

    def work() -> None:
        turn[0] += 1
        clock.now += 0.03 if 4 * 10 < turn[0] <= 6 * 10 else 0.01  # the fourth and fifth of six rounds

    repeats = time_in_turn({name: Call(work) for name in range(10)}, CPU, clock=clock)
    for one in repeats.values():
        assert sorted(one)[2] == pytest.approx(0.01) and disagreement(one) > BUSY


@pytest.mark.parametrize(
    ("repeats", "found"),
    [
        ([1.0], 0.0),
        ([1.0, 1.5], 0.5),
        ([1.0, 1.0, 1.0, 1.0, 9.0], 0.0),
        ([1.0, 1.1, 1.2, 1.3, 9.0], 1.3 / 1.1 - 1),
        ([2.0, 1.0, 2.0, 1.0, 2.0], 1.0),
    ],
)
def test_how_much_repeats_disagree(repeats: list[float], found: float) -> None:
    assert disagreement(repeats) == pytest.approx(found)
