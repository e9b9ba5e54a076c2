"""Gumbel noise draws tokens from p, belongs to a place of a text, and tells a draft what will be drawn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.randomness import streams
from eagle_fsd.core.randomness.noise import CUT, DraftNoise, RowNoise, least_log_q, noise_on
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.sampling import Warped

VOCAB = 40


def logits() -> Tensor:
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("sampling", [SamplingConfig(1.0), SamplingConfig(0.9, 7, 0.9), SamplingConfig(3.0)])
def test_it_draws_from_p(sampling: SamplingConfig) -> None:
    """Also where only a few tokens are left, over texts and over the places of one text."""
    expected = Warped.from_logits(logits(), sampling).whole(VOCAB)
    texts, places = 300, 40
    noise = RowRandom(11, texts).noise([0] * texts, places, VOCAB, [True] * texts)
    levels = torch.arange(places).expand(texts, -1)
    warped = Warped.from_logits(logits().expand(texts, places, -1), sampling)
    drawn = warped.drawn_by(noise, levels)
    counts = torch.bincount(drawn.flatten(), minlength=VOCAB).double()
    wanted = expected.double() / expected.double().sum() * counts.sum()
    assert not counts[wanted == 0].any()
    often = wanted >= 5
    counts, wanted = (torch.cat((x[often], x[~often].sum()[None])) for x in (counts, wanted))
    assert chisquare(counts[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3
    # Two places of one text know nothing of each other.
    best = int(expected.argmax())
    hits = (drawn == best).double()
    both = float((hits[:, 1:] * hits[:, :-1]).mean())
    assert both == pytest.approx(float(expected[best]) ** 2, abs=0.02)


def test_few_and_all_tokens_are_drawn_alike() -> None:
    noise = RowRandom(4, 5).noise([0] * 5, 3, VOCAB, [True] * 5)
    levels = torch.tensor([[0, 1, 1, 2]]).expand(5, -1)
    few = Warped.from_logits(logits().expand(5, 4, -1), SamplingConfig(1.5, 6))
    whole = Warped(few.whole(VOCAB), few.largest)
    assert few.ids is not None and whole.drawn_by(noise, levels).equal(few.drawn_by(noise, levels))


def test_noise_belongs_to_a_place_of_a_text() -> None:
    """However it is asked for, and whatever is beside it; other places and other texts have their own."""
    together = RowRandom(7, 3).noise([0, 4, 2], 5, VOCAB, [True, True, True])
    alone = RowNoise((7, 1))
    assert torch.stack(alone.places(4, 2, VOCAB) + alone.places(6, 3, VOCAB)).equal(together[1])
    rows = RowRandom(7, 3)
    rows.select([2, 1])
    assert rows.noise([2, 5], 2, VOCAB, [True, True])[0].equal(together[2, :2])
    assert rows.at([1]).noise([5], 1, VOCAB, [True])[0].equal(together[1, 1:2])
    other = RowRandom(9, 1)
    rows.replace([0], other)
    assert rows.noise([0, 6], 1, VOCAB, [True, False])[0].equal(RowNoise((9, 0)).places(0, 1, VOCAB)[0][None])
    assert not rows.noise([0, 6], 1, VOCAB, [True, False])[1].any()
    vectors = together.flatten(0, 1)
    assert len(torch.unique(vectors, dim=0)) == len(vectors)


def test_noise_is_finite_where_a_generator_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite noise would draw a token of probability zero."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda numbers, generator: numbers.zero_())
    assert noise_on(torch.device("cpu"), [5], [0], 2, VOCAB).isfinite().all()
    zeros = SimpleNamespace(standard_exponential=lambda size, dtype: np.zeros(size, dtype))
    monkeypatch.setattr(np.random, "Generator", lambda bits: zeros)
    (vector,) = RowNoise((7, 1)).places(0, 1, VOCAB)
    assert vector.isfinite().all() and (vector > 60).all()


def test_noise_does_not_follow_torchs_default_device() -> None:
    """On "meta" there is no data; a row that has no noise gets zeros all the same."""
    usual = RowRandom(7, 2).noise([0, 3], 2, VOCAB, [True, False])
    try:
        torch.set_default_device("meta")
        noise = RowRandom(7, 2).noise([0, 3], 2, VOCAB, [True, False])
    finally:
        torch.set_default_device(None)
    assert noise.equal(usual)


def test_a_draft_expects_what_the_target_will_draw() -> None:
    """Where the draft is the target, its likeliest token is the draw, and the others' order is that of p."""
    p = logits().log_softmax(-1).expand(50, 1, -1)
    temperature = 0.8
    noise = RowRandom(1, 50).noise([0] * 50, 1, VOCAB, [True] * 50)
    all_of_them = torch.full((50,), temperature), torch.full((50,), -torch.inf), torch.ones(50).bool()
    known = DraftNoise(noise, *all_of_them)
    expected = known.condition(p, 0, None)
    drawn = Warped.from_logits(p, SamplingConfig(temperature)).drawn_by(noise, torch.zeros(50, 1).long())
    assert expected.argmax(-1).equal(drawn) and len(drawn.unique()) > 5
    torch.testing.assert_close(expected.exp().sum(-1), torch.ones(50, 1))
    by_hand = (p[3, 0] + temperature * noise[3, 0]).softmax(-1)
    torch.testing.assert_close(expected[3, 0].exp(), by_hand)
    drafted = torch.arange(0, VOCAB, 3)
    some = known.condition(p[..., drafted].log_softmax(-1), 0, drafted)
    assert drafted[some.argmax(-1)].equal(drafted[(p + temperature * noise)[..., drafted].argmax(-1)])


def test_rows_that_share_nothing_draft_as_ever() -> None:
    p = logits().log_softmax(-1).expand(2, 3, -1)
    noise = RowRandom(1, 2).noise([0, 0], 2, VOCAB, [True, True])
    known = DraftNoise(noise, torch.ones(2), torch.zeros(2) - torch.inf, torch.tensor([True, False]))
    found = known.condition(p, 1, None)
    assert found[1].equal(p[1]) and not found[0].equal(p[0])


def test_tokens_that_will_be_cut_off_are_not_drafted() -> None:
    sampling = SamplingConfig(1.0, top_p=0.9)
    p = torch.tensor([0.5, 0.3, 0.19, 0.009, 0.001]).log()[None, None]
    huge = torch.tensor([0.0, 0.0, 0.0, 0.0, 50.0])[None, None]
    least = torch.tensor([least_log_q(sampling)])
    one = torch.ones(1)
    assert DraftNoise(huge, one, least, one.bool()).condition(p, 0, None).argmax() == 0
    least = torch.tensor([least_log_q(SamplingConfig(1.0))])
    assert DraftNoise(huge, one, least, one.bool()).condition(p, 0, None).argmax() == 4


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_share_that_a_draft_leaves_out_is_one_at_the_targets_temperature(temperature: float) -> None:
    """Tokens on either side of it, by their probabilities once the logits are divided by the temperature."""
    shares = torch.tensor([1.0, 1.2 * CUT, 0.8 * CUT])
    log_q = (temperature * shares.log()).log_softmax(-1)
    sampling = SamplingConfig(temperature, min_p=0.001)
    assert (log_q - log_q[0] >= least_log_q(sampling)).tolist() == [True, True, False]


def test_noise_that_a_gpu_draws_belongs_to_a_place_of_a_text_too() -> None:
    """The same code draws it on a CPU, whose generators tell seeds apart by their last 32 bits alone."""
    cpu, keys = torch.device("cpu"), [5, None, 2**63 - 3]
    together = noise_on(cpu, keys, [0, 4, 2], 5, VOCAB)
    assert together.dtype == torch.float32 and not together[1].any()
    assert noise_on(cpu, keys[2:], [4], 2, VOCAB)[0].equal(together[2, 2:4])
    vectors = together[[0, 2]].flatten(0, 1)
    assert len(torch.unique(vectors, dim=0)) == len(vectors)
    expected = logits().double().softmax(-1)
    texts, places = 300, 40
    noise = noise_on(cpu, [1000 * text for text in range(texts)], [0] * texts, places, VOCAB)
    warped = Warped.from_logits(logits().expand(texts, places, -1), SamplingConfig(1.0))
    counts = torch.bincount(
        warped.drawn_by(noise, torch.arange(places).expand(texts, -1)).flatten(), minlength=VOCAB
    )
    assert chisquare(counts.double(), expected * counts.sum()).pvalue > 1e-3


def test_rows_on_a_gpu_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is beside them; a row that needs no noise has none."""
    asked = []
    monkeypatch.setattr(streams, "noise_on", lambda device, keys, *sizes: asked.append((keys, *sizes)))
    rows = RowRandom(7, 3, torch.device("cuda"))
    rows.noise([0, 4, 2], 5, VOCAB, [True, True, False])
    rows.select([2, 1])
    rows.noise([2, 4], 5, VOCAB, [True, True])
    RowRandom([(8, 1), (7, 1)], 2, torch.device("cuda")).noise([0, 0], 1, VOCAB, [True, True])
    (first, starts, count, size), (second, *_), (others, *_) = asked
    assert first[2] is None and (starts, count, size) == ([0, 4, 2], 5, VOCAB)
    assert second[1] == first[1] == others[1]
    keys = [first[0], first[1], second[0], others[0]]
    assert len(set(keys)) == 4 and all(0 <= key < 2**63 for key in keys)
