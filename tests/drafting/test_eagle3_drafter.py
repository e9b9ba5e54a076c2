"""The EAGLE-3 drafter against a recursion that keeps no cache and no mask, and inside the decoding loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.drafter_laws import require_same_state
from support.drafters import feed
from support.eagle3 import VARIANTS, Eagle3Twin, eagle3_head
from support.op_recorder import OpRecorder
from support.stubs import generator
from support.tiny_models import VOCAB, greedy_alone, prompts_of, run_loop, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, TreeConfig
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.drafting.drafter import Seen
from eagle_fsd.drafting.eagle3.drafter import Eagle3Spec
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.step_recorder import Graphs
from eagle_fsd.target.model import TargetModel

TREE = TreeConfig(10, 4, 3)
TARGET = TargetModel(tiny_model())
Pairs = tuple[Tensor, Tensor]  # features [n, D] and the tokens [n] that followed them


def random_pairs(head: Eagle3Head, count: int, seed: int) -> Pairs:
    draw = generator(seed)
    width = head.config.fc_inputs
    return torch.randn(count, width, generator=draw), torch.randint(VOCAB, (count,), generator=draw)


def pad(rows: list[Pairs]) -> tuple[Tensor, Tensor, list[int]]:
    """Return right-padded features, tokens and counts, with junk in the padding."""
    counts = [len(tokens) for _, tokens in rows]
    features = torch.full((len(rows), max(counts), rows[0][0].shape[1]), 77.0)
    tokens = torch.full((len(rows), max(counts)), VOCAB - 1)
    for row, (feature, token) in enumerate(rows):
        features[row, : counts[row]], tokens[row, : counts[row]] = feature, token
    return features, tokens, counts


@cache
def graph_target() -> TargetModel:
    """Return a target like TARGET that OpenVINO computes."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    return TargetModel(tiny_model(), runtime=OpenVINO("float32"))


def start_drafter(head: Eagle3Head, rows: list[Pairs], target: TargetModel = TARGET) -> BeamDrafter:
    drafter = Eagle3Spec.for_target(head, target).make(len(rows), 16, TREE)
    feed(drafter, *pad(rows))
    return drafter


class PlainEagle3:
    """EAGLE-3 for one text whose true pairs are known: every node's path is run on its own."""

    def __init__(self, head: Eagle3Head, pairs: Pairs) -> None:
        self.head, self.twin, self.pairs = head, Eagle3Twin(head), pairs

    def states(self, path: tuple[int, ...]) -> list[Tensor]:
        """Return the head's own states at the root and at each token of a path but the last."""
        features, tokens = self.pairs
        own = self.states(path[:-1]) if path else []
        inputs = torch.cat((self.twin.start(features), *[state[None] for state in own]))
        tokens = torch.cat((tokens, torch.tensor(path, dtype=torch.int64)))
        table = self.head.embed_tokens
        embeddings = TARGET.embed(tokens) if table is None else table.weight[tokens]
        return [*own, self.twin.run(inputs, embeddings, list(range(len(tokens))))[-1]]

    def log_q(self, path: tuple[int, ...]) -> Tensor:
        own = None if self.head.lm_head is not None else TARGET.lm_head.weight
        return self.twin.logits(self.states(path)[-1], own).log_softmax(-1)


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


# What only the network knows is tested with the network; these differ in what the drafter does with it.
HEADS = VARIANTS | {"short training": {"windows": (0, 3), "trained_positions": 4}}
DRAFTED = ["plain", "norm_output", "whole vocabulary", "target's lm_head", "another width", "two layers"]
DRAFTED += ["window", "short training", "no taps", "logit_scale"]


@pytest.mark.parametrize("name", DRAFTED)
def test_trees_carry_the_distributions_of_the_plain_recursion(name: str) -> None:
    check_trees(eagle3_head(2, **HEADS[name]), TARGET)


QUICK = ("norm_output", "target's lm_head", "window")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in HEADS]
)
def test_trees_carry_the_distributions_of_the_plain_recursion_on_openvino(name: str) -> None:
    check_trees(eagle3_head(2, **HEADS[name]), graph_target())


def test_trees_after_some_steps_on_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are read two at a time, rows commit different counts, and trees are grown between."""
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", 2)
    check_trees(eagle3_head(2, windows=(0, 4), norm_output=True), graph_target(), steps=2)


@torch.no_grad()
def check_trees(head: Eagle3Head, target: TargetModel, steps: int = 0) -> None:
    """log q at every node with children, the best children of the root, and only drafted tokens."""
    rows = [random_pairs(head, count, count) for count in (11, 3, 1)]
    drafter = start_drafter(head, rows, target)
    for step in range(steps):
        drafter.draft(torch.stack([tokens[-1] for _, tokens in rows]), TREE)
        news = [random_pairs(head, 1 + (step + row) % 3, 90 + 9 * step + row) for row in range(3)]
        drafter.root_states = drafter.predictor.commit_pairs(*pad(news))
        rows = [(torch.cat((f, g)), torch.cat((t, u))) for (f, t), (g, u) in zip(rows, news, strict=True)]
    tree = drafter.draft(torch.stack([tokens[-1] for _, tokens in rows]), TREE)
    for row, pairs in enumerate(rows):
        require_plain(tree, row, head, pairs)


def require_plain(tree: DraftTree, row: int, head: Eagle3Head, pairs: Pairs) -> None:
    """Require that a row's tree has the distributions of the plain recursion after these pairs."""
    drafted = torch.arange(VOCAB) if head.draft_tokens is None else head.draft_tokens
    twin, paths = PlainEagle3(head, pairs), paths_of(tree, row)
    assert set(tree.tokens[row, 1:].tolist()) <= set(drafted.tolist())
    best = drafted[twin.log_q(()).topk(1).indices].item()
    assert (best,) in paths
    for place, owner in enumerate(tree.owners[row].tolist()):
        if owner >= 0:
            wanted = twin.log_q(paths[owner])
            torch.testing.assert_close(tree.log_q[row, place], wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("parts", [(7,), (4, 3), (2, 1, 4)])
@torch.no_grad()
def test_a_prompt_is_read_in_pairs_whole_or_in_parts(parts: tuple[int, ...]) -> None:
    """Each token but the first stands beside the feature before it, also behind what was kept of a text."""
    head = eagle3_head(2)
    features, tokens = random_pairs(head, sum(parts), 1)
    features[0] = 0.0  # before the first token there is none
    drafter, start = Eagle3Spec.for_target(head, TARGET).make(1, 16, TREE), 0
    for count in parts:
        if start:  # as of a text that was kept: another drafter goes on from it
            drafter, kept = Eagle3Spec.for_target(head, TARGET).make(1, 16, TREE), drafter
            drafter.load_row(0, kept.save_row(0, start), tokens[:start].tolist())
        part = slice(start, start + count)
        seen = Seen(tokens[None, part], [count], features[None, part], None)
        drafter.read_on(seen) if start else drafter.begin(seen)
        start += count
    tree = drafter.draft(tokens[-1:], TREE)
    require_plain(tree, 0, head, (features[1:], tokens[1:]))


@pytest.mark.parametrize("name", ["plain", "eagle3.1", "window", "short training", "no taps"])
@pytest.mark.parametrize("chunk", [2, 512])
@torch.no_grad()
def test_the_state_after_any_steps_is_that_of_a_fresh_drafter(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was drafted between, true features take its place; rows commit different counts, or none."""
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", chunk)
    head = eagle3_head(3, **HEADS[name])
    rows = [random_pairs(head, count, count) for count in (5, 2, 1)]
    drafter = start_drafter(head, rows)
    for step in range(3):
        roots = torch.stack([tokens[-1] for _, tokens in rows])
        grown, again = drafter.draft(roots, TREE), drafter.draft(roots, TREE)
        assert torch.equal(grown.tokens, again.tokens) and torch.equal(grown.log_q, again.log_q)
        news = [random_pairs(head, 1 + (step + row) % 3, 90 + 9 * step + row) for row in range(3)]
        features, tokens, counts = pad(news)
        counts[step % 3] = 0 if step else counts[step % 3]  # a row that is done
        drafter.root_states = drafter.predictor.commit_pairs(features, tokens, counts)
        if step:
            news[step % 3] = (news[step % 3][0][:0], news[step % 3][1][:0])
        rows = [(torch.cat((f, g)), torch.cat((t, u))) for (f, t), (g, u) in zip(rows, news, strict=True)]
        fresh = start_drafter(head, rows)
        require_same_state(drafter, fresh, [len(tokens) for _, tokens in rows], counts)
        drafter.root_states = fresh.root_states.clone()


# --- in the loop ---


def engine(name: str = "plain", recorded: bool = False, **options: Any) -> EagleFSD:
    target = TargetModel(tiny_model(), *([Graphs(OpRecorder())] if recorded else []))
    return EagleFSD(target, eagle3_head(4, **HEADS[name]), **options)


@pytest.mark.parametrize("name", ["plain", "eagle3.1", "window", "no taps", "target's lm_head"])
def test_greedy_text_is_the_targets_own(name: str) -> None:
    """T = 0, prompts of 6, 1 and 13 tokens alone and together."""
    prompts = [prompts_of([length], seed=length)[0] for length in (6, 1, 13)]
    wanted = greedy_alone(tiny_model(), prompts, 16)
    model = engine(name)
    spec = model.drafter
    assert spec is not None and spec.name == "eagle3"
    found = run_loop(model.target, prompts, spec.make(3, 8, TREE), 16, tree=TREE)
    assert found.texts == wanted
    for prompt, text in zip(prompts, wanted, strict=True):
        assert run_loop(model.target, [prompt], spec.make(1, 4, TREE), 16, tree=TREE).texts == [text]


@pytest.mark.parametrize("name", ["plain", pytest.param("two layers", marks=pytest.mark.slow)])
def test_greedy_text_is_the_targets_own_on_openvino(name: str) -> None:
    """Alone, in a batch, and beside a head that reads other layers."""
    prompts = [prompts_of([length], seed=length)[0] for length in (6, 1, 13)]
    wanted = greedy_alone(tiny_model(), prompts, 16)
    target = graph_target()
    first = EagleFSD(target, eagle3_head(4, taps=(1, 1, 1))).generate(
        prompts[:1], max_new_tokens=16, tree=TREE
    )
    model = EagleFSD(target, eagle3_head(4, **HEADS[name]))
    assert model.drafter is not None and model.runtime == "openvino"
    together = run_loop(target, prompts, model.drafter.make(3, 8, TREE), 16, tree=TREE)
    torches = run_loop(TARGET, prompts, engine(name).drafter.make(3, 8, TREE), 16, tree=TREE)
    assert first.new_tokens == wanted[:1] and together.texts == torches.texts == wanted
    assert [row.exact_accepts for row in together.stats] == [row.exact_accepts for row in torches.stats]
    for prompt, text in zip(prompts, wanted, strict=True):
        assert model.generate([prompt], max_new_tokens=16, tree=TREE).new_tokens == [text]


def test_a_head_in_another_dtype_is_refused_on_openvino() -> None:
    with pytest.raises(ValueError, match="the head is in bfloat16 and the target's runtime is openvino"):
        EagleFSD(graph_target(), eagle3_head(4), head_dtype=torch.bfloat16)


def test_greedy_text_through_generate_with_padding_and_another_dtype() -> None:
    prompts = prompts_of([4, 9])
    ids = torch.tensor([[0] * 5 + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * 5 + [1] * 4, [1] * 9])
    wanted = greedy_alone(tiny_model(), prompts, 12)
    for options in ({}, {"head_dtype": torch.bfloat16}):
        model = engine(**options)
        assert model.generate(ids, mask, max_new_tokens=12, tree=TREE).new_tokens == wanted
        assert model.draft_vocab_size == 40


@pytest.mark.parametrize("name", ["plain", "short training"])
def test_recorded_steps_give_the_same_text(name: str) -> None:
    prompts, head = prompts_of([5, 8]), eagle3_head(4, **HEADS[name])
    wanted = run_loop(TARGET, prompts, Eagle3Spec.for_target(head, TARGET).make(2, 8, TREE), 12)
    model = engine(name, recorded=True)
    assert model.drafter is not None
    found = run_loop(model.target, prompts, model.drafter.make(2, 8, TREE), 12)
    assert found.texts == wanted.texts
    assert [row.steps for row in found.stats] == [row.steps for row in wanted.stats]


def test_fuzzy_rules_ask_for_a_divergence_of_sparse_drafts() -> None:
    model = engine()
    model.settler.require_rule(Fuzzy(0.3, "js"))
    with pytest.raises(ValueError, match="40"):
        model.settler.require_rule(Fuzzy(0.3, "forward_kl"))


def test_a_head_of_another_target_is_refused() -> None:
    for sizes in ({"target_size": 64, "embeddings": True}, {"vocab_size": 95}):
        with pytest.raises(ValueError, match="a head drafts only for the target it was trained on"):
            EagleFSD(TARGET, eagle3_head(0, **sizes))
    with pytest.raises(ValueError, match="taps of this target are 1 to 2"):
        EagleFSD(TARGET, eagle3_head(0, taps=(1, 2, 3)))


def test_the_identity_knows_the_weights_and_how_they_are_read() -> None:
    heads = [eagle3_head(0), eagle3_head(1), eagle3_head(0, norm_output=True), eagle3_head(0, taps=(1, 1, 2))]
    found = {Eagle3Spec.for_target(head, TARGET).identity for head in [*heads, eagle3_head(0)]}
    assert len(found) == 4
