"""AutoTree: what it measures, how often, what it remembers, and what it does on a busy machine."""

from __future__ import annotations

import json
import logging
import math
import platform
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import prompts_of, tiny_head, tiny_model

from eagle_fsd import AutoTree, EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.other_rules import Typical
from eagle_fsd.autotune import on_disk, settle, step_costs, tree_chooser
from eagle_fsd.autotune.on_disk import (
    forwards_from_json,
    forwards_to_json,
    observations_from_json,
    observations_to_json,
    overhead_from_json,
    overhead_to_json,
)
from eagle_fsd.autotune.tree_chooser import observation_kind, overhead_kind
from eagle_fsd.autotune.tree_search import Choice, Observation, usual_tree
from eagle_fsd.core.config import SamplingConfig as Sampling
from eagle_fsd.files.records import cache_file
from eagle_fsd.runtime import timing
from eagle_fsd.runtime.step_recorder import Graphs
from eagle_fsd.target.model import TargetModel

GREEDY, SAMPLED = Sampling(), Sampling(0.6, 50, 0.9)
MEASUREMENTS = ("observe", "measure_forwards", "measure_overhead")
WIDTHS = step_costs.WIDTHS[::2]  # that are timed here


def engine(seed: int = 0, name: str = "tiny") -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head(seed), base_model=name)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (step_costs, on_disk):
        monkeypatch.setattr(module, "WIDTHS", WIDTHS)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microseconds never agree where tests run beside each other; tests of a busy machine set it back."""
    monkeypatch.setattr(tree_chooser, "BUSY", float("inf"))


def fake_measurement(name: str, *parts: Any) -> Any:
    """Return values that a measurement might have found."""
    if name == "observe":
        return [Observation([-1, 0, 0, 1], [0, 1, 1, 2], [0.0, -0.1, -2.5, -0.2], [1, 3])]
    if name == "measure_overhead":
        return step_costs.StepOverhead(drafted={3: 0.25, 16: 0.5}, plain=0.125), 0.0
    verify = {width: 1 + 0.01 * width for width in (1, *WIDTHS)}
    return step_costs.Forwards(verify, dict.fromkeys(parts[2], (0.25, 0.125))), 0.0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the measurements that are made, in their order."""
    made: list[str] = []
    for name in MEASUREMENTS:

        def counting(*parts: Any, name: str = name) -> Any:
            made.append(name)
            return fake_measurement(name, *parts)

        monkeypatch.setattr(tree_chooser, name, counting)
    return made


def choose(
    model: EagleFSD,
    rule: AcceptanceRule = Lossless(),  # noqa: B008 (frozen)
    sampling: SamplingConfig = GREEDY,
    wanted: AutoTree = AutoTree(),  # noqa: B008
    batch: int = 1,
    context: int = 50,
) -> Choice:
    return model.choose_tree(wanted, rule, sampling, batch, context, prompts_of([5]))


def test_what_is_really_measured_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fewer in (("REPEATS", 2), ("NEW_TOKENS", 30), ("TIMED_TOKENS", 12)):
        monkeypatch.setattr(step_costs, name, fewer)
    first = choose(engine(), Fuzzy(0.3), SAMPLED)
    for name in MEASUREMENTS:
        monkeypatch.setattr(tree_chooser, name, lambda *_: pytest.fail("remembered"))
    monkeypatch.setattr(tree_chooser, "choose", lambda *_: pytest.fail("remembered"))
    assert choose(engine(), Fuzzy(0.3), SAMPLED) == first


def test_a_choice_is_measured_once_and_remembered(
    measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first = choose(engine())
        assert sorted(measured) == sorted(MEASUREMENTS) and caplog.text.count("measuring") == 1
        again = engine()
        assert choose(again, context=99) == first
        assert again.generate(prompts_of([5]), max_new_tokens=4, tree=AutoTree()).new_tokens
    assert len(measured) == 3 and caplog.text.count("measuring") == 1


def test_temperature_top_p_and_a_near_threshold_measure_nothing_anew(measured: list[str]) -> None:
    """Neither in the same process nor in the next one."""
    model = engine()
    choose(model, Fuzzy(0.3), SAMPLED)
    done = len(measured)
    for rule, sampling in (
        (Fuzzy(0.3), Sampling(0.61, 50, 0.9)),
        (Fuzzy(0.3), Sampling(1.2, 40, 0.95)),
        (Fuzzy(0.31), SAMPLED),
        (Fuzzy(0.499), Sampling(0.7, 50, 0.8)),
    ):
        for same in (model, engine()):
            choose(same, rule, sampling)
            assert len(measured) == done, (rule, sampling)


def test_forwards_are_timed_once_for_all_rules_and_ways_of_sampling(measured: list[str]) -> None:
    model = engine()
    for rule in (Lossless(), Fuzzy(0.3), Fuzzy(2.0), Fuzzy(0.3, divergence="tv"), Typical()):
        for sampling in (GREEDY, SAMPLED, Sampling(1.0)):
            choose(model, rule, sampling)
    assert measured.count("measure_forwards") == 1


def test_greedy_cool_and_warm_observations_are_three(measured: list[str]) -> None:
    model = engine()
    cool, warm = (SAMPLED, Sampling(0.1, 0, 0.5), Sampling(0.6)), (Sampling(1.0), Sampling(2.0))
    for sampling in (GREEDY, *cool, *warm, GREEDY):
        choose(model, Lossless(), sampling)
    assert measured.count("observe") == 3
    assert measured.count("measure_overhead") == 5, "greedy, three ways to warp, and one of them warm"


@pytest.mark.parametrize(
    ("other", "made"),
    [
        ({"wanted": AutoTree(depth=2)}, []),
        ({"wanted": AutoTree(min_confidence=0)}, []),
        ({"wanted": AutoTree(top_k=8)}, ["measure_forwards"]),
        ({"wanted": AutoTree(top_k=2)}, ["measure_forwards", "measure_overhead"]),
        ({"batch": 2}, ["measure_forwards", "measure_overhead"]),
        ({"context": 200}, ["measure_forwards"]),
        ({"sampling": SAMPLED}, ["measure_overhead", "observe"]),
        (
            {"rule": Fuzzy(0.3), "wanted": AutoTree(top_k=8)},
            ["measure_forwards", "measure_overhead", "observe"],
        ),
    ],
)
def test_what_depends_on_a_setting_is_measured_for_it(
    other: dict[str, Any], made: list[str], measured: list[str]
) -> None:
    choose(engine())
    measured.clear()
    choose(engine(), **other)
    assert sorted(measured) == made


def test_another_head_is_measured_and_another_name_for_the_same_weights_is_not(measured: list[str]) -> None:
    choose(engine())
    choose(engine(name="the/same"))
    assert len(measured) == 3
    choose(engine(1))
    assert len(measured) == 6


def test_a_container_with_a_new_host_name_finds_what_was_measured(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(engine())
    monkeypatch.setattr(platform, "node", lambda: "another")
    choose(engine())
    assert len(measured) == 3


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (tree_chooser, "cores", lambda: 1000),
        (tree_chooser, "processor", lambda: "another"),
        (tree_chooser, "backend_names", lambda _: ["blocks"]),
        (tree_chooser, "runtime_parts", lambda _: ["another"]),
        (torch, "get_num_threads", lambda: 77),
        (TargetModel, "layer_classes", ["Linear8bit"]),
        (TargetModel, "weight_format", "int8"),
        (tree_chooser, "__version__", "0.0.1"),
    ],
)
def test_acceptance_does_not_depend_on_the_machine_and_times_do(
    place: Any, name: str, value: object, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights, and another release, have other acceptance too."""
    choose(engine())
    monkeypatch.setattr(place, name, value)
    choose(engine())
    times = ["measure_forwards", "measure_overhead"]
    assert sorted(measured[3:]) == [*times, *["observe"] * (name in ("weight_format", "__version__"))]


def test_a_choice_is_made_once_for_all_that_it_depends_on(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    real = tree_chooser.choose

    def choosing(costs: Any, observed: Any, wanted: AutoTree, batch: int, **reading: bool) -> Choice:
        made.append((list(observed), wanted, batch, *reading.values()))
        return real(costs, observed, wanted, batch, **reading)

    monkeypatch.setattr(tree_chooser, "choose", choosing)
    beams, deep = [1, 2, 4, 8, 10], AutoTree(depth=2)
    others = ({"wanted": deep}, {"rule": Fuzzy(0.3)}, {"batch": 3}, {"batch": 4}, {"context": 200})
    for asked in ({}, {}, *others):
        choose(engine(), **asked)
    assert made == [
        *((beams, AutoTree(), 1, True, False), (beams, deep, 1, True, False)),
        *((beams, AutoTree(), batch, True, False) for batch in (1, 4, 1)),
    ]
    few = tiny_head().restrict(torch.tensor([3, 7]))
    choose(EagleFSD(TargetModel(tiny_model(), Graphs(lambda *_: pytest.fail("nothing runs"))), few))
    assert made[-1] == ([1, 2], AutoTree(), 1, True, True)


def test_rules_are_of_one_kind_by_powers_of_two() -> None:
    kind = observation_kind
    assert kind(Fuzzy(0.3)) == kind(Fuzzy(0.31)) == kind(Fuzzy(0.25)) != kind(Fuzzy(0.24))
    assert kind(Fuzzy(0.6)) == kind(Fuzzy(0.61)) and kind(Fuzzy(1)) == kind(Fuzzy(1.5))
    rules = [
        Fuzzy(0.0),
        Fuzzy(1.0),
        Fuzzy(float("inf")),
        Fuzzy(1.0, mode="paper"),
        Fuzzy(1.0, "tv"),
        Typical(),
        Lossless(),
    ]
    assert len(set(map(kind, rules))) == len(rules)
    assert kind(Fuzzy(1.0, max_consecutive=3)) != kind(Fuzzy(1.0, max_consecutive=2))
    assert overhead_kind(Fuzzy(0.1)) == overhead_kind(Fuzzy(7.0)) != overhead_kind(Fuzzy(0.1, min_p=0.1))


class Nameless:
    """A rule whose repr is an address."""

    chances = Lossless.chances


def test_a_rule_without_a_name_is_measured_and_not_remembered(measured: list[str]) -> None:
    rule = Nameless()
    model = engine()
    choose(model, rule)
    choose(model, rule)
    made = len(measured)
    choose(engine(), Nameless())
    assert measured[made:].count("observe") == 4 and "measure_forwards" not in measured[made:]
    assert len(json.loads(cache_file().read_text(encoding="utf-8"))) == 1, "the times of the forwards"


def test_a_tree_that_is_given_is_no_choice(measured: list[str]) -> None:
    with pytest.raises(ValueError, match=r"wanted is TreeConfig\(.*\): it must be an AutoTree"):
        choose(engine(), wanted=TreeConfig(8, 3, 2))
    assert not measured


# --- a busy machine ---


def fake_clock(
    monkeypatch: pytest.MonkeyPatch, made: list[str], *factors: float, waited: float = 0.0
) -> None:
    """Time forwards on a clock where a call takes a tick, longer by one of these factors.

    waited: how long a thread waits for a core, over how long it runs.
    """
    now, draw = [0.0], random.Random(0)

    def clock() -> float:
        now[0] += 0.001 * draw.choice(factors)
        return now[0]

    def measure(*parts: Any) -> Any:
        made.append("measure_forwards")
        return step_costs.measure_forwards(*parts)

    def thread_times() -> dict[str, tuple[int, int]]:
        clock()
        return {"thread": (int(1e9 * now[0]), int(1e9 * waited * now[0]))}

    monkeypatch.setattr(timing, "thread_times", thread_times)
    real = timing.time_in_turn
    monkeypatch.setattr(step_costs, "time_in_turn", lambda *parts, **more: real(*parts, clock=clock, **more))
    monkeypatch.setattr(tree_chooser, "measure_forwards", measure)
    monkeypatch.setattr(tree_chooser, "BUSY", timing.BUSY)


def test_a_busy_machine_is_named_and_its_times_are_not_remembered(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_clock(monkeypatch, measured, 1.0, 1.5, 3.0)
    model = engine()
    with caplog.at_level(logging.WARNING):
        first = choose(model)
    assert "the machine is busy (other work slows timings down by about " in caplog.text
    assert "this choice is not remembered" in caplog.text
    assert choose(model) == first and measured == ["observe", "measure_forwards", "measure_overhead"]
    choose(engine())
    assert measured[3:] == ["measure_forwards"], "what was observed has nothing to do with times"
    caplog.clear()
    fake_clock(monkeypatch, measured, 1.0)
    choose(engine())
    choose(engine())
    assert measured[4:] == ["measure_forwards"] and "busy" not in caplog.text


def test_a_machine_that_stays_busy_is_named_once(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forwards, and then what a step costs beside them, are both timed."""
    fake_clock(monkeypatch, measured, 1.0, waited=0.5)
    found, _ = fake_measurement("measure_overhead")
    monkeypatch.setattr(tree_chooser, "measure_overhead", lambda *_: (found, 2 * timing.BUSY))
    choose(engine())
    assert caplog.text.count("the machine is busy") == 1


def test_a_machine_whose_cores_are_taken_is_busy_though_its_times_agree(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_clock(monkeypatch, measured, 1.0, waited=0.5)
    with caplog.at_level(logging.WARNING):
        choose(engine())
    assert "the machine is busy (other work slows timings down by about 50 %)" in caplog.text
    choose(engine())
    assert measured[3:] == ["measure_forwards"]


def test_an_overhead_that_was_timed_on_a_busy_machine_is_not_remembered(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = fake_measurement("measure_overhead")
    with monkeypatch.context() as patch:
        patch.setattr(tree_chooser, "BUSY", timing.BUSY)
        patch.setattr(tree_chooser, "measure_overhead", lambda *_: (found, 2 * timing.BUSY))
        choose(engine())
    measured.clear()
    choose(engine())
    assert measured == ["measure_overhead"]


# --- texts that do not wait ---

LATER = AutoTree(later=True)


def test_a_text_does_not_wait_for_its_tree(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_chooser, "disturbance", lambda *_: 0.0)
    model, wanted = engine(), choose(engine(3), context=20).tree
    measured.clear()
    for _ in range(2):
        made = model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
        assert made.tree == TreeConfig(8, 6, 4, 0.1) and not measured
    assert model.settler.measure_postponed() and sorted(measured) == sorted(MEASUREMENTS)
    assert not model.settler.measure_postponed(), "once"
    for same in (model, engine()):
        assert same.generate(prompts_of([5]), max_new_tokens=4, tree=LATER).tree == wanted
        assert not same.settler.measure_postponed() and len(measured) == 3


def test_parts_that_are_known_make_a_choice_without_measuring(measured: list[str]) -> None:
    choose(engine())
    measured.clear()
    made = engine().generate(prompts_of([5]), max_new_tokens=4, tree=AutoTree(depth=2, later=True))
    assert made.tree == choose(engine(), wanted=AutoTree(depth=2)).tree and not measured


def test_sizes_that_are_given_are_kept_till_the_others_are_measured() -> None:
    asked = AutoTree(depth=2, top_k=3, min_confidence=0.0, later=True)
    made = engine().generate(prompts_of([5]), max_new_tokens=4, tree=asked)
    assert made.tree == TreeConfig(8, 2, 3)
    assert usual_tree(AutoTree(), "cuda", 5) == TreeConfig(60, 6, 5)


def test_a_busy_machine_is_not_measured_where_nobody_waits(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_clock(monkeypatch, measured, 1.0, waited=0.5)
    model = engine()
    model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
    with caplog.at_level(logging.INFO):
        assert not model.settler.measure_postponed()
    assert "the machine is busy: the draft tree's size is measured another time" in caplog.text
    assert not measured
    fake_clock(monkeypatch, measured, 1.0)
    model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
    assert model.settler.measure_postponed() and measured


def test_a_machine_that_becomes_busy_is_measured_no_further_where_nobody_waits(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_clock(monkeypatch, measured, 1.0, waited=0.5)
    monkeypatch.setattr(tree_chooser, "disturbance", lambda *_: 0.0)
    rounds = []
    timed = step_costs.time_in_turn
    monkeypatch.setattr(
        step_costs, "time_in_turn", lambda *parts, **more: rounds.append(1) or timed(*parts, **more)
    )
    model = engine()
    model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
    assert not model.settler.measure_postponed()
    assert "the machine is busy: the draft tree's size is measured another time" in caplog.text
    assert "measure_overhead" not in measured and len(rounds) == 4
    caplog.clear()
    assert not model.settler.measure_postponed() and not caplog.records, "it is said once"
    choose(model)
    assert "this choice is not remembered" in caplog.text, "who waits for a tree gets one"
    fake_clock(monkeypatch, measured, 1.0)
    model = engine()
    model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
    assert model.settler.measure_postponed() and measured.count("observe") == 1


def test_what_is_put_off_encodes_no_text(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be measured by another thread than encodes prompts, and a tokenizer is made for one."""
    seen: list[Any] = []
    monkeypatch.setattr(tree_chooser, "disturbance", lambda *_: 0.0)
    monkeypatch.setattr(tree_chooser, "observe", lambda _target, _head, texts, *_: seen.append(texts) or [])
    monkeypatch.setattr(settle, "encode_example_prompts", lambda tokenizer: [[1, 2], [3]])
    model = engine()
    model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
    monkeypatch.setattr(settle, "encode_example_prompts", lambda tokenizer: pytest.fail("too late"))
    monkeypatch.setattr(tree_chooser, "choose", lambda *_, **__: Choice(TreeConfig(3, 2, 2), 1.0, 1.0, 1.0))
    assert model.settler.measure_postponed() is not None and seen[0] == [[1, 2], [3]]


def test_without_memory_to_measure_texts_keep_the_tree_that_they_have(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(tree_chooser, "disturbance", lambda *_: 0.0)
    monkeypatch.setattr(tree_chooser, "measure_forwards", full)
    model = engine()
    before = model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER).tree
    choice = model.settler.measure_postponed()
    assert choice is not None and choice.tree == before != TreeConfig()
    assert model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER).tree == before


def test_an_overhead_that_a_busy_machine_had_is_taken_where_somebody_waits_alone(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_clock(monkeypatch, measured, 1.0)
    monkeypatch.setattr(tree_chooser, "disturbance", lambda *_: 0.0)
    found, _ = fake_measurement("measure_overhead")
    model = engine()
    model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
    with monkeypatch.context() as patch:
        patch.setattr(tree_chooser, "measure_overhead", lambda *_: (found, 2 * timing.BUSY))
        assert model.settler.measure_postponed() is None and model.settler.postpones
    assert model.settler.measure_postponed() is not None and measured.count("measure_overhead") == 1


def test_a_measurement_that_is_not_to_go_on_ends_at_once_and_keeps_its_whole_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked again and again, while texts are observed, forwards timed, and accept and keep."""
    begun: list[str] = []
    for name, fewer in (("REPEATS", 2), ("NEW_TOKENS", 30), ("TIMED_TOKENS", 12), ("SLOW", math.inf)):
        monkeypatch.setattr(step_costs, name, fewer)
    monkeypatch.setattr(timing, "ENOUGH", math.inf)  # as many calls on a slow machine
    parts_of_it = ("disturbance", *MEASUREMENTS)
    for name in parts_of_it:
        real = getattr(step_costs, name)

        def noting(*parts: Any, name: str = name, real: Any = real) -> Any:
            begun.append(name)
            return real(*parts)

        monkeypatch.setattr(tree_chooser, name, noting)

    def measure(rounds: int) -> tuple[EagleFSD, Choice | None, list[str]]:
        """Let a measurement go on for some rounds; return what was begun when it was asked each time."""
        monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / str(rounds)))
        begun.clear()
        model, at = engine(), []
        model.generate(prompts_of([5]), max_new_tokens=4, tree=LATER)
        with caplog.at_level(logging.INFO):
            found = model.settler.measure_postponed(
                lambda: at.append(begun[-1]) or len(at) <= rounds, "a word puts it off"
            )
        return model, found, at

    model, found, at = measure(10**6)
    assert found is not None and "a word puts it off" in caplog.text and not model.settler.postpones
    for name in parts_of_it:
        assert at.count(name) > step_costs.REPEATS
    for rounds in (0, at.index("observe"), at.index("measure_forwards") + 3, len(at) - 1):
        model, found, seen = measure(rounds)
        assert found is None and model.settler.postpones
        assert seen == [*at[: rounds + 1], at[rounds]], "at once, and it is asked once more behind it"
        first, _ = begun[1:], begun.clear()
        assert model.settler.measure_postponed() is not None and not model.settler.postpones
        assert first == list(MEASUREMENTS[: len(first)])
        assert begun[1:] == list(MEASUREMENTS[max(len(first) - 1, 0) :]), "only what was in hand again"
    assert "busy" not in caplog.text


# --- on disk ---


def test_what_was_measured_is_read_back_as_it_was() -> None:
    seen = [
        Observation([-1, 0, 1], [0, 1, 2], [0.0, -0.501234, -1.25], [1, 2]),
        Observation([-1], [0], [0.0], []),
    ]
    assert observations_from_json(json.loads(json.dumps(observations_to_json(seen)))) == seen
    forwards = step_costs.Forwards(dict.fromkeys((1, *WIDTHS), 0.5), {1: (0.25, 0.0), 8: (0.5, 0.125)})
    assert forwards_from_json(json.loads(json.dumps(forwards_to_json(forwards)))) == forwards
    overhead = step_costs.StepOverhead({3: 0.25, 16: 0.5}, 0.125)
    assert overhead_from_json(json.loads(json.dumps(overhead_to_json(overhead)))) == overhead


VERIFY = [[width, 0.5] for width in (1, *WIDTHS)]


@pytest.mark.parametrize(
    ("unpack", "found"),
    [
        *(
            (forwards_from_json, {"verify": [[1, seconds], *VERIFY[1:]], "draft": [[1, [0.5, 0.0]]]})
            for seconds in (-1.0, 0.0, math.inf, math.nan, 1)
        ),
        (forwards_from_json, {"verify": VERIFY, "draft": [[1, [0.0, 0.5]]]}),
        (forwards_from_json, {"verify": VERIFY[:-1], "draft": [[1, [0.5, 0.0]]]}),
        (forwards_from_json, {"verify": VERIFY, "draft": []}),
        (overhead_from_json, {"drafted": [[3, 0.25]], "plain": 0.5}),
        (overhead_from_json, {"drafted": [[3, 0.25], [16, 0.5]], "plain": -0.5}),
        (observations_from_json, [[[-1, 1], [0, 1], [0.0, -0.5], []]]),  # a node above itself
        (observations_from_json, [[[-1, -2], [0, 1], [0.0, -0.5], []]]),
        (observations_from_json, [[[-1, 0], [0, 1], [0.0], []]]),
        (observations_from_json, [[[-1], [0], [0.0], [1]]]),
    ],
)
def test_measurements_that_cannot_be_are_not_read(unpack: Callable[[Any], object], found: Any) -> None:
    with pytest.raises(ValueError):
        unpack(found)


OLD = {"0123456789abcdef01234567": asdict(Choice(TreeConfig(4, 3, 2), 2.0, 3.0, 1.0))}


def test_a_file_of_an_older_version_is_neither_read_nor_erased(measured: list[str]) -> None:
    cache_file().write_text(json.dumps(OLD, indent=1) + "\n", encoding="utf-8")
    choose(engine())
    assert len(measured) == 3
    kept = json.loads(cache_file().read_text(encoding="utf-8"))
    assert kept.items() > OLD.items()


@pytest.mark.parametrize(
    "spoil",
    [
        "{}",
        "[]",
        "null",
        '"text"',
        "NaN",
    ],
)
def test_a_damaged_record_is_measured_again(spoil: str, measured: list[str]) -> None:
    choose(engine())
    records = json.loads(cache_file().read_text(encoding="utf-8"))
    records = {key: one | {"measured": json.loads(spoil)} for key, one in records.items()}
    cache_file().write_text(json.dumps(records), encoding="utf-8")
    choose(engine())
    assert sorted(measured[3:]) == sorted(MEASUREMENTS)
