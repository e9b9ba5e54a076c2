"""Divergences against a float64 twin in plain Python, and the identities that the thresholds rest on."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from eagle_fsd.acceptance.divergence import (
    DIVERGENCES,
    SPARSE_DIVERGENCES,
    TOP_K,
    get_divergence,
    over_top_k,
    require_listed,
    require_sparse,
    sparse_divergence,
)

FULL = ("reverse_kl", "forward_kl", "js", "tv", "ag")
BOUNDED = ("js", "tv")
INF = math.inf


# ---------------------------------------------------------------- the slow plain twin


def log_probs(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - top - total for x in logits]


def kl(log_a: list[float], log_b: list[float]) -> float:
    """KL(a || b); a weight counts as zero where float32 could not hold it."""
    terms = [math.exp(a) * (a - b) for a, b in zip(log_a, log_b, strict=True) if a > -103.9]
    return INF if INF in terms else math.fsum(terms)


def mean(log_a: list[float], log_b: list[float]) -> list[float]:
    def log_mean(a: float, b: float) -> float:
        high = max(a, b)
        return high if high == -INF else high + math.log1p(math.exp(-abs(a - b))) - math.log(2)

    return [log_mean(a, b) for a, b in zip(log_a, log_b, strict=True)]


def twin(name: str, p_logits: list[float], q_logits: list[float]) -> float:
    p, q = log_probs(p_logits), log_probs(q_logits)
    if name == "tv":
        return math.fsum(abs(math.exp(a) - math.exp(b)) for a, b in zip(p, q, strict=True)) / 2
    m = mean(p, q)
    pairs = {"reverse_kl": [(q, p)], "forward_kl": [(p, q)], "js": [(p, m), (q, m)], "ag": [(m, p), (m, q)]}
    return math.fsum(kl(a, b) for a, b in pairs[name]) / len(pairs[name])


def twin_of_top(name: str, p_logits: list[float], q_logits: list[float], k: int) -> float:
    p, q = log_probs(p_logits), log_probs(q_logits)
    top = sorted(range(len(p)), key=lambda i: -p[i])[:k]
    rest = [i for i in range(len(p)) if i not in top]

    def merged(log_x: list[float]) -> list[float]:
        mass = math.fsum(math.exp(log_x[i]) for i in rest)
        return [log_x[i] for i in top] + [math.log(mass) if mass else -INF]

    return twin(name, merged(p), merged(q))


def random_pairs() -> list[tuple[str, Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    near = normal(4, 300) * 3
    peaked = normal(4, 300)
    peaked[:, 7] += 40
    return [
        ("independent", normal(4, 300) * 2, normal(4, 300) * 2),
        ("near", near, near + 0.05 * normal(4, 300)),
        ("wide", normal(4, 300) * 20, normal(4, 300) * 20),
        ("peaked against flat", peaked, torch.zeros(4, 300)),
        ("two tokens", normal(4, 2), normal(4, 2)),
        ("far from zero", normal(4, 300) + 500, normal(4, 300) - 500),
    ]


PAIRS = random_pairs()
PAIR_IDS = [name for name, _, _ in PAIRS]

# Logits of p, of q; the smallest hard cases.
ADVERSARIAL = {
    "p zero where q is not": ([0.0, 0.0, -INF], [0.0, 0.0, 0.0]),
    "q zero where p is not": ([0.0, 0.0, 0.0], [0.0, 0.0, -INF]),
    "both zero": ([0.0, 1.0, -INF], [1.0, 0.0, -INF]),
    "disjoint": ([0.0, 0.0, -INF, -INF], [-INF, -INF, 0.0, 0.0]),
    "one token against another": ([0.0, -INF], [-INF, 0.0]),
    "the same one token": ([0.0, -INF], [3.0, -INF]),
    "underflowed, not zero": ([0.0, -200.0, -1.0], [-200.0, 0.0, -1.0]),
    "one side underflowed": ([0.0, 0.0, -500.0], [0.0, 0.0, 0.0]),
    "minus 1e30 on one side": ([0.0, 0.0, -1e30], [0.0, 0.0, 0.0]),
    "minus 1e30 on both": ([0.0, 1.0, -1e30], [1.0, 0.0, -1e30]),
    "minus 1e30 against -inf": ([0.0, 1.0, -1e30], [1.0, 0.0, -INF]),
    "big logits": ([1e4, 0.0, -1e4], [1e4 - 1.0, 1e4, -1e4]),
    "subnormal probability": ([0.0, -100.0], [0.0, -101.0]),
}


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(("p", "q"), [(p, q) for _, p, q in PAIRS], ids=PAIR_IDS)
def test_equals_the_float64_twin_on_random_pairs(name: str, p: Tensor, q: Tensor) -> None:
    expected = [twin(name, a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    assert DIVERGENCES[name](p, q).tolist() == pytest.approx(expected, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_equals_the_float64_twin_at_zero_and_near_zero(name: str, case: str) -> None:
    p, q = ADVERSARIAL[case]
    value = DIVERGENCES[name](torch.tensor(p), torch.tensor(q)).item()
    assert value == pytest.approx(twin(name, p, q), rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(("p", "q"), [(p, q) for _, p, q in PAIRS], ids=PAIR_IDS)
def test_top_variant_equals_its_float64_twin(name: str, p: Tensor, q: Tensor) -> None:
    expected = [twin_of_top(name, a, b, TOP_K) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    assert DIVERGENCES[f"{name}_top10"](p, q).tolist() == pytest.approx(expected, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_never_nan_never_negative(name: str, case: str) -> None:
    p, q = (torch.tensor(x) for x in ADVERSARIAL[case])
    for value in (DIVERGENCES[name](p, q), DIVERGENCES[name](q, p)):
        assert value.item() >= 0.0  # false for NaN
        if name.removesuffix("_top10") in BOUNDED:
            assert math.isfinite(value.item())


def test_infinite_exactly_where_a_positive_weight_meets_a_zero() -> None:
    p, q = torch.tensor([0.0, 0.0, -INF]), torch.zeros(3)
    assert DIVERGENCES["reverse_kl"](p, q) == INF
    assert DIVERGENCES["ag"](p, q) == INF
    assert DIVERGENCES["forward_kl"](p, q).item() == pytest.approx(math.log(1.5))
    underflowed = torch.tensor([0.0, 0.0, -300.0])
    assert DIVERGENCES["reverse_kl"](underflowed, q).item() == pytest.approx(100 + math.log(2 / 3), rel=1e-6)


def sparse(q: Tensor, missing: Tensor) -> Tensor:
    """A draft that gives these tokens no probability at all."""
    return q.index_fill(-1, missing, -INF).log_softmax(-1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_draft_of_few_tokens(name: str) -> None:
    """Where q lacks one of the ten best of p, however little p has of it, exactly SPARSE_DIVERGENCES are
    finite, and right; where it lacks others, the top variants are finite too."""
    p = torch.randn(50, generator=torch.Generator().manual_seed(0))
    p[:10] = torch.tensor([30.0, 29.0, *[8.0] * 8])  # the tenth best has 1e-10
    near = p + 0.5 * torch.randn(50, generator=torch.Generator().manual_seed(1))
    value = DIVERGENCES[name](p, sparse(near, torch.tensor([9, 30, 31])))
    assert bool(value.isfinite()) == (name in SPARSE_DIVERGENCES)
    value = DIVERGENCES[name](p, sparse(near, torch.arange(20, 50)))
    assert bool(value.isfinite()) == (name in SPARSE_DIVERGENCES or name.endswith("_top10"))
    if name in FULL:
        for _, p, q in PAIRS:
            few = sparse(q, torch.arange(1, q.shape[-1], 3))
            expected = [twin(name, a, b) for a, b in zip(p.tolist(), few.tolist(), strict=True)]
            found = DIVERGENCES[name](p, few)
            assert found.tolist() == pytest.approx(expected, rel=2e-5, abs=2e-6)
            assert bool(found.isfinite().all()) == (name in SPARSE_DIVERGENCES)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_draft_of_few_tokens_by_its_list(name: str) -> None:
    """The list's log q alone, in any order, gives what log q over the whole vocabulary gives; so does a list
    of all tokens, and no list at all."""
    for _, p, q in PAIRS:
        vocab = q.shape[-1]
        drafted = torch.randperm(vocab, generator=torch.Generator().manual_seed(2))[: vocab // 2 + 1]
        whole = sparse(q, torch.tensor([x for x in range(vocab) if x not in drafted]).long())
        expected = DIVERGENCES[name](p, whole)
        found = sparse_divergence(name, p, whole[..., drafted], drafted)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
        every = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
        found = sparse_divergence(name, p, q.log_softmax(-1)[..., every], every)
        torch.testing.assert_close(found, DIVERGENCES[name](p, q), rtol=2e-5, atol=2e-6)
        assert torch.equal(sparse_divergence(name, p, q, None), DIVERGENCES[name](p, q))


def test_looked_up_drafts_name_the_head_only_as_a_condition() -> None:
    with pytest.raises(ValueError, match="choose one of reverse_kl, js, tv, or, where there is a head, let"):
        require_listed("forward_kl")


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_for_few_tokens_are_named_in_one_line(name: str) -> None:
    if name in SPARSE_DIVERGENCES:
        require_sparse(name, 9)
        return
    with pytest.raises(ValueError, match=f"divergence is '{name}': .* of 9 tokens; choose one of") as caught:
        require_sparse(name, 9)
    assert "\n" not in str(caught.value)
    assert all(works in str(caught.value) for works in SPARSE_DIVERGENCES)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_bounds(name: str) -> None:
    bound = {"js": math.log(2), "tv": 1.0}.get(name.removesuffix("_top10"), INF)
    for _, p, q in PAIRS:
        value = DIVERGENCES[name](p, q).double()
        assert bool((value >= 0).all())
        assert bool((value <= bound).all())
    p, q = (torch.tensor(x) for x in ADVERSARIAL["disjoint"])
    assert DIVERGENCES[name](p, q).item() == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("case", PAIR_IDS)
def test_js_and_ag_add_up_to_a_quarter_of_both_kls(case: str) -> None:
    _, p, q = PAIRS[PAIR_IDS.index(case)]
    value = {name: DIVERGENCES[name](p, q) for name in FULL}
    torch.testing.assert_close(
        value["js"] + value["ag"], (value["forward_kl"] + value["reverse_kl"]) / 4, rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_exactly_zero_for_equal_inputs(name: str) -> None:
    hard = [torch.tensor(p) for p, _ in ADVERSARIAL.values()]
    for logits in [p for _, p, _ in PAIRS] + hard:
        assert bool((DIVERGENCES[name](logits, logits.clone()) == 0).all())


@pytest.mark.parametrize("name", ["js", "tv", "ag"])
def test_symmetric(name: str) -> None:
    for _, p, q in PAIRS:
        assert torch.equal(DIVERGENCES[name](p, q), DIVERGENCES[name](q, p))


def test_forward_and_reverse_kl_swap_their_arguments() -> None:
    for _, p, q in PAIRS:
        assert torch.equal(DIVERGENCES["forward_kl"](p, q), DIVERGENCES["reverse_kl"](q, p))


def test_reverse_kl_is_the_one_that_punishes_mass_where_the_target_has_none() -> None:
    target, draft = torch.tensor([0.0, -20.0]), torch.tensor([0.0, 0.0])
    assert DIVERGENCES["reverse_kl"](target, draft) > 9
    assert DIVERGENCES["forward_kl"](target, draft) < 0.7


def test_classical_inequalities() -> None:
    """Pinsker; js <= ln 2 * tv; tv^2 / 2 <= js; js <= ag."""
    for _, p, q in PAIRS:
        value = {name: f(p, q) for name, f in DIVERGENCES.items()}
        slack = 2e-6
        assert bool((2 * value["tv"] ** 2 <= value["reverse_kl"] + slack).all())
        assert bool((2 * value["tv"] ** 2 <= value["forward_kl"] + slack).all())
        assert bool((value["js"] <= math.log(2) * value["tv"] + slack).all())
        assert bool((value["tv"] ** 2 / 2 <= value["js"] + slack).all())
        assert bool((value["js"] <= value["ag"] + slack).all())


@pytest.mark.parametrize("name", FULL)
def test_data_processing_coarser_is_never_larger(name: str) -> None:
    for _, p, q in PAIRS:
        coarse = [over_top_k(DIVERGENCES[name], k)(p, q) for k in (1, 2, 10, 100)] + [DIVERGENCES[name](p, q)]
        for smaller, larger in pairwise(coarse):
            assert bool((smaller <= larger * (1 + 1e-5) + 2e-6).all())


@pytest.mark.parametrize("name", FULL)
def test_top_variant_over_the_whole_vocabulary_is_the_full_divergence(name: str) -> None:
    for _, p, q in PAIRS:
        for k in (p.shape[-1], p.shape[-1] + 5):
            torch.testing.assert_close(over_top_k(DIVERGENCES[name], k)(p, q), DIVERGENCES[name](p, q))


def test_rest_bin_is_not_lost_to_rounding() -> None:
    """A rest of 1e-17 cannot be had as 1 - sum; it decides whether the value is finite."""
    p = torch.full((50,), -40.0)
    p[:10] = 0.0
    q = torch.zeros(50)
    expected = twin_of_top("reverse_kl", p.tolist(), q.tolist(), 10)
    assert 25 < expected < 40
    assert DIVERGENCES["reverse_kl_top10"](p, q).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_shifting_logits_changes_nothing_and_log_probabilities_are_logits(name: str) -> None:
    _, p, q = PAIRS[0]
    plain = DIVERGENCES[name](p, q)
    torch.testing.assert_close(DIVERGENCES[name](p + 7, q - 3), plain, rtol=1e-4, atol=1e-5)
    of_log_probs = DIVERGENCES[name](p.log_softmax(-1), q.log_softmax(-1))
    torch.testing.assert_close(of_log_probs, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    _, p, q = PAIRS[0]
    p, q = p.to(dtype), q.to(dtype)
    value = DIVERGENCES[name](p, q)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, DIVERGENCES[name](p.float(), q.float()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(DIVERGENCES[name](p, q.float()), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_row_of_a_batch_equals_that_row_alone(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    p, q = (torch.randn(2, 3, 4, 60, generator=g) for _ in range(2))
    value = DIVERGENCES[name](p, q)
    assert value.shape == (2, 3, 4)
    torch.testing.assert_close(value[1, 2, 3], DIVERGENCES[name](p[1, 2, 3], q[1, 2, 3]))
    assert DIVERGENCES[name](p[:, :0], q[:, :0]).shape == (2, 0, 4)
    torch.testing.assert_close(DIVERGENCES[name](p, q[:1]), DIVERGENCES[name](p, q[:1].expand_as(p)))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_inputs_are_left_alone_and_no_gradient_flows(name: str) -> None:
    p, q = PAIRS[0][1].clone().requires_grad_(), PAIRS[0][2].clone()
    value = DIVERGENCES[name](p, q)
    assert not value.requires_grad
    assert torch.equal(p, PAIRS[0][1])
    assert torch.equal(q, PAIRS[0][2])


def test_accuracy_over_a_real_vocabulary() -> None:
    g = torch.Generator().manual_seed(2)
    p = torch.randn(49152, generator=g) * 3
    q = p + torch.randn(49152, generator=g)
    for name in FULL:
        expected = twin(name, p.tolist(), q.tolist())
        assert DIVERGENCES[name](p, q).item() == pytest.approx(expected, rel=2e-5), name


@pytest.mark.parametrize("name", DIVERGENCES)
def test_trap_16_padded_vocabulary_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"152064 tokens and q_logits 151936"):
        DIVERGENCES[name](torch.zeros(1, 152064), torch.zeros(1, 151936))
    with pytest.raises(ValueError, match=r"8 tokens and q_logits 1:"):
        DIVERGENCES[name](torch.zeros(3, 8), torch.zeros(3, 1))  # would broadcast without a word


def test_names() -> None:
    assert set(DIVERGENCES) == {*FULL, *(f"{name}_top{TOP_K}" for name in FULL)}
    for name, function in DIVERGENCES.items():
        assert get_divergence(name) is function
        assert function.__name__ == name


@pytest.mark.parametrize("name", ["jsd", "JS", "", "js_topk", "js_top9"])
def test_unknown_name_is_one_line_that_lists_the_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"it must be one of .*; choose one") as error:
        get_divergence(name)
    message = str(error.value)
    assert "\n" not in message
    assert all(known in message for known in DIVERGENCES)
