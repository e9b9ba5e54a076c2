"""Every rule of others against the distribution that its source states, in plain Python; all by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.stubs import generator, random_tree
from support.whole_distribution import path_distributions
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.acceptance.divergence import DIVERGENCES
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, PublishedFSD, RelaxedTopK, SGLang, Typical
from eagle_fsd.acceptance.rule_names import RULES, build_rule, describe, parse_rule, rule_fields
from eagle_fsd.cli.flags.types import RULE_NAMES
from eagle_fsd.core.config import DIVERGENCE_NAMES, SamplingConfig
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.tree import DraftTree

VOCAB = 13
NONE = torch.empty(0, dtype=torch.int64)
GREEDY = SamplingConfig()
SAMPLINGS = [SamplingConfig(1.0), SamplingConfig(0.8, 5, 0.95)]


def case(seed: int, sampling: SamplingConfig) -> Verified:
    """A batch of random trees with target logits near the draft's, so that children are often likely."""
    tree = random_tree(batch=6, nodes=11, depth=4, width=4, vocab_size=VOCAB, seed=seed)
    logits = torch.randn(6, 11, VOCAB, generator=generator(seed)) * 1.5
    rows = torch.arange(6)[:, None]
    logits[rows, tree.owners.clamp(min=0)] = tree.log_q + torch.randn(
        tree.log_q.shape, generator=generator(seed)
    )
    return Verified(tree, logits.float(), sampling, NONE)


def root_laws(rule: AcceptanceRule, verified: Verified) -> tuple[Tensor, Tensor]:
    """The rule's distribution and p at the roots: [B, V] both."""
    rows = len(verified.logits)
    verdict = accept(rule, verified, RowRandom(0, rows), torch.zeros(rows, dtype=torch.int64))
    law, p = path_distributions(verified, verdict, rule.mode)
    return law[:, 0].double(), p[:, 0].double()


def children_of_root(tree: DraftTree, row: int) -> list[int]:
    """The tokens of the root's children, in the tree's order."""
    return [int(t) for t, parent in zip(tree.tokens[row], tree.parents[row], strict=True) if parent == 0]


def root_log_q(tree: DraftTree, row: int) -> Tensor:
    """log q [V] at the root."""
    return tree.log_q[row, tree.owners[row].tolist().index(0)]


def sglang_law(p: list[float], siblings: list[int], single: float, acc: float) -> list[float]:
    """SGLang's sampler at one node: a coin u, siblings in order, then p without the siblings."""
    edges = [0.0]  # a coin in [edges[i], edges[i + 1]) takes sibling i
    mass = 0.0
    for token in siblings:
        mass += p[token]
        edges.append(1.0 if p[token] >= single else max(edges[-1], min(1.0, mass / acc)))
    law = [0.0] * len(p)
    for index, token in enumerate(siblings):
        law[token] = edges[index + 1] - edges[index]
    rest = {token: x for token, x in enumerate(p) if token not in siblings}
    for token, x in rest.items():
        if edges[-1] < 1:
            law[token] = (1 - edges[-1]) * x / sum(rest.values())
    return law


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["warm", "narrow"])
@pytest.mark.parametrize(
    ("single", "acc"), [(1.0, 1.0), (0.2, 1.0), (1.0, 0.5), (0.3, 0.7), (0.0, 1.0), (1.0, 1e-9)]
)
def test_sglang_has_its_samplers_law(single: float, acc: float, sampling: SamplingConfig) -> None:
    for seed in range(8):
        verified = case(seed, sampling)
        law, p = root_laws(SGLang(single, acc), verified)
        for row in range(6):
            # p > 0 is every rule's condition here; SGLang's single = 0 would also take what cannot be drawn.
            siblings = [t for t in children_of_root(verified.tree, row) if p[row, t] > 0]
            expected = sglang_law(p[row].tolist(), siblings, single, acc)
            torch.testing.assert_close(law[row], torch.tensor(expected).double(), atol=2e-6, rtol=0)


def test_sglang_at_one_is_lossless_and_greedy_ignores_it() -> None:
    law, p = root_laws(SGLang(1.0, 1.0), case(1, SAMPLINGS[0]))
    assert torch.equal(law, p)
    assert SGLang(0.0, 0.5).chances(case(1, GREEDY)) is None


@pytest.mark.parametrize(
    ("rule", "near"),
    [
        (Fuzzy(0.0), Fuzzy(1.0)),
        (Fuzzy(1.0, price=math.inf), Fuzzy(1.0, price=1e-9)),
        (PublishedFSD(0.0), PublishedFSD(1.0)),
        (SGLang(1.0, 1.0), SGLang(1.0, 0.9)),
        (Cactus(0.0), Cactus(0.1)),
        (Ensemble(1.0), Ensemble(0.9)),
        (FLy(1.2, 1), FLy(1.0, 1)),
    ],
)
def test_an_exact_rule_says_so_and_follows_no_child(rule: Any, near: Any) -> None:
    """Not even by rounding."""
    verified = case(1, SAMPLINGS[0])
    assert rule.exact and rule.chances(verified) is None
    chances = near.chances(verified)
    assert not near.exact and isinstance(chances, Tensor) and (chances > 0).any()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["warm", "narrow"])
@pytest.mark.parametrize("delta", [0.0, 0.01, 0.3, 5.0, math.inf])
def test_cactus_gives_the_drafted_token_its_bonus(delta: float, sampling: SamplingConfig) -> None:
    """p'(x) = min(1, p(x) + sqrt(2 delta p(x) (1 - p(x)))) at the likeliest drafted x, p scaled elsewhere."""
    for seed in range(8):
        verified = case(seed, sampling)
        law, p = root_laws(Cactus(delta), verified)
        for row in range(6):
            q = root_log_q(verified.tree, row)
            allowed = [t for t in children_of_root(verified.tree, row) if p[row, t] > 0]
            expected = p[row].clone()
            if allowed:
                x = max(allowed, key=lambda t: float(q[t]))
                much = float(p[row, x])
                more = min(1.0, much + math.sqrt(2 * delta * much * (1 - much)))
                expected *= (1 - more) / (1 - much) if much < 1 else 1.0
                expected[x] = more
            torch.testing.assert_close(law[row], expected, atol=5e-6, rtol=0)


def test_the_law_of_cactus_stays_near_its_delta() -> None:
    """KL(p' || p) is delta to second order: a small one within a third, and seldom far below."""
    verified = case(3, SAMPLINGS[0])
    for delta in (1e-4, 1e-3):
        law, p = root_laws(Cactus(delta), verified)
        kl = torch.where(law > 0, law * (law / p).log(), 0.0).sum(-1)
        assert (kl <= 1.34 * delta).all() and (kl > 0.6 * delta).any()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["warm", "narrow"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.9, 1.0])
def test_ensemble_mixes_p_and_q(weight: float, sampling: SamplingConfig) -> None:
    for seed in range(8):
        verified = case(seed, sampling)
        law, p = root_laws(Ensemble(weight), verified)
        for row in range(6):
            q = (root_log_q(verified.tree, row).double() / sampling.temperature).softmax(-1)
            mine = torch.zeros(VOCAB).double()
            for token in children_of_root(verified.tree, row):
                mine[token] = q[token] if p[row, token] > 0 else 0.0
            expected = (1 - weight) * (mine + (1 - mine.sum()) * p[row]) + weight * p[row]
            torch.testing.assert_close(law[row], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("rule", [Ensemble(0.0), Typical(mode="paper"), RelaxedTopK(1, mode="paper")])
def test_the_coldest_sampling_is_the_greedy_choice(rule: AcceptanceRule) -> None:
    """Logits over such a temperature are beyond float32."""
    verified = case(0, SamplingConfig(1e-40))
    best = verified.at_parent(verified.best[1]) == verified.tree.tokens
    chances = rule.chances(verified)
    assert isinstance(chances, Tensor) and chances.isfinite().all()
    drafted = (verified.tree.parents >= 0) & (chances > 0)
    assert drafted.any() and (best | ~drafted).all()


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.6])
def test_greedy_ensemble_takes_the_mixtures_best(weight: float) -> None:
    taken = 0
    for seed in range(20):
        verified = case(seed, GREEDY)
        verdict = accept(Ensemble(weight), verified, RowRandom(0, 6), torch.zeros(6, dtype=torch.int64))
        for row in range(6):
            p, q = verified.logits[row, 0].softmax(-1), root_log_q(verified.tree, row).softmax(-1)
            best = int((weight * p + (1 - weight) * q).argmax())
            own = int(verified.logits[row, 0].argmax())
            inside = best in children_of_root(verified.tree, row)
            taken += inside and best != own
            assert int(verdict.tokens[row, 0]) == (best if inside else own)
    assert taken > 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS], ids=["greedy", "warm", "narrow"])
def test_chances_of_siblings_are_chances(name: str, sampling: SamplingConfig) -> None:
    """None negative, siblings at most 1 together, none for what p rules out or for an end token.

    The published algorithm alone has no such guards.
    """
    for seed in range(10):
        verified = case(seed, sampling)
        eos = verified.tree.tokens[:, 1].unique()
        verified = replace(verified, eos=eos)
        chances = build_rule(name).chances(verified)
        if chances is None:
            continue
        assert (chances >= 0).all()
        together = (verified.tree.children * chances[:, None, :]).sum(-1)
        assert (together <= 1 + 1e-5).all()
        mine = torch.isin(verified.tree.tokens, eos)
        if verified.probs is not None:
            mine |= verified.at_token(verified.probs) == 0
        mine[:, 0] = False
        assert (chances[mine] == 0).all() or name == "fsd_paper"


LIMITS = [
    (Typical(epsilon=1.0, delta=math.inf), "lossless"),
    (RelaxedTopK(1, 0.0), "greedy"),
    (RelaxedTopK(VOCAB, 1.0), "likeliest"),
]


@pytest.mark.parametrize(("rule", "what"), LIMITS, ids=str)
def test_rules_at_their_ends(rule: AcceptanceRule, what: str) -> None:
    """Nothing is above p = 1; one candidate is the target's best token; all candidates are all children."""
    verified = case(5, SAMPLINGS[0])
    chances = rule.chances(verified)
    assert chances is not None
    p = verified.at_token(verified.probs)
    followed = (chances > 0) & (verified.tree.parents >= 0)
    if what == "lossless":
        assert not followed.any()
    elif what == "greedy":
        assert torch.equal(followed[:, 1:], (p == verified.at_parent(verified.probs.amax(-1)))[:, 1:])
    else:
        families = (verified.tree.children * p[:, None, :]).amax(-1)  # [B, N]
        assert torch.equal(followed[:, 1:], (p == verified.at_parent(families))[:, 1:])
    assert followed.any() or what == "lossless"


@pytest.mark.parametrize(
    "rule",
    [
        Lossless(),
        Lossless(share_noise=False),
        Fuzzy(0.2, "reverse_kl", mode="paper", child="target", min_p=0.1, max_consecutive=2),
        Fuzzy(math.inf),
        Fuzzy(math.inf, price=1.5),
        Fuzzy(0.5, "tv", mode="swap", price=2.0, cost="divergence", exact_eos=False),
        PublishedFSD(0.2, "tv"),
        Typical(0.2, 0.3),
        RelaxedTopK(7, 0.4),
        SGLang(0.4, 0.9),
        Cactus(0.3),
        Ensemble(0.25),
        FLy(0.2, 2),
    ],
    ids=str,
)
def test_a_rule_is_what_was_written_down_of_it(rule: AcceptanceRule) -> None:
    written = json.loads(json.dumps(describe(rule), allow_nan=False))
    fields = {key: math.inf if value == "inf" else value for key, value in written.items()}
    assert build_rule(fields.pop("name"), **fields) == rule
    short = json.loads(json.dumps(rule_fields(rule), allow_nan=False))
    assert list(short)[:4] == ["rule", "threshold", "divergence", "mode"]
    if isinstance(rule, Lossless):  # whose threshold is no field of its own
        assert short.pop("threshold") == 0
    if isinstance(rule, Fuzzy) and rule.price:
        assert (short["price"], short["cost"]) == (rule.price, rule.cost)
    said = {key: math.inf if value == "inf" else value for key, value in short.items() if value is not None}
    assert build_rule(said.pop("rule"), **said) == rule and len(short) < len(describe(Fuzzy()))


@dataclass(frozen=True)
class Own:
    """A rule of a user's own, whose first field has no default."""

    share: float
    sizes: tuple[int, ...] = ()
    judge: Callable[[float], float] | None = None
    mode: str = "hybrid"
    max_consecutive: int | None = None
    exact_prefix: int = 0

    def chances(self, verified: Verified) -> Tensor | None:
        return torch.full((3,), self.share)


class Bare:
    """A rule that is no dataclass, with one attribute of its own."""

    mode, max_consecutive, exact_prefix = "paper", None, 0

    def __init__(self) -> None:
        self.share = math.inf

    def chances(self, verified: Verified) -> Tensor | None:
        return None


def test_a_users_own_rule_is_reported_by_its_class_and_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Own(np.float32(0.5), sizes=(1, 2), judge=abs)
    own = {"share": 0.5, "sizes": [1, 2], "judge": "<built-in function abs>"}
    usual = {"mode": "hybrid", "max_consecutive": None, "exact_prefix": 0}
    assert json.loads(json.dumps(describe(rule))) == {"name": "Own", **own, **usual}
    shown = {"threshold": None, "divergence": None, "mode": "hybrid"}
    assert json.loads(json.dumps(rule_fields(rule))) == {"rule": "Own", **shown, **own}
    assert describe(Bare()) == {"name": "Bare", "share": "inf"}
    assert rule_fields(Bare()) == {"rule": "Bare", **shown, "mode": None, "share": "inf"}
    monkeypatch.setitem(RULES, "own", Own)
    assert describe(rule)["name"] == "own"


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_reported_as_plain_ones(number: type[Any]) -> None:
    rule = Fuzzy(number(1), max_consecutive=np.int64(2))
    assert json.dumps(describe(rule)) == json.dumps(describe(rule) | {"threshold": number(1).item()})
    assert json.loads(json.dumps(rule_fields(rule)))["max_consecutive"] == 2


@pytest.mark.parametrize("value", ["no", 1, None], ids=repr)
@pytest.mark.parametrize("name", [name for name in RULES if name != "fsd_paper"])
def test_a_switch_of_a_rule_is_true_or_false(name: str, value: object) -> None:
    switch = "share_noise" if name == "lossless" else "exact_eos"
    with pytest.raises(ValueError, match=f"{switch} is {value!r}: it must be True or False; choose one"):
        build_rule(name, **{switch: value})


def test_chances_of_a_wrong_shape_are_refused_in_one_line() -> None:
    verified, emitted = case(5, GREEDY), torch.zeros(6, dtype=torch.int64)
    line = r"the chances of Own are of shape \[3\]: they must be a tensor \[6, 11\], .*; return None to"
    with pytest.raises(ValueError, match=line):
        accept(Own(0.5), verified, RowRandom(0, 6), emitted)


@pytest.mark.parametrize("rule", [Fuzzy(0.0), Fuzzy(math.inf, price=math.inf), SGLang(1.0, 1.0)], ids=str)
def test_answers_call_a_rule_lossless_that_follows_nothing_else(rule: AcceptanceRule) -> None:
    assert rule_fields(rule) == rule_fields(Lossless())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("lossless", Lossless()),
        ("js:0.3", Fuzzy(0.3, "js")),
        ("reverse_kl:2:paper", Fuzzy(2.0, "reverse_kl", mode="paper")),
        ("tv:0.5:paper:likeliest", Fuzzy(0.5, "tv", mode="paper", child="likeliest")),
        ("js:0.3:max_consecutive=2:exact_eos=false", Fuzzy(0.3, max_consecutive=2, exact_eos=False)),
        ("js:threshold=inf:min_p=0.1", Fuzzy(math.inf, min_p=0.1)),
        ("fuzzy:0.2:tv", Fuzzy(0.2, "tv")),
        ("typical:0.2:0.1:paper", Typical(0.2, 0.1, mode="paper")),
        ("relaxed_topk:5:0.3", RelaxedTopK(5, 0.3)),
        ("sglang:0.4:0.9", SGLang(0.4, 0.9)),
        ("cactus:0.2", Cactus(0.2)),
        ("ensemble", Ensemble()),
        ("fly:0.2:2", FLy(0.2, 2)),
    ],
)
def test_rules_are_written_in_a_word(text: str, rule: AcceptanceRule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("fast", "rule is 'fast': it must begin with one of lossless, fuzzy"),
        ("hellinger:0.3", "rule is 'hellinger:0.3': it must begin"),
        ("js", "rule is 'js': a divergence needs its threshold"),
        ("js:x", "rule is 'js:x': threshold is 'x': it must be a number; correct it"),
        ("js:0.3:max_consecutive=x", "max_consecutive is 'x': it must be a whole number; correct it"),
        ("js:0.3:divergence=tv", "'divergence=tv' fits no field .*; leave it out"),
        ("lossless:0.3", "lossless text has no value '0.3'; leave it out, or name a divergence .* js:0.3"),
        ("lossless:share_noise=1", "share_noise is '1': it must be true or false; correct it"),
        ("cactus:0.1:true:3", "'3' fits no field"),
        ("js:0.3:exact_eos=perhaps", "exact_eos is 'perhaps'"),
        ("js:0.3:both", "mode is 'both'"),
        ("js:0.3:paper:first", "child is 'first'"),
        ("js:inf:cost=kl", "rule is 'js:inf:cost=kl': its cost has no effect without a price above 0; add a"),
        ("js:inf:cost=kl:price=0", "its cost has no effect without a price above 0; add a price, or leave"),
    ],
)
def test_words_that_are_no_rule(text: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        parse_rule(text)


def test_names() -> None:
    assert set(RULE_NAMES) == set(RULES)  # the flags know them without loading torch
    assert tuple(DIVERGENCES) == DIVERGENCE_NAMES
    with pytest.raises(ValueError, match=r"rule is 'nucleus': it must be one of .*, such as js:0\.3"):
        build_rule("nucleus")
    with pytest.raises(ValueError, match=r"threshold is 0\.3 for the rule cactus: it has delta, exact_eos"):
        build_rule("cactus", threshold=0.3)


@pytest.mark.parametrize(
    ("name", "parameters", "line"),
    [
        ("relaxed_topk", {"candidates": 0}, "candidates is 0"),
        ("relaxed_topk", {"margin": 2.0}, "margin is 2.0"),
        ("sglang", {"single": -0.1}, "single is -0.1"),
        ("sglang", {"acc": 0.0}, "acc is 0.0"),
        ("cactus", {"delta": math.nan}, "delta is nan"),
        ("ensemble", {"weight": 1.1}, "weight is 1.1"),
        ("fly", {"entropy": -0.1}, "entropy is -0.1"),
        ("fly", {"window": 0}, "window is 0"),
        ("typical", {"mode": "fast"}, "mode is 'fast'"),
    ],
)
def test_bad_parameters_are_named(name: str, parameters: dict[str, float], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        build_rule(name, **parameters)


@pytest.mark.parametrize("value", [-1, 2**31, 1.5])
@pytest.mark.parametrize("guard", ["max_consecutive", "exact_prefix"])
def test_a_guard_out_of_range_is_refused(guard: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{guard} is {value}"):
        Fuzzy(0.3, **{guard: value})
