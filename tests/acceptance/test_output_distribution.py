"""The closed form against counted draws, and against a plain sum over what can happen at a node."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from support.stubs import generator, random_tree
from support.whole_distribution import distances, path_distributions
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verdict, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, RelaxedTopK, SGLang, Typical
from eagle_fsd.acceptance.output_distribution import output_distribution
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.tree import DraftTree

ROWS, VOCAB = 20_000, 12
NONE = torch.empty(0, dtype=torch.int64)
WARM, NARROW = SamplingConfig(1.0), SamplingConfig(0.8, 6, 0.95)
FUZZY = [
    Fuzzy(10.0, "reverse_kl", mode=mode, child=child)
    for mode in ("hybrid", "paper")
    for child in ("draft", "likeliest", "target")
]
RULES = [
    Lossless(),
    *FUZZY,
    Fuzzy(math.inf, price=0.5),
    Fuzzy(0.4, price=0.2, cost="kl"),
    Fuzzy(10.0, mode="paper", price=1.0, cost="divergence"),
    Typical(0.05, 0.5),
    RelaxedTopK(3, 0.3),
    RelaxedTopK(4, 1.0, mode="paper"),
    SGLang(0.3, 0.7),
    Cactus(0.2),
    Ensemble(0.6),
    FLy(0.0, 1),
]


class OneStream:
    """All rows' numbers from one generator: ROWS generators would be slow."""

    def __init__(self, seed: int) -> None:
        self.generator = generator(seed)

    def uniform(self, n: int) -> Tensor:
        return torch.rand(ROWS, n, generator=self.generator)


def copies(seed: int) -> tuple[DraftTree, Tensor]:
    """ROWS copies of one small tree of three levels and the target's logits."""
    tree = random_tree(batch=1, nodes=9, depth=2, width=4, vocab_size=VOCAB, seed=seed)
    logits = torch.randn(1, 9, VOCAB, generator=generator(seed))
    logits[0, tree.owners[0].clamp(min=0)] = tree.log_q[0] + 0.5 * torch.randn(
        tree.log_q[0].shape, generator=generator(seed)
    )
    many = {
        name: getattr(tree, name).expand(ROWS, *getattr(tree, name).shape[1:])
        for name in ("tokens", "parents", "depths", "log_q", "owners")
    }
    return DraftTree(**many, depth=tree.depth), logits.expand(ROWS, -1, -1).float()


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampling", [WARM, NARROW], ids=["warm", "narrow"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_drawn_from_the_law(rule: AcceptanceRule, sampling: SamplingConfig) -> None:
    """The first token, and the second given the commonest first one that was drafted: chi-square, at 1e-6."""
    tree, logits = copies(4)
    verified = Verified(tree, logits, sampling, NONE)
    verdict = accept(rule, verified, OneStream(1), torch.zeros(ROWS, dtype=torch.int64))  # type: ignore[arg-type]
    law, _ = path_distributions(verified, verdict, rule.mode)
    assert_counts(verdict.tokens[:, 0], law[0, 0])
    deep = verdict.length > 1
    node = int(verdict.path[deep, 1].mode().values)
    there = deep & (verdict.path[:, 1] == node)
    assert int(there.sum()) > 500
    laws = law[there, 1]
    assert torch.equal(laws, laws[:1].expand_as(laws))
    assert_counts(verdict.tokens[there, 1], laws[0])


def assert_counts(tokens: Tensor, law: Tensor) -> None:
    counts, expected = torch.bincount(tokens, minlength=VOCAB).double(), law.double() * len(tokens)
    assert counts[law <= 1e-9].sum() == 0
    few = expected < 5
    counts, expected = (torch.cat((x[~few], x[few].sum()[None])) for x in (counts, expected))
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) > 1:
        assert chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue > 1e-6


def plain_law(rule: AcceptanceRule, p: list[float], chances: dict[int, float]) -> list[float]:
    """A sum over the target's draws and the rule's answers. chances: of each child's token."""
    law = [0.0] * len(p)
    answers = {**chances, None: 1 - sum(chances.values())}
    for drawn, much in enumerate(p):
        for answer, chance in answers.items():
            if rule.mode == "paper":
                token = drawn if answer is None else answer
            else:
                token = drawn if drawn in chances or answer is None else answer
            law[token] += much * chance
    return law


@pytest.mark.parametrize(
    ("rule", "guard"),
    [
        *((rule, "asked") for rule in RULES),
        *((rule, guard) for rule in FUZZY for guard in ("exact_prefix", "max_consecutive")),
    ],
    ids=str,
)
def test_the_law_is_the_sum_over_draws_and_answers(rule: AcceptanceRule, guard: str) -> None:
    """At every node of every path; where a guard keeps the rule from being asked, the distribution is p."""
    if guard != "asked":
        rule = replace(rule, **{guard: 1})
    tree = random_tree(batch=40, nodes=11, depth=4, width=4, vocab_size=VOCAB, seed=2)
    logits = torch.randn(40, 11, VOCAB, generator=generator(9))
    verified = Verified(tree, logits, NARROW, NONE)
    verdict = accept(rule, verified, RowRandom(3, 40), torch.zeros(40, dtype=torch.int64))
    law, p = path_distributions(verified, verdict, rule.mode)
    for row, length in enumerate(verdict.length.tolist()):
        in_a_row = 0
        for level in range(length):
            node = int(verdict.path[row, level])
            in_a_row = in_a_row + 1 if verdict.fuzzy[row, level] else 0
            asked = not (guard == "exact_prefix" and level < 1) and not (
                guard == "max_consecutive" and in_a_row
            )
            chances = {
                int(tree.tokens[row, child]): float(verdict.chances[row, child])
                if asked and verdict.chances is not None
                else 0.0
                for child in range(11)
                if tree.parents[row, child] == node
            }
            expected = plain_law(rule, p[row, level].tolist(), chances)
            torch.testing.assert_close(law[row, level], torch.tensor(expected), atol=1e-5, rtol=0)
            torch.testing.assert_close(p[row, level], verified.probs[row, node])


def test_greedy_laws_are_of_the_argmax() -> None:
    tree = random_tree(batch=6, nodes=11, depth=4, width=4, vocab_size=VOCAB, seed=2)
    verified = Verified(tree, torch.randn(6, 11, VOCAB, generator=generator(9)), SamplingConfig(), NONE)
    verdict = accept(Fuzzy(10.0, mode="paper"), verified, RowRandom(0, 6), torch.zeros(6, dtype=torch.int64))
    law, p = path_distributions(verified, verdict, "paper")
    assert set(p.unique().tolist()) == {0.0, 1.0}
    kl, tv = distances(law, p)
    for row, length in enumerate(verdict.length.tolist()):
        for level in range(length):
            wrong = bool(
                verdict.tokens[row, level] != verified.logits[row, verdict.path[row, level]].argmax()
            )
            assert float(tv[row, level]) == wrong and (kl[row, level] == torch.inf) == wrong


def test_distances_against_plain_sums() -> None:
    draw = generator(0)
    p, law = (torch.randn(5, 7, VOCAB, generator=draw).softmax(-1) for _ in range(2))
    law[0, 0, :4] = 0.0
    law[0, 0] /= law[0, 0].sum()
    p[1, 1, 3] = 0.0
    kl, tv = distances(law, p)
    for i in range(5):
        for j in range(7):
            pairs = list(zip(law[i, j].double().tolist(), p[i, j].double().tolist(), strict=True))
            assert float(tv[i, j]) == pytest.approx(sum(abs(a - b) for a, b in pairs) / 2, abs=1e-5)
            if any(a > 0 and b == 0 for a, b in pairs):
                assert kl[i, j] == torch.inf
            else:
                plain = sum(a * (torch.tensor(a / b).log().item()) for a, b in pairs if a > 0)
                assert float(kl[i, j]) == pytest.approx(plain, abs=1e-5)
    assert (kl[1, 1] == torch.inf) and torch.isfinite(kl).sum() == kl.numel() - 1
    zero, none = distances(p[2], p[2])
    assert (zero == 0).all() and (none == 0).all()


def test_a_lossless_verdict_has_no_distance() -> None:
    tree, logits = copies(1)
    verified = Verified(tree, logits, WARM, NONE)
    verdict: Verdict = accept(Lossless(), verified, OneStream(0), torch.zeros(ROWS, dtype=torch.int64))  # type: ignore[arg-type]
    law, p = path_distributions(verified, verdict, "hybrid")
    assert torch.equal(law, p)


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampling", [WARM, NARROW, SamplingConfig()], ids=["warm", "narrow", "greedy"])
@pytest.mark.parametrize("rule", [*RULES, Fuzzy(math.inf, mode="swap", price=0.4)], ids=str)
def test_few_entries_say_what_the_whole_vocabulary_does(
    rule: AcceptanceRule, sampling: SamplingConfig
) -> None:
    """The nodes' own entries and distances, against r and p over all tokens, along every path."""
    tree = random_tree(batch=40, nodes=11, depth=4, width=4, vocab_size=VOCAB, seed=2)
    verified = Verified(tree, torch.randn(40, 11, VOCAB, generator=generator(9)), sampling, NONE)
    verdict = accept(rule, verified, RowRandom(3, 40), torch.zeros(40, dtype=torch.int64))
    whole, p = path_distributions(verified, verdict, rule.mode)
    kl, tv = distances(whole, p)
    found = output_distribution(verified, verdict.chances, verdict.weak, rule.mode)
    for row, length in enumerate(verdict.length.tolist()):
        for level, node in enumerate(verdict.path[row, :length].tolist()):
            assert float(found.tv[row, node]) == pytest.approx(float(tv[row, level]), abs=1e-5)
            assert float(found.kl[row, node]) == pytest.approx(float(kl[row, level]), abs=1e-5)
            for child in (tree.parents[row] == node).nonzero().flatten().tolist():
                expected = float(whole[row, level, tree.tokens[row, child]])
                assert float(found.token[row, child]) == pytest.approx(expected, abs=1e-5)
