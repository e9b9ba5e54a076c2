"""Prompts in slices, kept texts and the budget of the caches: none of them changes a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from support.drafters import StandInSpec
from support.every_drafter import DRAFTERS, engine, every_drafter, target
from support.tiny_models import VOCAB, prompts_of
from torch import Tensor

from eagle_fsd import Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding import scheduler as scheduler_module
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.loop import keep
from eagle_fsd.decoding.prompts import prefill as prefill_module
from eagle_fsd.decoding.prompts import prefix_cache
from eagle_fsd.decoding.prompts.prefill import SHARED, PromptReader, prefill
from eagle_fsd.decoding.prompts.prefix_cache import KeptText, PrefixCache, count_agreed
from eagle_fsd.decoding.prompts.reading import unique_prompts
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import CANCELLED, Scheduler
from eagle_fsd.decoding.workspace import Workspace, make_workspace
from eagle_fsd.drafting.drafter import Resumable
from eagle_fsd.drafting.tree_growth import BeamDrafter, slots_per_row
from eagle_fsd.runtime.kv_cache import SavedRow
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
State = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # of each step: tokens, parents and logits
TERMS = (
    Terms((), Lossless()),
    Terms((), Fuzzy(0.5), SamplingConfig(0.8, top_k=20)),
    Terms((3, 40), Lossless(), SamplingConfig(1.0)),
    Terms((), Fuzzy(0.4, "tv"), SamplingConfig(0.7)),
)


def text(number: int, prompt: Sequence[int], limit: int) -> Text:
    return Text(number, limit, TERMS[number % len(TERMS)], prompt=prompt, stream=(7, number))


def alone(name: str, one: Text) -> list[int]:
    """Return the engine's tokens for the text on its own."""
    sampling = one.terms.sampling
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "rule": one.terms.rule}
    ids = torch.tensor([list(one.prompt)])
    made = engine(name).generate(
        ids,
        torch.ones_like(ids),  # a turn's tokens may be the pad token's, which is no padding here
        max_new_tokens=one.limit,
        tree=TREE,
        seed=[one.stream],
        eos_token_id=one.terms.eos_token_ids,
        **options,
    )
    return made.new_tokens[0]


def scheduler_of(name: str, rows: int = 4, **options: int | None) -> Scheduler:
    model = engine(name)
    return Scheduler(model.target, model.drafter, TREE, rows, **options)


def held(scheduler: Scheduler) -> int:
    """Return the slots that all caches of a scheduler have been given."""
    sessions = [] if scheduler.batch is None else [scheduler.batch.target]
    if scheduler.reading is not None:
        sessions.append(scheduler.reading.workspace.session)
    return sum(one.cache.rows * one.cache.capacity for one in sessions) + scheduler.prefixes.slots


class Counted:
    """Counts the prompt tokens that targets read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[int] = []
        read = TargetSession.prefill

        def counted(session: TargetSession, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
            self.parts.append(tokens.numel())
            return read(session, tokens, lengths)

        monkeypatch.setattr(TargetSession, "prefill", counted)

    def take(self) -> list[int]:
        """Return how many tokens each forward read since the last call."""
        parts, self.parts = self.parts, []
        return parts


def steps_of(scheduler: Scheduler, found: dict[Text, list[int]]) -> Iterator[None]:
    """Run steps until all texts are done; yield after each, and add what it emitted to `found`."""
    while scheduler.busy:
        for one, tokens in scheduler.step().items():
            found.setdefault(one, []).extend(tokens)
        yield


def drain(scheduler: Scheduler, found: dict[Text, list[int]]) -> None:
    for _ in steps_of(scheduler, found):
        pass


# --- random arrivals ---


def random_run(name: str, seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Let texts come and go at random; return how many were retired, and how many tokens not read."""
    monkeypatch.setattr(prefix_cache, "LEAST", 4)
    monkeypatch.setattr(prefill_module, "LISTED", 3)
    monkeypatch.setattr(prefix_cache, "LISTED", 3)
    rng, counter = random.Random(f"{name}/{seed}"), Counted(monkeypatch)
    limit = rng.choice([None, 500]) if name != "openvino" else rng.choice([None, 2000])
    scheduler = scheduler_of(
        name,
        rows=rng.randint(1, 4),
        group=rng.randint(1, 2),
        slice_tokens=rng.choice([1, 3, 8, 20, None]),
        cache_tokens=limit,
        prefix_tokens=rng.choice([200, 1000]) if name != "openvino" else 1024,
    )
    found: dict[Text, list[int]] = {}
    texts: list[Text] = []
    saved = 0
    starts: list[int] = []
    load = TargetSession.load_row
    monkeypatch.setattr(TargetSession, "load_row", lambda *given: (starts.append(given[3]), load(*given))[1])
    while len(texts) < count or scheduler.busy:
        if len(texts) < count and rng.random() < 0.4:
            prompt = prompts_of([rng.choice([1, 2, 5, 9, 14, 30, 50])], seed=len(texts))[0]
            if texts and rng.random() < 0.7:  # a next turn, or another end of a prompt
                before = rng.choice([one for one in texts if one.done] or texts)
                history = [*before.prompt, *found[before]]
                prompt = (history[: rng.choice([len(history), rng.randint(1, len(history))])] + prompt)[:70]
            texts.append(text(len(texts), prompt, rng.randint(1, 24)))
            found[texts[-1]] = []
            scheduler.admit(texts[-1])
        if texts and rng.random() < 0.08:
            scheduler.retire(rng.choice(texts))
        for one, tokens in scheduler.step().items():
            found[one] += tokens
        assert limit is None or held(scheduler) <= limit
        assert scheduler.prefixes.slots <= scheduler.prefixes.limit
    assert scheduler.batch is None and scheduler.reading is None and not scheduler._unkept
    saved = sum(starts)
    counter.take()
    monkeypatch.setattr(TargetSession, "load_row", load)
    cancelled = 0
    for one in texts:
        whole, mine = alone(name, one), found[one]
        if one.stats.finish_reason == CANCELLED:
            cancelled += 1
            assert mine == whole[: len(mine)], f"text {one.number} of seed {seed}"
        else:
            assert mine == whole, f"text {one.number} of seed {seed}"
    return cancelled, saved


@every_drafter
def test_texts_that_come_and_go_are_those_that_they_are_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        saved = random_run(name, 4, 8, patched)[1]
    assert saved > 10, "no text went on from a kept one"


@pytest.mark.slow
@every_drafter
def test_many_more_texts_that_come_and_go(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = saved = 0
    for seed in range(100, 120):
        with monkeypatch.context() as patched:
            found = random_run(name, seed, 25, patched)
        cancelled, saved = cancelled + found[0], saved + found[1]
    assert saved > 1000 and cancelled > 20


# --- slices ---


def state_of(name: str, read: Callable[[Scheduler, torch.Tensor], Workspace], prompt: Sequence[int]) -> State:
    """Return what target and drafter say after a prompt, and after two more steps of it."""
    workspace = read(scheduler_of(name), torch.tensor([list(prompt)]))
    session, drafter = workspace.session, workspace.drafter
    roots, found = torch.tensor([prompt[-1]]), []
    for _ in range(2):
        tree = drafter.draft(roots, TREE)
        logits, features = session.verify(tree)
        found.append((tree.tokens, tree.parents, logits))
        verdict = greedy_verdict(tree, logits)
        emitted = [verdict.tokens[0, : int(verdict.length[0])].tolist()]
        roots = keep(session, drafter, verdict, features, emitted, logits)
    return found


def greedy_verdict(tree: DraftTree, logits: torch.Tensor) -> Verdict:
    random = RowRandom(0, 1)
    ends = torch.empty(0, dtype=torch.int64)
    emitted = torch.zeros(1, dtype=torch.int64)
    return AcceptStep()(Lossless(), Verified(tree, logits, SamplingConfig(), ends), random, emitted)


def require_same(mine: State, its: State) -> None:
    for (tokens, parents, logits), (wanted, its_parents, its_logits) in zip(mine, its, strict=True):
        assert torch.equal(tokens, wanted) and torch.equal(parents, its_parents)
        torch.testing.assert_close(logits, its_logits, atol=2e-3, rtol=1e-3)


def read_whole(scheduler: Scheduler, tokens: torch.Tensor) -> Workspace:
    made = make_workspace(scheduler.target, scheduler.drafter, 1, tokens.shape[1], 100, TREE)
    with torch.inference_mode():
        prefill(tokens, [tokens.shape[1]], made.session, made.drafter)
    return made


@pytest.mark.parametrize("length", [1, 2, 3, 40])
@every_drafter
@torch.inference_mode()
def test_a_prompt_in_slices_is_a_prompt_at_once(
    name: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_module, "LISTED", 6)
    prompt = prompts_of([length], seed=length)[0]
    rng = random.Random(length)

    def read(scheduler: Scheduler, tokens: torch.Tensor) -> Workspace:
        made = make_workspace(scheduler.target, scheduler.drafter, 1, 1, 100, TREE)
        reader = PromptReader(tokens, made.session, made.drafter)
        while reader.shown < length:
            before, most = reader.position, rng.randint(1, 9)
            assert reader.read(most) == reader.position - before <= most
        return made

    require_same(state_of(name, read, prompt), state_of(name, read_whole, prompt))


@every_drafter
@torch.inference_mode()
def test_a_prompt_after_a_kept_text_is_a_prompt_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any of the kept text's first tokens on, though the kept text went on otherwise."""
    monkeypatch.setattr(prefill_module, "LISTED", 6)
    prompt, other = prompts_of([30, 26], seed=1)
    for start in (2, 9, 23):

        def read(scheduler: Scheduler, tokens: torch.Tensor, start: int = start) -> Workspace:
            history = [*prompt[:start], *other]
            kept = read_whole(scheduler, torch.tensor([history]))
            saved = kept.session.save_row(0, len(history) - 1)
            made = make_workspace(scheduler.target, scheduler.drafter, 1, 1, 100, TREE)
            made.session.load_row(0, saved, start - 1)
            if isinstance(made.drafter, Resumable):
                assert isinstance(kept.drafter, Resumable)
                drafted = kept.drafter.save_row(0, len(history))
                assert drafted is not None
                made.drafter.load_row(0, drafted, prompt[:start])
            reader = PromptReader(tokens, made.session, made.drafter, start)
            while reader.left:
                reader.read(8)
            return made

        require_same(state_of(name, read, prompt), state_of(name, read_whole, prompt))


@every_drafter
@torch.inference_mode()
def test_what_all_prompts_begin_with_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on differently for any number of tokens, for none, or are one prompt several times."""
    monkeypatch.setattr(prefill_module, "LISTED", 6)
    start, *ends = prompts_of([14, 1, 4, 9], seed=1)
    read_at_once, scheduler = TargetSession.prefill, scheduler_of(name)
    numbers: list[int] = []

    def counted(session: TargetSession, tokens: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if session.target is scheduler.target:
            numbers.append(tokens.numel())
        return read_at_once(session, tokens, counts)

    def read(prompts: Sequence[Sequence[int]], least: int) -> tuple[State, int]:
        made = make_workspace(scheduler.target, scheduler.drafter, len(prompts), 1, 100, TREE)
        numbers.clear()
        with monkeypatch.context() as patched:
            patched.setattr(prefill_module, "SHARED", least)
            patched.setattr(TargetSession, "prefill", counted)
            roots = prefill(pad_right(prompts, 0), [len(one) for one in prompts], made.session, made.drafter)
        tree = made.drafter.draft(roots, TREE)
        return [(tree.tokens, tree.parents, made.session.verify(tree)[0])], sum(numbers)

    for rows, shared in (
        ([start, start + ends[1], start + ends[2]], 13),  # the last token of a prompt is the root
        ([start + ends[0], start + ends[2]], 14),
        ([start] * 3, 13),
    ):
        (mine, once), (wanted, apart) = read(rows, 8), read(rows, 1000)
        require_same(mine, wanted)
        assert apart - once == (len(rows) - 1) * shared


@every_drafter
def test_what_waiting_prompts_begin_with_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of prompts take turns; none of their texts has ended when the next one is read."""
    monkeypatch.setattr(prefix_cache, "LEAST", 4)
    monkeypatch.setattr("eagle_fsd.decoding.prompts.prefix_cache.SHARED", 10)
    monkeypatch.setattr(prefill_module, "LISTED", 2)
    monkeypatch.setattr(prefix_cache, "LISTED", 2)
    starts, ends = prompts_of([24, 18], seed=1), prompts_of([3, 7, 2, 5, 4, 6], seed=2)
    texts = [text(number, starts[number % 2] + end, 12) for number, end in enumerate(ends)]
    wanted = [alone(name, one) for one in texts]
    for kept in (0, 4096):
        scheduler, found = scheduler_of(name, rows=6, slice_tokens=8, prefix_tokens=kept), {}
        again = [text(one.number, one.prompt, one.limit) for one in texts]
        for one in again:
            scheduler.admit(one)
        drain(scheduler, found)
        assert [found[one] for one in again] == wanted
        assert [one.stats.reused_tokens for one in again] == ([0, 0, 24, 18, 24, 18] if kept else [0] * 6)


def test_a_long_prompt_stalls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, found = scheduler_of("eagle", slice_tokens=4), {}
    first = [text(number, prompt, 40) for number, prompt in enumerate(prompts_of([3, 4]))]
    for one in first:
        scheduler.admit(one)
    while set(scheduler.decoding) != set(first):
        for one, tokens in scheduler.step().items():
            found.setdefault(one, []).extend(tokens)
    late, counter = text(2, prompts_of([30], seed=2)[0], 5), Counted(monkeypatch)
    scheduler.admit(late)
    for _ in range(7):  # 29 tokens are to be read
        emitted = scheduler.step()
        assert set(emitted) == set(first) and counter.take() == [4]
        for one, tokens in emitted.items():
            found[one] += tokens
    drain(scheduler, found)
    assert counter.take() == [1]
    monkeypatch.undo()
    assert found == {one: alone("eagle", one) for one in (*first, late)}


@pytest.mark.parametrize("name", ["eagle", "merged", "draft model"])
def test_a_short_prompt_overtakes_a_long_one(name: str) -> None:
    scheduler, found = scheduler_of(name, slice_tokens=4), {}
    long, short = (text(number, prompt, 5) for number, prompt in enumerate(prompts_of([60, 3])))
    scheduler.admit(long)
    for _ in range(2):
        scheduler.step()
    scheduler.admit(short)
    emitted = scheduler.step()
    assert set(emitted) == {short} and scheduler.reading is not None and scheduler.reading.texts == [long]
    found.update(emitted)
    drain(scheduler, found)
    assert found == {one: alone(name, one) for one in (long, short)}


@pytest.mark.parametrize(("length", "second"), [(20, [3, 13]), (24, [7, 9]), (25, [8]), (30, [13])])
def test_what_is_left_of_a_slice_is_read_of_the_next_prompt_if_it_is_more_than_half(
    length: int, second: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of fewer tokens would take about as long as one of a whole slice."""
    scheduler, counter = scheduler_of("eagle", slice_tokens=16), Counted(monkeypatch)
    for number, prompt in enumerate(prompts_of([length, 40])):
        scheduler.admit(text(number, prompt, 9))
    scheduler.step()
    assert counter.take() == [16]
    scheduler.step()
    assert counter.take() == second


def test_short_prompts_never_keep_a_long_one_from_being_read() -> None:
    """However many come, it is read at half the speed at least."""
    scheduler, found = scheduler_of("eagle", rows=32, slice_tokens=4), {}
    long, others = text(0, prompts_of([41])[0], 5), []
    scheduler.admit(long)
    overtook = steps = 0
    while long not in scheduler.decoding and steps < 40:
        others.append(text(len(others) + 1, prompts_of([4], seed=len(others))[0], 4))
        scheduler.admit(others[-1])
        for one, tokens in scheduler.step().items():
            found.setdefault(one, []).extend(tokens)
        overtook, steps = overtook + scheduler._overtaken, steps + 1
    assert steps == 19 and overtook == 9  # a slice is for others at every second step; forty tokens have ten
    drain(scheduler, found)
    assert found == {one: alone("eagle", one) for one in (long, *others)}


def test_who_goes_on_from_a_kept_text_overtakes_but_nothing_makes_room_for_that() -> None:
    slots = slots_per_row(124, TREE)
    for room, overtakes in ((None, True), (3 * slots, False)):
        before, long = text(4, prompts_of([50])[0], 4), text(8, prompts_of([120], seed=2)[0], 4)
        scheduler, found = scheduler_of("eagle", slice_tokens=8, cache_tokens=room, prefix_tokens=slots), {}
        scheduler.admit(before)
        drain(scheduler, found)
        assert scheduler.prefixes.slots > 50
        turn = text(12, [*before.prompt, *found[before], 7], 4)
        scheduler.admit(long)
        scheduler.step()
        scheduler.admit(turn)
        for _ in steps_of(scheduler, found):
            assert room is None or held(scheduler) <= room
        assert turn.stats.reused_tokens > 50  # the kept text is still there, whenever the turn is read
        order = [one for one in found if one is not before]  # by their first tokens
        assert order == ([turn, long] if overtakes else [long, turn])
        assert found == {one: alone("eagle", one) for one in (before, turn, long)}


@pytest.mark.parametrize(
    "limit", [400, 800, *(pytest.param(one, marks=pytest.mark.slow) for one in (480, 560))]
)
def test_texts_that_overtake_stay_inside_the_budget_of_slots(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while they join, beside the caches of the batch and of the text that is being read."""
    most, overtook, join = [], [], Scheduler._join

    def watched(self: Scheduler, joining: Batch, workspace: Workspace) -> None:
        if self.reading is not None:
            overtook.extend(joining.texts)
        own = joining.target.cache.rows * joining.target.cache.capacity
        most.append(held(self) + own)
        join(self, joining, workspace)
        most.append(held(self) + (0 if self.batch is joining else own))

    monkeypatch.setattr(Scheduler, "_join", watched)
    scheduler, found = scheduler_of("eagle", rows=6, slice_tokens=8, cache_tokens=limit), {}
    first, long = text(0, prompts_of([5])[0], 60), text(4, prompts_of([60])[0], 5)
    for one in (first, long):
        scheduler.admit(one)
        for seen, tokens in scheduler.step().items():
            found.setdefault(seen, []).extend(tokens)
    shorts = [text(number, prompts_of([4], seed=3)[0], 60) for number in (8, 12, 16)]
    for one in shorts:
        scheduler.admit(one)
    drain(scheduler, found)
    assert max(most) <= limit
    assert overtook and set(overtook) <= set(shorts)
    assert found == {one: alone("eagle", one) for one in (first, long, *shorts)}


# --- kept texts ---


@every_drafter
def test_the_next_turn_reads_only_what_is_new(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "LISTED", 6)
    monkeypatch.setattr(prefix_cache, "LISTED", 6)
    scheduler, found = scheduler_of(name, prefix_tokens=4096, slice_tokens=8), {}
    first = text(4, prompts_of([40], seed=9)[0], 12)
    scheduler.admit(first)
    drain(scheduler, found)
    history, new = [*first.prompt, *found[first]], prompts_of([5], seed=3)[0]
    turns = [text(8, [*history, *new], 9), text(9, [*history[:25], *new], 9), text(10, history[:14], 9)]
    counter, read = Counted(monkeypatch), []
    for turn in turns:
        scheduler.admit(turn)
        drain(scheduler, found)
        read.append(sum(counter.take()))
    assert found == {one: alone(name, one) for one in (first, *turns)}
    lists = 6 if name in ("lookup", "merged") else 0
    assert 5 <= read[0] <= 5 + TREE.depth + 1 + lists
    assert read[1] == max(5, lists)
    assert read[2] == 13, "fewer than LEAST tokens are read"


def require_same_slots(mine: SavedRow, its: SavedRow) -> None:
    """Assert that two saved rows have the same keys and values, up to rounding."""
    assert mine.slots == its.slots and mine.parts.keys() == its.parts.keys()
    for layer, tensors in mine.parts.items():
        for one, other in zip(tensors, its.parts[layer], strict=True):
            if one.ndim == 5:  # in blocks: [M, blocks, H, BLOCK, D]
                one, other = (x.permute(0, 2, 1, 3, 4).flatten(2, 3) for x in (one, other))
            torch.testing.assert_close(
                one[..., : mine.slots, :], other[..., : mine.slots, :], atol=2e-3, rtol=1e-3
            )


@every_drafter
def test_what_is_kept_of_a_row_is_what_its_text_would_store(name: str) -> None:
    """Of every row, whichever texts left before it, and whether it ended or was retired."""
    scheduler, found = scheduler_of(name, prefix_tokens=4096, slice_tokens=None), {}
    texts = [text(4 * number, prompt, 20) for number, prompt in enumerate(prompts_of([20, 26, 19, 23]))]
    texts[1].limit = 6
    for one in texts:
        scheduler.admit(one)
    for _ in range(5):
        for one, tokens in scheduler.step().items():
            found.setdefault(one, []).extend(tokens)
    scheduler.retire(texts[2])
    drain(scheduler, found)
    kept = sorted(scheduler.prefixes.texts, key=lambda one: found_in(texts, one))
    assert len(kept) == 4
    for one, its in zip(texts, kept, strict=True):
        tokens = its.tokens.tolist()
        assert tokens == [*one.prompt, *found[one]][: len(tokens)] and len(tokens) > len(one.prompt)
        fresh = read_whole(scheduler, its.tokens[None])
        with torch.inference_mode():
            require_same_slots(its.target, fresh.session.save_row(0, len(tokens) - 1))
            if isinstance(fresh.drafter, Resumable):
                again = fresh.drafter.save_row(0, len(tokens))
                assert again is not None and its.drafter is not None
                for mine, new in zip(its.drafter, again, strict=True):
                    require_same_slots(mine, new)


def found_in(texts: Sequence[Text], kept: KeptText) -> int:
    """Return the number of the text that was kept."""
    return next(one.number for one in texts if list(one.prompt) == kept.tokens.tolist()[: len(one.prompt)])


class AtOnce:
    """A drafter that reads every prompt at once, whatever the one inside can do."""

    def __init__(self, inside: BeamDrafter) -> None:
        self.inside, self.needs, self.rows = inside, inside.needs, inside.rows
        for method in ("begin", "extend", "draft", "select", "reset"):
            setattr(self, method, getattr(inside, method))

    def replace(self, rows: Sequence[int], other: AtOnce) -> None:
        self.inside.replace(rows, other.inside)


@pytest.mark.parametrize("name", ["eagle", "draft model"])
def test_a_drafter_may_read_prompts_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's part is kept all the same, unless the drafter needs features of the whole prompt."""
    inside = DRAFTERS[name]()
    spec = StandInSpec(lambda batch, tokens, tree: AtOnce(inside.make(batch, tokens, tree)), VOCAB)
    scheduler = Scheduler(target(), spec, TREE, 4, slice_tokens=8, prefix_tokens=4096)
    counter, found = Counted(monkeypatch), {}
    first = text(5, prompts_of([40], seed=9)[0], 12)
    scheduler.admit(first)
    drain(scheduler, found)
    assert counter.take() == [8, 8, 8, 8, 7]
    second = text(6, [*first.prompt, *found[first], 5], 9)
    scheduler.admit(second)
    drain(scheduler, found)
    assert sum(counter.take()) == 52 if name == "eagle" else 6
    monkeypatch.undo()
    assert found == {one: alone(name, one) for one in (first, second)}


def test_kept_texts_do_not_follow_torchs_default_device() -> None:
    """On "meta" there is no data, so that a text compared there would end the step."""
    scheduler, found = scheduler_of("eagle", prefix_tokens=4096), {}
    first = text(0, prompts_of([40], seed=9)[0], 6)
    second = text(1, [*first.prompt, 3, 1], 6)
    try:
        torch.set_default_device("meta")
        for one in (first, second):
            scheduler.admit(one)
            drain(scheduler, found)
    finally:
        torch.set_default_device(None)
    assert second.stats.reused_tokens >= 39 and found == {one: alone("eagle", one) for one in (first, second)}


def test_the_least_recently_used_text_is_dropped() -> None:
    scheduler = scheduler_of("eagle", prefix_tokens=110)
    prompts = prompts_of([30, 31, 32, 33], seed=5)

    def serve(prompt: Sequence[int]) -> None:
        scheduler.admit(text(0, prompt, 6))
        drain(scheduler, {})

    def kept() -> set[int]:
        return {int(one.tokens[0]) for one in scheduler.prefixes.texts}

    for prompt in prompts[:3]:
        serve(prompt)
    assert kept() == {prompt[0] for prompt in prompts[:3]}
    serve(prompts[0])  # used again, and no longer the oldest
    serve(prompts[3])
    assert kept() == {prompts[0][0], prompts[2][0], prompts[3][0]}
    assert len(scheduler.prefixes.texts) == 3, "of two texts that begin alike, the longer one is enough"


def test_a_kept_text_that_another_begins_with_adds_nothing() -> None:
    prefixes = PrefixCache(1000)

    def add(tokens: Sequence[int]) -> bool:
        wanted = prefixes.prepare(tokens, len(tokens), 1000)
        if wanted:
            prefixes.texts.append(
                KeptText(torch.tensor(tokens), len(tokens), SavedRow(len(tokens), {}), None)
            )
        return wanted

    assert add(range(40)) and not add(range(30)) and not add(range(40)) and not add(range(7))
    assert add(range(60)) and add([*range(20), *range(20)])
    assert [len(kept.tokens) for kept in prefixes.texts] == [60, 40]
    found = prefixes.find([*range(20), 0, 9])
    assert found is not None and (len(found[0].tokens), found[1]) == (40, 21)
    assert prefixes.find(range(1, 50)) is None and prefixes.find(range(15)) is None
    prefixes.read_anyway = 25
    assert prefixes.find(range(55)) == (prefixes.texts[0], 30)
    assert not add(range(1, 1002))


def keeping(texts: Sequence[Sequence[int]]) -> PrefixCache:
    prefixes = PrefixCache(10_000)
    prefixes.texts = [KeptText(torch.tensor(one), len(one), SavedRow(0, {}), None) for one in texts]
    return prefixes


def test_a_prompt_that_goes_on_from_another_is_found_as_by_comparing_all() -> None:
    rng = random.Random(0)
    trunk = [rng.randrange(9) for _ in range(200)]

    def branch() -> list[int]:
        """A text that begins with a part of the trunk."""
        return trunk[: rng.randrange(200)] + [rng.randrange(9) for _ in range(rng.randrange(1, 90))]

    def saves_reading(read: list[int], prompts: list[list[int]]) -> bool:
        for prompt in prompts:
            agreed, found = count_agreed(torch.tensor(read), torch.tensor(prompt)), prefixes.find(prompt)
            if agreed >= SHARED and agreed - (found or (None, 0))[1] >= SHARED:
                return True
        return False

    answers = []
    for _ in range(500):
        prefixes = keeping([branch() for _ in range(rng.randrange(3))])
        read, prompts = branch(), [branch() for _ in range(3)]
        answers.append(saves_reading(read, prompts))
        assert prefixes.saves_reading(read, prompts) == answers[-1]
    assert 50 < sum(answers) < 450


def test_texts_that_begin_otherwise_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that waits is looked up after every slice of a long one, which must not take long."""
    compared: list[int] = []

    def counted(one: Tensor, other: Tensor) -> int:
        compared.append(len(one))
        return count_agreed(one, other)

    monkeypatch.setattr(prefix_cache, "count_agreed", counted)
    prefixes = keeping([[number, *range(40 + number)] for number in range(9)])
    found = prefixes.find([7, *range(30), 99])
    assert found == (prefixes.texts[7], 31) and compared == [48]
    shared = [7, *range(40), *range(80)]
    assert prefixes.saves_reading(shared, [[*shared, number] for number in range(64)])
    assert compared == [48, 48], "that prompts are alike is seen without kept texts"
    assert prefixes.prepare(shared, len(shared), 1000) and compared == [48, 48, 48]


def test_copies_of_a_prompt_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that a reading is made up, and not for every copy anew."""
    seen: list[int] = []

    def counted(texts: Sequence[Text]) -> list[tuple[int, ...]]:
        seen.append(len(texts))
        return unique_prompts(texts)

    monkeypatch.setattr(scheduler_module, "unique_prompts", counted)
    scheduler, prompt = scheduler_of("eagle", rows=16), prompts_of([20])[0]
    for number in range(16):
        scheduler.admit(text(number, prompt, 2))
    drain(scheduler, {})
    assert sum(seen) == 16


# --- the budget and those who leave ---


@pytest.mark.parametrize("most", [1, 2])
def test_a_text_waits_for_slots(most: int) -> None:
    """For those of the texts before it, and not for those of the next one."""
    limit, found = most * slots_per_row(30 + 10, TREE), {}
    scheduler = scheduler_of("eagle", cache_tokens=limit)
    texts = [text(number, prompt, 10) for number, prompt in enumerate(prompts_of([20, 30, 20]))]
    for one in texts:
        scheduler.admit(one)
    together = 0
    for count, _ in enumerate(steps_of(scheduler, found)):
        together = max(together, len(scheduler.decoding))
        assert held(scheduler) <= limit and count < 100
    assert together == most
    assert found == {one: alone("eagle", one) for one in texts}


def test_texts_without_drafts_stay_inside_the_budget_too() -> None:
    plain, model = TreeConfig(1), engine("none")
    limit, together = 2 * slots_per_row(30, plain), 0
    scheduler = Scheduler(model.target, model.drafter, plain, 4, cache_tokens=limit)
    for number, prompt in enumerate(prompts_of([20, 20, 20])):
        scheduler.admit(text(number, prompt, 10))
    for _ in steps_of(scheduler, {}):
        together = max(together, len(scheduler.decoding))
        assert held(scheduler) <= limit
    assert together == 2


def test_a_kept_text_makes_room_for_equal_prompts_that_begin_like_it() -> None:
    """They go on from it, and it is dropped all the same."""
    first = text(4, prompts_of([40])[0], 10)
    slots, found = slots_per_row(50, TREE), {}
    scheduler = scheduler_of("eagle", cache_tokens=2 * slots, prefix_tokens=slots)
    scheduler.admit(first)
    drain(scheduler, found)
    assert scheduler.prefixes.slots > 40
    equal = [text(number, [*first.prompt[:35], 7], 14) for number in (8, 12)]
    for one in equal:
        scheduler.admit(one)
    for _ in steps_of(scheduler, found):
        assert held(scheduler) <= 2 * slots
    assert found == {one: alone("eagle", one) for one in (first, *equal)}


def test_a_kept_text_that_is_gone_on_from_outlasts_one_that_nobody_needs() -> None:
    """Room for the second of two equal prompts is made while the first is about to begin with the older."""
    older, newer = (text(number, prompt, 10) for number, prompt in enumerate(prompts_of([40, 40])))
    slots, found = slots_per_row(50, TREE), {}
    scheduler = scheduler_of("eagle", cache_tokens=2 * slots + 50, prefix_tokens=2 * slots)
    for one in (older, newer):
        scheduler.admit(one)
        drain(scheduler, found)
    assert len(scheduler.prefixes.texts) == 2
    for number in (8, 12):
        scheduler.admit(text(number, [*older.prompt[:35], 7], 14))
    scheduler.step()
    assert [one.tokens[:40].tolist() for one in scheduler.prefixes.texts] == [list(older.prompt)]


def test_rows_of_texts_that_ended_are_not_computed_while_another_waits_for_slots() -> None:
    scheduler, found = scheduler_of("eagle", cache_tokens=3 * slots_per_row(50, TREE)), {}
    texts = [text(4 * number, prompt, 10) for number, prompt in enumerate(prompts_of([8, 9, 60]))]
    texts[1].limit, texts[2].limit = 40, 20
    for one in texts:
        scheduler.admit(one)
    computed = set()
    while scheduler.busy:
        done = texts[0].done
        for one, tokens in scheduler.step().items():
            found.setdefault(one, []).extend(tokens)
        if done and scheduler.decoding == [texts[1]]:
            assert scheduler.batch is not None and scheduler.waiting
            computed.add(len(scheduler.batch.texts))
    assert computed == {1}
    assert found == {one: alone("eagle", one) for one in texts}


def test_a_text_that_can_never_have_its_slots_is_refused() -> None:
    prompt, need = prompts_of([90])[0], slots_per_row(110, TREE)
    with pytest.raises(ValueError, match=r"^prompt 3 has 90 tokens and may get 20 more, so that") as error:
        scheduler_of("eagle", cache_tokens=need - 1).admit(text(3, prompt, 20))
    assert f"needs {need} slots" in str(error.value) and "\n" not in str(error.value)
    assert f"cache_tokens allows {need - 1}; shorten the prompt" in str(error.value)
    scheduler_of("eagle", cache_tokens=need).admit(text(3, prompt, 20))


@pytest.mark.parametrize("name", ["eagle", pytest.param("draft model", marks=pytest.mark.slow)])
def test_memory_of_a_long_text_that_left_is_given_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tightened = []
    tighten = Scheduler._tighten
    monkeypatch.setattr(Scheduler, "_tighten", lambda self: (tightened.append(1), tighten(self)))
    scheduler, found = scheduler_of(name, cache_tokens=520), {}
    long, lasting = text(0, prompts_of([120])[0], 8), text(1, prompts_of([6])[0], 60)
    texts = [long, lasting, *(text(number, prompts_of([9], seed=number)[0], 12) for number in range(2, 7))]
    for one in texts:
        scheduler.admit(one)
    together = 0
    for _ in steps_of(scheduler, found):
        together = max(together, len(scheduler.decoding))
        assert held(scheduler) <= 520
    assert tightened and together >= 3
    assert found == {one: alone(name, one) for one in texts}


@pytest.mark.parametrize("when", ["waiting", "being read", "being decoded"])
def test_a_text_can_be_retired_at_any_time(when: str) -> None:
    scheduler = scheduler_of("eagle", rows=1, slice_tokens=8, prefix_tokens=1000)
    gone, other = text(0, prompts_of([40])[0], 30), text(1, prompts_of([9], seed=2)[0], 7)
    scheduler.admit(gone)
    if when != "waiting":
        scheduler.step()
    if when == "being decoded":
        while not scheduler.decoding:
            scheduler.step()
    assert (gone in scheduler.waiting, scheduler.reading is not None, gone in scheduler.decoding) == (
        when == "waiting",
        when == "being read",
        when == "being decoded",
    )
    scheduler.retire(gone)
    scheduler.retire(gone)
    assert gone.stats.finish_reason == CANCELLED
    assert not scheduler.busy and scheduler.batch is None and scheduler.reading is None
    kept = [len(one.tokens) for one in scheduler.prefixes.texts]
    assert kept == {"waiting": [], "being read": [], "being decoded": kept}[when] or kept[0] > 8
    found: dict[Text, list[int]] = {}
    scheduler.admit(other)
    drain(scheduler, found)
    assert found == {other: alone("eagle", other)}


def test_one_of_equal_prompts_is_retired_while_they_are_read() -> None:
    scheduler, found = scheduler_of("eagle", slice_tokens=8), {}
    texts = [text(number, prompts_of([30])[0], 9) for number in range(3)]
    for one in texts:
        scheduler.admit(one)
    assert scheduler.step() == {} and scheduler.reading is not None
    scheduler.retire(texts[1])
    drain(scheduler, found)
    assert found == {one: alone("eagle", one) for one in (texts[0], texts[2])}


@pytest.mark.parametrize("options", [{"slice_tokens": 0}, {"cache_tokens": 0}, {"prefix_tokens": -1}])
def test_numbers_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        scheduler_of("none", **options)
    scheduler_of("none", **{name: number + 1 for name, number in options.items()})
