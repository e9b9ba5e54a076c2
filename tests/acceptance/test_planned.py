"""Planned acceptance against a plain twin that tries every policy of a small tree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.stubs import generator, random_tree
from torch import Tensor

from eagle_fsd import Fuzzy, SamplingConfig
from eagle_fsd.acceptance.accept import Verified, accept
from eagle_fsd.acceptance.output_distribution import distances, path_distributions
from eagle_fsd.acceptance.planned import COSTS
from eagle_fsd.core.sampling import RowRandom

VOCAB, NODES = 7, 8
NONE = torch.empty(0, dtype=torch.int64)
SAMPLINGS = {"warm": SamplingConfig(1.0), "narrow": SamplingConfig(0.7, 5, 0.9), "greedy": SamplingConfig()}
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
every_cost = pytest.mark.parametrize("cost", COSTS)
both_modes = pytest.mark.parametrize("mode", ["hybrid", "paper"])
Policy = dict[int, int]  # the child that is followed at each node with children; -1: none


def verified_tree(seed: int, sampling: SamplingConfig, batch: int = 1) -> Verified:
    tree = random_tree(batch=batch, nodes=NODES, depth=3, width=3, vocab_size=VOCAB, seed=seed)
    logits = 1.5 * torch.randn(batch, NODES, VOCAB, generator=generator(seed))
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


def policy_of(chances: Tensor, parents: list[int]) -> Policy:
    return {parents[node]: node for node, chance in enumerate(chances.tolist()) if node and chance == 1}


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


@every_sampling
def test_an_infinite_price_and_a_threshold_of_zero_are_lossless(sampling: SamplingConfig) -> None:
    verified = verified_tree(1, sampling, batch=4)
    assert Fuzzy(math.inf, price=math.inf).chances(verified) is None
    assert Fuzzy(0.0, price=1.0).chances(verified) is None
    dear = Fuzzy(math.inf, price=1e6).chances(verified)
    assert dear is not None and dear[:, 1:].sum() == 0


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
        ({"price": 1.0, "child": "target"}, "child is 'target' with a price of 1: the plan chooses"),
    ):
        with pytest.raises(ValueError, match=named):
            Fuzzy(**fields)
