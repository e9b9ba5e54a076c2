"""The reading of an ambiguous config that a head was made for has the lowest loss on the target's text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.eagle3 import VARIANTS, eagle3_head
from support.stubs import generator
from support.tiny_models import VOCAB, tiny_model
from test_eagle3_drafter import PlainEagle3
from torch import Tensor

from eagle_fsd.drafting.eagle3.config import Reading
from eagle_fsd.drafting.eagle3.readings import chain_loss, reading_losses, shown_losses, take_reading
from eagle_fsd.target.model import TargetModel

TARGET = TargetModel(tiny_model())


@pytest.mark.parametrize("name", ["plain", "eagle3.1", "whole vocabulary", "window", "qk_norm"])
@torch.no_grad()
def test_the_loss_is_that_of_drafted_chains(name: str) -> None:
    """Every chain is drafted alone, by the plain recursion, along the true text."""
    head, draw = eagle3_head(1, **VARIANTS[name]), generator(0)
    tokens = torch.randint(VOCAB, (8,), generator=draw)
    features = torch.randn(8, head.config.fc_inputs, generator=draw)
    columns = list(range(VOCAB)) if head.draft_tokens is None else head.draft_tokens.tolist()
    losses = []
    for root in range(1, 8):  # the text up to this token is committed
        twin = PlainEagle3(head, (features[:root], tokens[1 : root + 1]))
        for step in range(3):
            path = tuple(tokens[root + 1 : root + 1 + step].tolist())
            if root + 1 + step < 8 and len(path) == step:
                wanted = int(tokens[root + 1 + step])
                if wanted in columns:
                    losses.append(-float(twin.log_q(path)[columns.index(wanted)]))
    assert len(losses) > 3
    found = chain_loss(head, TARGET, tokens, features, 3)
    assert found == pytest.approx(sum(losses) / len(losses), abs=1e-3)


@torch.no_grad()
def drafts_of(head: torch.nn.Module, features: Tensor, first: int, count: int) -> Tensor:
    """Return a text of `count` tokens, each the likeliest draft of a two-step chain of the head."""
    tokens = [first, first]
    columns = head.draft_tokens if head.draft_tokens is not None else torch.arange(VOCAB)
    while len(tokens) < count:
        # The last token but one is the root and the last is drafted, so that the carried state matters.
        root = len(tokens) - 2
        if root == 0:
            tokens.append(int(columns[3]))
            continue
        pairs = (features[:root], torch.tensor(tokens[1 : root + 1]))
        tokens.append(int(columns[PlainEagle3(head, pairs).log_q((tokens[-1],)).argmax()]))
    return torch.tensor(tokens)


@pytest.mark.parametrize("place", range(4))
def test_the_right_reading_is_found(place: int) -> None:
    """A text that the head itself would write, read in one of four ways, is best predicted in that way."""
    readings = [Reading(taps, normed) for taps in ((1, 1, 2), (2, 2, 1)) for normed in (False, True)]
    head = eagle3_head(5, taps=(1, 1, 2))
    draw = generator(1)
    states = {taps: torch.randn(14, 96, generator=draw) for taps in ((1, 1, 2), (2, 2, 1))}
    true = readings[place]
    plain = head.config
    head.config = replace(plain, taps=true.taps, norm_output=true.norm_output)
    tokens = drafts_of(head, states[true.taps], 1, 14)
    head.config = plain
    head.readings = tuple(readings)
    asked = list[tuple[int, ...]]()
    losses = reading_losses(head, TARGET, tokens, lambda taps: (asked.append(taps), states[taps])[1])
    assert asked == list(states), "the target ran more than once for the same taps"
    assert head.config == plain and list(losses) == readings
    best = take_reading(head, min(losses, key=losses.__getitem__))
    assert best == true == head.config.reading and head.readings == (true,)
    text = shown_losses(losses, best)
    assert str(true) in text and text.count(";") == 3 and "\n" not in text
