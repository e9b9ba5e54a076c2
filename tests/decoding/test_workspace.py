"""Workspaces: memory that follows the texts, and one workspace for one batch at a time."""

from __future__ import annotations

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.drafters import StandInSpec
from support.op_recorder import OpRecorder, as_on_an_accelerator
from support.tiny_models import VOCAB, KnowingDrafter, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Lossless, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.decoding import workspace
from eagle_fsd.decoding.workspace import AHEAD, LEAST, Workspace, Workspaces
from eagle_fsd.drafting.eagle_drafter import EagleSpec
from eagle_fsd.runtime.openvino.block_cache import BlockCache
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.step_recorder import EAGER, Graphs
from eagle_fsd.target.model import TargetModel

TREE = TreeConfig(8, 3, 3)
HEAD = tiny_head()
LONG = 131_072


def engine(recorder: OpRecorder | None = None, **settings: int) -> EagleFSD:
    stepper = EAGER if recorder is None else Graphs(recorder)
    model = TargetModel(tiny_model("llama", **settings), stepper)
    return EagleFSD(model, tiny_head(max_position_embeddings=LONG))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Workspace]:
    """Every workspace that was given back after a text."""
    made, give_back = [], Workspaces.give_back

    def noted(self: Workspaces, one: Workspace) -> None:
        made.append(one)
        give_back(self, one)

    monkeypatch.setattr(Workspaces, "give_back", noted)
    return made


def slots(one: Workspace) -> list[int]:
    """Return the slots that are allocated for a row in each layer of the target and of the head."""
    caches = [part.cache for part in (one.session, one.drafter) if hasattr(part, "cache")]
    return [buffer.shape[2] for cache in caches for layer in cache.layers.values() for buffer in layer]


# --- memory ---


@pytest.mark.parametrize("tokens", [1, 40])
def test_memory_follows_the_text_and_not_its_limit(tokens: int, used: list[Workspace]) -> None:
    """A text that ends early takes little memory, even if it may have a hundred thousand tokens."""
    model = engine(max_position_embeddings=LONG)
    plain = engine().generate(prompts_of([5]), max_new_tokens=60, tree=TREE).new_tokens[0]
    place = next(i for i in range(tokens, 60) if plain[i] not in plain[:i])
    found = model.generate(prompts_of([5]), max_new_tokens=100_000, tree=TREE, eos_token_id=plain[place])
    assert found.new_tokens == [plain[: place + 1]]
    one = used[-1]
    assert len(slots(one)) == 6 and max(slots(one)) <= 5 + AHEAD + 8 + 6
    assert one.session.cache.limit == 5 + 100_000 + 8


@pytest.mark.parametrize("recorded", [False, True])
def test_texts_in_caches_that_grow_are_the_texts_in_large_ones(
    recorded: bool, used: list[Workspace], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if recorded:
        request.getfixturevalue("accelerator")
    ids, mask = pad_left(prompts_of([5, 19, 11]), 0)
    options = {"max_new_tokens": 90, "tree": TREE, "temperature": 0.8, "seed": 0}
    large = engine().generate(ids, mask, **options)
    assert max(slots(used.pop())) == 19 + 90 + 8 + 6
    monkeypatch.setattr(workspace, "AHEAD", 4)
    monkeypatch.setattr(workspace, "LEAST", 16)
    model = engine(OpRecorder() if recorded else None)
    for _ in range(2):
        small = model.generate(ids, mask, **options)
        assert small.new_tokens == large.new_tokens
        assert [row.steps for row in small.stats] == [row.steps for row in large.stats]
    assert max(slots(used[0])) <= 128, "it doubles, but not past what the texts may need"


def test_memory_of_a_short_limit_is_no_more_than_it_needs(used: list[Workspace]) -> None:
    engine().generate(prompts_of([5]), max_new_tokens=3, tree=TREE)
    assert set(slots(used[0])) == {5 + 3 + 8, 5 + 3 + 8 + 6}


# --- the spare one ---


def take(spaces: Workspaces, batch: int, drafts: bool = True, longest: int = 30) -> Workspace:
    spec = EagleSpec.for_target(HEAD, spaces.target)
    return spaces.take(batch, 5, longest, TREE if drafts else TreeConfig(1), spec)


def test_two_threads_never_get_one_workspace() -> None:
    """Four threads ask at once while there is one spare workspace, and looking at it takes long."""

    class Slow(Workspaces):
        @property
        def spare(self) -> Workspace | None:
            found = self.__dict__.get("kept")
            time.sleep(0.05)
            return found

        @spare.setter
        def spare(self, one: Workspace | None) -> None:
            self.__dict__["kept"] = one

    spaces = Slow(TargetModel(tiny_model(), Graphs(OpRecorder())))
    spare = take(spaces, 1)
    spaces.give_back(spare)
    start, taken = threading.Barrier(4), []

    def work() -> None:
        start.wait()
        taken.append(take(spaces, 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one is spare for one in taken) == 1 and len({id(one) for one in taken}) == 4


def test_the_spare_one_can_be_dropped() -> None:
    spaces = Workspaces(TargetModel(tiny_model(), Graphs(OpRecorder())))
    spaces.give_back(take(spaces, 1))
    assert spaces.spare is not None
    spaces.clear()
    assert spaces.spare is None


def test_a_workspace_is_kept_only_where_steps_are_recorded_and_used_only_where_it_fits() -> None:
    eager = Workspaces(TargetModel(tiny_model()))
    eager.give_back(take(eager, 1))
    assert eager.spare is None
    spaces = Workspaces(TargetModel(tiny_model(), Graphs(OpRecorder())))
    one = take(spaces, 2)
    assert one.session.cache.capacity == LEAST and one.drafter.cache.capacity >= LEAST
    spaces.give_back(one)
    assert take(spaces, 2, longest=5000) is one, "it grows"
    assert one.session.cache.limit == 5000 + 8 and one.drafter.cache.limit == 5000 + 8 + 6
    spaces.give_back(one)
    assert take(spaces, 3) is not one
    spaces.give_back(one)
    assert take(spaces, 2, drafts=False) is not one


@pytest.mark.usefixtures("accelerator")
def test_a_workspace_is_used_again_after_rows_have_left_it() -> None:
    """But not while it is in use, nor when it grew for fewer rows than it was made for."""
    model, plain = engine(OpRecorder()), engine()

    def text(lengths: list[int], **options: object) -> list[list[int]]:
        ids, mask = pad_left(prompts_of(lengths), 0)
        return model.generate(ids, mask, **{"max_new_tokens": 24, "tree": TREE, **options}).new_tokens

    whole = text([5, 9])
    spare = model._workspaces.spare
    ends = {"eos_token_id": [whole[0][3]]}
    assert [len(words) for words in text([5, 9], **ends)] != [24, 24]
    assert spare is not None and model._workspaces.spare is spare
    chunks = iter(model.stream(prompts_of([5]), max_new_tokens=8, tree=TREE))
    first = next(chunks)
    assert model._workspaces.spare is None
    assert text([5])[0][: len(first)] == first
    other = model._workspaces.spare
    assert other is not None and other is not spare
    words = [*first, *(token for chunk in chunks for token in chunk)]
    assert words == plain.generate(prompts_of([5]), max_new_tokens=8, tree=TREE).new_tokens[0]
    assert text([5], max_new_tokens=8, tree=TreeConfig(1)) == [words]


@pytest.mark.usefixtures("accelerator")
def test_what_is_never_run_takes_no_workspace() -> None:
    """A call that is refused, or a stream that nobody reads, leaves the next one what was recorded."""
    model, options = engine(OpRecorder()), {"max_new_tokens": 8, "tree": TREE}
    model.generate(prompts_of([5]), **options)
    spare = model._workspaces.spare
    with pytest.raises(ValueError, match="streamer is 'x': it must have put and end"):
        model.generate(prompts_of([5]), streamer="x", **options)
    with pytest.raises(ValueError, match="a stream gives one text"):
        model.stream(prompts_of([5]), num_return_sequences=2, temperature=1.0, **options)
    model.stream(prompts_of([5]), **options).close()
    model.stream_batch(prompts_of([5]), **options)
    assert spare is not None and model._workspaces.spare is spare


@pytest.mark.usefixtures("accelerator")
def test_a_workspace_is_not_used_for_other_weights_or_under_another_autocast() -> None:
    """Recorded steps read the weights where they were, in the dtype that autocast had."""
    source = copy.deepcopy(tiny_model())
    model = EagleFSD(TargetModel(source, Graphs(OpRecorder())), HEAD)
    plain = EagleFSD(TargetModel(source), HEAD)

    def require_the_text_of_plain_steps() -> list[list[int]]:
        made = [one.generate(prompts_of([5]), max_new_tokens=24, tree=TREE) for one in (plain, model, model)]
        assert made[1].new_tokens == made[2].new_tokens == made[0].new_tokens
        return made[0].new_tokens

    first = require_the_text_of_plain_steps()
    with torch.autocast("cpu", torch.bfloat16):
        require_the_text_of_plain_steps()
    require_the_text_of_plain_steps()
    source.load_state_dict(copy.deepcopy(tiny_model(seed=9)).state_dict(), assign=True)
    assert require_the_text_of_plain_steps() != first


@pytest.mark.usefixtures("accelerator")
def test_a_workspace_that_grew_for_some_of_its_rows_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "AHEAD", 4)
    monkeypatch.setattr(workspace, "LEAST", 16)
    model = engine(OpRecorder())
    ids, mask = pad_left(prompts_of([5, 9]), 0)
    options = {"tree": TREE, "rule": Lossless()}
    first = model.generate(ids, mask, max_new_tokens=60, **options).new_tokens
    assert model._workspaces.spare is not None
    ends = [token for token in first[0][1:4] if token not in first[1]][:1]
    assert ends, "one row was meant to end before the other"
    model._workspaces.clear()
    cut = model.generate(ids, mask, max_new_tokens=60, eos_token_id=ends, **options).new_tokens
    assert len(cut[0]) < 5 and cut[1] == first[1]
    assert model._workspaces.spare is None


def test_a_lone_text_does_not_keep_the_memory_of_those_that_were_beside_it() -> None:
    """Blocks of rows close ranks within the memory of all: a server that is idle must not hold it."""
    spaces = Workspaces(TargetModel(tiny_model(), FixedShapes()))
    for rows in (4, 1):
        cache = BlockCache(rows, 256, [(2, 3)] * 2)
        cache.select([rows - 1])
        session, drafter = SimpleNamespace(cache=cache), SimpleNamespace(rows=cache.rows)
        spaces.give_back(Workspace(session, drafter, None, 1, spaces.plain, None))
        assert (spaces.spare is None) == (rows == 4)


def test_graphs_are_expected_for_trees_and_for_steps_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that looks drafts up finds none for some steps, which then verify the root alone."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(TargetModel, "expect", lambda self, *sizes: asked.append(sizes))
    target = TargetModel(tiny_model())
    for head, lookup in ((tiny_head(), False), (None, True)):
        model = EagleFSD(target, head, lookup=lookup)
        model.generate(prompts_of([5]), max_new_tokens=2, tree=TREE)
    assert asked == [(1, 8), (1, 8), (1, 1)]


def test_a_drafter_without_a_cache_has_a_workspace_too() -> None:
    spaces = Workspaces(TargetModel(tiny_model(), Graphs(OpRecorder())))
    spec = StandInSpec(lambda *_: KnowingDrafter([[1]]), VOCAB)
    one = spaces.take(1, 5, 30, TREE, spec)
    spaces.give_back(one)
    assert one.complete and torch.equal(one.session.cache.lengths, torch.zeros(1, dtype=torch.int64))
