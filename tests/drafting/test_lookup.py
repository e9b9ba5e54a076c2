"""Looked-up drafts under the loop: the text is the target's, whatever was remembered, and in any batch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from support.drafter_laws import CHAIN_TREE, random_chain, require_own_calibrations, worst_fit
from support.stubs import ChainTarget
from support.tiny_models import greedy_alone, prompts_of, run_loop, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verified
from eagle_fsd.acceptance.accept_step import accept_by
from eagle_fsd.acceptance.divergence import DIVERGENCES, LISTED_DIVERGENCES, sparse_divergence
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble
from eagle_fsd.autotune.tree_search import TreeObserver, path_scores
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.drafter import NextTokens, Seen
from eagle_fsd.drafting.lookup.confidences import PRIORS
from eagle_fsd.drafting.lookup.lookup_drafter import WORTH, LookupDrafter, LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import MergedSpec
from eagle_fsd.drafting.lookup.text_memory import Sources
from eagle_fsd.hub import save_head
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.step_recorder import EAGER, Stepper
from eagle_fsd.target.model import TargetModel

CPU = torch.device("cpu")
TREES = (TreeConfig(2, 1, 1), TreeConfig(16, 5, 8), TreeConfig(12, 8, 3, 0.05))
SOURCES = {"merged": Sources(), "suffix": Sources(recycled=False), "recycling": Sources(copied=False)}
every_source = pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
SAMPLING = {"temperature": 0.7, "top_k": 12}


def engine(sources: Sources | None = None, **overrides: object) -> EagleFSD:
    target = TargetModel(tiny_model(**overrides))
    return EagleFSD(target, LookupSpec.for_target(target, sources, worth=0.0))


def prompts() -> list[list[int]]:
    """Prompts of several lengths, one of them a single token and one that repeats itself."""
    loop = prompts_of([4], seed=9)[0]
    return [*prompts_of([7, 1, 12], seed=3), loop * 4]


@cache
def targets_own() -> list[list[int]]:
    return greedy_alone(tiny_model(), prompts(), 40)


@pytest.mark.covering(1)
@every_source
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_greedy_text_is_the_targets_own_in_any_batch(sources: Sources, tree: TreeConfig) -> None:
    model, ends = engine(sources), targets_own()
    for row, prompt in enumerate(prompts()):
        assert model.generate([prompt], max_new_tokens=40, tree=tree).new_tokens == [ends[row]]
    padded = [[0] * (16 - len(prompt)) + prompt for prompt in prompts()]
    mask = [[0] * (16 - len(prompt)) + [1] * len(prompt) for prompt in prompts()]
    together = model.generate(padded, torch.tensor(mask), max_new_tokens=40, tree=tree)
    assert together.new_tokens == ends
    assert sum(row.exact_accepts for row in together.stats) > 0, "nothing was drafted"


@pytest.mark.covering(1)
@every_source
@pytest.mark.parametrize("rule", [None, Fuzzy(0.4)], ids=["lossless", "fuzzy"])
def test_sampled_text_is_the_same_alone_beside_others_and_joining_late(
    sources: Sources, rule: AcceptanceRule | None
) -> None:
    """What one text teaches must not change the trees of another: they decide which tokens are drawn."""
    model, tree = engine(sources), TREES[1]
    keywords = {"max_new_tokens": 24, "tree": tree, "rule": rule, **SAMPLING}
    alone = [
        model.generate([prompt], seed=[(5, row)], **keywords).new_tokens[0]
        for row, prompt in enumerate(prompts())
    ]
    scheduler = Scheduler(model.target, model.drafter, tree, 2)
    terms = Terms((), rule or Lossless(), SamplingConfig(**SAMPLING))
    for row, prompt in enumerate([*prompts(), prompts()[0]]):
        scheduler.admit(Text(row, 24, terms, prompt=prompt, stream=(5, row % 4)))
    found: dict[int, list[int]] = {}
    for one, tokens in scheduler.run():
        found.setdefault(one.number, []).extend(tokens)
    assert [found[row] for row in range(5)] == [*alone, alone[0]]


class ListingChain(ChainTarget):
    """A ChainTarget that gives the logits of features too, for the lists of a prompt."""

    def logits(self, features: Tensor) -> Tensor:
        before, last = features.long().unbind(-1)
        return self.chain.table[before, last]


def fit(rule: AcceptanceRule, rows: int = 500) -> float:
    """Return the worst fit of many texts with looked-up drafts."""
    target, drafter = ListingChain(random_chain(), rows), LookupSpec(4, CPU).make(rows, 20, CHAIN_TREE)
    worst, stats = worst_fit(target, drafter, rule, rows)
    assert sum(row.exact_accepts for row in stats) > rows, "too few drafts were accepted to tell anything"
    return worst


def test_sampled_texts_have_the_targets_distribution() -> None:
    assert fit(Lossless()) > 1e-4
    assert fit(Fuzzy(0.45), rows=300) < 1e-6, "this test would see nothing"


@dataclass
class Recorded:
    """A drafter that keeps what it was shown and what it proposed."""

    inner: LookupDrafter
    trees: list[DraftTree]
    shown: list[Seen]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        self.trees.append(self.inner.draft(roots, config, noise))
        return self.trees[-1]

    def begin(self, seen: Seen) -> None:
        self.inner.begin(seen)

    def extend(self, seen: Seen) -> None:
        self.shown.append(seen)
        self.inner.extend(seen)


@every_source
def test_its_state_is_that_of_a_fresh_one_that_saw_the_same(sources: Sources) -> None:
    """A row of a batch, with any accepts, rejections and rows that left, against a drafter of its own."""
    target, tree = TargetModel(tiny_model()), TREES[1]
    spec, limits = LookupSpec.for_target(target, sources, worth=0.0), [30, 12, 24, 18]
    recorded = Recorded(spec.make(4, 64, tree), [], [])
    made = run_loop(target, prompts(), recorded, limits, tree=tree, rule=Fuzzy(0.2))
    fresh = spec.make(1, 64, tree)
    fresh.begin(Seen(torch.tensor(prompts()[:1]), [7], None, prompt_lists(target, prompts()[0], spec)))
    for step, seen in zip(recorded.trees, recorded.shown, strict=False):
        mine = fresh.draft(step.tokens[:1, 0], tree)
        nodes = mine.tokens.shape[1]
        assert torch.equal(mine.tokens, step.tokens[:1, :nodes])
        assert torch.equal(mine.parents, step.parents[:1, :nodes]) and (step.parents[0, nodes:] == -1).all()
        if nodes > 1:  # plain decoding has no scores
            assert torch.allclose(mine.scores, step.scores[:1, :nodes])
        lists = seen.next_tokens and NextTokens(seen.next_tokens.ids[:1], seen.next_tokens.log_p[:1])
        fresh.extend(Seen(seen.tokens[:1], seen.counts[:1], None, lists))
    one, other = recorded.inner.memories[0], fresh.memories[0]
    assert one.store.text == other.store.text
    assert prompts()[0] + made.texts[0] == [*one.store.text, *made.texts[0][len(one.store.text) - 7 :]]
    assert one.store.places == other.store.places
    assert one.confidences.seen == other.confidences.seen and sum(one.confidences.seen) > 20
    assert one.confidences.rates == other.confidences.rates
    assert one.lists.after_pair.keys() == other.lists.after_pair.keys()


def prompt_lists(target: TargetModel, prompt: Sequence[int], spec: LookupSpec) -> NextTokens | None:
    """The target's lists after every token of a prompt but the last, from a plain forward."""
    if not spec.sources.recycled:
        return None
    with torch.inference_mode():
        logits = target.model(torch.tensor([list(prompt)])).logits[:, :-1]
    return NextTokens.from_logits(logits, 8)


def test_rows_that_are_taken_twice_go_on_separately_and_reset_forgets() -> None:
    drafter = LookupSpec(9, CPU).make(2, 8, TREES[1])
    drafter.begin(Seen(torch.tensor([[1, 2, 1], [3, 0, 0]]), [3, 1]))
    drafter.select([0, 0, 1])
    drafter.extend(Seen(torch.tensor([[4], [5], [6]]), [1, 0, 1]))
    assert [memory.store.text for memory in drafter.memories] == [[1, 2, 1, 4], [1, 2, 1], [3, 6]]
    other = LookupSpec(9, CPU).make(1, 8, TREES[1])
    other.begin(Seen(torch.tensor([[7, 7]]), [2]))
    drafter.replace([1], other)
    assert drafter.memories[1].store.text == [7, 7] and drafter.rows == 3
    drafter.reset(8, TREES[1])
    assert [memory.store.text for memory in drafter.memories] == [[]] * 3


# --- q, thresholds, shapes ---


def random_lists(seed: int, rows: int = 3, vocab: int = 30) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p's logits [rows, V], log_q [rows, W] of lists of their own, the drafted tokens and the rest."""
    rng = torch.Generator().manual_seed(seed)
    drafted = torch.randperm(vocab, generator=rng)[:9]
    log_q = torch.randn(rows, 10, generator=rng).log_softmax(-1)
    mask = torch.rand(rows, 9, generator=rng) < 0.5
    log_q[:, :9] = log_q[:, :9].masked_fill(mask, -math.inf)
    log_q = log_q.log_softmax(-1)
    return torch.randn(rows, vocab, generator=rng), log_q[:, :9], drafted, log_q[:, 9]


@pytest.mark.parametrize("name", LISTED_DIVERGENCES)
@pytest.mark.parametrize("seed", range(3))
def test_all_tokens_that_a_row_does_not_list_are_one_outcome(name: str, seed: int) -> None:
    logits, log_q, drafted, rest = random_lists(seed)
    found = sparse_divergence(name, logits, log_q, drafted, rest)
    for row in range(len(logits)):
        listed = log_q[row] > -math.inf
        p = logits[row].double().softmax(-1)
        mine = p[drafted[listed]]
        few_p = torch.cat((mine, 1 - mine.sum(0, keepdim=True)))
        few_q = torch.cat((log_q[row][listed], rest[row : row + 1])).double()
        wanted = DIVERGENCES[name](few_p.log(), few_q)
        assert found[row].item() == pytest.approx(wanted.item(), abs=1e-5)
        # The way of spreading the rest that is nearest to p gives this value; another one cannot give less.
        others = torch.ones(30, dtype=torch.bool)
        others[drafted[listed]] = False
        for weights, exact in ((p, True), (torch.ones_like(p), False)):
            q = torch.where(others, weights, 0.0)
            q = q / q.sum() * rest[row].double().exp()
            q[drafted[listed]] = log_q[row][listed].double().exp()
            whole = DIVERGENCES[name](logits[row].double(), q.log()).item()
            assert whole == pytest.approx(wanted.item(), abs=1e-5) if exact else whole >= wanted - 1e-6


def grown_tree(fixed_shapes: bool, rows: int = 2, config: TreeConfig = TREES[1]) -> tuple[DraftTree, Tensor]:
    """Return a tree of rows with copies and lists, and logits [B, N, V] by the tokens of its nodes."""
    drafter = LookupSpec(96, CPU, fixed_shapes).make(rows, 64, config)
    tokens = torch.tensor([prompts()[3], [*range(40, 49), 5, 6, 5, 6, 7, 5, 6]])[-rows:]
    rng = torch.Generator().manual_seed(0)
    lists = NextTokens.from_logits(torch.randn(2, 15, 96, generator=rng)[-rows:] * 2, 8)
    drafter.begin(Seen(tokens, [16] * rows, None, lists))
    tree = drafter.draft(tokens[:, -1], config)
    table = torch.randn(96, 96, generator=rng) * 2
    return tree, table[tree.tokens]


@pytest.mark.parametrize("rule", [Lossless(), Fuzzy(0.45), Fuzzy(1.2, "reverse_kl", child="target")], ids=str)
def test_fixed_shapes_change_no_verdict(rule: AcceptanceRule) -> None:
    sampling, most = SamplingConfig(0.8), TREES[1].total_tokens
    verdicts = []
    for fixed in (False, True):
        tree, logits = grown_tree(fixed)
        uniforms = torch.rand(2, 2 * most, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        verified = Verified(tree, logits, sampling, torch.tensor([], dtype=torch.int64))
        verdicts.append(accept_by(rule, verified, uniforms, torch.zeros(2, dtype=torch.int64)))
    width = verdicts[0].tokens.shape[1]
    assert torch.equal(verdicts[0].tokens, verdicts[1].tokens[:, :width])
    assert torch.equal(verdicts[0].length, verdicts[1].length)
    tree, _ = grown_tree(True)
    assert tree.tokens.shape == (2, most) and tree.log_q.shape[1:] == (most - 1, 64)
    assert tree.depth == 5 and len(set(tree.drafted.tolist())) == 64


def test_trees_of_one_size_go_on_below_min_confidence() -> None:
    sure = TreeConfig(15, 4, 2, 0.05)
    (whole, _), (few, _), (loose, _) = (
        grown_tree(fixed, 1, config) for fixed, config in ((True, sure), (False, sure), (True, sure.unpruned))
    )
    assert torch.equal(whole.tokens, loose.tokens) and torch.equal(whole.parents, loose.parents)
    nodes, real = few.tokens.shape[1], int((whole.parents >= 0).sum()) + 1
    assert torch.equal(whole.tokens[:, :nodes], few.tokens) and 1 < nodes < real
    assert few.scores[0, 1:].exp().min() >= 0.05 > whole.scores[0, nodes:real].exp().max()


def test_a_threshold_means_the_same_whatever_the_other_rows_list() -> None:
    (both, logits), (alone, _) = grown_tree(False), grown_tree(False, rows=1)
    nodes = alone.tokens.shape[1]
    assert len(both.drafted) > len(alone.drafted)
    of = [
        Fuzzy(0.3).node_divergences(Verified(tree, values, SamplingConfig(), torch.tensor([])))
        for tree, values in ((both, logits), (alone, logits[1:, :nodes]))
    ]
    assert torch.allclose(of[0][1:, :nodes], of[1], atol=1e-6)


def test_every_row_of_q_sums_to_one_and_scores_are_the_chances() -> None:
    tree, _ = grown_tree(False)
    whole = tree.log_q.exp().sum(-1) + tree.rest.exp()
    assert torch.allclose(whole[tree.owners >= 0], torch.ones(()))
    assert torch.equal(path_scores(tree), tree.scores)
    above = tree.scores.gather(1, tree.parents.clamp(min=0))
    assert (tree.scores <= above)[tree.parents >= 0].all() and (tree.scores[:, 0] == 0).all()
    assert (tree.node_log_q() > -math.inf)[tree.parents >= 0].all(), "q of every drafted token is above 0"
    some = tree.filled_up().select([1])
    assert torch.equal(some.rest, tree.rest[1:]) and some.scores.shape == some.tokens.shape


@pytest.mark.parametrize("rule", [Cactus(), Ensemble(), Fuzzy(0.3)], ids=str)
def test_a_step_may_have_nothing_to_draft(rule: AcceptanceRule) -> None:
    """At a text's first token the tree is the root alone, for every rule and for what observes it."""
    observer, model = TreeObserver(), engine(SOURCES["suffix"])
    keywords = {"tree": TREES[1], "rule": rule, "seed": 1, "observer": observer, **SAMPLING}
    made = model.generate([prompts()[1]], max_new_tokens=6, **keywords)
    assert made.stats[0].new_tokens == 6
    assert [0.0] in [one.scores for one in observer.observations]


@pytest.mark.parametrize("stepper", [EAGER, FixedShapes()], ids=["any shapes", "fixed shapes"])
def test_a_tree_that_is_not_worth_it_is_a_root_and_its_guesses_are_still_judged(stepper: Stepper) -> None:
    target, tree = TargetModel(tiny_model(), stepper), TREES[1]
    made = {}
    for worth in (0.0, 0.3, 99.0):
        recorded = Recorded(LookupSpec.for_target(target, worth=worth).make(4, 64, tree), [], [])
        assert run_loop(target, prompts(), recorded, 30, tree=tree).texts == [
            text[:30] for text in targets_own()
        ]
        made[worth] = recorded
    nodes = {worth: [one.tokens.shape[1] for one in recorded.trees] for worth, recorded in made.items()}
    assert set(nodes[99.0]) == {1} and max(nodes[0.3]) > 1
    for one in made[0.3].trees:  # each row decides for itself
        chances = torch.where(one.parents >= 0, one.scores.exp(), 0.0) if one.tokens.shape[1] > 1 else None
        assert chances is None or all(worth == 0 or worth >= 0.3 - 1e-6 for worth in chances.sum(1).tolist())
    # What was proposed below the root was right or wrong.
    assert any(memory.confidences.rates != list(PRIORS) for memory in made[99.0].inner.memories)


def test_only_a_cpu_without_a_head_takes_steps_without_drafts() -> None:
    target = TargetModel(tiny_model())
    alone = LookupSpec.for_target(target)
    assert alone.worth == WORTH and alone.rests
    merged = EagleFSD(target, tiny_head(), lookup=True).drafter
    assert merged.lookup.worth == 0 and not merged.rests
    assert len({LookupSpec.for_target(target, worth=worth).identity for worth in (0.0, 0.3, 0.5)}) == 3


def test_a_runtime_of_fixed_shapes_gets_the_same_text() -> None:
    target = TargetModel(tiny_model(), FixedShapes())
    spec = LookupSpec.for_target(target, worth=0.0)
    assert spec.fixed_shapes
    made = run_loop(target, prompts(), spec.make(4, 64, TREES[1]), 30, tree=TREES[1])
    assert made.texts == [text[:30] for text in targets_own()]


def test_it_drafts_beside_openvino() -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    from eagle_fsd.runtime.openvino.backend import OpenVINO

    target = TargetModel(tiny_model(), runtime=OpenVINO("float32"))
    model = EagleFSD(target, None, lookup=True)
    assert model.drafter.fixed_shapes is target.stepper.records
    made = [model.generate([prompt], max_new_tokens=30, tree=TREES[1]) for prompt in prompts()]
    assert [one.new_tokens[0] for one in made] == [text[:30] for text in targets_own()]
    assert sum(one.stats[0].exact_accepts for one in made) > 0


# --- surfaces ---


@pytest.mark.parametrize("name", sorted(set(DIVERGENCES) - set(LISTED_DIVERGENCES)))
def test_divergences_that_need_every_token_are_refused(name: str) -> None:
    model = engine()
    with pytest.raises(ValueError, match=f"divergence is '{name}': .* choose one of reverse_kl, js, tv"):
        model.generate([[1, 2]], rule=Fuzzy(0.3, name))
    model.settler.require_rule(Fuzzy(0.0, name))


def test_the_pages_floors_are_those_of_the_divergences() -> None:
    """docs/concepts.md: what a threshold means for a copied token, whose q is 1."""
    page = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")
    for name in ("js", "reverse_kl"):
        found = re.search(rf"\| `{name}` at most \|(.*)\|\n.*\n\| p\(x\) at least \|(.*)\|\n", page)
        assert found is not None
        limits, floors = ([float(cell) for cell in line.split("|")] for line in found.groups())
        assert len(limits) == len(floors) == 6
        for limit, floor in zip(limits, floors, strict=True):
            p = torch.tensor([[floor - 0.0051, floor + 0.0051]]).T
            logits = torch.cat((p, 1 - p), dim=1).log()
            value = sparse_divergence(name, logits, torch.zeros(2, 1), torch.tensor([0]))
            assert value[0] > limit > value[1]


def test_a_calibration_of_another_drafter_is_refused(tmp_path: Path) -> None:
    target = TargetModel(tiny_model())
    engines = [EagleFSD(target, tiny_head()), engine(), engine(SOURCES["suffix"])]
    require_own_calibrations(engines, tmp_path)


def test_lookup_without_a_head_takes_its_place() -> None:
    target = TargetModel(tiny_model())
    model = EagleFSD(target, None, lookup=True)
    assert model.drafter == LookupSpec.for_target(target) and (model.ea_model, model.head) == ("lookup", None)


def test_a_saved_target_needs_no_head(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    args = build_parser().parse_args(["--base-model", str(tmp_path), "--ea-model", "none", "--lookup", "x"])
    assert args.lookup and args.ea_model == "none"
    model = EagleFSD.from_pretrained(args.base_model, args.ea_model, lookup=args.lookup, pack=False)
    prompt = prompts()[3]
    found = model.generate([prompt], max_new_tokens=20, tree=TREES[1])
    assert found.new_tokens == greedy_alone(tiny_model(), [prompt], 20) and found.stats[0].exact_accepts
    plain = EagleFSD.from_pretrained(args.base_model, "none", pack=False)
    assert plain.drafter is None and plain.head_folder is None and plain.ea_model == "none"
    with pytest.raises(ValueError, match="there is no draft head"):
        plain.generate([prompt], max_new_tokens=2)


@pytest.mark.parametrize("shipped", [True, False])
@pytest.mark.parametrize("lookup", [None, True, False])
def test_a_shipped_head_looks_up_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: bool, lookup: bool | None
) -> None:
    tiny_model().save_pretrained(tmp_path / "target")
    save_head(tiny_head(), tmp_path / "head")
    monkeypatch.setattr("eagle_fsd.hub.resolve.shipped_places", lambda name: [tmp_path / "head"] * shipped)
    names = (tmp_path / "target", tmp_path / "head")
    model = EagleFSD.from_pretrained(*names, device="cpu", pack=False, lookup=lookup)
    assert isinstance(model.drafter, MergedSpec) == (shipped if lookup is None else lookup)
    assert model.ea_model == str(tmp_path / "head") and model.head_folder == tmp_path / "head"


def test_the_prompts_lists_are_those_of_a_plain_forward() -> None:
    """Over ragged rows: the X tokens before each root, and nothing for a drafter that asks for none."""
    target = TargetModel(tiny_model())
    spec = LookupSpec.for_target(target, worth=0.0)
    drafter = spec.make(4, 64, TREES[0])
    run_loop(target, prompts(), drafter, 1, tree=TREES[0])
    for memory, prompt in zip(drafter.memories, prompts(), strict=False):
        if len(prompt) == 1:
            continue
        with torch.inference_mode():
            probs = target.model(torch.tensor([prompt])).logits[0].softmax(-1)
        known = {pair: place for place, pair in enumerate(zip([-1, *prompt], prompt[:-1], strict=False))}
        for pair, place in known.items():
            values, ids = probs[place].topk(8)
            assert memory.lists.after_pair[pair].ids == ids.tolist()
            assert memory.lists.after_pair[pair].probs == pytest.approx(values.tolist(), rel=1e-3)
    assert replace(spec, sources=SOURCES["suffix"]).make(1, 8, TREES[0]).needs.next_tokens == 0
