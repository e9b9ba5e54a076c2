"""What every drafter must keep, tested on all of them: drafts change the speed of a text and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from support.eagle3 import eagle3_head
from support.tiny_engine import near_model
from support.tiny_models import VOCAB, greedy_alone, prompts_of, run_loop, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule, Verified
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, PublishedFSD, SGLang
from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.prompts.prefill import prefill
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import Drafter, DrafterSpec, NoDrafter, Seen
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.specs import spec_for, with_lookup
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TARGET = TargetModel(tiny_model())
TREE, CONFIDENT = TreeConfig(10, 4, 3), TreeConfig(12, 5, 4, 0.05)
SAMPLING = SamplingConfig(0.7, 12)
FEW = torch.arange(0, VOCAB, 2)  # every other token


def head_spec(head: object) -> DrafterSpec:
    spec = spec_for(head, TARGET, torch.float32)
    assert spec is not None
    return spec


def draft_model_spec(model: object, name: str = "draft-model") -> DrafterSpec:
    return DraftModelSpec.for_target(TargetModel(model), TARGET, name)


SPECS: dict[str, Callable[[], DrafterSpec]] = {
    "none": lambda: NoDrafter(VOCAB),
    "eagle": lambda: head_spec(tiny_head(4)),
    "eagle, some tokens": lambda: head_spec(tiny_head(4).restrict(FEW)),
    "eagle, some tokens and the text's": lambda: head_spec(tiny_head(4).restrict(FEW, 6)),
    "eagle, texts longer than its training's": lambda: head_spec(tiny_head(4, trained_positions=14)),
    "eagle3": lambda: head_spec(eagle3_head(4)),
    "draft model": lambda: draft_model_spec(tiny_model("mistral", seed=5)),
    "narrow draft model": lambda: draft_model_spec(tiny_model(seed=5, vocab_size=VOCAB - 6)),
    "first layers": lambda: draft_model_spec(first_layers(TARGET.model, 1), "first-layers"),
    "lookup": lambda: LookupSpec.for_target(TARGET, worth=0.0),
    "lookup where it pays": lambda: LookupSpec.for_target(TARGET, worth=0.3),
    "merged": lambda: with_lookup(head_spec(tiny_head(4).restrict(FEW)), TARGET),
    "merged with the text's": lambda: with_lookup(head_spec(tiny_head(4).restrict(FEW, 6)), TARGET),
}
LEARNING = ("lookup", "lookup where it pays", "merged", "merged with the text's")
SLOW = ("eagle, some tokens", "narrow draft model")
every_drafter = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SPECS]
)


@cache
def engine(name: str) -> EagleFSD:
    return EagleFSD(TARGET, SPECS[name]())


@cache
def texts() -> list[list[int]]:
    """Prompts of several lengths, one of them a single token and one that repeats itself."""
    return [*prompts_of([7, 1, 12], seed=3), prompts_of([4], seed=9)[0] * 4]


@cache
def targets_own() -> list[list[int]]:
    return greedy_alone(TARGET.model, texts(), 20)


def padded() -> tuple[Tensor, Tensor]:
    ids = [[0] * (16 - len(text)) + text for text in texts()]
    return torch.tensor(ids), torch.tensor([[0] * (16 - len(text)) + [1] * len(text) for text in texts()])


# --- texts ---


@every_drafter
@pytest.mark.parametrize("tree", [TREE, pytest.param(CONFIDENT, marks=pytest.mark.slow)], ids=str)
def test_greedy_text_is_the_targets_own(name: str, tree: TreeConfig) -> None:
    """Alone, and padded beside others."""
    for prompt, wanted in zip(texts(), targets_own(), strict=True):
        assert engine(name).generate([prompt], max_new_tokens=20, tree=tree).new_tokens == [wanted]
    together = engine(name).generate(*padded(), max_new_tokens=20, tree=tree)
    assert together.new_tokens == targets_own()
    if name != "none":
        assert sum(row.exact_accepts for row in together.stats) > 0, "nothing was accepted"


@every_drafter
@pytest.mark.parametrize(
    "rule", [pytest.param(Lossless(), marks=pytest.mark.slow), Fuzzy(0.4)], ids=["lossless", "fuzzy"]
)
def test_sampled_text_does_not_depend_on_its_batch(name: str, rule: AcceptanceRule) -> None:
    """Alone, padded beside others, and joining and leaving a batch that is under way."""
    model = engine(name)
    options = {"max_new_tokens": 14, "tree": TREE, "rule": rule, "temperature": 0.7, "top_k": 12}
    alone = [
        model.generate([prompt], seed=[(5, row)], **options).new_tokens[0]
        for row, prompt in enumerate(texts())
    ]
    assert model.generate(*padded(), seed=[(5, row) for row in range(4)], **options).new_tokens == alone
    scheduler = Scheduler(TARGET, model.drafter, TREE, 2)
    again = model.generate([texts()[0]], seed=[(5, 4)], **options).new_tokens[0]
    # Two answers to one prompt come first: it is read once.
    first, *others = enumerate(texts())
    for row, prompt in [first, (4, first[1]), *others]:
        terms = Terms((), rule, SAMPLING)
        scheduler.admit(Text(row, 14 - 3 * (row % 2), terms, prompt=prompt, stream=(5, row)))
    found: dict[int, list[int]] = {}
    for one, tokens in scheduler.run():
        found.setdefault(one.number, []).extend(tokens)
    wanted = [text[: 14 - 3 * (row % 2)] for row, text in enumerate([*alone, again])]
    assert [found[row] for row in range(5)] == wanted


@pytest.mark.covering(1)
@every_drafter
@pytest.mark.parametrize("cut", [{}, {"top_k": 20, "top_p": 0.95}], ids=["all tokens", "some tokens"])
def test_warm_text_does_not_depend_on_its_tree(name: str, cut: dict[str, float]) -> None:
    """Draft and target share their noise, so a seed's text is that of plain decoding, whatever is drafted."""
    options = {"max_new_tokens": 20, "temperature": 0.9, "seed": 5, **cut}
    plain = engine(name).generate(*padded(), tree=TreeConfig(1), **options)
    apart = engine(name).generate(*padded(), tree=TREE, rule=Lossless(share_noise=False), **options)
    for tree in (TREE, CONFIDENT):
        made = engine(name).generate(*padded(), tree=tree, **options)
        assert made.new_tokens == plain.new_tokens != apart.new_tokens
        if name != "none":
            assert sum(row.exact_accepts for row in made.stats) > 0, "nothing was accepted"
    for rule in (Fuzzy(0.0), Cactus(0.0), Ensemble(1.0), SGLang(1.0, 1.0), FLy(2.0), PublishedFSD(0.0)):
        zero = engine(name).generate(*padded(), tree=TREE, rule=rule, **options)
        assert zero.new_tokens == plain.new_tokens, rule


def test_a_draft_that_is_the_target_knows_every_draw() -> None:
    """With the target's own distribution and the noise of its draws nothing is left to chance."""
    model = EagleFSD(TARGET, draft_model_spec(TARGET.model, "itself"))
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 2, "tree": TreeConfig(5, 4, 1)}
    made = model.generate(*padded(), **options)
    assert [row.steps for row in made.stats] == [4] * 4  # five tokens each
    apart = model.generate(*padded(), rule=Lossless(share_noise=False), **options)
    assert all(row.steps > 6 for row in apart.stats)


COUNT, SHALLOW, WIDE = 1200, TreeConfig(5, 3, 2), TreeConfig(12, 3, 4)


def two_tokens(model: EagleFSD, rule: AcceptanceRule, tree: TreeConfig) -> list[list[int]]:
    """Return the first two tokens of COUNT texts at temperature 1, all of one prompt."""
    ids = torch.tensor(prompts_of([5])).expand(COUNT, -1)
    options = {"max_new_tokens": 2, "temperature": 1.0, "seed": 3}
    return model.generate(ids, rule=rule, tree=tree, **options).new_tokens


def require_drawn_from(tokens: Sequence[int], law: Tensor) -> None:
    """Assert by chi-square that tokens are drawn from a distribution [V] float64."""
    expected = law * len(tokens)
    seen = torch.tensor(tokens).bincount(minlength=VOCAB).double()
    large = expected >= 5
    observed, wanted = seen[large], expected[large]
    if expected[~large].sum() < 0.01:  # no bin of its own for what never comes
        assert not seen[~large].any()
    else:
        observed = torch.cat((observed, seen[~large].sum()[None]))
        wanted = torch.cat((wanted, expected[~large].sum()[None]))
    assert len(wanted) > 2 and chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def require_the_targets(made: Sequence[Sequence[int]]) -> None:
    """Assert that the two tokens of these texts have the distributions that the target has on torch."""
    (prompt,) = prompts_of([5])
    with torch.no_grad():
        first = TARGET.model(torch.tensor([prompt])).logits[0, -1].softmax(-1).double()
        likely = int(first.argmax())
        second = TARGET.model(torch.tensor([[*prompt, likely]])).logits[0, -1].softmax(-1).double()
    require_drawn_from([row[0] for row in made], first)
    require_drawn_from([row[1] for row in made if row[0] == likely], second)


@every_drafter
def test_sampled_tokens_have_the_targets_distribution(name: str) -> None:
    """The first two tokens over COUNT texts, against the target's own product."""
    require_the_targets(two_tokens(engine(name), Lossless(), SHALLOW))


# --- the same on OpenVINO ---

LOOSE = Fuzzy(0.4)


@cache
def graph_engine(name: str = "draft model") -> EagleFSD:
    """Return an engine for TARGET and a draft model that is near it, or a head, computed by OpenVINO."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    target = TargetModel(tiny_model(), runtime=OpenVINO("float32"))
    if name == "eagle3":
        return EagleFSD(target, eagle3_head(4))
    draft = TargetModel(near_model(), runtime=OpenVINO("float32"), pages=False)
    return EagleFSD(target, DraftModelSpec.for_target(draft, target))


@pytest.mark.parametrize("name", ["draft model", "eagle3"])
def test_sampled_tokens_have_the_targets_distribution_on_openvino(name: str) -> None:
    require_the_targets(two_tokens(graph_engine(name), Lossless(), WIDE))


def test_fuzzy_tokens_have_the_rules_distribution_on_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the closed form, at the root and below it, of the tree and the chances that torch computes."""
    made, seen = two_tokens(graph_engine(), LOOSE, WIDE), []
    chances = Fuzzy.chances

    def noting(rule: Fuzzy, verified: Verified) -> Any:
        seen.append((verified, chances(rule, verified)))
        return seen[-1][1]

    monkeypatch.setattr(Fuzzy, "chances", noting)
    twin = EagleFSD(TARGET, draft_model_spec(near_model()))
    twin.generate(prompts_of([5]), max_new_tokens=2, temperature=1.0, rule=LOOSE, tree=WIDE)
    verified, follows = seen[0]
    first, moved = hybrid_law(verified, follows, 0)
    assert 0.3 < moved < 0.9, "the rule and the target must both show"
    require_drawn_from([row[0] for row in made], first)
    # The root's likeliest child has children, so that a walk that comes there goes on.
    second, moved = hybrid_law(verified, follows, 1)
    assert 0.3 < moved < 0.9
    token = int(verified.tree.tokens[0, 1])
    require_drawn_from([row[1] for row in made if row[0] == token], second)


def hybrid_law(verified: Verified, follows: Tensor, node: int) -> tuple[Tensor, float]:
    """Return the distribution [V] of the token after a node in hybrid mode, and its distance from p.

    With C the node's children and f the rule's chances, it is p + (1 - p(C)) f on C, else (1 - f(C)) p.
    """
    p = verified.logits[0, node].double().softmax(-1)
    children = [child for child, parent in enumerate(verified.tree.parents[0].tolist()) if parent == node]
    drafted, f = verified.tree.tokens[0, children], follows[0, children].double()
    law = (1 - f.sum()) * p
    law[drafted] = p[drafted] + (1 - p[drafted].sum()) * f
    return law.clamp(min=0), float((law - p).abs().sum() / 2)


# --- trees and states ---


@dataclass
class Recorded:
    """A drafter that keeps what it was shown and what it proposed, and drafts every tree twice."""

    inner: Drafter
    trees: list[DraftTree] = field(default_factory=list)
    shown: list[Seen] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        tree, again = (self.inner.draft(roots, config, noise) for _ in range(2))
        assert torch.equal(tree.tokens, again.tokens) and torch.equal(tree.log_q, again.log_q)
        self.trees.append(tree)
        return tree

    def begin(self, seen: Seen) -> None:
        self.shown = [seen]
        self.inner.begin(seen)

    def extend(self, seen: Seen) -> None:
        self.shown.append(seen)
        self.inner.extend(seen)


def run_recorded(name: str, prompts: Sequence[Sequence[int]]) -> Recorded:
    """Decode, at first with few accepts and then with many, and return what happened."""
    spec = engine(name).drafter
    recorded = Recorded(spec.make(len(prompts), 8, TREE))
    run_loop(TARGET, prompts, recorded, 16, tree=TREE, rule=Fuzzy(0.6, exact_prefix=6), sampling=SAMPLING)
    return recorded


@every_drafter
def test_a_trees_children_are_distinct_and_its_distributions_whole(name: str) -> None:
    """Parents first, no child twice, log q with its rest sums to 1, and no score exceeds its parent's."""
    drafted = 0
    for tree in run_recorded(name, texts()).trees:
        rows, nodes = tree.tokens.shape
        total = tree.log_q.exp().sum(-1)
        total = total if tree.rest is None else total + tree.rest.exp()
        owned = tree.owners >= 0
        torch.testing.assert_close(total[owned], torch.ones(int(owned.sum())), atol=1e-4, rtol=0)
        log_q = tree.node_log_q()
        for row in range(rows):
            parents = tree.parents[row].tolist()
            pairs = [(p, t) for p, t in zip(parents, tree.tokens[row].tolist(), strict=True) if p >= 0]
            assert len(set(pairs)) == len(pairs)
            assert all(parent < node for node, parent in enumerate(parents))
            for node in range(1, nodes):
                if parents[node] < 0:
                    continue
                drafted += 1
                assert int(tree.depths[row, node]) == int(tree.depths[row, parents[node]]) + 1
                assert log_q[row, node] > -torch.inf
                if tree.scores is not None and parents[node]:
                    assert tree.scores[row, node] <= tree.scores[row, parents[node]] + 1e-6
    assert drafted > 50 or name == "none"


@pytest.mark.parametrize("name", [name for name in SPECS if name not in LEARNING])
def test_the_state_after_any_accepts_is_that_of_a_fresh_drafter(name: str) -> None:
    """At every step, a drafter that is shown the whole text at once proposes the same tree."""
    recorded = run_recorded(name, texts()[:1])
    spec = engine(name).drafter
    assert len({seen.counts[0] for seen in recorded.shown[1:]}) > 1 or name == "none"
    for step, tree in enumerate(recorded.trees):
        parts = recorded.shown[: step + 1]
        counts = [seen.counts[0] for seen in parts]
        tokens = [seen.tokens[:1, :count] for seen, count in zip(parts, counts, strict=True)]
        features = None
        if parts[0].features is not None:
            features = [seen.features[:1, :count] for seen, count in zip(parts, counts, strict=True)]
        fresh = spec.make(1, 64, TREE)
        with torch.inference_mode():
            fresh.begin(Seen(torch.cat(tokens, 1), [sum(counts)], features and torch.cat(features, 1)))
            mine = fresh.draft(tree.tokens[:, 0], TREE)
            assert torch.equal(mine.tokens, tree.tokens) and torch.equal(mine.parents, tree.parents)
            torch.testing.assert_close(mine.log_q, tree.log_q, atol=2e-3, rtol=2e-3)
            if step == 0:  # a drafter that forgets its texts is a fresh one
                again = recorded.inner
                again.reset(64, TREE)
                again.begin(parts[0])
                torch.testing.assert_close(
                    again.draft(tree.tokens[:, 0], TREE).log_q, tree.log_q, atol=1e-4, rtol=1e-4
                )


@pytest.mark.parametrize("name", [name for name in SPECS if name != "none"])
def test_rows_that_have_left_are_there_for_the_next_batch(name: str) -> None:
    """A drafter that forgets its texts takes as many again, and drafts for each as a new one does."""
    recorded = run_recorded(name, texts())
    first, drafter = recorded.trees[0], recorded.inner
    assert len(recorded.trees[-1].tokens) < len(texts()) == len(first.tokens), "no row left early"
    assert drafter.rows == len(texts())
    drafter.reset(64, TREE)
    with torch.inference_mode():
        drafter.begin(recorded.shown[0])
        again = drafter.draft(first.tokens[:, 0], TREE)
    assert torch.equal(again.tokens, first.tokens) and torch.equal(again.parents, first.parents)
    torch.testing.assert_close(again.log_q, first.log_q, atol=1e-4, rtol=1e-4)


@every_drafter
def test_texts_join_rows_that_others_have_left(name: str) -> None:
    """After `reset` every row may be replaced, also one that had left before."""
    prompts, lengths = pad_right(texts(), 0), list(map(len, texts()))
    used, joining = (SPECS[name]().make(len(lengths), 64, TREE) for _ in range(2))
    with torch.inference_mode():
        for drafter in (used, joining):
            session = TargetSession(TARGET, len(lengths), 64, drafter.needs.taps)
            roots = prefill(prompts, lengths, session, drafter)
        used.select([1])
        used.reset(64, TREE)
        used.replace(range(len(lengths)), joining)
        found, wanted = used.draft(roots, TREE), joining.draft(roots, TREE)
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.parents, wanted.parents)


def test_the_pages_drafter_keeps_the_pages_rules() -> None:
    """That of docs/adding-a-drafter.md: rows do not depend on their batch, nor on prompts that come twice."""
    page = (Path(__file__).parents[2] / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(block.partition("\nmodel = ")[0], namespace)  # the class, without the lines that use it
    followers, target = namespace["Followers"], TARGET
    repeats, fresh = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1], [5, 9, 17, 23, 31, 37, 41, 43, 47, 53]

    def run(prompts: Sequence[list[int]], seed: int) -> list[int]:
        scheduler = Scheduler(target, followers(target.vocab_size), TreeConfig(5, 4, 1), len(prompts))
        terms, first = Terms((), sampling=SamplingConfig(0.6)), []
        for number, prompt in enumerate(prompts):
            scheduler.admit(Text(number, 12, terms, prompt=prompt, stream=(seed, number)))
        while scheduler.busy:
            first += [token for text, new in scheduler.step().items() for token in new if text.number == 0]
        return first

    drafter = followers(target.vocab_size).make(3, 8, TREE)
    for prompts in ([fresh, repeats, fresh], [repeats, fresh, repeats]):
        drafter.begin(Seen(torch.tensor(prompts), [10] * 3, None, None))
        drafter.select([1])
        drafter.reset(8, TREE)
    assert drafter.rows == len(drafter.memory) == 3, "a row that has left is there for the next batch"
    for seed in range(10):
        assert run([fresh], seed) == run([fresh, repeats], seed)
        assert run([repeats], seed) == run([repeats] * 3, seed)
