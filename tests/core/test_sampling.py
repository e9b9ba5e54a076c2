"""warp gives Hugging Face's distribution, draw follows it, and rows of RowRandom are independent."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle_fsd.core import sampling
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.sampling import Warped, draw, warp

INF = math.inf
LAST_U = 1 - 2**-24  # the largest number that torch.rand gives


def hf_law(logits: Tensor, config: SamplingConfig) -> Tensor:
    """What Hugging Face `generate` samples from, by its own warpers and in its order."""
    scores = logits.reshape(-1, logits.shape[-1]).float()
    if config.temperature != 1.0:
        scores = TemperatureLogitsWarper(config.temperature)(None, scores)
    if config.top_k:
        scores = TopKLogitsWarper(config.top_k)(None, scores)
    if config.top_p < 1.0:
        scores = TopPLogitsWarper(config.top_p)(None, scores)
    return scores.softmax(-1).reshape(logits.shape)


CONFIGS = [
    SamplingConfig(1.0),
    SamplingConfig(0.6),
    SamplingConfig(1.0, top_k=5),
    SamplingConfig(1.0, top_k=1),
    SamplingConfig(1.0, top_k=10_000),
    SamplingConfig(1.0, top_p=0.9),
    SamplingConfig(0.6, top_p=0.3),
    SamplingConfig(1.0, top_p=1e-6),
    SamplingConfig(1.0, top_p=0.999999),
    SamplingConfig(0.6, top_k=50, top_p=0.9),
    SamplingConfig(1.0, top_k=3, top_p=0.5),
    SamplingConfig(2.0, top_k=7, top_p=0.95),
    SamplingConfig(1.0, top_k=4, top_p=0.01),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("vocab", [2, 11, 300, 6000])
def test_hugging_face_law(config: SamplingConfig, vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, 4, vocab, generator=g) * 3
    probs = warp(logits, config)
    assert probs.dtype == torch.float32
    assert torch.equal(probs > 0, hf_law(logits, config) > 0)
    torch.testing.assert_close(probs, hf_law(logits, config), rtol=1e-6, atol=0)
    assert torch.equal(Warped.from_logits(logits, config).largest, logits.amax(-1))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hugging_face_law_where_ties_abound(config: SamplingConfig, dtype: torch.dtype) -> None:
    """Half precision. Which of the equal scores at a top-p cut stay is open in HF's sort: compare sorted."""
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, 4500, generator=g) * 2).to(dtype)
    ours, theirs = warp(logits, config), hf_law(logits, config)
    torch.testing.assert_close(ours.sort(-1).values, theirs.sort(-1).values, rtol=1e-6, atol=0)
    differ = (ours > 0) != (theirs > 0)
    cut = torch.where(ours > 0, logits.float(), INF).amin(-1, keepdim=True)
    assert bool((~differ | (logits == cut)).all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("top_p", [0.9, 0.7, 0.5, 0.2, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("seed", range(10))
def test_hugging_face_law_on_small_whole_logits(top_k: int, top_p: float, seed: int) -> None:
    """Logits from {0, 1, 2}: ties at the top-k boundary, at the top-p boundary, and at both at once."""
    config = SamplingConfig(1.0, top_k, top_p)
    logits = torch.randint(0, 3, (20, 9), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(warp(logits, config) > 0, hf_law(logits, config) > 0)
    torch.testing.assert_close(warp(logits, config), hf_law(logits, config))


def test_all_ties_with_the_kth_stay() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    assert (warp(logits, SamplingConfig(1.0, top_k=2)) > 0).tolist() == [True, False, True, True, True, False]


def test_top_p_cuts_through_ties_from_the_lowest_id() -> None:
    for config in (SamplingConfig(1.0, top_p=0.6), SamplingConfig(1.0, top_k=1, top_p=0.6)):
        assert warp(torch.zeros(4), config).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_minus_infinity_is_never_possible(config: SamplingConfig) -> None:
    g = torch.Generator().manual_seed(3)
    for vocab in (12, 5000):
        logits = torch.randn(5, vocab, generator=g)
        logits[:, 3:] = -INF
        probs = warp(logits, config)
        assert bool((probs[:, 3:] == 0).all())
        torch.testing.assert_close(probs, hf_law(logits, config))


def test_head_of_the_vocabulary_and_full_sort_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p alone looks at the likeliest tokens first, and sorts where these do not reach."""
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 8000, generator=g) * torch.tensor([0.1, 1.0, 2.0, 3.0, 5.0, 20.0])[:, None]
    logits = logits.bfloat16().float()
    for top_p in (0.05, 0.5, 0.9, 0.99):
        config = SamplingConfig(1.0, top_p=top_p)
        together, alone = warp(logits, config), torch.stack([warp(row, config) for row in logits])
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "_HEAD", logits.shape[-1])
            sorted_whole = warp(logits, config)
        for other in (together, alone):
            assert torch.equal(other > 0, sorted_whole > 0)
            torch.testing.assert_close(other, sorted_whole)


def test_a_top_p_cut_through_more_ties_than_are_looked_at_keeps_the_highest_ids() -> None:
    """Of 4,000 equal scores the last 8 survive, in a row beside one whose few likeliest tokens are enough."""
    logits = torch.zeros(2, 5000)
    logits[:, :1010] = torch.tensor([[5.0], [25.0]])
    likely = 1010 * math.exp(5.0)
    config = SamplingConfig(1.0, top_p=(likely + 7.5) / (likely + 3990))
    assert (warp(logits, config)[0] > 0).nonzero().flatten().tolist() == [*range(1010), *range(4992, 5000)]


def test_greedy_is_the_first_largest_whatever_else_is_set() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, -INF, 1.0]])
    for config in (SamplingConfig(), SamplingConfig(0.0, top_k=2, top_p=0.5)):
        assert warp(logits, config).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert torch.equal(draw(warp(logits, SamplingConfig()), torch.tensor([0.0, LAST_U])), logits.argmax(-1))
    assert warp(logits.bfloat16(), SamplingConfig()).dtype == torch.float32


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 5])
def test_no_temperature_that_may_be_asked_for_brings_a_banned_token_back(top_k: int, top_p: float) -> None:
    logits = torch.tensor([3.0, -math.inf, 0.0, -math.inf, 1.0] * 8)
    probs = warp(logits, SamplingConfig(1e10, top_k, top_p))
    assert not probs.isnan().any() and (probs[logits.isinf()] == 0).all()
    assert probs.sum().item() == pytest.approx(1.0)
    for temperature in (1.1e10, 3.5e38, 10**400, math.inf):
        with pytest.raises(ValueError, match=r"temperature is .*: it must be a number between 0 and 1e\+10"):
            SamplingConfig(temperature, top_k, top_p)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-40, 5e-324])
@pytest.mark.parametrize("top_k", [0, 2])
def test_tiny_temperatures_tend_to_greedy(temperature: float, top_k: int) -> None:
    logits = torch.tensor([[30.0, -30.0, 29.0], [-1.0, -2.0, -INF]])
    probs = warp(logits, SamplingConfig(temperature, top_k, 0.9 if top_k else 1.0))
    assert probs.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_warp_leaves_its_input_alone() -> None:
    logits = torch.randn(2, 5000)
    for config in CONFIGS:
        before = logits.clone()
        warp(logits, config)
        assert torch.equal(logits, before)


# ---------------------------------------------------------------- draw


def plain_draw(probs: list[float], u: float) -> int:
    """The slow twin: the first positive weight at which the running sum exceeds u * total."""
    point = u * math.fsum(probs)
    for token in range(len(probs)):
        if probs[token] > 0 and math.fsum(probs[: token + 1]) > point:
            return token
    raise AssertionError


@pytest.mark.parametrize("vocab", [1, 2, 5, 255, 256, 257, 700])
def test_draw_equals_its_plain_twin(vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    probs = torch.rand(40, vocab, generator=g) ** 8
    probs = probs.masked_fill(torch.rand(40, vocab, generator=g) < 0.5, 0.0)
    probs[:, vocab // 2] = 0.3
    u = torch.rand(40, generator=g)
    u[0], u[1] = 0.0, LAST_U
    expected = [plain_draw(p, x) for p, x in zip(probs.tolist(), u.tolist(), strict=True)]
    assert draw(probs, u).tolist() == expected


@pytest.mark.parametrize("u", [0.0, 2**-24, 0.5, LAST_U])
@pytest.mark.parametrize("vocab", [3, 256, 1000, 49152])
def test_trap_10_a_token_of_probability_zero_is_never_drawn(u: float, vocab: int) -> None:
    """Also at u = 0 with leading zeros, and at the largest u with trailing ones."""
    for token in {0, 1, vocab // 2, vocab - 2, vocab - 1}:
        probs = torch.zeros(2, vocab)
        probs[:, token] = 1.0
        assert draw(probs, torch.full((2,), u)).tolist() == [token, token]
    probs = torch.zeros(vocab)
    probs[1], probs[-2] = 0.25, 0.75
    expected = 1 if u < 0.25 else vocab - 2
    assert draw(probs, torch.tensor(u)).item() == expected


def test_a_boundary_belongs_to_the_token_after_it() -> None:
    """u in [0, 1/4) is the first token's, as wide as its probability; at u = 1/4 the next one begins."""
    probs = torch.tensor([0.25, 0.0, 0.25, 0.5]).expand(4, 4)
    assert draw(probs, torch.tensor([0.25 - 2**-24, 0.25, 0.5 - 2**-24, 0.5])).tolist() == [0, 2, 2, 3]
    halves = torch.full((2, 512), 2.0**-9)
    assert draw(halves, torch.tensor([0.5 - 2**-24, 0.5])).tolist() == [255, 256]


def test_trap_10_random_sparse_rows() -> None:
    g = torch.Generator().manual_seed(5)
    probs = warp(torch.randn(200, 3000, generator=g) * 2, SamplingConfig(1.0, top_k=20))
    for u in (torch.zeros(200), torch.full((200,), LAST_U), torch.rand(200, generator=g)):
        assert bool((probs.gather(-1, draw(probs, u)[:, None]) > 0).all())


def test_rounding_at_the_end_of_the_range() -> None:
    """A u that float64 rounding would carry to the total or beyond still gives the last possible token."""
    probs = torch.tensor([0.1, 0.2, 0.7, 0.0])
    for u in (1 - 2**-53, 1.0):
        assert draw(probs, torch.tensor(u, dtype=torch.float64)).item() == 2


def test_weights_need_not_sum_to_one() -> None:
    g = torch.Generator().manual_seed(6)
    probs, u = torch.rand(30, 600, generator=g), torch.rand(30, generator=g)
    for scale in (2.0**-80, 2.0**20):
        assert torch.equal(draw(probs * scale, u), draw(probs, u))


def test_draw_shapes() -> None:
    probs = torch.rand(2, 3, 4, 300)
    u = torch.rand(2, 3, 4)
    tokens = draw(probs, u)
    assert tokens.shape == (2, 3, 4)
    assert tokens.dtype == torch.int64
    assert tokens[1, 2, 3] == draw(probs[1, 2, 3], u[1, 2, 3])
    assert draw(probs[:, :0], u[:, :0]).shape == (2, 0, 4)


@pytest.mark.parametrize("config", [SamplingConfig(1.0), SamplingConfig(0.6, top_k=4, top_p=0.9)], ids=str)
def test_draw_has_the_law_of_its_probabilities(config: SamplingConfig) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 1.5, -0.5, 0.0, 1.0])
    probs = warp(logits, config)
    n = 100_000
    tokens = draw(probs.expand(1, n, 7), RowRandom(11, 1).uniform(n))[0]
    counts = tokens.bincount(minlength=7).double()
    possible = probs > 0
    assert bool((counts[~possible] == 0).all())
    assert chisquare(counts[possible], probs[possible].double() / probs.double().sum() * n).pvalue > 1e-3


def test_draw_has_the_law_across_its_blocks() -> None:
    g = torch.Generator().manual_seed(7)
    probs = warp(torch.randn(1000, generator=g), SamplingConfig(1.0))
    tokens = draw(probs.expand(60, 1000, 1000), RowRandom(12, 60).uniform(1000)).flatten()
    counts = (tokens // 25).bincount(minlength=40)
    expected = probs.double().reshape(40, 25).sum(-1)
    assert chisquare(counts, expected / expected.sum() * tokens.numel()).pvalue > 1e-3


# ---------------------------------------------------------------- RowRandom


def test_row_of_a_batch_equals_its_stream_alone() -> None:
    together = RowRandom(40, 5)
    alone = [RowRandom([(40, row)], 1) for row in range(5)]
    listed = RowRandom([40, *((40, row) for row in range(1, 5))], 5)
    for n in (1, 16, 17, 60):
        numbers = together.uniform(n)
        assert numbers.shape == (5, n)
        assert numbers.dtype == torch.float64
        assert torch.equal(numbers, torch.cat([row.uniform(n) for row in alone]))
        assert torch.equal(numbers, listed.uniform(n))


def test_streams_do_not_depend_on_the_batch_size() -> None:
    assert torch.equal(RowRandom(3, 2).uniform(8), RowRandom(3, 7).uniform(8)[:2])


def test_select_goes_on_with_the_chosen_rows_streams() -> None:
    some, all_rows = RowRandom(3, 4), RowRandom(3, 4)
    some.uniform(5), all_rows.uniform(5)
    some.select([2, 0])
    assert torch.equal(some.uniform(6), all_rows.uniform(6)[[2, 0]])
    some.select([])
    assert some.uniform(6).shape == (0, 6)


def test_same_seed_same_stream_other_seed_other_stream() -> None:
    assert torch.equal(RowRandom(1, 3).uniform(4), RowRandom(1, 3).uniform(4))
    numbers = RowRandom(1, 50).uniform(4)
    assert numbers.unique().numel() == numbers.numel()
    stream = RowRandom(1, 1)
    assert not torch.equal(stream.uniform(4), stream.uniform(4))


def test_trap_11_no_other_source_of_randomness() -> None:
    """Neither Python's nor torch's global generator is read or moved."""
    before = torch.get_rng_state(), random.getstate()
    numbers = RowRandom(5, 2).uniform(9)
    tokens = draw(warp(torch.zeros(2, 9, 50), SamplingConfig(1.0)), numbers)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(99)
    random.seed(99)
    assert torch.equal(RowRandom(5, 2).uniform(9), numbers)
    assert torch.equal(draw(warp(torch.zeros(2, 9, 50), SamplingConfig(1.0)), numbers), tokens)


def test_no_two_rows_of_any_two_seeds_share_a_stream() -> None:
    """Whoever samples in a loop over seeds 1000, 1001, ... gets samples that have nothing in common."""
    firsts = torch.cat([RowRandom(1000 + call, 200).uniform(2) for call in range(120)])
    assert len({tuple(pair) for pair in firsts.tolist()}) == 120 * 200
    seeds = [0, 1, 2**32, 2**32 + 1, 2**62, (0, 1), (1, 0), (0, 2**32), (2**32, 1)]  # (1, 0) is 1 again
    assert len({tuple(pair) for pair in RowRandom(seeds, len(seeds)).uniform(2).tolist()}) == len(seeds) - 1


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_do_not_follow_torchs_default_dtype(default: torch.dtype) -> None:
    """In bfloat16 there would be 256 numbers, and every token would have a probability of whole parts."""
    usual = RowRandom(3, 2).uniform(5)
    try:
        torch.set_default_dtype(default)
        numbers = RowRandom(3, 1).uniform(100_000)
        assert torch.equal(RowRandom(3, 2).uniform(5), usual)
    finally:
        torch.set_default_dtype(torch.float32)
    assert numbers.unique().numel() == numbers.numel()
    probs = torch.tensor([0.9, 0.0999, 0.0001])
    counts = draw(probs.expand(1, 100_000, 3), numbers).flatten().bincount(minlength=3)
    assert chisquare(counts, 100_000 * probs.double() / probs.double().sum()).pvalue > 1e-3


def test_a_token_of_next_to_no_probability_can_be_drawn() -> None:
    """Float32's grid would leave all that is less likely than 2^-24 to no number at all."""
    probs = torch.full((2**20,), 2.0**-40)
    probs[0] = 1.0
    rare = 1.0 - 2.0**-20 * (1 + torch.rand(100, dtype=torch.float64)) / 4
    assert bool((draw(probs.expand(100, -1), rare) > 0).any())
    numbers = RowRandom(0, 1).uniform(1000)
    assert bool((numbers * 2**24 % 1 > 0).any())


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), [np.int64(3)], np.array([3])])
def test_numpys_integers_are_seeds(seed: object) -> None:
    assert torch.equal(RowRandom(seed, 1).uniform(4), RowRandom(3, 1).uniform(4))


def test_uniform_along_a_stream_and_across_neighbouring_seeds() -> None:
    for numbers in (RowRandom(0, 1).uniform(50_000)[0], *RowRandom(0, 20_000).uniform(3).T):
        assert bool(((numbers >= 0) & (numbers < 1)).all())
        assert chisquare((numbers * 32).long().bincount(minlength=32)).pvalue > 1e-3


@pytest.mark.parametrize(
    "seed", [-1, 2**63, 1.5, True, [1, -2], ["a", "b"], [(1, 2, 3), 4], [(1, -1), 2], None]
)
def test_bad_seed(seed: object) -> None:
    with pytest.raises(ValueError, match="must be an int in"):
        RowRandom(seed, 2)


def test_seeds_must_fit_the_batch() -> None:
    with pytest.raises(ValueError, match="3 values for 2 rows"):
        RowRandom([1, 2, 3], 2)


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(0.6, 50, 0.9), SamplingConfig(1.3, 7)])
def test_few_tokens_are_drawn_as_of_all(config: SamplingConfig) -> None:
    """Distributions over the tokens that can be drawn give the draws of those over all tokens."""
    g = torch.Generator().manual_seed(4)
    for vocab, scale in ((100, 1.0), (3000, 2.0), (49152, 0.5)):
        logits = torch.randn(3, 20, vocab, generator=g) * scale
        few = Warped.from_logits(logits, config)
        assert few.ids is not None and bool((few.ids.diff() > 0).all())
        whole = few.whole(vocab)
        assert torch.equal(whole, warp(logits, config))
        for u in (torch.rand(3, 20, dtype=torch.float64, generator=g), torch.full((3, 20), LAST_U)):
            assert torch.equal(few.draw(u), draw(whole, u))


def test_a_few_ties_at_the_cut_are_kept_among_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded logits, which tie in most rows: the same tokens and probabilities as over all tokens."""
    config = SamplingConfig(0.6, 50, 0.9)
    logits = (torch.randn(64, 3000, generator=torch.Generator().manual_seed(1)) * 3 * 8).round() / 8
    tied = logits.topk(51, dim=-1).values
    assert int((tied[:, 49] == tied[:, 50]).sum()) > 32
    few = Warped.from_logits(logits, config)
    monkeypatch.setattr("eagle_fsd.core.sampling.host_can_read", lambda _: False)
    whole = Warped.from_logits(logits, config)
    assert few.ids is not None and whole.ids is None
    assert torch.equal(few.whole(3000) > 0, whole.probs > 0)
    torch.testing.assert_close(few.whole(3000), whole.probs, rtol=1e-6, atol=0)


def test_many_ties_at_the_cut_are_kept_over_all_tokens() -> None:
    """Every token that ties with the k-th stays, which a fixed number of tokens could not express."""
    logits = torch.tensor([[3.0, *[1.0] * 20, 0.0, 1.0]])
    tied = Warped.from_logits(logits, SamplingConfig(1.0, top_k=2))
    assert tied.ids is None and (tied.probs > 0).tolist() == [[True] * 21 + [False, True]]
    assert tied.whole(23) is tied.probs
