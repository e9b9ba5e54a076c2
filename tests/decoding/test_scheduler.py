"""The scheduler: texts join and leave, and each is the same as alone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from support.op_recorder import OpRecorder, as_on_an_accelerator
from support.tiny_models import prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig, Typical
from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.decoding import workspace
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import CANCELLED, Scheduler
from eagle_fsd.drafting.specs import with_lookup
from eagle_fsd.runtime.ranks import Ranks
from eagle_fsd.runtime.step_recorder import EAGER, Graphs
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
LENGTHS = [5, 1, 9, 5, 12, 2, 7]
LIMITS = [12, 5, 20, 3, 9, 16, 1]
Kind = tuple[AcceptanceRule, SamplingConfig]
KINDS: list[Kind] = [
    (Lossless(), SamplingConfig()),
    (Fuzzy(0.5), SamplingConfig(0.8, top_k=20)),
    (Lossless(), SamplingConfig(1.0)),
    (Typical(), SamplingConfig(0.7, top_p=0.9)),
]
# Rules whose verdicts have one shape, so that recordings of them share their results' memory.
ALIKE: list[Kind] = [
    (Fuzzy(0.6, mode="paper"), SamplingConfig(1.0)),
    (Fuzzy(0.2), SamplingConfig(0.7)),
    (Fuzzy(0.4, "tv"), SamplingConfig()),
]


def engine(recorder: OpRecorder | None = None) -> EagleFSD:
    stepper = EAGER if recorder is None else Graphs(recorder)
    return EagleFSD(TargetModel(tiny_model(), stepper), tiny_head())


def with_looked_up(model: EagleFSD) -> EagleFSD:
    return EagleFSD(model.target, with_lookup(model.drafter, model.target))


def prompts() -> list[list[int]]:
    return [prompts_of([length], seed=number)[0] for number, length in enumerate(LENGTHS)]


def text(
    number: int, prompt: Sequence[int], limit: int, ends: tuple[int, ...] = (), kinds: Sequence[Kind] = KINDS
) -> Text:
    rule, sampling = kinds[number % len(kinds)]
    return Text(number, limit, Terms(ends, rule, sampling), prompt=prompt, stream=(7, number))


def alone(model: EagleFSD, one: Text, size: TreeConfig) -> list[int]:
    """Return the engine's tokens for the text on its own."""
    sampling = one.terms.sampling
    return model.generate(
        [one.prompt],
        max_new_tokens=one.limit,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        rule=one.terms.rule,
        tree=size,
        seed=[one.stream],
        eos_token_id=one.terms.eos_token_ids,
    ).new_tokens[0]


def collect(scheduler: Scheduler) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for one, tokens in scheduler.run():
        found.setdefault(one.number, []).extend(tokens)
    return found


@pytest.mark.covering(2)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("size", [TREE, TreeConfig(1)], ids=["drafted", "plain"])
def test_a_text_is_the_one_that_it_is_alone(size: TreeConfig, rows: int, group: int) -> None:
    """Whatever rule and sampling its neighbours have, whenever they join and leave."""
    model = engine()
    scheduler = Scheduler(model.target, model.drafter, size, rows, group)
    texts = [text(number, prompt, LIMITS[number]) for number, prompt in enumerate(prompts())]
    for one in texts:
        scheduler.admit(one)
    assert collect(scheduler) == {one.number: alone(model, one, size) for one in texts}
    assert all(one.stats.finish_reason == "length" for one in texts)
    assert not scheduler.busy and scheduler.step() == {}


def test_texts_may_come_while_others_are_decoded() -> None:
    """One more after every step, also where the batch has to grow for it; an end token ends a text."""
    model = engine()
    scheduler = Scheduler(model.target, model.drafter, TREE, 4)
    found: dict[int, list[int]] = {number: [] for number in range(len(LENGTHS))}
    texts = []
    for number, prompt in enumerate(prompts()):
        texts.append(text(number, prompt, 12, ends=tuple(range(40, 50))))
        scheduler.admit(texts[-1])
        for one, tokens in scheduler.step().items():
            found[one.number] += tokens
    for one, tokens in scheduler.run():
        found[one.number] += tokens
    assert found == {one.number: alone(model, one, TREE) for one in texts}
    assert {one.stats.finish_reason for one in texts} == {"stop", "length"}


def test_a_retired_text_makes_room() -> None:
    model = engine()
    scheduler = Scheduler(model.target, model.drafter, TREE, 1)
    first, second, third = (text(number, prompts()[number], 40) for number in range(3))
    for one in (first, second, third):
        scheduler.admit(one)
    assert set(scheduler.step()) == {first}
    scheduler.retire(first)
    scheduler.retire(third)
    assert first.stats.finish_reason == third.stats.finish_reason == CANCELLED
    assert collect(scheduler) == {1: alone(model, second, TREE)}


def test_equal_prompts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = engine(), []
    prefill = TargetSession.prefill

    def counted(session: TargetSession, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        read.append(len(lengths))
        return prefill(session, tokens, lengths)

    monkeypatch.setattr(TargetSession, "prefill", counted)
    scheduler = Scheduler(model.target, model.drafter, TREE, 8)
    texts = [text(number, prompts()[number % 2], 10) for number in range(6)]
    for one in texts:
        scheduler.admit(one)
    found = collect(scheduler)
    assert read == [2]
    assert found == {one.number: alone(model, one, TREE) for one in texts}


@pytest.mark.parametrize("kinds", [KINDS, ALIKE], ids=["different", "alike"])
def test_recorded_steps_give_the_same_texts(kinds: list[Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)
    recorder, plain = OpRecorder(), engine()
    model = engine(recorder)
    scheduler = Scheduler(model.target, model.drafter, TREE, 2)
    texts = [text(number, prompt, 24, kinds=kinds) for number, prompt in enumerate(prompts())]
    for one in texts:
        scheduler.admit(one)
    assert collect(scheduler) == {one.number: alone(plain, one, TREE) for one in texts}
    assert recorder.replays > 10


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [TREE, TreeConfig(1)], ids=["drafted", "plain"])
@pytest.mark.parametrize("cache_tokens", [None, 4096])
def test_a_lone_text_takes_the_memory_and_the_recordings_of_the_one_before(
    cache_tokens: int | None, size: TreeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after several at once. With a limit on the caches it gives them back, and is recorded anew."""
    as_on_an_accelerator(monkeypatch, view=256)
    recorder, plain = OpRecorder(), engine()
    model = engine(recorder)
    scheduler = Scheduler(model.target, model.drafter, size, 2, cache_tokens=cache_tokens)
    counts = []
    for number, prompt in enumerate([*prompts()[:4], None, *prompts()[4:7]]):
        asked = prompts()[:2] if prompt is None else [prompt]
        texts = [text(number, one, 10, kinds=KINDS[:1]) for one in asked]
        for one in texts:
            scheduler.admit(one)
        before = recorder.recordings
        collect(scheduler)
        counts.append(recorder.recordings - before)
        assert [one.new_tokens for one in texts] == [alone(plain, one, size) for one in texts]
    assert counts[0] > 0 and counts[5] > 0, "the first, and the first after several"
    kept = cache_tokens is None
    assert all((count == 0) == kept for count in (*counts[1:4], *counts[6:])), counts


def test_a_lone_text_may_follow_several_whose_caches_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grew when all but one had left, and have memory for that one alone: so has what is looked up."""
    as_on_an_accelerator(monkeypatch, view=16)
    monkeypatch.setattr(workspace, "AHEAD", 3)
    model, plain = (with_looked_up(engine(one)) for one in (OpRecorder(), None))
    scheduler = Scheduler(model.target, model.drafter, TREE, 2)
    for limits in ([3, 90], [20], [20]):
        pairs = enumerate(zip(prompts(), limits, strict=False))
        texts = [text(number, prompt, limit, kinds=KINDS[:1]) for number, (prompt, limit) in pairs]
        for one in texts:
            scheduler.admit(one)
        assert collect(scheduler) == {one.number: alone(plain, one, TREE) for one in texts}


def test_ranks_check_what_each_of_them_goes_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may have lacked the memory to keep a text: it would read more than the others, which wait."""
    told: list[tuple[int, ...]] = []
    monkeypatch.setattr(Ranks, "check", lambda _, what, numbers: told.append(numbers))
    model, prompt = engine(), prompts_of([40])[0]
    scheduler = Scheduler(model.target, model.drafter, TREE, 2, prefix_tokens=1000)
    for number in range(2):
        scheduler.admit(text(number, prompt, 5))
        collect(scheduler)
    assert told == [(1, 0, 0), (1, len(prompt) - 1, 0)]


def test_recordings_of_a_text_in_which_the_weights_were_replaced_are_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They read the weights where these were when the text began."""
    as_on_an_accelerator(monkeypatch, view=256)
    source = copy.deepcopy(tiny_model())
    target = TargetModel(source, Graphs(OpRecorder()))
    plain = EagleFSD(TargetModel(source), tiny_head())
    scheduler = Scheduler(target, EagleFSD(target, tiny_head()).drafter, TREE, 1)
    first, second = (text(number, prompts()[0], 24, kinds=KINDS[:1]) for number in range(2))
    scheduler.admit(first)
    while first.stats.steps < 4:
        scheduler.step()
    source.load_state_dict(copy.deepcopy(tiny_model(seed=9)).state_dict(), assign=True)
    collect(scheduler)
    scheduler.admit(second)
    collect(scheduler)
    assert second.new_tokens == alone(plain, second, TREE)


@pytest.mark.parametrize("length", [0, 256])
def test_a_prompt_without_room_is_refused(length: int) -> None:
    model = engine()
    scheduler = Scheduler(model.target, None, TREE, 2)
    length = length and model.target.max_positions
    with pytest.raises(ValueError, match=f"prompt 4 has {length} tokens"):
        scheduler.admit(Text(4, 5, Terms(()), prompt=[1] * length))
    with pytest.raises(ValueError, match="rows is 0"):
        Scheduler(model.target, None, TREE, 0)


def test_texts_that_are_abandoned_are_let_go() -> None:
    """A prompt of a hundred thousand tokens must not stay for as long as its scheduler does."""
    model = engine()
    scheduler = Scheduler(model.target, model.drafter, TREE, rows=4)
    for number, prompt in enumerate(prompts()):
        scheduler.admit(text(number, prompt, 20))
    held = [weakref.ref(one) for one in scheduler.waiting]
    for _ in range(3):
        scheduler.step()
    scheduler.abandon()
    gc.collect()
    assert not scheduler.busy and not any(one() for one in held)
