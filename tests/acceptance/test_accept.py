"""`accept` against a plain twin that walks one row at a time with Python floats, and against the
distributions that the rules promise, by chi-square.

A chi-square test here fails a correct program with probability 1e-6 (there are about twenty, all seeded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from scipy.stats import chisquare
from support.stubs import Chain, ChainDrafter, ChainTarget, generator, random_tree, tiny_head, tiny_llama
from torch import Tensor

from eagle_fsd.acceptance import accept_step
from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verdict, Verified, scatter_to_owners
from eagle_fsd.acceptance.accept_step import accept, choose
from eagle_fsd.acceptance.divergence import DIVERGENCES, get_divergence, largest_value
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.other_rules import RelaxedTopK, Typical
from eagle_fsd.core.config import CHILDREN, SamplingConfig, TreeConfig
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.sampling import warp
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.loop import decode
from eagle_fsd.decoding.request import Request
from eagle_fsd.engine import EagleFSD
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.data.token_counts import rank_tokens

INF, NAN = math.inf, math.nan
ALPHA = 1e-6
GREEDY, WARM = SamplingConfig(), SamplingConfig(temperature=1.0)
PAPERS = SamplingConfig(temperature=0.6, top_k=50, top_p=0.9)  # the FSD paper's setting
NARROW = SamplingConfig(temperature=0.8, top_k=4, top_p=0.9)  # the same on a vocabulary of a few tokens
SAMPLINGS = [GREEDY, WARM, NARROW]
EOS = torch.tensor([2, 5])


@dataclass
class OneStream:
    """Uniform numbers for very many rows at once: the distribution matters, not whose stream it is."""

    rows: int
    source: torch.Generator
    kept: tuple[list[int], Tensor] | None = None
    device = torch.device("cpu")

    def uniform(self, n: int) -> Tensor:
        return torch.rand(self.rows, n, generator=self.source)

    def noise(self, first: Sequence[int], count: int, size: int, rows: Sequence[bool]) -> Tensor:
        """Noise that is kept while a step drafts and draws, as a place's is."""
        if self.kept is None or self.kept[0] != list(first):
            uniform = torch.rand(len(first), 1 + count, size, generator=self.source, dtype=torch.float64)
            self.kept = list(first), -(-uniform.log()).log().float()
        return self.kept[1][:, :count]

    def select(self, rows: Sequence[int]) -> None:
        self.rows = len(rows)


@dataclass
class Given:
    """The same uniform number for everything."""

    rows: int
    value: float

    def uniform(self, n: int) -> Tensor:
        return torch.full((self.rows, n), self.value)


# --- the twin ---


@dataclass
class Row:
    """One row of a tree as plain data. law: log q of a node with children. p, warped: the target's
    probabilities at every node, raw and as sampled from."""

    tokens: list[int]
    parents: list[int]
    law: dict[int, list[float]]
    logits: list[list[float]]
    warped: list[list[float]]

    @classmethod
    def of(cls, tree: DraftTree, logits: Tensor, sampling: SamplingConfig, row: int) -> Row:
        owners, log_q = tree.owners[row].tolist(), tree.log_q[row].double().tolist()
        return cls(
            tokens=tree.tokens[row].tolist(),
            parents=tree.parents[row].tolist(),
            law={owner: q for owner, q in zip(owners, log_q, strict=True) if owner >= 0},
            logits=logits[row].double().tolist(),
            warped=warp(logits[row], sampling).double().tolist(),
        )

    def p(self, node: int, temperature: float = 1.0) -> list[float]:
        return softmax([x / temperature for x in self.logits[node]])

    def gain(self, node: int, sampling: SamplingConfig) -> float:
        if sampling.greedy:
            best = self.logits[node].index(max(self.logits[node]))
            weights = [float(x == best) for x in range(len(self.logits[node]))]
        else:
            weights = self.warped[node]
        return sum(weights[self.tokens[c]] * (1 + self.gain(c, sampling)) for c in self.children(node))

    def children(self, node: int) -> list[int]:
        return [n for n, parent in enumerate(self.parents) if parent == node]


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [weight / sum(weights) for weight in weights]


def inverse_cdf(weights: list[float], u: float) -> int:
    running, point = 0.0, u * sum(weights)
    last = -1
    for index, weight in enumerate(weights):
        running += weight
        if weight > 0:
            last = index
            if running > point:
                break
    return last


def kl(a: list[float], b: list[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if x > 0:
            total += x * math.log(x / y) if y > 0 else INF
    return total


def plain_divergence(name: str, p: list[float], q: list[float]) -> float:
    if name.endswith("_top10"):
        top = sorted(range(len(p)), key=lambda x: -p[x])[:10]
        rest = [x for x in range(len(p)) if x not in top]
        p, q = ([law[x] for x in top] + [sum(law[x] for x in rest)] for law in (p, q))
    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return {
        "reverse_kl": lambda: kl(q, p),
        "forward_kl": lambda: kl(p, q),
        "js": lambda: (kl(p, m) + kl(q, m)) / 2,
        "tv": lambda: sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2,
        "ag": lambda: (kl(m, p) + kl(m, q)) / 2,
    }[name.removesuffix("_top10")]()


def plain_choice(rule: AcceptanceRule, row: Row, node: int, sampling: SamplingConfig, u: float) -> int:
    """The child that a relaxed rule would follow at a node, -1 for none."""
    family = row.children(node)
    if isinstance(rule, Lossless) or not family:
        return -1
    support = row.p(node) if sampling.greedy else row.warped[node]
    allowed = [c for c in family if support[row.tokens[c]] > 0]
    if rule.exact_eos:
        allowed = [c for c in allowed if row.tokens[c] not in EOS.tolist()]
    if isinstance(rule, Typical):
        p = row.p(node, 1.0 if sampling.greedy else sampling.temperature)
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        bound = min(rule.epsilon, rule.delta * math.exp(-entropy))
        typical = [c for c in allowed if p[row.tokens[c]] > bound]
        return max(typical, key=lambda c: p[row.tokens[c]], default=-1)
    if isinstance(rule, RelaxedTopK):
        p = row.p(node, 1.0 if sampling.greedy else sampling.temperature)
        least = sorted(p, reverse=True)[min(rule.candidates, len(p)) - 1]
        good = [c for c in allowed if p[row.tokens[c]] >= max(least, max(p) - rule.margin)]
        return max(good, key=lambda c: p[row.tokens[c]], default=-1)
    assert isinstance(rule, Fuzzy)
    if rule.threshold == 0 or any(math.isnan(x) for x in row.law[node]):
        return -1
    p, q = row.p(node), [math.exp(x) for x in row.law[node]]
    if not plain_divergence(rule.divergence, p, q) <= rule.threshold:
        return -1
    eligible = [
        c
        for c in allowed
        if p[row.tokens[c]] >= rule.min_p * max(p)
        and (rule.max_overshoot == INF or q[row.tokens[c]] <= rule.max_overshoot * p[row.tokens[c]])
        and (rule.min_gain == 0 or row.gain(c, sampling) >= rule.min_gain)
    ]
    if rule.child == "target":
        return max(eligible, key=lambda c: p[row.tokens[c]], default=-1)
    if sampling.greedy or rule.child == "likeliest":
        return max(eligible, key=lambda c: q[row.tokens[c]], default=-1)
    index = inverse_cdf([q[row.tokens[c]] for c in eligible], u)
    return eligible[index] if index >= 0 else -1


def plain_accept(
    rule: AcceptanceRule,
    row: Row,
    sampling: SamplingConfig,
    uniforms: list[float],
    emitted: int,
    depth: int,
) -> tuple[list[int], list[int], list[bool]]:
    """The path, the emitted tokens, and which nodes of the path were fuzzy accepts."""
    nodes = len(row.tokens)
    path, tokens, fuzzy, in_a_row = [0], [], [False], 0
    while True:
        node = path[-1]
        if sampling.greedy:
            x = row.logits[node].index(max(row.logits[node]))
        else:
            x = inverse_cdf(row.warped[node], uniforms[node])
        exact = next((c for c in row.children(node) if row.tokens[c] == x), -1)
        choice = plain_choice(rule, row, node, sampling, uniforms[nodes + node])
        if emitted + len(tokens) < rule.exact_prefix:
            choice = -1
        if rule.max_consecutive is not None and in_a_row >= rule.max_consecutive:
            choice = -1
        order = (choice, exact) if rule.mode == "paper" else (exact, choice)
        child = next((c for c in order if c >= 0), -1)
        if child < 0 or len(path) > depth:
            return path, [*tokens, x], fuzzy
        in_a_row = in_a_row + 1 if child != exact else 0
        path.append(child)
        tokens.append(row.tokens[child])
        fuzzy.append(child != exact)


# --- cases ---

FUZZY = Fuzzy(threshold=0.25)
GUARDS = {
    "no guard": replace(FUZZY, exact_eos=False),
    "exact_eos": FUZZY,
    "min_p": replace(FUZZY, min_p=0.3),
    "max_overshoot": replace(FUZZY, max_overshoot=1.3),
    "min_gain": replace(FUZZY, min_gain=0.3),
    "max_consecutive": replace(FUZZY, max_consecutive=1),
    "exact_prefix": replace(FUZZY, exact_prefix=4),
    "all": replace(FUZZY, min_p=0.1, max_overshoot=2.0, min_gain=0.2, max_consecutive=1, exact_prefix=2),
}
RULES: dict[str, AcceptanceRule] = {
    "lossless": Lossless(),
    "T = 0": Fuzzy(threshold=0.0),
    "T = inf": Fuzzy(threshold=INF, divergence="reverse_kl"),
    "two consecutive": replace(FUZZY, threshold=INF, mode="paper", max_consecutive=2),
    "two consecutive, prefix": replace(FUZZY, threshold=INF, max_consecutive=2, exact_prefix=3),
    "never fuzzy": replace(FUZZY, max_consecutive=0),
    "only p = max p": replace(FUZZY, threshold=INF, min_p=1.0),
    **{f"{name} 0.4": Fuzzy(threshold=0.4, divergence=name) for name in DIVERGENCES},
    **GUARDS,
    "typical": Typical(),
    "typical, loose": Typical(epsilon=0.05, delta=0.5, exact_eos=False),
    "relaxed top-3": RelaxedTopK(3, 0.2),
    "relaxed top-2, wide": RelaxedTopK(2, 1.0, exact_eos=False),
    "relaxed top-5, guarded": RelaxedTopK(5, 0.5, max_consecutive=1, exact_prefix=2),
    "typical, guarded": Typical(epsilon=0.05, delta=0.5, max_consecutive=1, exact_prefix=2),
}
KINDS = ["near", "far", "tied", "holes", "broken"]


def logits_near(tree: DraftTree, kind: str, seed: int) -> tuple[DraftTree, Tensor]:
    """Target logits [B, N, V] for a tree, and the tree with its q bent to the kind.

    near: p and q close, so that thresholds decide. far: independent. tied: rounded logits, many equal. holes:
    -inf among both. broken: NaN in some rows of q.
    """
    draw = generator(seed)
    batch, nodes = tree.tokens.shape
    vocab = tree.log_q.shape[-1]
    logits = torch.randn(batch, nodes, vocab, generator=draw) * 1.5
    log_q = tree.log_q
    if kind != "far":
        rows = torch.arange(batch)[:, None]
        noise = torch.rand(batch, nodes, 1, generator=draw) * 1.5
        logits[rows, tree.owners.clamp(min=0)] = log_q + noise[:, : log_q.shape[1]] * torch.randn(
            log_q.shape, generator=draw
        )
    if kind == "tied":
        logits, log_q = logits.round(), log_q.round().log_softmax(-1)
    if kind == "holes":
        logits = logits.masked_fill(torch.rand(logits.shape, generator=draw) < 0.2, -INF)
        logits[:, :, 0] = 0.5
        log_q = log_q.masked_fill(torch.rand(log_q.shape, generator=draw) < 0.2, -INF)
        log_q[:, :, 1] = 0.3
        log_q = log_q.log_softmax(-1)
    if kind == "broken":
        log_q = log_q.masked_fill(torch.rand(log_q.shape, generator=draw) < 0.03, NAN)
    return replace(tree, log_q=log_q), logits.float()


def case(kind: str, seed: int, batch: int = 6, vocab: int = 13) -> tuple[DraftTree, Tensor]:
    return logits_near(random_tree(batch, 11, 4, 4, vocab, seed), kind, 1000 + seed)


def run(
    rule: AcceptanceRule,
    tree: DraftTree,
    logits: Tensor,
    sampling: SamplingConfig,
    seed: int = 0,
    emitted: Tensor | None = None,
) -> Verdict:
    rows = len(logits)
    emitted = torch.zeros(rows, dtype=torch.int64) if emitted is None else emitted
    return accept(rule, Verified(tree, logits, sampling, EOS), RowRandom(seed, rows), emitted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shared", [False, True], ids=["uniform numbers", "noise"])
@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=["warm", "narrow"])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_along_the_path_are_those_of_the_whole_tree(
    kind: str, sampling: SamplingConfig, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU draws at the nodes that the walk reaches; an accelerator, which must not wait, at all of them."""
    tree, logits = case(kind, seed=50 + KINDS.index(kind))
    emitted, longest = torch.zeros(6, dtype=torch.int64), 0
    for seed in range(12):
        random = RowRandom(seed, 6)
        noise = random.noise([0] * 6, tree.depth + 1, logits.shape[-1], [True] * 6) if shared else None
        found = []
        for reads in (True, False):
            monkeypatch.setattr(accept_step, "host_can_read", lambda tensor, reads=reads: reads)
            verified = Verified(tree, logits, sampling, EOS)
            found.append(accept(Lossless(), verified, RowRandom(seed, 6), emitted, noise))
        for name in ("path", "tokens", "length", "next_token", "sound", "fuzzy"):
            assert getattr(found[0], name).equal(getattr(found[1], name)), name
        longest = max(longest, int(found[0].length.max()))
    assert longest > (kind != "holes")  # where hardly a draft is likely


def outcomes(verdict: Verdict) -> list[tuple[list[int], list[int], list[bool]]]:
    """Every row of a verdict as the twin gives it; checks the padding."""
    rows = []
    for row, length in enumerate(verdict.length.tolist()):
        assert (verdict.path[row, length:] == -1).all() and (verdict.tokens[row, length:] == -1).all()
        assert not verdict.fuzzy[row, length:].any()
        assert verdict.next_token[row] == verdict.tokens[row, length - 1]
        parts = (verdict.path, verdict.tokens, verdict.fuzzy)
        rows.append(tuple(part[row, :length].tolist() for part in parts))
    return rows


# --- the walk equals the twin ---


@pytest.mark.covering(2)
@pytest.mark.parametrize("seed", [0, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "narrow"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_accept_equals_the_plain_walk(name: str, kind: str, sampling: SamplingConfig, seed: int) -> None:
    """Every rule in both modes and with both children, on trees of another shape in every row."""
    rule = RULES[name]
    variants = [rule]
    if isinstance(rule, Fuzzy):
        variants = [replace(rule, mode=m, child=c) for m in ("hybrid", "paper") for c in CHILDREN]
    if isinstance(rule, (Typical, RelaxedTopK)):
        variants = [replace(rule, mode=m) for m in ("hybrid", "paper")]
    tree, logits = case(kind, seed=KINDS.index(kind))
    emitted = torch.tensor([0, 1, 2, 3, 7, 0])
    for variant in variants:
        verdict = run(variant, tree, logits, sampling, seed, emitted)
        uniforms = RowRandom(seed, 6).uniform(22).double().tolist()
        expected = [
            plain_accept(
                variant, Row.of(tree, logits, sampling, r), sampling, uniforms[r], int(emitted[r]), 4
            )
            for r in range(6)
        ]
        assert outcomes(verdict) == expected


def test_the_cases_are_worth_comparing() -> None:
    """Over the cases above: paths of every length, exact and fuzzy accepts at every level, a fuzzy accept
    after an exact one and the other way round."""
    lengths, steps = set(), set()
    for kind in KINDS:
        for sampling in SAMPLINGS:
            for seed in range(20):
                tree, logits = case(kind, seed)
                verdict = run(Fuzzy(threshold=0.25), tree, logits, sampling, seed)
                for path, _, fuzzy in outcomes(verdict):
                    lengths.add(len(path))
                    steps |= {(level, *fuzzy[level - 1 : level + 1]) for level in range(1, len(path))}
    assert lengths == {1, 2, 3, 4, 5}
    pairs = {(a, b) for a in (False, True) for b in (False, True)}
    assert {step[1:] for step in steps if step[0] > 1} == pairs
    assert (
        {step[0] for step in steps if step[-1]} == {step[0] for step in steps if not step[-1]} == {1, 2, 3, 4}
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [name for name in GUARDS if name not in ("no guard", "all")])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "narrow"])
def test_every_guard_acts_alone(name: str, sampling: SamplingConfig) -> None:
    """Each guard changes some verdict that the rule without guards gives, and only ever takes fuzzy accepts
    away at the first place where the two differ."""
    free, guarded = GUARDS["no guard"], replace(GUARDS[name], exact_eos=name == "exact_eos")
    differences = 0
    for seed in range(30):
        tree, logits = case("near", seed)
        pairs = zip(
            outcomes(run(free, tree, logits, sampling, seed)),
            outcomes(run(guarded, tree, logits, sampling, seed)),
            strict=True,
        )
        for (path, _, fuzzy), (guarded_path, _, guarded_fuzzy) in pairs:
            if path != guarded_path:
                differences += 1
                together = [a == b for a, b in zip(path, guarded_path, strict=False)]
                first = together.index(False) if False in together else len(together)
                assert first < len(fuzzy) and fuzzy[first], "the free rule took a fuzzy accept there"
                assert name in ("exact_eos", "min_p", "max_overshoot", "min_gain") or not any(
                    guarded_fuzzy[first : first + 1]
                )
    assert differences >= 3


def test_end_tokens_are_only_emitted_by_the_target() -> None:
    """exact_eos: every end token on a path is the target's own draw; without the guard some are not."""
    found = {True: 0, False: 0}
    for exact_eos in found:
        for seed in range(40):
            tree, logits = case("near", seed)
            rule = Fuzzy(threshold=INF, exact_eos=exact_eos, mode="paper")
            for path, tokens, fuzzy in outcomes(run(rule, tree, logits, WARM, seed)):
                for level in range(1, len(path)):
                    found[exact_eos] += fuzzy[level] and tokens[level - 1] in EOS.tolist()
    assert found[True] == 0 < found[False]


@pytest.mark.parametrize(
    "rule", [Lossless(), Fuzzy(), Fuzzy(threshold=INF, mode="paper"), Typical()], ids=str
)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "narrow"])
def test_a_row_is_the_same_alone(rule: AcceptanceRule, sampling: SamplingConfig) -> None:
    tree, logits = case("near", 3)
    seeds, emitted = [5, 17, 3, 3, 9, 1], torch.arange(6)
    together = accept(rule, Verified(tree, logits, sampling, EOS), RowRandom(seeds, 6), emitted)
    for row in range(6):
        part = DraftTree(
            *(
                getattr(tree, name)[row : row + 1]
                for name in ("tokens", "parents", "depths", "log_q", "owners")
            ),
            depth=tree.depth,
        )
        alone = accept(
            rule,
            Verified(part, logits[row : row + 1], sampling, EOS),
            RowRandom(seeds[row : row + 1], 1),
            emitted[row : row + 1],
        )
        assert outcomes(alone)[0] == outcomes(together)[row]


@pytest.mark.covering(1)
@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
@pytest.mark.parametrize(
    "rule", [Lossless(), Fuzzy(threshold=INF), Fuzzy(threshold=INF, mode="paper"), Typical()]
)
def test_extreme_uniforms_emit_nothing_impossible(u: float, rule: AcceptanceRule) -> None:
    """At u = 0 and at the largest u every emitted token has p > 0 after the warpers (trap 10), and no
    padding is read as a token (trap 6)."""
    for kind in KINDS:
        for seed in range(10):
            tree, logits = case(kind, seed)
            probs = warp(logits, NARROW)
            emitted = torch.zeros(6, dtype=torch.int64)
            verdict = accept(rule, Verified(tree, logits, NARROW, EOS), Given(6, u), emitted)
            for row, (path, tokens, _) in enumerate(outcomes(verdict)):
                for node, token in zip(path, tokens, strict=True):
                    assert 0 <= token < 13 and probs[row, node, token] > 0


def test_a_tree_without_children_emits_the_draw() -> None:
    tree = random_tree(3, 1, 2, 2, 13, 0)
    bare = replace(tree, log_q=tree.log_q[:, :0], owners=tree.owners[:, :0])
    logits = torch.randn(3, 1, 13, generator=generator(0))
    for rule in (Lossless(), Fuzzy(threshold=INF), Typical(epsilon=0.0)):
        verdict = run(rule, bare, logits, GREEDY)
        assert outcomes(verdict) == [([0], [int(x)], [False]) for x in logits[:, 0].argmax(-1)]


# --- thresholds ---


def followed(rule: AcceptanceRule, tree: DraftTree, logits: Tensor, sampling: SamplingConfig) -> Tensor:
    uniforms = torch.rand(tree.tokens.shape, generator=generator(77))
    chances = rule.chances(Verified(tree, logits, sampling, EOS))
    return torch.full_like(tree.tokens, -1) if chances is None else choose(tree, chances, uniforms)


def test_chances_that_sum_to_one_up_to_rounding_leave_none_for_no_child() -> None:
    """But what is short of one by more than rounding stays the chance of following none."""
    tokens, parents, depths = torch.tensor([[[0, 1, 2]], [[-1, 0, 0]], [[0, 1, 1]]])
    tree = DraftTree(tokens, parents, depths, torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.int64), 1)
    below_one = torch.full((1, 3), 1 - 2**-24)  # the largest number that a draw of float32 may be
    for second, taken in ((0.5 - 2**-23, 2), (0.5 - 2**-15, -1)):
        chances = torch.tensor([[0.0, 0.5, second]])
        assert choose(tree, chances, below_one)[0, 0] == taken


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "narrow"])
@pytest.mark.parametrize("child", CHILDREN)
def test_a_larger_threshold_never_follows_less(name: str, sampling: SamplingConfig, child: str) -> None:
    """In the same context the nodes where the draft is followed only grow with T, and the child stays."""
    for kind in KINDS:
        tree, logits = case(kind, 5)
        tables = [
            followed(Fuzzy(threshold=t, divergence=name, child=child), tree, logits, sampling)
            for t in (0.0, 1e-6, 0.02, 0.1, 0.3, 0.6, 1.0, 3.0, INF)
        ]
        assert (tables[0] == -1).all() and (tables[-1] >= 0).any()
        for smaller, larger in pairwise(tables):
            assert torch.equal(larger[smaller >= 0], smaller[smaller >= 0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("child", CHILDREN)
def test_an_infinite_threshold_follows_wherever_a_child_is_eligible(name: str, child: str) -> None:
    """Also where the divergence itself is infinite; never where no child has p > 0 or all are end tokens."""
    for kind in ("near", "far", "holes"):
        for seed in range(10):
            tree, logits = case(kind, seed)
            table = followed(Fuzzy(threshold=INF, divergence=name, child=child), tree, logits, WARM)
            for r in range(6):
                row = Row.of(tree, logits, WARM, r)
                for node in range(11):
                    eligible = [
                        c
                        for c in row.children(node)
                        if row.warped[node][row.tokens[c]] > 0
                        and row.tokens[c] not in EOS.tolist()
                        and (child != "draft" or row.law[node][row.tokens[c]] > -INF)
                    ]
                    assert int(table[r, node]) in (eligible or [-1])


@pytest.mark.parametrize("sampling", [WARM, NARROW], ids=["warm", "narrow"])
@pytest.mark.parametrize("mode", ["hybrid", "paper"])
def test_zero_threshold_is_off_where_the_divergence_is_zero(sampling: SamplingConfig, mode: str) -> None:
    """A perfect head: D is exactly 0 everywhere. T = 0 takes draws only; the least T > 0 does not."""
    tree = random_tree(40, 11, 4, 4, 13, 0)
    logits = torch.randn(40, 11, 13, generator=generator(1))
    rows = torch.arange(40)[:, None]
    tree = replace(tree, log_q=logits[rows, tree.owners.clamp(min=0)].log_softmax(-1))
    exact = logits[rows, tree.owners.clamp(min=0)]
    assert (get_divergence("js")(exact, exact) == 0).all()
    tree = replace(tree, log_q=exact)
    zero = outcomes(run(Fuzzy(threshold=0.0, mode=mode), tree, logits, sampling))
    assert zero == outcomes(run(Lossless(), tree, logits, sampling))
    assert not any(any(fuzzy) for _, _, fuzzy in zero)
    assert any(
        any(fuzzy) for _, _, fuzzy in outcomes(run(Fuzzy(threshold=1e-30, mode=mode), tree, logits, sampling))
    )


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "narrow"])
def test_an_undefined_divergence_is_a_rejection(name: str, sampling: SamplingConfig) -> None:
    """NaN anywhere in q at a node: not followed, even at T = inf; its neighbours are not touched."""
    tree, logits = case("near", 8)
    rule = Fuzzy(threshold=INF, divergence=name)
    before = followed(rule, tree, logits, sampling)
    row, owner = (before >= 0).nonzero()[0].tolist()
    source = tree.owners[row].tolist().index(owner)
    expected = before.clone()
    expected[row, owner] = -1
    for hole in (NAN, INF):
        log_q = tree.log_q.clone()
        log_q[row, source, int(tree.tokens[row, before[row, owner]]) - 1] = hole
        assert torch.equal(followed(rule, replace(tree, log_q=log_q), logits, sampling), expected)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_threshold_above_every_value_measures_nothing_and_says_the_same(name: str) -> None:
    tree, logits = case("near", 8)
    row, source = (tree.owners >= 0).nonzero()[-1].tolist()
    log_q, broken = tree.log_q.clone(), logits.clone()
    log_q[row, source, 0] = NAN
    broken[0, 0, 0] = INF
    rule = Fuzzy(threshold=largest_value(name), divergence=name)
    for tree_, logits_ in ((tree, logits), (replace(tree, log_q=log_q), logits), (tree, broken)):
        verified = Verified(tree_, logits_, SAMPLINGS[0], torch.tensor([], dtype=torch.long))
        measured = rule.node_divergences(verified)
        # Elsewhere measured is inf, and T may be.
        drafted = scatter_to_owners(tree_, tree_.owners >= 0, False)
        assert torch.equal(rule.is_close(verified), drafted & (measured <= rule.threshold))


# --- distributions ---


def assert_law(counts: Tensor, law: Tensor) -> None:
    """Counts follow this distribution: none where it is 0, chi-square elsewhere (cells of fewer than five
    expected outcomes are put together)."""
    counts, law = counts.double().flatten(), law.double().flatten()
    assert torch.isclose(law.sum(), torch.tensor(1.0, dtype=torch.float64), atol=1e-6)
    assert counts[law == 0].sum() == 0, "something impossible was drawn"
    expected = law / law.sum() * counts.sum()
    common = expected >= 5
    cells = [(counts[common], expected[common]), (counts[~common].sum()[None], expected[~common].sum()[None])]
    if cells[1][1] < 5:  # too few even together: leave them in the largest cell
        top = int(cells[0][1].argmax())
        for whole, rest in zip(cells[0], cells.pop(1), strict=True):
            whole[top] += rest[0]
    found, wanted = (torch.cat(part).numpy() for part in zip(*cells, strict=True))
    if len(found) > 1:
        assert chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > ALPHA


def plain_law(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """The sampling distribution [V], float64, token by token: temperature, top-k, then top-p."""
    p = softmax([x / sampling.temperature for x in logits.double().tolist()])
    ranked = sorted(range(len(p)), key=lambda x: -p[x])[: sampling.top_k or len(p)]
    mass, total, kept = 0.0, sum(p[x] for x in ranked), []
    for x in ranked:
        if not kept or sampling.top_p == 1 or mass < sampling.top_p:
            kept.append(x)
            mass += p[x] / total
    return torch.tensor([p[x] * (x in kept) for x in range(len(p))], dtype=torch.float64) / sum(
        p[x] for x in kept
    )


ROWS = 20_000


def one_node(seed: int = 6) -> tuple[DraftTree, Tensor]:
    """ROWS copies of a root with four children, the target's tokens of rank 1, 2, 4 and 9 among twelve; the
    target's logits [ROWS, 5, 12]."""
    draw = generator(seed)
    logits = torch.randn(5, 12, generator=draw)
    q_logits = logits[0] + 0.7 * torch.randn(12, generator=draw)
    tokens = logits[0].argsort(descending=True)[[2, 9, 1, 4]]
    tree = DraftTree(
        tokens=torch.cat((torch.zeros(1, dtype=torch.int64), tokens)).expand(ROWS, -1),
        parents=torch.tensor([-1, 0, 0, 0, 0]).expand(ROWS, -1),
        depths=torch.tensor([0, 1, 1, 1, 1]).expand(ROWS, -1),
        log_q=q_logits.log_softmax(-1).expand(ROWS, 1, -1),
        owners=torch.zeros(ROWS, 1, dtype=torch.int64),
        depth=1,
    )
    return tree, logits.expand(ROWS, -1, -1)


def accept_many(
    rule: AcceptanceRule, tree: DraftTree, logits: Tensor, sampling: SamplingConfig, eos: Tensor = EOS
) -> Verdict:
    random, emitted = OneStream(ROWS, generator(11)), torch.zeros(ROWS, dtype=torch.int64)
    return accept(rule, Verified(tree, logits, sampling, eos), random, emitted)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "narrow"])
def test_gains_are_what_the_target_goes_on_to_accept(sampling: SamplingConfig) -> None:
    """The gain at the root is the mean number of drafted tokens that lossless decoding accepts."""
    found = set()
    for seed in range(12 if sampling.greedy else 5):
        tree, logits = case("near", seed, batch=1)
        gain = float(Verified(tree, logits, sampling, EOS).gains()[0, 0])
        same = {
            name: getattr(tree, name).expand(ROWS, *[-1] * (getattr(tree, name).ndim - 1))
            for name in ("tokens", "parents", "depths", "log_q", "owners")
        }
        verdict = accept_many(Lossless(), replace(tree, **same), logits.expand(ROWS, -1, -1), sampling)
        accepted = (verdict.length - 1).double()
        assert abs(float(accepted.mean()) - gain) <= 5 * float(accepted.std()) / ROWS**0.5 + 1e-5
        found.add(round(gain, 2))
    assert len(found) > 1 and max(found) > 0.3


@pytest.mark.covering(2)
@pytest.mark.parametrize("sampling", [WARM, SamplingConfig(0.8, top_k=6, top_p=0.95)], ids=["warm", "narrow"])
@pytest.mark.parametrize("mode", ["hybrid", "paper"])
@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("guard", ["none", "exact_eos", "max_overshoot", "draft vocabulary"])
def test_next_token_law_at_a_node(sampling: SamplingConfig, mode: str, child: str, guard: str) -> None:
    """D <= T at a node with children C, of which E may be followed. hybrid: p on C, and the rest, 1 - p(C),
    spread over E as the draft chooses. paper: E alone, as the draft chooses. The choice is q restricted to E,
    or the child of the largest q or p. With a draft vocabulary q is zero on all but five tokens: nothing else
    is different, and js stays below ln 2."""
    tree, logits = one_node()
    tokens = tree.tokens[0, 1:].tolist()
    threshold = INF
    if guard == "draft vocabulary":
        drafted = torch.tensor([*tokens, next(x for x in range(12) if x not in tokens)])
        few = tree.log_q[0, 0, drafted].log_softmax(-1)
        columns = torch.tensor([0, 0, 1, 2, 3]).expand(ROWS, -1)
        tree = replace(tree, log_q=few.expand(ROWS, 1, -1), drafted=drafted, columns=columns)
        threshold = 0.69
    q = tree.whole_log_q(12)[0, 0].double().exp()
    raw, p = logits[0, 0].double().softmax(-1), plain_law(logits[0, 0], sampling)
    rule, eos = Fuzzy(threshold=threshold, mode=mode, child=child), torch.tensor([], dtype=torch.int64)
    eligible = [x for x in tokens if p[x] > 0]
    assert len(eligible) == (4 if sampling == WARM else 3)
    if guard == "exact_eos":
        eos = torch.tensor(tokens[2:3])
        eligible.remove(tokens[2])
    if guard == "max_overshoot":  # between the two largest: one child falls
        first, second = sorted(eligible, key=lambda x: float(q[x] / raw[x]))[-2:]
        rule = replace(rule, max_overshoot=float(q[first] / raw[first] + q[second] / raw[second]) / 2)
        eligible.remove(second)
    choice = torch.zeros(12, dtype=torch.float64)
    if child == "draft":
        choice[eligible] = q[eligible] / q[eligible].sum()
    else:
        choice[max(eligible, key=lambda x: (raw if child == "target" else q)[x])] = 1.0
    law = choice
    if mode == "hybrid":
        law = torch.zeros(12, dtype=torch.float64)
        law[tokens] = p[tokens]
        law = law + (1 - p[tokens].sum()) * choice
    verdict = accept_many(rule, tree, logits, sampling, eos)
    assert_law(torch.bincount(verdict.tokens[:, 0], minlength=12), law)
    # An accept is followed by a draw at the child.
    for place, token in enumerate(tokens):
        there = verdict.path[:, 1] == place + 1
        if there.sum() > 1000:
            assert (verdict.tokens[there, 0] == token).all()
            seconds = torch.bincount(verdict.next_token[there], minlength=12)
            assert_law(seconds, plain_law(logits[0, place + 1], sampling))


def test_the_law_test_can_fail() -> None:
    """Lossless acceptance has the target's distribution, fuzzy has not, and the test says so."""
    tree, logits = one_node()
    law = plain_law(logits[0, 0], WARM)
    lossless, fuzzy = (
        torch.bincount(accept_many(rule, tree, logits, WARM).tokens[:, 0], minlength=12)
        for rule in (Lossless(), Fuzzy(threshold=INF))
    )
    assert_law(lossless, law)
    with pytest.raises(AssertionError):
        assert_law(fuzzy, law)


def pair_law(first: Tensor, second: list[Tensor]) -> Tensor:
    """[V, V]: the joint distribution of a token and its successor."""
    return first[:, None] * torch.stack(second)


def check_pairs(pairs: Tensor, law: Tensor) -> None:
    """pairs [n, 2] of tokens: the distribution of the first token, of the second, and of both."""
    vocab = len(law)
    counts = torch.bincount(pairs[:, 0] * vocab + pairs[:, 1], minlength=vocab**2).view(vocab, vocab)
    assert_law(counts.sum(1), law.sum(1))
    assert_law(counts.sum(0), law.sum(0))
    assert_law(counts, law)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("sampling", "vocab", "scale"),
    [(WARM, 16, 1.5), (PAPERS, 64, 1.2)],
    ids=["temperature 1", "temperature 0.6, top-p 0.9, top-k 50"],
)
@pytest.mark.parametrize("share", [0.0, 0.4], ids=["perfect head", "fair head"])
@pytest.mark.parametrize("batches", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_lossless_law_of_the_first_two_tokens(
    batches: int, sampling: SamplingConfig, vocab: int, scale: float, share: float
) -> None:
    """Batches of 10,000 draws through the loop on a language whose distribution is known: first token, second
    token and pairs; the pair may come from one step or from two."""
    chain = Chain.random(vocab, seed=1, scale=scale)
    draft = chain.blend(Chain.random(vocab, seed=2, scale=scale), share)
    before, last = 3, 5
    first = plain_law(chain.table[before, last], sampling)
    law = pair_law(first, [plain_law(chain.table[last, x], sampling) for x in range(vocab)])
    pairs, accepted, rows = [], 0, 10_000
    for batch in range(batches):
        request = Request(
            prompts=[[before, last]] * rows,
            limits=[2] * rows,
            eos_token_ids=(),
            rule=Lossless(),
            tree=TreeConfig(6, 2, 3),
            sampling=sampling,
        )
        texts, random = request.texts(), OneStream(rows, generator(100 + batch))
        parts = (ChainTarget(chain, rows), ChainDrafter(draft, rows), random, request.tree)
        for _ in decode(Batch(*parts), texts):  # type: ignore[arg-type]
            pass
        pairs.append(torch.tensor([text.new_tokens for text in texts]))
        accepted += sum(text.stats.exact_accepts for text in texts)
    assert 0.2 * batches * rows < accepted < 1.8 * batches * rows, (
        "the draft must be right sometimes for this to test anything"
    )
    check_pairs(torch.cat(pairs), law)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "sampling", [WARM, PAPERS], ids=["temperature 1", "temperature 0.6, top-p 0.9, top-k 50"]
)
@pytest.mark.parametrize("drafted", [None, 24], ids=["all tokens", "a draft vocabulary"])
@pytest.mark.parametrize("batches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_lossless_law_of_a_real_model(batches: int, sampling: SamplingConfig, drafted: int | None) -> None:
    """Batches of 10,000 draws of a tiny Llama (vocabulary 64) through the engine, with a head that is often
    right, one seed per row, and which drafts all tokens or the likeliest few. The distribution comes from the
    model's plain forward."""
    vocab, prompt = 64, [3, 9, 27]
    model, head = tiny_llama(vocab, 16, layers=1, seed=4, peak=2.0), tiny_head(vocab, 16)
    with torch.no_grad():
        # Small layers on unit embeddings: a feature is nearly the token's embedding, which this head returns.
        embeddings = model.model.embed_tokens.weight
        embeddings /= embeddings.pow(2).mean(-1, keepdim=True).sqrt()
        for layer in (model.model.layers[0], head.layers[0]):
            share = 0.3 if layer is model.model.layers[0] else 0.0
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
        head.fc.weight.copy_(torch.cat((torch.eye(16), torch.zeros(16, 16)), dim=1))
        texts = torch.tensor([[*prompt, x] for x in range(vocab)])
        logits = model(texts).logits
    first = plain_law(logits[0, len(prompt) - 1], sampling)
    law = pair_law(first, [plain_law(logits[x, -1], sampling) for x in range(vocab)])
    if drafted is not None:
        head.restrict(rank_tokens(law.sum(0), drafted))
        assert law.sum(0)[head.draft_tokens].sum() < 0.95, "the rest must matter"
    engine = EagleFSD(TargetModel(model), head)
    pairs, accepted, rows = [], 0, 10_000
    for batch in range(batches):
        out = engine.generate(
            torch.tensor([prompt]).expand(rows, -1),
            max_new_tokens=2,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            rule=Lossless(),
            tree=TreeConfig(7, 2, 4),
            seed=range(batch * rows, (batch + 1) * rows),
            eos_token_id=(),
        )
        pairs.append(torch.tensor(out.new_tokens))
        accepted += sum(entry.exact_accepts for entry in out.stats)
    assert accepted > 0.2 * batches * rows
    check_pairs(torch.cat(pairs), law)


# --- what is no number ---


@pytest.mark.parametrize("child", ["draft", "likeliest", "target"])
@pytest.mark.parametrize("threshold", [0.5, INF])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_draft_with_a_nan_is_followed_nowhere(name: str, threshold: float, child: str) -> None:
    """One NaN in q at a node, at a token of the tree or at any other: its children have no chance, and the
    other nodes' children have theirs."""
    tree, logits = random_tree(2, 9, 3, 3, vocab_size=20, seed=4), torch.randn(2, 9, 20)
    rule = Fuzzy(threshold, name, mode="paper", child=child)
    eos = torch.empty(0, dtype=torch.int64)
    for sampling in (SamplingConfig(), SamplingConfig(1.0)):
        clean = rule.chances(Verified(tree, logits, sampling, eos))
        for token in (int(tree.tokens[0, tree.parents[0] == 0][0]), 19):
            log_q = tree.log_q.clone()
            log_q[0, tree.owners[0] == 0, token] = NAN
            found = rule.chances(Verified(replace(tree, log_q=log_q), logits, sampling, eos))
            below_root = torch.zeros(2, 9, dtype=torch.bool)
            below_root[0] = tree.parents[0] == 0
            assert not found[below_root].any()
            assert torch.equal(found[~below_root], clean[~below_root])


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8)], ids=["greedy", "sampled"])
def test_a_verdict_says_of_every_row_how_far_its_path_is_finite(sampling: SamplingConfig) -> None:
    tree, eos = random_tree(6, 9, 3, 3, vocab_size=20, seed=4), torch.empty(0, dtype=torch.int64)
    logits = torch.randn(6, 9, 20, generator=torch.Generator().manual_seed(1))
    logits[1, 0, 3], logits[2, 0, 3], logits[3, 0], logits[4, 0, 3] = NAN, INF, -INF, -INF
    verified = Verified(tree, logits, sampling, eos)
    verdict = accept(Lossless(), verified, RowRandom(0, 6), torch.zeros(6, dtype=torch.int64))
    whole = torch.tensor([True, False, False, False, True, True])
    assert torch.equal(verdict.sound, verdict.length * whole)


def test_a_verdict_counts_the_tokens_before_the_first_node_without_a_distribution() -> None:
    tree = random_tree(1, 9, 3, 3, vocab_size=20, seed=4)
    logits = torch.randn(1, 9, 20, generator=torch.Generator().manual_seed(1))
    rule = Fuzzy(INF, mode="paper", child="target")
    clean = accept(
        rule, Verified(tree, logits, SamplingConfig(), EOS), RowRandom(0, 1), torch.zeros(1).long()
    )
    length = int(clean.length)
    assert length > 2 and int(clean.sound) == length
    for place, node in enumerate(clean.path[0, :length].tolist()):
        bad = logits.clone()
        bad[0, node] = -INF
        found = accept(
            rule, Verified(tree, bad, SamplingConfig(), EOS), RowRandom(0, 1), torch.zeros(1).long()
        )
        assert int(found.sound) == place
        assert torch.equal(found.tokens[0, :place], clean.tokens[0, :place])


@pytest.mark.parametrize("sampling", [*SAMPLINGS[1:], SamplingConfig(1.0, top_k=3)])
@pytest.mark.parametrize("kind", KINDS)
def test_warped_p_is_read_off_the_whole_distributions(sampling: SamplingConfig, kind: str) -> None:
    tree, logits = case(kind, 3)
    verified = Verified(tree, logits, sampling, EOS)
    assert verified.probs is not None
    assert torch.equal(verified.warped_p()[:, 1:], verified.at_token(verified.probs)[:, 1:])
    assert torch.equal(verified.largest, logits.amax(-1)) and verified.probs is verified.probs


def test_greedy_reads_the_largest_logits_only() -> None:
    tree, logits = case("tied", 3)
    verified = Verified(tree, logits, GREEDY, EOS)
    assert verified.probs is None
    assert torch.equal(verified.best[1], logits.argmax(-1))
    assert torch.equal(verified.largest, logits.amax(-1))
