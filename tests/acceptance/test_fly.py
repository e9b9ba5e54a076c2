"""FLy's deferred window: on a greedy chain as vLLM has it, elsewhere as often as its draws would make it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from support.stubs import generator, random_tree
from torch import Tensor

from eagle_fsd.acceptance.accept import Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.acceptance.other_rules import FLy
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.randomness.streams import RowRandom

VOCAB, ROWS, NODES = 11, 64, 9
EOS = torch.tensor([0])
SAMPLINGS = [SamplingConfig(1.0), SamplingConfig(0.8, 5, 0.95)]


def chains(seed: int) -> Verified:
    """Greedy chains whose tokens are often the target's best, and seldom more than one in a row are not."""
    tree = random_tree(ROWS, NODES, depth=NODES - 1, width=1, vocab_size=VOCAB, seed=seed)
    logits = torch.randn(ROWS, NODES, VOCAB, generator=generator(seed))
    agreed = torch.rand(ROWS, NODES - 1, generator=generator(seed + 1)) < 0.75
    best = torch.where(agreed, logits[:, :-1].amax(-1) + 1, -torch.inf)
    logits[:, :-1].scatter_reduce_(2, tree.tokens[:, 1:, None], best[..., None], "amax")
    return Verified(tree, logits, SamplingConfig(), EOS)


def entropy_of_three(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in sorted(p)[-3:] if x > 0)


def as_vllm(drafted: list[int], rows: Tensor, entropy: float, window: int) -> list[int]:
    """The tokens that vLLM emits for a chain, in its two passes: defer rejections, then accept."""
    wanted = rows.argmax(-1).tolist()  # the target's, at the root and at each drafted token
    native = list(wanted)
    for place, token in enumerate(drafted):
        ahead = range(place + 1, place + 1 + window)
        if (
            token != native[place]
            and token not in EOS.tolist()  # our guard
            and place + window < len(drafted)
            and entropy_of_three(rows[place].softmax(-1).tolist()) >= entropy
            and all(drafted[i] == native[i] for i in ahead)
        ):
            wanted[place] = token
    accepted = next((i for i, token in enumerate(drafted) if token != wanted[i]), len(drafted))
    return [*drafted[:accepted], wanted[accepted]]


@dataclass
class PlainTree:
    """One row's tree, and p [N][V]."""

    tokens: list[int]
    parents: list[int]
    p: list[list[float]]

    def family(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def made(self, node: int, levels: int) -> float:
        """How likely the draws accept so many tokens below a node."""
        below = self.family(node) if levels else []
        made = sum(self.p[node][self.tokens[child]] * self.made(child, levels - 1) for child in below)
        return made if levels else 1.0

    def may_follow(self, node: int, child: int, window: int) -> bool:
        token = self.tokens[child]
        return token not in EOS.tolist() and self.p[node][token] > 0 and self.made(child, window) > 0


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("entropy", [0.0, 0.9])
def test_a_greedy_chain_is_accepted_as_in_vllm(window: int, entropy: float) -> None:
    fuzzy = 0
    for seed in range(4):
        verified = chains(seed)
        verdict = accept(
            FLy(entropy, window), verified, RowRandom(0, ROWS), torch.zeros(ROWS, dtype=torch.int64)
        )
        fuzzy += int(verdict.fuzzy.sum())
        for row in range(ROWS):
            made = verdict.tokens[row, : int(verdict.length[row])].tolist()
            drafted = verified.tree.tokens[row, 1:].tolist()
            assert made == as_vllm(drafted, verified.logits[row], entropy, window)
    assert fuzzy > 10


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(1.0), SamplingConfig(0.8, 5, 0.95)], ids=["warm", "narrow"]
)
@pytest.mark.parametrize(("entropy", "window"), [(0.0, 1), (0.5, 2), (0.8, 1)])
def test_a_child_is_followed_as_often_as_draws_make_the_window(
    entropy: float, window: int, sampling: SamplingConfig
) -> None:
    followed = 0
    for seed in range(12):
        tree = random_tree(batch=6, nodes=11, depth=4, width=4, vocab_size=VOCAB, seed=seed)
        verified = Verified(tree, torch.randn(6, 11, VOCAB, generator=generator(seed)), sampling, EOS)
        chances, p = FLy(entropy, window).chances(verified), verified.probs
        assert chances is not None and p is not None
        for row in range(6):
            one = PlainTree(tree.tokens[row].tolist(), tree.parents[row].tolist(), p[row].tolist())
            log_q = tree.node_log_q()[row].tolist()
            for node in range(11):
                able = [child for child in one.family(node) if one.may_follow(node, child, window)]
                wanted = dict.fromkeys(one.family(node), 0.0)
                if able and entropy_of_three(one.p[node]) >= entropy:
                    best = max(able, key=log_q.__getitem__)
                    wanted[best] = one.made(best, window)
                    followed += 1
                for child, chance in wanted.items():
                    assert float(chances[row, child]) == pytest.approx(chance, abs=1e-5)
    assert followed > 5


def test_a_window_that_fits_in_no_tree_changes_nothing() -> None:
    verified = chains(0)
    assert FLy(0.0, NODES - 1).chances(verified) is None
    assert FLy(0.0, NODES - 2).chances(verified) is not None
