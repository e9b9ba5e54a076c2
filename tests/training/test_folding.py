"""A bias of fc folded into its weights: exact where a direction is constant, elsewhere better than none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.training_world import VOCAB, WIDTH, lm_head, noise, sequences, tiny_head
from torch import Tensor

from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub import load_head, resolve_head, save_head
from eagle_fsd.training import folding
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.folding import Moments, fc_inputs, fold_bias, input_moments
from eagle_fsd.training.loss import unroll


def inputs_with(constant: float, spread: float, count: int = 400, seed: int = 0) -> Tensor:
    """Inputs [N, 2 d] whose sum over the last three dimensions is `constant`, give or take `spread`."""
    rows = noise(count, 2 * WIDTH, seed=seed)
    rows[:, -1] = constant - rows[:, -3:-1].sum(1) + spread * noise(count, seed=seed + 1)
    return rows


def test_a_bias_is_folded_exactly_where_some_direction_is_constant() -> None:
    head, rows = tiny_head(fc_bias=True), inputs_with(5.0, 0.0)
    folded = fold_bias(head, Moments.from_inputs(rows[:200]), Moments.from_inputs(rows[200:]))
    assert folded.head.fc.bias is None and "fc.bias" not in folded.head.state_dict()
    assert not folded.head.config.fc_bias and head.fc.bias is not None
    torch.testing.assert_close(folded.head.fc(rows), head.fc(rows), atol=1e-4, rtol=1e-4)
    assert folded.true < 1e-5 and folded.predicted < 1e-5 and folded.inputs == 400
    for name, value in folded.head.state_dict().items():
        assert name == "fc.weight" or torch.equal(value, head.state_dict()[name]), name


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_a_fold_is_the_least_squares_one_and_better_than_dropping_the_bias(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "RIDGE", 1e-12)
    head, rows = tiny_head(fc_bias=True), inputs_with(5.0, spread)
    moments = Moments.from_inputs(rows)
    folded = fold_bias(head, moments, moments)
    wanted, bias = head.fc(rows).detach(), head.fc.bias.detach()
    left = (folded.head.fc(rows) - wanted).square().sum(1).mean() / bias.square().sum()
    assert folded.true == pytest.approx(left.item(), rel=1e-3) == pytest.approx(folded.predicted, rel=1e-3)
    assert 0 < left < 0.5, "dropping the bias leaves 1"
    best = torch.linalg.lstsq(rows.double(), torch.ones(len(rows), 1).double()).solution.squeeze(1)
    torch.testing.assert_close(moments.unit_direction(), best, atol=1e-6, rtol=1e-5)


def test_inputs_without_any_constant_direction_leave_the_bias_out() -> None:
    rows = noise(4000, 2 * WIDTH, seed=3)
    rows = torch.cat((rows, -rows))
    folded = fold_bias(tiny_head(fc_bias=True), Moments.from_inputs(rows), Moments.from_inputs(rows))
    assert folded.true == pytest.approx(1.0) and folded.head.fc.bias is None
    assert "0.00 % is kept on true features" in str(folded)


def test_dimensions_that_are_never_used_do_no_harm() -> None:
    rows = inputs_with(5.0, 0.0)
    rows[:, :4] = 0.0
    folded = fold_bias(tiny_head(fc_bias=True), Moments.from_inputs(rows), Moments.from_inputs(rows))
    assert folded.true < 1e-5 and all(value.isfinite().all() for value in folded.head.parameters())


def test_moments_of_parts_are_those_of_the_whole() -> None:
    rows = noise(50, 2 * WIDTH, seed=7)
    whole, joined = (
        Moments.from_inputs(rows),
        Moments.from_inputs(rows[:13]).join(Moments.from_inputs(rows[13:])),
    )
    torch.testing.assert_close(joined.mean, whole.mean)
    torch.testing.assert_close(joined.product, whole.product)
    assert joined.count == 50


def test_what_fc_reads_is_what_drafting_feeds_it() -> None:
    """True features first, then the head's own predictions one place on; learned places alone."""
    head, one = tiny_head(fc_bias=True), sequences(1)[0]
    true, predicted = fc_inputs(head, one, lm_head(), 3)
    places = one.learn[1:].nonzero().squeeze(1)
    embeddings = F.embedding(one.tokens[1:], lm_head())
    assert torch.equal(true, torch.cat((embeddings, one.features[:-1]), dim=1)[places])
    steps = unroll(head, one.features[None, :-1], embeddings[None], 3)
    later = [place for place in places.tolist() if place - 1 in places]
    second = torch.stack([torch.cat((embeddings[at], steps[0][0, at - 1])) for at in later])
    assert torch.equal(predicted[: len(later)], second.detach())
    assert len(predicted) == 2 * len(places) - 3, "each step is one place shorter than the one before"


def test_nothing_to_fold_over_is_refused() -> None:
    one = sequences(1)[0]
    nothing = FeatureSequence(one.tokens, torch.zeros_like(one.learn), one.features)
    with pytest.raises(ValueError, match="no inputs to fold the bias over: give sequences with"):
        input_moments(tiny_head(fc_bias=True), [nothing], lm_head(), 3)


def test_a_folded_head_keeps_its_draft_vocabulary_and_is_written_without_a_bias(tmp_path: Path) -> None:
    head = tiny_head(fc_bias=True).restrict(torch.arange(9).flip(0))
    rows = inputs_with(5.0, 0.1)
    folded = fold_bias(head, Moments.from_inputs(rows), Moments.from_inputs(rows)).head
    save_head(folded, tmp_path / "head")
    again = load_head(resolve_head(str(tmp_path / "head"), "x"), WIDTH, VOCAB)
    assert again.fc.bias is None and torch.equal(again.draft_tokens, head.draft_tokens)
    assert folded.config == HeadConfig(WIDTH, 24, 4, 2, 4, VOCAB, draft_vocab_size=9)
    assert head.fc.bias is not None and isinstance(folded, DraftHead)
