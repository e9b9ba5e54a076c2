"""Planned acceptance against a plain twin that tries every policy of a small tree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.stubs import generator, random_tree
from support.whole_distribution import distances, path_distributions
from torch import Tensor

from eagle_fsd import Fuzzy, SamplingConfig
from eagle_fsd.acceptance.accept import Choices, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.core.config import COSTS
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.tree import DraftTree

VOCAB, NODES = 7, 8
NONE = torch.empty(0, dtype=torch.int64)
SAMPLINGS = {"warm": SamplingConfig(1.0), "narrow": SamplingConfig(0.7, 5, 0.9), "greedy": SamplingConfig()}
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
every_cost = pytest.mark.parametrize("cost", COSTS)
both_modes = pytest.mark.parametrize("mode", ["hybrid", "paper"])
Policy = dict[int, int]  # the child that is followed at each node with children; -1: none


def verified_tree(seed: int, sampling: SamplingConfig, batch: int = 1, nodes: int = NODES) -> Verified:
    tree = random_tree(batch=batch, nodes=nodes, depth=3, width=3, vocab_size=VOCAB, seed=seed)
    logits = 1.5 * torch.randn(batch, nodes, VOCAB, generator=generator(seed))
    return Verified(tree, logits, sampling, NONE)


class Plain:
    """One tree in plain numbers."""

    def __init__(self, verified: Verified, rule: Fuzzy) -> None:
        self.rule, tree = rule, verified.tree
        self.parents, self.tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
        drawn = verified.probs
        if drawn is None:
            drawn = torch.nn.functional.one_hot(verified.logits.argmax(-1), VOCAB).double()
        self.drawn = drawn[0].double()
        raw = verified.logits[0].double().softmax(-1)
        self.priced = raw if verified.sampling.greedy else self.drawn
        self.divergences = rule.node_divergences(verified)[0].tolist()
        allowed = self.drawn > 0 if not verified.sampling.greedy else raw > 0
        self.may = [
            node > 0
            and bool(allowed[parent, self.tokens[node]])
            and self.divergences[parent] <= rule.threshold
            and self.divergences[parent] < math.inf
            for node, parent in enumerate(self.parents)
        ]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def p(self, table: Tensor, child: int) -> float:
        return float(table[self.parents[child], self.tokens[child]])

    def cost(self, child: int) -> float:
        """What following a child costs in one step of it: in hybrid mode where the draw is no child."""
        node = self.parents[child]
        p = self.p(self.priced, child)
        inside = sum(self.p(self.priced, one) for one in self.children(node))
        moved = max(0.0, 1 - inside if self.rule.mode == "hybrid" else 1 - p)
        unit = 1.0
        if self.rule.cost == "kl":
            unit = (p + moved) / moved * math.log1p(moved / p) if moved > 1e-9 else 1.0
        elif self.rule.cost == "divergence":
            unit = self.divergences[node]
        return unit if self.rule.mode == "hybrid" else moved * unit

    def worth(self, node: int, policy: Policy) -> float:
        """The expected number of drafted tokens below a node under a policy, less the price of its cost."""
        children = self.children(node)
        exact = sum(self.p(self.drawn, child) * (1 + self.worth(child, policy)) for child in children)
        child = policy.get(node, -1)
        if child < 0:
            return exact
        followed = 1 + self.worth(child, policy) - self.rule.price * self.cost(child)
        if self.rule.mode == "paper":
            return followed
        return exact + (1 - sum(self.p(self.drawn, one) for one in children)) * followed

    def policies(self) -> Iterator[Policy]:
        nodes = [node for node in range(NODES) if self.children(node)]
        choices = [[-1, *(child for child in self.children(node) if self.may[child])] for node in nodes]
        for chosen in product(*choices):
            yield dict(zip(nodes, chosen, strict=True))


Reply = tuple[
    int, dict[int, int]
]  # at a node: the child followed after a draw of no child, and after each child


class PlainSwaps(Plain):
    """The same tree, where a policy says of every draw whether it stays or which child takes its place."""

    def worth_of(self, node: int, policy: dict[int, Reply]) -> float:
        total, children = 0.0, self.children(node)
        outside = 1 - sum(self.p(self.drawn, child) for child in children)
        missed, swaps = policy.get(node, (-1, {}))
        price = self.rule.price * (self.divergences[node] if self.rule.cost == "divergence" else 1.0)
        if missed >= 0:
            total += outside * (1 + self.worth_of(missed, policy) - price)
        for child in children:
            other = swaps[child]
            paid = 0.0 if other == child else price
            total += self.p(self.drawn, child) * (1 + self.worth_of(other, policy) - paid)
        return total

    def replies(self) -> Iterator[dict[int, Reply]]:
        choices = []
        nodes = [node for node in range(len(self.parents)) if self.children(node)]
        for node in nodes:
            children = self.children(node)
            may = [child for child in children if self.may[child]]
            after = product(*([child, *(one for one in may if one != child)] for child in children))
            swaps = [dict(zip(children, each, strict=True)) for each in after]
            choices.append(list(product([-1, *may], swaps)))
        for chosen in product(*choices):
            yield dict(zip(nodes, chosen, strict=True))


def policy_of(chances: Tensor, parents: list[int]) -> Policy:
    return {parents[node]: node for node, chance in enumerate(chances.tolist()) if node and chance == 1}


@pytest.mark.covering(2)
@every_sampling
@every_cost
@both_modes
@pytest.mark.parametrize("threshold", [math.inf, 0.35])
def test_no_policy_of_the_tree_is_better(
    sampling: SamplingConfig, cost: str, mode: str, threshold: float
) -> None:
    followed = kept = 0
    for seed in range(12):
        for price in (0.3, 1.0, 2.0, 8.0):
            rule = Fuzzy(threshold, mode=mode, price=price, cost=cost)
            verified = verified_tree(seed, sampling)
            plain, chances = Plain(verified, rule), rule.chances(verified)
            assert chances is not None and set(chances.unique().tolist()) <= {0.0, 1.0}
            mine = policy_of(chances[0], plain.parents)
            assert all(plain.may[child] for child in mine.values())
            best = max(plain.worth(0, policy) for policy in plain.policies())
            assert plain.worth(0, mine) == pytest.approx(best, abs=1e-5)
            followed += len(mine)
            kept += sum(bool(plain.children(node)) for node in range(NODES)) - len(mine)
    assert followed > 10 and kept > 10


def test_a_certain_child_costs_nothing_where_the_divergence_is_infinite() -> None:
    """A form or top-k may leave one token: nothing can be moved there, and what lies above is planned."""
    chain = DraftTree(
        tokens=torch.tensor([[0, 1, 2]]),
        parents=torch.tensor([[-1, 0, 1]]),
        depths=torch.tensor([[0, 1, 2]]),
        log_q=torch.zeros(1, 2, VOCAB).log_softmax(-1),
        owners=torch.tensor([[0, 1]]),
        depth=2,
    )
    logits = torch.zeros(1, 3, VOCAB)
    logits[0, 1, torch.arange(VOCAB) != 2] = -math.inf
    verified = Verified(chain, logits, SamplingConfig(1.0), NONE)
    chances = Fuzzy(math.inf, "reverse_kl", "paper", price=0.1, cost="divergence").chances(verified)
    assert isinstance(chances, Tensor) and chances[0, 1] == 1


@pytest.mark.covering(2)
@every_sampling
@pytest.mark.parametrize("cost", ["tokens", "divergence"])
@pytest.mark.parametrize("threshold", [math.inf, 0.35])
def test_no_policy_of_draws_is_better_than_swapping(
    sampling: SamplingConfig, cost: str, threshold: float
) -> None:
    """Every policy that answers each draw of the target with its child, another child, or none."""
    swapped = 0
    for seed in range(16):
        for price in (0.2, 0.6, 1.5):
            rule = Fuzzy(threshold, mode="swap", price=price, cost=cost)
            verified = verified_tree(seed, sampling, nodes=5)
            plain, found = PlainSwaps(verified, rule), rule.chances(verified)
            assert isinstance(found, Choices)
            followed = policy_of(found.chances[0], plain.parents)
            weak = found.weak[0].tolist()
            mine = {}
            for node in range(5):
                children = plain.children(node)
                swaps = {child: followed[node] if weak[child] else child for child in children}
                mine[node] = (followed.get(node, -1), swaps)
                swapped += sum(child != other for child, other in swaps.items())
            best = max(plain.worth_of(0, policy) for policy in plain.replies())
            assert plain.worth_of(0, mine) == pytest.approx(best, abs=1e-5)
            same = replace(rule, mode="hybrid").chances(verified)
            kept = policy_of(same[0], plain.parents)  # type: ignore[index]
            stays = {
                node: (kept.get(node, -1), {child: child for child in plain.children(node)})
                for node in range(5)
            }
            assert plain.worth_of(0, stays) <= best + 1e-5
    assert swapped > 3


def test_the_walk_swaps_what_the_distribution_says() -> None:
    """The share of first tokens that the walk emits is the closed form's, within chance."""
    rule, rows = Fuzzy(math.inf, mode="swap", price=0.3), 20000
    for seed in range(20):
        one = verified_tree(seed, SAMPLINGS["warm"])
        found = rule.chances(one)
        assert isinstance(found, Choices)
        if bool((found.weak[0] & (one.tree.parents[0] == 0)).any()):  # a child of the root can be swapped
            break
    else:
        pytest.fail("no tree has a weak child of the root")
    many = Verified(one.tree.select([0] * rows), one.logits.expand(rows, -1, -1), one.sampling, NONE)
    zeros = torch.zeros(rows, dtype=torch.int64)
    verdict = accept(rule, many, RowRandom(5, rows), zeros)
    r, p = path_distributions(many, verdict, "swap")
    seen = torch.bincount(verdict.tokens[:, 0], minlength=VOCAB).double()
    expected = r[0, 0].double() * rows
    possible = expected > 0
    assert seen[~possible].sum() == 0 and float(distances(r[:1, 0], p[:1, 0])[1]) > 0.05
    chi = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    assert float(chi) < 27  # of at most 6 degrees of freedom: one in 7,000
    assert bool(verdict.fuzzy[:, 1].any()) and not bool(verdict.fuzzy[:, 1].all())


def test_an_end_token_that_was_drawn_stays() -> None:
    verified = verified_tree(3, SAMPLINGS["warm"], batch=64)
    rule = Fuzzy(math.inf, mode="swap", price=0.1)
    found = rule.chances(verified)
    assert isinstance(found, Choices) and bool(found.weak.any())
    token = int(verified.tree.tokens[found.weak].mode().values)
    ended = replace(verified, eos=torch.tensor([token]))
    fewer = rule.chances(ended)
    assert isinstance(fewer, Choices) and not bool(fewer.weak[ended.tree.tokens == token].any())
    free = replace(rule, exact_eos=False).chances(ended)
    assert isinstance(free, Choices) and bool(free.weak[ended.tree.tokens == token].any())


@every_sampling
def test_an_infinite_price_and_a_threshold_of_zero_are_lossless(sampling: SamplingConfig) -> None:
    verified = verified_tree(1, sampling, batch=4)
    assert Fuzzy(math.inf, price=math.inf).chances(verified) is None
    assert Fuzzy(0.0, price=1.0).chances(verified) is None
    dear = Fuzzy(math.inf, price=1e6).chances(verified)
    assert dear is not None and dear[:, 1:].sum() == 0


@pytest.mark.covering(1)
@every_cost
@both_modes
def test_a_higher_price_moves_less_and_a_plan_costs_what_it_says(cost: str, mode: str) -> None:
    """The closed-form distribution at the root has the TV, or the KL, that the plan was charged for."""
    prices, moved = (0.05, 0.5, 1.0, 2.0, 8.0), []
    for price in prices:
        rule = Fuzzy(math.inf, mode=mode, price=price, cost=cost)
        total = 0.0
        for seed in range(12):
            verified = verified_tree(seed, SAMPLINGS["warm"])
            zeros = torch.zeros(1, dtype=torch.int64)
            r, p = path_distributions(verified, accept(rule, verified, RowRandom(seed, 1), zeros), mode)
            kl, tv = distances(r[:, 0], p[:, 0])
            total += float(tv)
            plain = Plain(verified, rule)
            child = policy_of(rule.chances(verified)[0], plain.parents).get(0)  # type: ignore[index]
            if child is None:
                assert float(tv) == pytest.approx(0, abs=1e-6)
                continue
            inside = sum(plain.p(plain.drawn, one) for one in plain.children(0))
            weight = 1 - inside if mode == "hybrid" else 1.0
            charged = {"tokens": tv, "kl": kl, "divergence": plain.divergences[0] * tv}[cost]
            assert weight * plain.cost(child) == pytest.approx(float(charged), abs=1e-5)
        moved.append(total)
    assert moved == sorted(moved, reverse=True) and moved[0] > moved[-1]


def test_guards_narrow_the_plan() -> None:
    verified = verified_tree(3, SAMPLINGS["warm"], batch=64)
    free = Fuzzy(math.inf, price=0.3)
    whole = free.chances(verified)
    assert whole is not None
    whole[:, 0] = 0  # nobody follows a root
    assert whole.sum() > 64
    token = int(verified.tree.tokens[whole > 0].mode().values)
    ended = Verified(verified.tree, verified.logits, verified.sampling, torch.tensor([token]))
    chances = free.chances(ended)
    assert chances is not None and chances[:, 1:][ended.tree.tokens[:, 1:] == token].sum() == 0
    likely = replace(free, min_p=0.6).chances(verified)
    assert likely is not None and 0 < likely[:, 1:].sum() < whole.sum()
    zeros = torch.zeros(64, dtype=torch.int64)
    one = accept(replace(free, max_consecutive=1), verified, RowRandom(1, 64), zeros)
    assert not bool((one.fuzzy[:, 1:] & one.fuzzy[:, :-1]).any()) and bool(one.fuzzy.any())
    assert not bool(accept(replace(free, exact_prefix=9), verified, RowRandom(1, 64), zeros).fuzzy.any())


def test_wrong_values_are_named() -> None:
    for fields, named in (
        ({"price": -1.0}, "price is -1.0"),
        ({"price": math.nan}, "price is nan"),
        ({"price": 1.0, "cost": "time"}, "cost is 'time': it must be one of tokens, kl, divergence"),
        ({"mode": "swap"}, "mode is 'swap' with a price of 0 of tokens: it swaps children by a plan"),
        ({"mode": "swap", "price": 1.0, "cost": "kl"}, "mode is 'swap' with a price of 1 of kl"),
        ({"price": 1.0, "child": "target"}, "child is 'target' with a price of 1: the plan chooses"),
    ):
        with pytest.raises(ValueError, match=named):
            Fuzzy(**fields)
