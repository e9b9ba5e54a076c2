"""Recorded steps: the same texts as steps run one launch at a time, from recordings that run no Python.

There is no CUDA here: `OpRecorder` plays the part of a CUDA graph, operation by operation, and refuses what a
stream cannot capture.
"""

from __future__ import annotations

import logging

import pytest
import torch
from fake_flash import plain_prefix
from op_recorder import OpRecorder
from tiny_models import prompts_of, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, Lossless, TreeConfig, Typical, cache, draft, flash, sampling, tree
from eagle_fsd import target as target_module
from eagle_fsd.acceptance import AcceptanceRule
from eagle_fsd.attention import grouped_attention
from eagle_fsd.engine import GenerationOutput
from eagle_fsd.graphs import EAGER, Graphs
from eagle_fsd.judge import Judge
from eagle_fsd.padding import left_padded
from eagle_fsd.relaxed import Cactus, Ensemble
from eagle_fsd.target import TargetModel

TREE = TreeConfig(8, 3, 3)
RULES = [
    *(Lossless(), Fuzzy(0.5), Fuzzy(0.9, "reverse_kl", mode="paper", child="target", max_consecutive=1)),
    *(
        Fuzzy(0.4, "js_top10", min_p=0.05, max_overshoot=3.0, min_gain=0.2),
        Typical(),
        Cactus(0.5),
        Ensemble(0.3),
    ),
]


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """No way is chosen by what a tensor holds, and views are narrow enough to change within a text."""
    for module in (cache, draft, sampling, tree):
        monkeypatch.setattr(module, "may_ask", lambda tensor: False)
    monkeypatch.setattr(Graphs, "view", 16)


def engine(recorder: OpRecorder | None, family: str = "llama", drafted: int | None = None) -> EagleFSD:
    stepper = EAGER if recorder is None else Graphs(recorder)
    tokens = None if drafted is None else torch.arange(0, 96, 96 // drafted)[:drafted]
    attention = "eager" if family == "gemma2" else "sdpa"
    return EagleFSD(TargetModel(tiny_model(family, attention), stepper), tiny_head().restrict(tokens))


def text(model: EagleFSD, lengths: list[int], rule: AcceptanceRule, **options: object) -> GenerationOutput:
    ids, mask = left_padded(prompts_of(lengths), 0)
    return model.generate(ids, mask, max_new_tokens=24, rule=rule, **{"tree": TREE, **options})


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("warm", [{}, {"temperature": 0.9, "top_k": 20, "top_p": 0.95}, {"temperature": 1.0}])
def test_every_rule_gives_the_same_text(rule: AcceptanceRule, warm: dict[str, float]) -> None:
    """Twice, the second time with the recordings of the first; with one row and with ragged ones."""
    recorder = OpRecorder()
    recorded, plain = engine(recorder, drafted=48), engine(None, drafted=48)
    for lengths in ([5], [5], [7, 3, 12], [9]):
        found, wanted = text(recorded, lengths, rule, **warm), text(plain, lengths, rule, **warm)
        assert found.new_tokens == wanted.new_tokens
        for mine, its in zip(found.stats, wanted.stats, strict=True):
            assert mine.accept_histogram == its.accept_histogram
            assert (mine.exact_accepts, mine.fuzzy_accepts) == (its.exact_accepts, its.fuzzy_accepts)
    assert recorder.recordings >= 8 and recorder.replays > 4 * recorder.recordings


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "gpt2", "granite"])
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
    monkeypatch.setattr(target_module, "flash_available", lambda device, dtype: True)
    monkeypatch.setattr(flash, "flash_prefix", plain_prefix)
    monkeypatch.setattr(flash, "flash_causal", causal)
    recorder = OpRecorder()
    model = engine(recorder)
    assert model.target.flash
    ends.clear()
    assert [text(model, lengths, Lossless()).new_tokens for lengths in ([6], [6], [4, 11])] == plain
    assert recorder.replays > recorder.recordings >= 8 and ends == {(5, 5), (10, 10)}


@pytest.mark.parametrize("warm", [{}, {"temperature": 1.0}])
def test_a_tree_as_large_as_the_draft_is_sure_gives_the_text_that_it_gives_on_a_cpu(
    warm: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, with fillers in the place of what is cut, and where the tree's size varies."""
    recorder, sure = OpRecorder(), TreeConfig(14, 3, 4, 0.012)
    found = [text(engine(recorder), lengths, Fuzzy(0.5), tree=sure, **warm) for lengths in ([5], [7, 3, 12])]
    assert recorder.recordings >= 4
    for module in (cache, draft, sampling, tree):
        monkeypatch.setattr(module, "may_ask", lambda tensor: True)
    for output, lengths in zip(found, ([5], [7, 3, 12]), strict=True):
        wanted = text(engine(None), lengths, Fuzzy(0.5), tree=sure, **warm)
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


def test_a_workspace_is_used_again_only_where_it_fits() -> None:
    """Not by another batch, nor while it is in use; a longer text grows it."""
    model = engine(OpRecorder())
    text(model, [5], Lossless())
    spare = model._workspaces.spare
    text(model, [9], Lossless())
    assert spare is not None and model._workspaces.spare is spare
    stream = model.stream(prompts_of([5]), max_new_tokens=8, tree=TREE)
    assert model._workspaces.spare is None
    chunks = iter(stream)
    first = next(chunks)
    text(model, [5], Lossless())
    other = model._workspaces.spare
    assert other is not None and other is not spare
    rest = [token for chunk in chunks for token in chunk]
    assert [*first, *rest] == engine(None).generate(prompts_of([5]), max_new_tokens=8, tree=TREE).new_tokens[
        0
    ]
    text(model, [5, 6], Lossless())
    left = model._workspaces.spare
    assert left is None or left.batch == 2
    plain = model.generate(prompts_of([5]), max_new_tokens=8, tree=TreeConfig(1))
    assert plain.new_tokens[0] == [*first, *rest]


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
    assert model.target.stepper.record is None


def test_a_rule_that_cannot_be_named_is_not_recorded() -> None:
    class Moody(list):  # a list has no hash
        mode, max_consecutive, exact_prefix = "hybrid", None, 0

        def chances(self, verified: object) -> None:
            self.append(verified)

    recorder, rule = OpRecorder(), Moody()
    model = engine(recorder)
    assert text(model, [5], rule).new_tokens == text(engine(None), [5], Lossless()).new_tokens
    assert len(rule) == text(model, [5], Lossless()).stats[0].steps


def test_one_rule_has_one_work() -> None:
    judge = Judge(Graphs(OpRecorder()))
    greedy, warm = sampling.SamplingConfig(), sampling.SamplingConfig(1.0)
    assert judge._work(Fuzzy(0.3), greedy) is judge._work(Fuzzy(0.3), greedy)
    assert judge._work(Fuzzy(0.3), greedy) is not judge._work(Fuzzy(0.31), greedy)
    assert judge._work(Fuzzy(0.3), greedy) is not judge._work(Fuzzy(0.3), warm)
