"""Recorded steps: the same texts as steps run one launch at a time, from recordings that run no Python.

There is no CUDA here: `OpRecorder` plays the part of a CUDA graph, operation by operation, and refuses what a
stream cannot capture.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.fake_flash import plain_prefix
from support.op_recorder import OpRecorder, as_on_an_accelerator
from support.tiny_models import prompts_of, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, Lossless, TreeConfig, Typical
from eagle_fsd.acceptance import accept_step
from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified
from eagle_fsd.acceptance.accept_step import is_immutable
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble
from eagle_fsd.autotune.step_costs import timed_tree
from eagle_fsd.core import tree
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.decoding import workspace
from eagle_fsd.engine import GenerationOutput
from eagle_fsd.runtime import flash_attention, kv_cache
from eagle_fsd.runtime.grouped_attention import grouped_attention
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.step_recorder import EAGER, MOST, Graphs, RecordedWork, Recording, leaves
from eagle_fsd.target.admission import checks
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
RULES = [
    *(Lossless(), Fuzzy(0.5), Fuzzy(0.9, "reverse_kl", mode="paper", child="target", max_consecutive=1)),
    *(
        Fuzzy(0.4, "js_top10", min_p=0.05, max_overshoot=3.0, min_gain=0.2),
        Fuzzy(float("inf"), mode="swap", price=0.5),
        Typical(),
        Cactus(0.5),
        Ensemble(0.3),
    ),
]
WARMTHS: list[dict[str, float]] = [
    {},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0},
]


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)


def engine(
    recorder: OpRecorder | None, family: str = "llama", drafted: int | None = None, own: int | None = None
) -> EagleFSD:
    """Return an engine whose head texts outgrow.

    drafted: the tokens in the head's list; own: see HeadConfig.draft_text_tokens.
    """
    stepper = EAGER if recorder is None else Graphs(recorder)
    tokens = None if drafted is None else torch.arange(0, 96, 96 // drafted)[:drafted]
    attention = "eager" if family == "gemma2" else "sdpa"
    head = tiny_head(trained_positions=16).restrict(tokens, own)
    return EagleFSD(TargetModel(tiny_model(family, attention), stepper), head)


def recordings_of(piece: RecordedWork) -> list[Recording]:
    return [one for one in piece.known.values() if isinstance(one, Recording)]


def text(model: EagleFSD, lengths: list[int], rule: AcceptanceRule, **options: object) -> GenerationOutput:
    ids, mask = pad_left(prompts_of(lengths), 0)
    return model.generate(ids, mask, rule=rule, **{"max_new_tokens": 24, "tree": TREE, "seed": 0, **options})


@pytest.mark.parametrize(
    ("rule", "warm"),
    [  # every rule at one temperature in each run, and at all of them in the long ones
        pytest.param(rule, warm, marks=() if (number + place) % len(WARMTHS) == 0 else pytest.mark.slow)
        for number, rule in enumerate(RULES)
        for place, warm in enumerate(WARMTHS)
    ],
    ids=str,
)
def test_every_rule_gives_the_same_text(rule: AcceptanceRule, warm: dict[str, float]) -> None:
    """Twice, the second time with the recordings of the first; with one row and with ragged ones."""
    # Where top-k cuts a draft that knows its noise, which of the impossible tokens fill a tree is arbitrary.
    recorder, own = OpRecorder(), None if "top_k" in warm else 6
    recorded, plain = engine(recorder, drafted=24, own=own), engine(None, drafted=24, own=own)
    for lengths in ([5], [5], [7, 3, 12], [9]):
        found, wanted = text(recorded, lengths, rule, **warm), text(plain, lengths, rule, **warm)
        assert found.new_tokens == wanted.new_tokens
        for mine, its in zip(found.stats, wanted.stats, strict=True):
            assert mine.accept_histogram == its.accept_histogram
            assert (mine.exact_accepts, mine.fuzzy_accepts) == (its.exact_accepts, its.fuzzy_accepts)
    assert recorder.recordings >= 8 and recorder.replays > 4 * recorder.recordings


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma2", "gpt2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral", "granite")),
    ],
)
def test_every_family_gives_the_same_text(family: str) -> None:
    recorder = OpRecorder()
    recorded, plain = engine(recorder, family), engine(None, family)
    for lengths in ([6], [6], [4, 11]):
        # Lossless, whose text no tie in the draft can change: views of other widths round otherwise.
        assert text(recorded, lengths, Lossless()).new_tokens == text(plain, lengths, Lossless()).new_tokens
    assert recorder.recordings >= 8 and recorder.replays > recorder.recordings


def test_flash_attention_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is made of tensors within the forward; prompts, which are not recorded, have exact views."""
    ends = set()

    def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ends.add((q.shape[2], k.shape[2]))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return grouped_attention(q, k, v, seen[None, None], scale)

    plain = [text(engine(None), lengths, Lossless()).new_tokens for lengths in ([6], [6], [4, 11])]
    monkeypatch.setattr(checks, "flash_available", lambda device, dtype: True)
    monkeypatch.setattr(flash_attention, "flash_prefix", plain_prefix)
    monkeypatch.setattr(flash_attention, "flash_causal", causal)
    recorder = OpRecorder()
    model = engine(recorder)
    assert model.target.flash
    ends.clear()
    assert [text(model, lengths, Lossless()).new_tokens for lengths in ([6], [6], [4, 11])] == plain
    assert recorder.replays > recorder.recordings >= 8 and ends == {(5, 5), (10, 10)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("warm", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("reads", [True, False])
def test_a_tree_as_deep_as_the_draft_is_sure_gives_the_text_that_it_gives_unrecorded(
    reads: bool, warm: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, with all levels drafted, and where the host ends the draft of a tree of the same size."""
    recorder, sure = OpRecorder(), TreeConfig(14, 3, 4, 0.012)
    found = [text(engine(recorder), lengths, Fuzzy(0.5), tree=sure, **warm) for lengths in ([5], [7, 3, 12])]
    assert recorder.recordings >= 4
    as_on_an_accelerator(monkeypatch, reads=reads)
    for output, lengths in zip(found, ([5], [7, 3, 12]), strict=True):
        unrecorded = engine(None)
        if reads:  # as OpenVINO does
            unrecorded = EagleFSD(TargetModel(unrecorded.target.held, FixedShapes()), unrecorded.head)
        wanted = text(unrecorded, lengths, Fuzzy(0.5), tree=sure, **warm)
        assert output.new_tokens == wanted.new_tokens
        assert [one.steps for one in output.stats] == [one.steps for one in wanted.stats]


def test_a_replay_runs_no_model_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps of a shape the target and the head are not called again, but for prompts."""
    recorder = OpRecorder()
    model = engine(recorder)
    calls = []
    forward = TargetModel.features

    def counted(self: TargetModel, tokens: Tensor, *rest: Tensor) -> Tensor:
        calls.append(tokens.shape[1])
        return forward(self, tokens, *rest)

    monkeypatch.setattr(TargetModel, "features", counted)
    first = text(model, [5], Lossless())
    assert 5 - 1 in calls and 0 < calls.count(8) < first.stats[0].steps
    calls.clear()
    again = text(model, [5], Lossless())
    assert again.new_tokens == first.new_tokens and calls.count(8) == 0


def test_a_stream_that_is_dropped_leaves_a_clean_workspace() -> None:
    model = engine(OpRecorder())
    wanted = text(engine(None), [5], Lossless()).new_tokens
    for _ in range(3):
        next(iter(model.stream(prompts_of([8]), max_new_tokens=30, tree=TREE)))
        assert text(model, [5], Lossless()).new_tokens == wanted


def test_what_cannot_be_recorded_runs_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A forward that waits for the device: one warning, the same text, and no second try."""
    forward = TargetModel.features

    def asks(self: TargetModel, tokens: Tensor, *rest: Tensor) -> Tensor:
        assert int(tokens.sum()) >= 0
        return forward(self, tokens, *rest)

    monkeypatch.setattr(TargetModel, "features", asks)
    recorder = OpRecorder()
    model = engine(recorder)
    wanted = text(engine(None), [5], Lossless()).new_tokens
    with caplog.at_level(logging.WARNING):
        assert text(model, [5], Lossless()).new_tokens == wanted
        assert text(model, [5], Lossless()).new_tokens == wanted
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and warnings[0].startswith("no CUDA graphs for this model (operation not")
    assert not model.target.stepper.records


def test_a_rule_that_cannot_be_named_is_not_recorded() -> None:
    class Moody(list):  # a list has no hash
        mode, max_consecutive, exact_prefix = "hybrid", None, 0

        def chances(self, verified: object) -> None:
            self.append(verified)

    recorder, rule = OpRecorder(), Moody()
    model = engine(recorder)
    assert text(model, [5], rule).new_tokens == text(engine(None), [5], Lossless()).new_tokens
    assert len(rule) == text(model, [5], Lossless()).stats[0].steps


# --- batches ---

BATCHES = [(2, [4, 6]), (4, [4, 6, 8, 7]), (8, [1, 20, 8, 1, 24, 10, 24, 7])]


@pytest.mark.covering(1)
@pytest.mark.parametrize("own", [None, 6], ids=["all", "text-tokens"])
@pytest.mark.parametrize(("batch", "lengths"), BATCHES)
def test_rows_that_finish_cost_few_recordings_and_none_in_the_end(
    batch: int, lengths: list[int], own: int | None
) -> None:
    """Rows end one after the other, in three generations: all texts and counts as without recording.

    A recording serves one number of rows, which is halved at most, and what was recorded serves again.
    """
    recorder, drafted = OpRecorder(), None if own is None else 24
    recorded, plain = engine(recorder, drafted=drafted, own=own), engine(None, drafted=drafted, own=own)
    prompts = list(range(5, 5 + batch))
    whole = text(plain, prompts, Lossless()).new_tokens
    ends = sorted({words[min(3 + 2 * row, 20)] for row, words in enumerate(whole)})[:3]
    wanted = text(plain, prompts, Lossless(), eos_token_id=ends)
    assert [len(words) for words in wanted.new_tokens] == lengths
    counts = []
    for _ in range(3):
        before = recorder.recordings
        found = text(recorded, prompts, Lossless(), eos_token_id=ends)
        counts.append(recorder.recordings - before)
        assert found.new_tokens == wanted.new_tokens
        for mine, its in zip(found.stats, wanted.stats, strict=True):
            assert (mine.steps, mine.new_tokens, mine.finish_reason) == (
                its.steps,
                its.new_tokens,
                its.finish_reason,
            )
    rows = batch.bit_length()  # as many numbers of rows: 8, 4, 2, 1
    assert counts[2] == 0 and sum(counts) <= 6 * rows


def test_a_row_that_is_done_stays_as_it_is_beside_the_others() -> None:
    """Its text, its cache and its counts do not grow, and its neighbours' texts are their own."""
    recorder = OpRecorder()
    recorded, plain = engine(recorder), engine(None)
    prompts = [6, 9, 7, 8]
    ids, mask = pad_left(prompts_of(prompts), 0)
    stop = text(plain, prompts, Lossless()).new_tokens[1][2]
    options = {"max_new_tokens": 40, "tree": TREE, "eos_token_id": [stop]}
    wanted = plain.generate(ids, mask, **options)
    stream = recorded.stream_batch(ids, mask, **options)
    session, seen, chunks = None, [], [[], [], [], []]
    verify = TargetSession.verify

    def watched(self: TargetSession, draft: tree.DraftTree) -> tuple[Tensor, Tensor]:
        nonlocal session
        session = self
        return verify(self, draft)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetSession, "verify", watched)
        for step in stream.steps:
            seen.append(session.cache.row_lengths.copy())
            for row, chunk in enumerate(step):
                chunks[row] += chunk
    assert chunks == wanted.new_tokens
    assert len(chunks[1]) + 10 < sorted(map(len, chunks))[1]
    together = [lengths[1] for lengths in seen if len(lengths) == 4]
    done = together[stream.stats[1].steps :]
    assert len(done) > 5 and set(done) == {together[stream.stats[1].steps - 1]}
    assert done[0] <= 9 + len(chunks[1])
    for mine, its in zip(stream.stats, wanted.stats, strict=True):
        assert mine.accept_histogram == its.accept_histogram and mine.finish_reason == its.finish_reason


@pytest.mark.parametrize("rule", [Lossless(), Fuzzy(0.3)], ids=str)
def test_an_observer_sees_the_rows_that_go_on_only(
    rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sees of them is what it sees without recording, where rows that are done leave at once."""
    prompts, seen = [6, 9, 7, 8, 5], list[tuple[dict[int, int], list[list[int]], Tensor]]()

    def watch(verified: Verified, verdict: Verdict, emitted: dict[int, int]) -> None:
        assert len(verified.logits) == len(verdict.path) == len(emitted) and all(emitted.values())
        tokens = [
            words[:count] for words, count in zip(verdict.tokens.tolist(), emitted.values(), strict=True)
        ]
        chances = verified.logits.new_zeros(1) if verdict.chances is None else verdict.chances.sum(-1)
        seen.append((emitted, tokens, torch.cat((chances, verified.largest[:, 0]))))

    sizes, verify = list[int](), TargetSession.verify

    def counted(self: TargetSession, draft: tree.DraftTree) -> tuple[Tensor, Tensor]:
        sizes.append(len(draft.tokens))
        return verify(self, draft)

    monkeypatch.setattr(TargetSession, "verify", counted)
    recorded, plain = engine(OpRecorder()), engine(None)
    stop = text(plain, prompts, rule).new_tokens[1][2]
    options = {"eos_token_id": [stop], "observer": watch}
    sizes.clear()
    text(recorded, prompts, rule, eos_token_id=[stop])
    unobserved = sizes.copy()
    sizes.clear()
    found = text(recorded, prompts, rule, **options)
    assert sizes == unobserved and set(sizes) <= {len(prompts), 3, 2, 1}, "an observer changes no batch"
    with_recordings = seen.copy()
    seen.clear()
    assert found.new_tokens == text(plain, prompts, rule, **options).new_tokens
    assert len({len(emitted) for emitted, *_ in seen}) > 2, "rows left together"
    assert [(emitted, tokens) for emitted, tokens, _ in with_recordings] == [
        (emitted, tokens) for emitted, tokens, _ in seen
    ]
    for (*_, mine), (*_, its) in zip(with_recordings, seen, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-3, rtol=1e-3)


def test_the_accept_step_reads_logits_where_verify_left_them() -> None:
    """Also behind views of several widths, whose recordings have one memory for their results."""
    model = engine(OpRecorder())
    for _ in range(3):
        text(model, [5], Lossless(), max_new_tokens=60)
    workspace = model._workspaces.spare
    verified = recordings_of(workspace.session._forward)
    (accepted,) = recordings_of(workspace.accept_step._accept_recorded)
    assert len(verified) >= 4
    (logits,) = {id(one.result[0]) for one in verified}
    assert logits in map(id, accepted.inputs)


def test_results_are_in_memory_that_no_capture_allocates() -> None:
    """All captures allocate from one pool: the replay of an earlier one overwrites what a later one left."""
    pieces = [lambda x: x + 1, lambda x: (x * 2, x.sum())]
    recorder, during = OpRecorder(), []

    def noting(work: Callable[[], object], repeatable: bool) -> object:
        def run() -> object:
            during.append(work())
            return during[-1]

        return recorder(run, repeatable)

    graphs = Graphs(noting)
    wrapped = [graphs.wrap(piece) for piece in pieces]
    for number in range(3):
        x = torch.arange(4.0) + number
        first, (doubled, whole) = (piece(x) for piece in wrapped)
        assert first.equal(x + 1) and doubled.equal(x * 2) and whole.equal(x.sum())
    # Each was tried once, then captured; both times the results went to the same memory.
    assert recorder.recordings == 2 and len(during) == 4
    for tried, captured in zip(during[::2], during[1::2], strict=True):
        pairs = zip(leaves(tried), leaves(captured), strict=True)
        assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)


def test_recordings_that_are_dropped_meanwhile_do_no_harm() -> None:
    """Another thread may run out of memory between the trial and the capture."""
    recorder = OpRecorder()

    def dropping(work: Callable[[], object], repeatable: bool) -> object:
        def run() -> object:
            made = work()
            graphs.drop()
            return made

        return recorder(run, repeatable)

    graphs = Graphs(dropping)
    piece = graphs.wrap(lambda x: x + 1)
    for number in range(3):
        assert piece(torch.full((4,), float(number))).eq(number + 1).all()
    assert recorder.recordings == 1 and recorder.replays == 2


# --- how many there are ---


def test_prompts_are_not_recorded() -> None:
    """Forty lengths, twice: what is recorded is a step's, whose shapes recur."""
    recorder = OpRecorder()
    model = engine(recorder)
    for _ in range(2):
        for length in range(2, 42):
            text(model, [length], Lossless(), max_new_tokens=4)
    extended = recordings_of(model._workspaces.spare.drafter.predictor._read)
    assert {one.inputs[1].shape[1] for one in extended} == {TREE.depth + 1}
    assert recorder.recordings <= 4 * 4 + 2, "by view of 16 slots, of verify, draft and extend"


def test_recordings_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty temperatures, and more views than are kept; what was used last is there."""
    recorder = OpRecorder()
    model = engine(recorder)
    for number in range(50):
        text(model, [5], Lossless(), max_new_tokens=4, temperature=0.5 + number / 100)
    known = model._workspaces.spare.accept_step._accept_recorded.known
    assert len(known) == MOST and len(model._workspaces.spare.accept_step._accept_recorded.memory) <= 8
    before = recorder.recordings
    text(model, [5], Lossless(), max_new_tokens=4, temperature=0.99)
    assert recorder.recordings == before
    piece = Graphs(recorder).wrap(lambda static, tensor: tensor + static)
    for static in [*range(MOST + 5), *range(MOST + 5), *range(MOST + 5)]:
        assert float(piece(static, torch.ones(1))[0]) == 1 + static
    assert len(piece.known) == MOST and not recordings_of(piece), "each had gone when it came again"


# --- what a recording may depend on ---


@dataclass(frozen=True)
class Closer(Fuzzy):
    """A rule of somebody's own that is what its fields say."""

    more: tuple[float, ...] = (0.1, 0.2)


class Changing:
    """One that is not."""

    mode, max_consecutive, exact_prefix = "hybrid", None, 0

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def chances(self, verified: Verified) -> Tensor | None:
        return Fuzzy(self.threshold, "reverse_kl").chances(verified)


@dataclass(frozen=True)
class Holding(Fuzzy):
    inner: object = None


class Derived(Fuzzy):
    pass


@pytest.mark.parametrize(("rows", "several", "recorded"), [(9, False, 1), (8, True, 1), (9, True, 0)])
def test_groups_of_many_rows_are_not_recorded(rows: int, several: bool, recorded: int) -> None:
    """Their sizes change from step to step."""
    recorder = OpRecorder()
    steps = [accept_step.AcceptStep(), *[accept_step.AcceptStep(Graphs(recorder))] * 3]
    found = timed_tree(torch.zeros(rows, dtype=torch.int64), 4, 16)
    logits = torch.randn(rows, 4, 16, generator=torch.Generator().manual_seed(0))
    none = torch.zeros(rows, dtype=torch.int64)
    verified = Verified(found, logits, SamplingConfig(), none[:0])
    verdicts = [step(Lossless(), verified, RowRandom(0, rows), none, several=several) for step in steps]
    assert recorder.recordings == recorded
    assert all(one.tokens.equal(verdicts[0].tokens) for one in verdicts[1:])


def test_a_rule_that_changes_between_calls_is_never_recorded() -> None:
    rule, recorder = Changing(0.0), OpRecorder()
    model, plain = engine(recorder), engine(None)
    for threshold in (0.0, 5.0, 0.0):
        rule.threshold = threshold
        found = [text(model, [5], rule) for _ in range(2)]
        wanted = text(plain, [5], rule)
        for one in found:
            assert one.new_tokens == wanted.new_tokens
            assert one.stats[0].fuzzy_accepts == wanted.stats[0].fuzzy_accepts
        assert (wanted.stats[0].fuzzy_accepts > 0) == (threshold > 0)
    assert not model._workspaces.spare.accept_step._accept_recorded.known


def test_only_frozen_dataclasses_of_plain_values_never_change() -> None:
    extra = Derived(0.3)
    object.__setattr__(extra, "threshold_of_today", 0.5)
    for rule in (*RULES, Closer(0.2), Holding(inner=(1, "a", None, Fuzzy(0.5))), Fuzzy(0.3)):
        assert is_immutable(rule) and hash(rule) is not None
    for rule in (Changing(0.3), Holding(inner=[1]), Holding(inner=Changing(1.0)), Derived(0.3), extra, len):
        assert not is_immutable(rule)


# --- threads ---


def test_steps_of_two_threads_leave_torch_its_threads() -> None:
    """A new thread begins with the number that was set last, here with the 1 of a step under way."""
    before, seen = torch.get_num_threads(), []
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with FixedShapes().running(1):
            first_is_in.set()
            assert second_is_in.wait(60)
        first_is_out.set()

    def second() -> None:
        assert first_is_in.wait(60)
        with FixedShapes().running(1):
            seen.append(torch.get_num_threads())
            second_is_in.set()
            assert first_is_out.wait(60)
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    def third() -> None:
        seen.append(torch.get_num_threads())
        torch.set_num_threads(2)  # its own: nobody else's number takes its place
        with FixedShapes().running(1), FixedShapes().running(1):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    try:
        torch.set_num_threads(3)
        both = [threading.Thread(target=work) for work in (first, second)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        new = threading.Thread(target=third)
        new.start()
        new.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 3, 3, 1, 2]


# --- memory ---


@pytest.mark.parametrize("recorded", [True, False])
def test_a_session_goes_with_its_last_user(recorded: bool) -> None:
    """At once, and not when garbage is next collected: it holds the memory of a whole text."""
    model = engine(OpRecorder() if recorded else None)
    gone = []
    start = TargetSession.__init__

    def noted(self: TargetSession, *args: object) -> None:
        start(self, *args)
        gone.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TargetSession, "__init__", noted)
            text(model, [5, 6], Lossless())
            text(model, [5], Lossless())
            model._workspaces.clear()
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_memory_that_ends_while_a_cache_grows_spoils_no_later_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have moved by then, and what was recorded of them reads where they were."""
    monkeypatch.setattr(workspace, "LEAST", 32)
    monkeypatch.setattr(workspace, "AHEAD", 16)
    model, grow, cat = engine(OpRecorder()), kv_cache.KVCache.grow, torch.cat
    text(model, [5], Lossless())

    def grow_in_part(cache: kv_cache.KVCache, capacity: int) -> None:
        left = iter([True, True])  # the keys and values of one layer

        def fill(*parts: Any) -> Tensor:
            if not next(left, False):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return cat(*parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "cat", fill)
            grow(cache, capacity)

    with monkeypatch.context() as patch:
        patch.setattr(kv_cache.KVCache, "grow", grow_in_part)
        with pytest.raises(torch.OutOfMemoryError):
            text(model, [5], Lossless(), max_new_tokens=60)
    assert text(model, [9], Lossless()).new_tokens == text(engine(None), [9], Lossless()).new_tokens


def test_logits_that_a_text_has_changed_leave_the_targets_own_alone() -> None:
    """The accept step of an earlier text reads its logits where verify leaves them."""
    recorded, plain = engine(OpRecorder()), engine(None)
    text(recorded, [5], Lossless())
    changed: dict[str, Any] = {"repetition_penalty": 1.5, "logprobs": 2}
    found, wanted = (text(one, [5], Lossless(), **changed) for one in (recorded, plain))
    assert found.new_tokens == wanted.new_tokens
    pairs = zip(found.logprobs[0], wanted.logprobs[0], strict=True)
    assert all(mine.logprob == pytest.approx(its.logprob, abs=1e-4) for mine, its in pairs)
