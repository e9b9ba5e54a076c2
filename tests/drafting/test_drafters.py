"""Drafters without a head: the texts are the target's, whatever drafter proposes the trees."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from support.drafters import StandInSpec
from support.tiny_models import greedy_alone, prompts_of, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import Verified
from eagle_fsd.acceptance.divergence import SPARSE_DIVERGENCES
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import Candidates, DraftTree, build_tree
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.drafter import Drafter, Needs, Seen
from eagle_fsd.target.model import TargetModel

TREE = TreeConfig(5, 4, 1)


class CopyDrafter:
    """Proposes the tokens that followed the root's last occurrence in the text: chains, with a one-hot q.

    It needs only the committed tokens, from the first one on, and lists the tokens that it copied.
    """

    needs = Needs()

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.texts: list[list[int]] = []

    def begin(self, seen: Seen) -> None:
        assert seen.features is None
        self.texts = [row[:count] for row, count in zip(seen.tokens.tolist(), seen.counts, strict=True)]

    def extend(self, seen: Seen) -> None:
        for text, row, count in zip(self.texts, seen.tokens.tolist(), seen.counts, strict=True):
            text += row[:count]

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [list(self.texts[row]) for row in rows]

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        assert isinstance(other, CopyDrafter)
        for row, text in zip(rows, other.texts, strict=True):
            self.texts[row] = text

    def reset(self, longest: int, tree: TreeConfig) -> None:
        self.texts = []

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        assert [text[-1] for text in self.texts] == roots.tolist()
        chains = [self.followers(text, config.reach) for text in self.texts]
        return copied_tree(roots, chains, config.reach)

    @staticmethod
    def followers(text: Sequence[int], count: int) -> list[int]:
        found = next((at for at in range(len(text) - 2, -1, -1) if text[at] == text[-1]), None)
        copied = list(text[-1:] if found is None else text[found + 1 :])[:count]
        return copied + [copied[-1]] * (count - len(copied))


def copied_tree(roots: Tensor, chains: Sequence[Sequence[int]], depth: int) -> DraftTree:
    """Return a tree of one chain per row with a one-hot q; `drafted` lists the copied tokens of all rows."""
    drafted = torch.tensor(sorted({token for chain in chains for token in chain}))
    columns = torch.searchsorted(drafted, torch.tensor(chains))  # [B, depth]
    log_q = torch.full((len(chains), depth, len(drafted)), -math.inf).scatter(2, columns[:, :, None], 0.0)
    levels = torch.arange(depth)
    pool = Candidates(columns, (levels - 1).expand_as(columns), torch.zeros(columns.shape), levels + 1)
    return build_tree(roots, pool, depth + 1, depth, log_q.unbind(1), pool.parents, drafted)


def engine(prompts: Sequence[Sequence[int]] = ()) -> EagleFSD:
    target = TargetModel(tiny_model())
    return EagleFSD(target, StandInSpec(lambda batch, *_: CopyDrafter(batch), target.vocab_size - 1))


@pytest.mark.parametrize("lengths", [[6], [1], [5, 9, 1]])
def test_a_drafter_that_copies_gives_the_targets_text(lengths: list[int]) -> None:
    model = engine()
    texts = [
        model.generate(prompts_of([length], seed=length), max_new_tokens=20, tree=TREE).new_tokens[0]
        for length in lengths
    ]
    prompts = [prompts_of([length], seed=length)[0] for length in lengths]
    assert texts == greedy_alone(tiny_model(), prompts, 20)


def test_it_joins_others_as_a_head_does() -> None:
    model = engine()
    scheduler = Scheduler(model.target, model.drafter, TREE, 2)
    for number in range(5):
        prompt = prompts_of([3 + number], seed=number)[0]
        scheduler.admit(Text(number, 12, Terms(()), prompt=prompt))
    found: dict[int, list[int]] = {}
    for one, tokens in scheduler.run():
        found.setdefault(one.number, []).extend(tokens)
    prompts = [prompts_of([3 + number], seed=number)[0] for number in range(5)]
    assert [found[number] for number in range(5)] == greedy_alone(tiny_model(), prompts, 12)


@pytest.mark.parametrize("name", ["js", "reverse_kl", "tv"])
def test_a_threshold_on_a_copied_token_is_a_floor_on_its_probability(name: str) -> None:
    """With q one-hot on x: KL(q || p) = -log p(x), TV = 1 - p(x), and JS is a function of p(x) alone."""
    assert name in SPARSE_DIVERGENCES
    vocab, depth = 12, 3
    logits = torch.randn(1, depth + 1, vocab, generator=torch.Generator().manual_seed(0))
    tree = copied_tree(torch.tensor([0]), [[4, 7, 4]], depth)
    p = logits.softmax(-1)[0, torch.arange(depth), torch.tensor([4, 7, 4])].double()
    m = (1 + p) / 2
    js = 0.5 * -m.log() + 0.5 * (p * (p / m).log() + (1 - p) * math.log(2))
    expected = {"reverse_kl": -p.log(), "tv": 1 - p, "js": js}[name]
    verified = Verified(tree, logits, SamplingConfig(), torch.tensor([]))
    for place, value in enumerate(expected.tolist()):
        for threshold, follows in ((value + 1e-4, True), (value - 1e-4, False)):
            rule = Fuzzy(threshold, name, child="likeliest")
            chances = rule.chances(verified)
            assert bool(chances[0, place + 1] > 0) is follows
