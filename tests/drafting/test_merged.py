"""A head's drafts and looked-up ones in one tree: the text is the target's, and q and scores are honest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from support.drafter_laws import random_chain, worst_fit
from support.eagle3 import eagle3_head
from support.stubs import Chain, ChainTarget
from support.tiny_models import greedy_alone, prompts_of, run_loop, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verified
from eagle_fsd.acceptance.accept_step import accept_by
from eagle_fsd.autotune.tree_search import path_scores
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.core.tree import HEAD, SUFFIX, DraftTree
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import Needs, NextTokens, Seen
from eagle_fsd.drafting.lookup import merging
from eagle_fsd.drafting.lookup.lookup_drafter import LookupDrafter, LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import COPIES, NOTHING, MergedDrafter, MergedSpec
from eagle_fsd.drafting.lookup.merging import ALL_PRIORS, HeadDraft, merge
from eagle_fsd.drafting.lookup.packing import Vocabulary, pack_trees
from eagle_fsd.drafting.lookup.recycled_lists import NextList
from eagle_fsd.drafting.lookup.text_memory import GrownTree, Sources, TextMemory
from eagle_fsd.drafting.tree_growth import NO_LIMIT, BeamDrafter
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.step_recorder import EAGER
from eagle_fsd.target.model import TargetModel

CPU = torch.device("cpu")
TREES = (TreeConfig(2, 1, 1), TreeConfig(16, 5, 4), TreeConfig(12, 3, 3, 0.05))
SOURCES = {"copies": COPIES, "all": Sources()}
SAMPLING = {"temperature": 0.7, "top_k": 12}


def engine(
    sources: Sources = COPIES, drafted: int | None = None, target: TargetModel | None = None
) -> EagleFSD:
    target = target or TargetModel(tiny_model())
    head = tiny_head()
    if drafted is not None:
        head.restrict(torch.arange(0, 2 * drafted, 2))
    alone = EagleFSD(target, head)
    return EagleFSD(target, MergedSpec.for_target(alone.drafter, target, sources))


def prompts() -> list[list[int]]:
    """Prompts of several lengths, one of them a single token and two that repeat themselves."""
    loop = prompts_of([4], seed=9)[0]
    return [*prompts_of([7, 1], seed=3), loop * 4, [*prompts_of([6], seed=2)[0]] * 2]


@pytest.fixture(scope="module")
def ends() -> list[list[int]]:
    return greedy_alone(tiny_model(), prompts(), 40)


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafted", [pytest.param(None, marks=pytest.mark.slow), 20])
@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_greedy_text_is_the_targets_own_in_any_batch(
    sources: Sources, tree: TreeConfig, drafted: int | None, ends: list[list[int]]
) -> None:
    model = engine(sources, drafted)
    for row, prompt in enumerate(prompts()):
        assert model.generate([prompt], max_new_tokens=40, tree=tree).new_tokens == [ends[row]]
    padded = [[0] * (16 - len(prompt)) + prompt for prompt in prompts()]
    mask = [[0] * (16 - len(prompt)) + [1] * len(prompt) for prompt in prompts()]
    together = model.generate(padded, torch.tensor(mask), max_new_tokens=40, tree=tree)
    assert together.new_tokens == ends
    assert sum(row.sources["suffix"] for row in together.stats) > 0, "nothing was copied"
    for row in together.stats:
        assert sum(row.sources.values()) == row.new_tokens
        assert row.new_tokens - row.sources["target"] == row.exact_accepts


def test_a_head_of_taps_has_lists_beside_it(ends: list[list[int]]) -> None:
    """Those of the steps: a prompt's taps are not what the target's logits are read from."""
    target = TargetModel(tiny_model())
    head = EagleFSD(target, eagle3_head(4)).drafter
    assert head is not None
    model = EagleFSD(target, MergedSpec.for_target(head, target, Sources()))
    padded = [[0] * (16 - len(prompt)) + prompt for prompt in prompts()]
    mask = [[0] * (16 - len(prompt)) + [1] * len(prompt) for prompt in prompts()]
    together = model.generate(padded, torch.tensor(mask), max_new_tokens=40, tree=TREES[1])
    assert together.new_tokens == ends
    assert sum(row.sources["recycled"] for row in together.stats) > 0, "no list was proposed"


class ChainPredictor:
    """A predictor on a Chain of its own, which remembers two tokens instead of keys and values."""

    needs = Needs(features=True)
    drafted = own = None
    width = 2
    longest = NO_LIMIT
    behind = 1

    def __init__(self, chain: Chain, rows: int) -> None:
        self.chain, self.cache = chain, KVCache(rows, 64, CPU)

    def commit(self, seen: Seen, first: bool) -> Tensor:
        last = (torch.tensor(seen.counts) - 1).clamp(min=0)
        rows = torch.arange(len(last))
        return torch.stack((seen.features[rows, last, 1], seen.tokens[rows, last].float()), dim=-1)

    def log_q(self, states: Tensor, own: object = None) -> Tensor:
        before, last = states.long().unbind(-1)
        return self.chain.table[before, last].log_softmax(-1)

    def step(self, tokens: Tensor, parents: Tensor, level: int, visible: Tensor) -> Tensor:
        return torch.stack((parents[..., 1], tokens.float()), dim=-1)


def fit(rule: AcceptanceRule, rows: int = 500) -> float:
    """Return the worst fit of many texts with merged trees."""
    chain = random_chain()
    head = BeamDrafter(ChainPredictor(chain.blend(Chain.random(4, seed=2), 0.4), rows))
    drafter = MergedDrafter(head, LookupDrafter(LookupSpec(4, CPU, sources=COPIES), rows, ALL_PRIORS))
    worst, stats = worst_fit(ChainTarget(chain, rows), drafter, rule, rows)
    whole = GenerationStats.total(stats).sources
    assert whole["suffix"] > 50 and whole["head"] > rows, "too few drafts were accepted to tell anything"
    return worst


def test_sampled_texts_have_the_targets_distribution() -> None:
    assert fit(Lossless()) > 1e-4
    assert fit(Fuzzy(0.3), rows=300) < 1e-6, "this test would see nothing"


# --- merging against a slow plain twin ---

VOCAB_SIZE, DRAFTED = 24, 17


def random_head(seed: int, config: TreeConfig) -> tuple[HeadDraft, list[Tensor]]:
    """Return a head's candidates in the pool's order, and its log_q [1, DRAFTED] of each expanded node."""
    rng = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    scores: list[float] = []
    place, rows = {-1: 0}, []

    def expand(above: float) -> None:
        log_q = (torch.randn(DRAFTED, generator=rng) * 2).log_softmax(-1)
        rows.append(log_q[None])
        best = log_q.topk(config.top_k)
        tokens.extend(best.indices.tolist())
        scores.extend((best.values + above).tolist())

    expand(0.0)
    level = range(config.top_k)
    for _ in range(1, config.reach):
        beam = sorted(level, key=lambda number: -scores[number])[: config.top_k]
        start = len(tokens)
        for number in beam:
            place[number] = len(rows)
            expand(scores[number])
        level = range(start, len(tokens))

    def prob(place: int, token: int) -> float | None:
        return None if token >= DRAFTED else rows[place][0, token].exp().item()

    return HeadDraft(tokens, scores, config.top_k, place, prob), rows


def remembered(seed: int, sources: Sources) -> TextMemory:
    """Return the memory of a text that repeats itself, after it learned something."""
    rng = torch.Generator().manual_seed(seed)
    part = torch.randint(VOCAB_SIZE, (9,), generator=rng).tolist()
    noise = torch.randint(VOCAB_SIZE, (40,), generator=rng).tolist()
    memory = TextMemory(sources, ALL_PRIORS)
    rows = torch.randn(50, VOCAB_SIZE, generator=rng).softmax(-1).topk(4)
    lists = [NextList(*row) for row in zip(rows.indices.tolist(), rows.values.tolist(), strict=True)]
    memory.begin([*part, *noise, *part[: 2 + seed % 7]], lists)
    for cell in range(merging.CELLS, len(ALL_PRIORS)):
        for number in range(5):
            memory.confidences.learn(cell, (cell * 7 + number * seed) % 3 > 0)
    return memory


def twin_q(memory: TextMemory, text: list[int], matches: list, place: int | None, rows: list[Tensor]):
    """Return a node's confidences by token, and q over the vocabulary with what is left over."""
    long = [match for match in matches if match[1] >= 2]
    if place is None:
        proposal = memory.propose(text[-2], text[-1], long)
        q, rest = proposal.q()
        return proposal.chances, q, rest
    copied = memory.store.continuations(long, 4) if long else {}
    head = {token: value.exp().item() for token, value in enumerate(rows[place][0])}
    weights = {}
    for token, (length, contested) in copied.items():
        known = merging.head_class(head.get(token))
        confidence = memory.confidences.rates[merging.cell_beside_head(length, contested, known)]
        if confidence > head.get(token, 0.0):
            weights[token] = (confidence - head.get(token, 0.0)) / (1 - head.get(token, 0.0))
    if sum(weights.values()) > merging.MOST:
        weights = {token: w * merging.MOST / sum(weights.values()) for token, w in weights.items()}
    kept = 1 - sum(weights.values())
    q = {token: kept * prob for token, prob in head.items()}
    for token, weight in weights.items():
        q[token] = q.get(token, 0.0) + weight
    return q | {token: q.get(token, 0.0) for token in copied}, q, 0.0


def twin(
    memory: TextMemory, head: HeadDraft, rows: list[Tensor], config: TreeConfig
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], tuple[dict[int, float], float]]]:
    """Return every candidate path with its confidence, and every node's q, without any search."""
    paths: dict[tuple[int, ...], float] = {}
    found: dict[tuple[int, ...], tuple[dict[int, float], float]] = {}

    def visit(path: tuple[int, ...], chance: float, matches: list, candidate: int | None) -> None:
        if len(path) >= min(config.total_tokens - 1, max(config.depth, merging.DEEPEST)) or chance < 1e-4:
            return
        place = None if candidate is None else head.place.get(candidate)
        text = [*memory.store.text, *path]
        confidences, *found[path] = twin_q(memory, text, matches, place, rows)
        mine: dict[int, int | None] = {}
        if place is not None:
            first = place * config.top_k
            mine = {head.tokens[number]: number for number in range(first, first + config.top_k)}
            long = [match for match in matches if match[1] >= 2]
            offered = [*mine, *(memory.store.continuations(long, 4) if long else {})]
            confidences = {token: confidences[token] for token in dict.fromkeys(offered)}
        best = sorted(confidences, key=lambda token: -confidences[token])[: config.top_k]
        for token in best:
            whole = chance * confidences[token]
            if whole > 0 and whole >= config.min_confidence:
                paths[(*path, token)] = whole
                visit((*path, token), whole, memory.store.follow(matches, token), mine.get(token))

    visit((), 1.0, memory.store.matches(), -1)
    return paths, found


def path_of(tree: GrownTree, node: int) -> tuple[int, ...]:
    return () if node == 0 else (*path_of(tree, tree.parents[node]), tree.tokens[node])


CASES = [(seed, sources, config) for seed in range(4) for sources in SOURCES for config in TREES[1:]]


@pytest.mark.parametrize(("seed", "sources", "config"), CASES, ids=str)
def test_the_tree_is_the_best_of_all_merged_candidates(seed: int, sources: str, config: TreeConfig) -> None:
    memory = remembered(seed, SOURCES[sources])
    head, rows = random_head(seed, config)
    paths, found = twin(memory, head, rows, config)
    tree = merge(memory, memory.store.text[-1], head, config)
    mine = {path_of(tree, node): tree.chances[node] for node in range(1, len(tree.tokens))}
    best = sorted(paths, key=lambda path: -paths[path])[: config.total_tokens - 1]
    assert set(mine) == set(best) and len(tree.tokens) == 1 + len(best)
    for path, chance in mine.items():
        assert chance == pytest.approx(paths[path], rel=1e-4)
    packed = pack_trees(
        [tree],
        torch.tensor([memory.store.text[-1]]),
        Vocabulary(torch.arange(DRAFTED), VOCAB_SIZE),
        config.total_tokens,
        merging.deepest(config),
        rows,
        with_rest=SOURCES[sources].recycled,
    )
    require_lawful(packed)
    assert (tree.sources[1:].count(SUFFIX) > 0) or seed == 0
    whole = packed.whole_log_q(VOCAB_SIZE)[0].exp()
    for row, owner in zip(whole, packed.owners[0].tolist(), strict=True):
        q, rest = found[path_of(tree, owner)]
        for token in range(VOCAB_SIZE):
            assert row[token].item() == pytest.approx(q.get(token, 0.0), abs=1e-5)
        assert row.sum().item() == pytest.approx(1 - rest, abs=1e-5)


def require_lawful(tree: DraftTree) -> None:
    """Parents come first, siblings are distinct, every q sums to one, and no score is above the parent's."""
    for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        pairs = [pair for pair in zip(parents, tokens, strict=True) if pair[0] >= 0]
        assert len(set(pairs)) == len(pairs)
        assert all(parent < node for node, parent in enumerate(parents))
    whole = tree.log_q.exp().sum(-1) + (0.0 if tree.rest is None else tree.rest.exp())
    assert torch.allclose(whole[tree.owners >= 0], torch.ones(()), atol=1e-5)
    above = tree.scores.gather(1, tree.parents.clamp(min=0))
    assert (tree.scores <= above + 1e-6)[tree.parents >= 0].all() and (tree.scores[:, 0] == 0).all()
    assert torch.equal(path_scores(tree), tree.scores)
    assert (tree.node_log_q() > -math.inf)[tree.parents >= 0].all(), "q of every drafted token is above 0"


def test_a_copied_chain_ends_at_the_deepest_level() -> None:
    """A recorded walk has that many steps. The text repeats itself for longer, and the tree has room."""
    memory, config = TextMemory(COPIES, ALL_PRIORS), TreeConfig(37, 3, 4)
    memory.begin([*range(30)] * 3, [])
    tree = merge(memory, memory.store.text[-1], NOTHING, config)
    assert max(tree.depths) == merging.deepest(config) == merging.DEEPEST
    shallow = TreeConfig(9, 3, 2)
    assert max(merge(memory, memory.store.text[-1], NOTHING, shallow).depths) == merging.deepest(shallow) == 8
    assert merging.deepest(TreeConfig(21, 20, 1)) == 20


def test_a_prior_beside_a_head_has_the_odds_of_its_evidence() -> None:
    probs = (None, 0.01, 0.1, 0.3, 0.6, 0.9)
    for length, of_length in zip((1, 2, 3, 4, 6, 10), merging.OF_LENGTH, strict=True):
        for contested in (False, True):
            for prob, of_head in zip(probs, merging.OF_HEAD, strict=True):
                cell = merging.cell_beside_head(length, contested, merging.head_class(prob))
                odds = math.log(ALL_PRIORS[cell] / (1 - ALL_PRIORS[cell]))
                assert odds == pytest.approx(of_length + contested * merging.OF_CONTESTED + of_head)
    assert len(ALL_PRIORS) == 1 + merging.cell_beside_head(99, True, merging.head_class(1.0))


def test_a_row_of_q_with_a_rest_lists_its_tokens() -> None:
    memory = remembered(1, Sources())
    tree = merge(memory, memory.store.text[-1], NOTHING, TREES[1])
    roots, vocabulary = torch.tensor([memory.store.text[-1]]), Vocabulary(None, VOCAB_SIZE)
    packed = [pack_trees([tree], roots, vocabulary, 16, 5, with_rest=rest) for rest in (True, False)]
    assert packed[0].drafted is not None and packed[0].drafted.tolist() == list(range(VOCAB_SIZE))
    assert packed[0].columns is not None and packed[0].columns[0, 1:].equal(packed[0].tokens[0, 1:])
    assert packed[1].drafted is packed[1].columns is packed[1].rest is None


def test_a_head_alone_keeps_its_tree() -> None:
    """Where nothing repeats, the merged tree has the head's nodes and the head's q."""
    model, prompt = engine(drafted=30), [*range(1, 12)]
    for tree in TREES:
        drafters = [spec.make(1, 64, tree) for spec in (model.drafter, model.drafter.head)]
        features = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(1))
        for drafter in drafters:
            drafter.begin(Seen(torch.tensor([prompt]), [11], features))
        with torch.inference_mode():
            merged, alone = [one.draft(torch.tensor([11]), tree) for one in drafters]
        assert (merged.sources == HEAD).all()
        both = [sorted(nodes_of(one)) for one in (merged, alone)]
        assert [node[0] for node in both[0]] == [node[0] for node in both[1]]
        for mine, its in zip(*both, strict=True):
            assert mine[1] == pytest.approx(its[1], abs=1e-4)


def nodes_of(tree: DraftTree) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every node of row 0 as its path and its log q."""
    parents, tokens, log_q = tree.parents[0].tolist(), tree.tokens[0].tolist(), tree.node_log_q()[0].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            paths[node] = (*paths[parents[node]], tokens[node])
            yield paths[node], log_q[node]


# --- the loop ---


def test_its_state_is_that_of_a_fresh_one_that_saw_the_same() -> None:
    model, tree, limits = engine(Sources(), 30), TREES[1], [30, 12, 24, 18]
    shown: list[Seen] = []
    trees: list[DraftTree] = []

    class Recorded(MergedDrafter):
        def extend(self, seen: Seen) -> None:
            shown.append(seen)
            super().extend(seen)

        def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
            trees.append(super().draft(roots, config, noise))
            return trees[-1]

        def begin(self, seen: Seen) -> None:
            shown.append(seen)
            super().begin(seen)

    made = model.drafter.make(4, 64, tree)
    run_loop(model.target, prompts(), Recorded(made.head, made.lookup), limits, tree=tree, rule=Fuzzy(0.2))
    fresh = model.drafter.make(1, 64, tree)
    with torch.inference_mode():
        fresh.begin(first_row(shown[0]))
        for step, seen in zip(trees, shown[1:], strict=False):
            mine = fresh.draft(step.tokens[:1, 0], tree)
            nodes = mine.tokens.shape[1]
            assert torch.equal(mine.tokens, step.tokens[:1, :nodes])
            assert torch.equal(mine.parents, step.parents[:1, :nodes])
            assert torch.allclose(mine.scores, step.scores[:1, :nodes], atol=2e-3)
            require_lawful(mine)
            fresh.extend(first_row(seen))
    assert len(trees) > 5 and any((step.sources == SUFFIX).any() for step in trees)


def first_row(seen: Seen) -> Seen:
    lists = seen.next_tokens and NextTokens(seen.next_tokens.ids[:1], seen.next_tokens.log_p[:1])
    width = seen.counts[0] if seen.counts[0] > 1 else 1
    return Seen(seen.tokens[:1, :width], seen.counts[:1], seen.features[:1, :width], lists)


def test_a_sure_text_is_copied_without_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree = engine(), TREES[1]
    drafter = model.drafter.make(2, 96, tree)
    loop = prompts_of([5], seed=4)[0]
    tokens = torch.tensor([loop * 6, prompts_of([30], seed=5)[0]])
    with torch.inference_mode():
        drafter.begin(Seen(tokens, [30, 30], torch.randn(2, 30, 32)))
        both = drafter.draft(tokens[:, -1], tree)
        drafter.select([0])
        monkeypatch.setattr(drafter.head, "candidates", lambda *_: pytest.fail("the head was asked"))
        alone = drafter.draft(tokens[:1, -1], tree)
    nodes = alone.tokens.shape[1]
    assert torch.equal(both.tokens[:1, :nodes], alone.tokens) and torch.equal(
        both.sources[:1, :nodes], alone.sources
    )
    assert (alone.sources[0, 1:] == SUFFIX).all() and int(alone.depths.max()) > tree.depth
    chain = [*loop, *loop, *loop, *loop][:15]
    assert alone.tokens[0, 1 : 1 + tree.depth].tolist() == chain[: tree.depth]
    assert (both.sources[1] == HEAD).any()


def test_what_turns_out_right_is_trusted_more() -> None:
    memory, config = remembered(3, COPIES), TREES[1]
    head, _ = random_head(3, config)
    for right in (True, False):
        one = memory.copy()
        tree = merge(one, one.store.text[-1], head, config)
        cells = tree.proposals[0].cells
        assert cells, "nothing was copied at the root"
        token, cell = next(iter(cells.items()))
        before = one.confidences.rates[cell]
        one.extend([token if right else VOCAB_SIZE + 1], [])
        assert (one.confidences.rates[cell] > before) == right


def test_rows_leave_join_and_are_forgotten() -> None:
    model, tree = engine(), TREES[1]
    drafter, other = (model.drafter.make(rows, 64, tree) for rows in (2, 1))
    with torch.inference_mode():
        drafter.begin(Seen(torch.tensor([[1, 2, 1], [3, 4, 0]]), [3, 2], torch.randn(2, 3, 32)))
        other.begin(Seen(torch.tensor([[7, 7]]), [2], torch.randn(1, 2, 32)))
        drafter.select([1, 0, 1])
        drafter.replace([2], other)
        assert [memory.store.text for memory in drafter.lookup.memories] == [[3, 4], [1, 2, 1], [7, 7]]
        assert drafter.rows == 3 and drafter.head.cache.row_lengths == [1, 2, 1]
        drafter.reset(8, tree)
    assert not any(memory.store.text for memory in drafter.lookup.memories)


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_a_tree_without_min_confidence_goes_on_where_one_with_it_ends(sources: Sources) -> None:
    sure = TreeConfig(12, 3, 3, 0.3)
    head, _ = random_head(3, sure)

    def tree(config: TreeConfig) -> GrownTree:
        memory = remembered(3, sources)
        return merge(memory, memory.store.text[-1], head, config)

    whole, few = tree(sure.unpruned), tree(sure)
    assert whole.tokens[: len(few.tokens)] == few.tokens and len(few.tokens) < len(whole.tokens)
    assert min(few.chances) >= 0.3 > max(whole.chances[len(few.tokens) :])


def test_trees_of_one_size_go_on_below_min_confidence() -> None:
    sure, trees = TreeConfig(12, 4, 3, 0.2), []
    text = torch.tensor([[5, 6, 7, 8, 5, 6, 9, 5, 6]])
    for stepper in (EAGER, FixedShapes()):
        model = engine(drafted=30, target=TargetModel(tiny_model(), stepper))
        drafter = model.drafter.make(1, 64, sure)
        with torch.inference_mode():
            drafter.begin(Seen(text, [9], torch.ones(1, 9, 32)))
            trees.append(drafter.draft(text[:, -1], sure))
    few, whole = trees
    nodes, real = few.tokens.shape[1], int((whole.parents >= 0).sum()) + 1
    assert whole.tokens.shape[1] == 12 and 1 < nodes < real
    assert torch.equal(whole.tokens[:, :nodes], few.tokens)
    assert few.scores[0, 1:].exp().min() >= 0.2 > whole.scores[0, nodes:real].exp().max()


@torch.inference_mode()
def test_a_tree_is_the_same_beside_one_for_which_the_head_goes_deeper() -> None:
    """What the head computes below a text's last level is masked: it is no draft, and copies go on alone."""
    tree, weak = TreeConfig(12, 4, 10, 0.2), tiny_model()
    weak.lm_head.weight.mul_(0.1)
    model, deeper = engine(drafted=10, target=TargetModel(weak)), 0
    texts = torch.tensor([[2, 4, 6, 8, 2, 4, 6, 8, 2, 4], [*range(20, 30)]])
    for seed in range(8):
        features = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(seed))
        features[1] *= 30.0  # the head is surer
        found, depths = [], []
        for rows in ([0, 1], [0]):
            drafter = model.drafter.make(len(rows), 64, tree)
            drafter.begin(Seen(texts[rows], [10] * len(rows), features[rows]))
            depths.append(drafter.head.candidates(texts[rows, -1], tree).depth)
            found.append(dict(nodes_of(drafter.draft(texts[rows, -1], tree))))
        assert found[0] == pytest.approx(found[1], abs=1e-4), f"seed {seed}"
        deeper += depths[0] > depths[1]
    assert deeper > 3


@pytest.mark.parametrize("rule", [Lossless(), Fuzzy(0.45), Fuzzy(1.2, "reverse_kl", child="target")], ids=str)
@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_fixed_shapes_change_no_verdict(rule: AcceptanceRule, sources: Sources) -> None:
    config, table = TREES[1], torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    memories = [remembered(seed, sources) for seed in (3, 4)]
    heads = [random_head(seed, config) for seed in (3, 4)]
    rows = [torch.cat(pair) for pair in zip(heads[0][1], heads[1][1], strict=True)]
    trees = [
        merge(memory, memory.store.text[-1], head, config)
        for memory, (head, _) in zip(memories, heads, strict=True)
    ]
    roots = torch.tensor([memory.store.text[-1] for memory in memories])
    vocabulary, verdicts = Vocabulary(torch.arange(DRAFTED), VOCAB_SIZE), []
    for fixed in (False, True):
        sizes = (config.total_tokens, merging.deepest(config), rows, sources.recycled)
        tree = pack_trees(trees, roots, vocabulary, *sizes, filled=fixed, recorded=fixed)
        verified = Verified(
            tree, table[tree.tokens] * 3, SamplingConfig(0.8), torch.tensor([], dtype=torch.int64)
        )
        uniforms = torch.rand(2, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        verdicts.append(accept_by(rule, verified, uniforms, torch.zeros(2, dtype=torch.int64)))
    width = verdicts[0].tokens.shape[1]
    assert torch.equal(verdicts[0].tokens, verdicts[1].tokens[:, :width])
    assert tree.tokens.shape == (2, 16) and tree.log_q.shape == (2, 15, VOCAB_SIZE) and tree.depth == 15
    assert len(set(tree.drafted.tolist())) == VOCAB_SIZE


def test_a_runtime_of_fixed_shapes_gets_the_same_text(ends: list[list[int]]) -> None:
    target = TargetModel(tiny_model(), FixedShapes())
    model = engine(drafted=30, target=target)
    made = run_loop(target, prompts(), model.drafter.make(4, 64, TREES[2]), 30, tree=TREES[2])
    assert made.texts == [text[:30] for text in ends]


@pytest.mark.slow
def test_it_drafts_beside_openvino(ends: list[list[int]]) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    from eagle_fsd.runtime.openvino.backend import OpenVINO

    model = EagleFSD(TargetModel(tiny_model(), runtime=OpenVINO("float32")), tiny_head(), lookup=True)
    made = [model.generate([prompt], max_new_tokens=40, tree=TREES[1]) for prompt in prompts()]
    assert [one.new_tokens[0] for one in made] == ends
    assert sum(one.stats[0].sources["suffix"] for one in made) > 0


def test_a_broken_head_leaves_the_copies(ends: list[list[int]]) -> None:
    model = engine()
    with torch.no_grad():
        model.drafter.network.fc.weight.fill_(math.nan)
    made = model.generate([prompts()[2]], max_new_tokens=30, tree=TREES[1])
    assert made.new_tokens == [ends[2][:30]] and made.stats[0].sources["head"] == 0


# --- surfaces ---


class ElsewhereTokens:
    """Stands for a list of tokens on another device: it can be brought here, and nothing else."""

    def to(self, device: torch.device) -> Tensor:
        return torch.arange(20, device=device)


def test_lookup_beside_a_narrower_draft_model_on_another_device() -> None:
    """The draft model's list of tokens is asked about here, where its trees are brought to."""
    target = TargetModel(tiny_model())
    narrow = DraftModelSpec.for_target(TargetModel(tiny_model(seed=5, vocab_size=20)), target)
    head = narrow.make(1, 64, TREES[1])
    head.predictor.drafted = ElsewhereTokens()
    drafter = MergedDrafter(head, LookupDrafter(LookupSpec.for_target(target), 1, ALL_PRIORS))
    assert [drafter.vocabulary.column(token) for token in (0, 19, 20)] == [0, 19, None]
    assert drafter.vocabulary.tokens(torch.tensor([3, 7])).tolist() == [3, 7]


def test_lookup_beside_a_head() -> None:
    target, head = TargetModel(tiny_model()), tiny_head()
    model, alone = (
        EagleFSD(target, head, ea_model="mine", lookup=True),
        EagleFSD(target, head, ea_model="mine"),
    )
    assert model.drafter == MergedSpec.for_target(alone.drafter, target)
    assert (model.ea_model, model.head, model.drafter.name) == ("mine", head, "eagle+lookup")
    assert model.drafter.tokens == alone.drafter.tokens
    assert model.drafter.longest == alone.drafter.longest
    identities = {
        one.identity()["drafter" if "drafter" in one.identity() else "head"] for one in (model, alone)
    }
    assert len(identities) == 2
    with pytest.raises(ValueError, match=r"divergence is 'forward_kl': .* choose one of reverse_kl, js, tv"):
        model.generate([[1, 2]], rule=Fuzzy(0.3, "forward_kl"))
    with pytest.raises(
        ValueError, match="lookup beside the drafter 'lookup': it must be one that grows trees"
    ):
        replace(model.drafter, head=LookupSpec.for_target(target)).make(1, 8, TREES[1])


def test_weights_of_copies() -> None:
    def weights(chances: Sequence[float], probs: Sequence[float | None]) -> list[float]:
        found = merging.copies_weights(dict(enumerate(chances)), dict(enumerate(probs)))
        return [found.get(place, 0.0) for place in range(len(chances))]

    assert weights([0.8], [0.5]) == pytest.approx([0.6])  # 0.4 * 0.5 + 0.6
    assert weights([0.8], [None]) == pytest.approx([0.8])
    assert weights([0.4, 0.3], [0.5, 1.0]) == [0.0, 0.0]
    assert sum(weights([0.9, 0.9], [None, None])) == pytest.approx(merging.MOST)
