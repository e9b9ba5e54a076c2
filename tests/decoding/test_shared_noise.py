"""The noise that a step's draft and draws share belongs to the places of the texts that share it."""

from __future__ import annotations

import pytest
import torch
from support.stubs import random_tree

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.randomness.noise import RowNoise, least_log_q
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.decoding.logits.shared_noise import draft_noise, draw_noise
from eagle_fsd.decoding.request import Terms, Text

VOCAB, TREE = 11, TreeConfig(8, 3, 2)
WARM, CUT = SamplingConfig(1.25), SamplingConfig(1.5, top_k=3)


def text(number: int, sampling: SamplingConfig, rule: AcceptanceRule | None = None, made: int = 0) -> Text:
    one = Text(number, 9, Terms((), rule or Lossless(), sampling))
    one.stats.new_tokens = made
    return one


def texts() -> list[Text]:
    """Return two texts that share their noise, one whose rule does not, and one that is done."""
    done = text(3, WARM)
    done.stats.finish_reason = "stop"
    return [text(0, WARM, made=4), text(1, CUT), text(2, WARM, Fuzzy(0.3)), done]


def of_row(row: int, first: int, count: int) -> torch.Tensor:
    return torch.stack(RowNoise((7, row)).places(first, count, VOCAB))


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_a_draft_is_told_the_noise_below_its_root(default: torch.dtype) -> None:
    try:
        torch.set_default_dtype(default)
        found = draft_noise(texts(), RowRandom(7, 4), TREE, VOCAB)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found is not None and found.shared.tolist() == [True, True, False, False]
    assert found.noise[0].equal(of_row(0, 4, 3)) and found.noise[1].equal(of_row(1, 0, 3))
    assert not found.noise[2:].any() and found.noise.dtype == found.temperatures.dtype == torch.float32
    assert found.temperatures.tolist() == [1.25, 1.5, 1.25, 1.25]
    assert found.least.tolist() == pytest.approx([-torch.inf, least_log_q(CUT), -torch.inf, -torch.inf])


def test_the_draws_have_it_at_every_depth_of_the_tree() -> None:
    tree = random_tree(4, 6, 3, 2, VOCAB, seed=1)
    deepest = int(tree.depths.max())
    found = draw_noise(texts(), RowRandom(7, 4), tree, VOCAB)
    assert found is not None and found.shape == (4, deepest + 1, VOCAB)
    assert found[0].equal(of_row(0, 4, deepest + 1)) and found[1].equal(of_row(1, 0, deepest + 1))


def test_where_nobody_shares_noise_there_is_none() -> None:
    """Noise of zeros would draw the likeliest token every time."""
    others, tree = texts()[2:], random_tree(2, 6, 3, 2, VOCAB, seed=1)
    greedy = [text(0, SamplingConfig()), text(1, WARM, Lossless(share_noise=False))]
    for mine in (others, greedy):
        assert draft_noise(mine, RowRandom(7, 2), TREE, VOCAB) is None
        assert draw_noise(mine, RowRandom(7, 2), tree, VOCAB) is None
    assert draft_noise(texts(), RowRandom(7, 4), TreeConfig(1, 1, 1), VOCAB) is None, "nothing is drafted"
