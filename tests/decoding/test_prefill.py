"""What is read of prompts once for all, and what a drafter is shown of a prompt's end."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from support.tiny_models import VOCAB, prompts_of, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.decoding.prompts.prefill import (
    LISTED,
    SHARED,
    PromptReader,
    list_next_tokens,
    prefill,
    read_prompts,
)
from eagle_fsd.drafting.drafter import Needs, NoDrafter, Seen
from eagle_fsd.drafting.eagle_drafter import EagleSpec
from eagle_fsd.drafting.specs import with_lookup
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession


def test_lists_are_those_after_the_last_tokens_of_every_row() -> None:
    """Here a token's features are its logits. A row of fewer tokens than LISTED begins with its first one."""
    target = SimpleNamespace(logits=lambda features: features)
    features = torch.randn(2, LISTED + 9, 5, generator=torch.Generator().manual_seed(0))
    found = list_next_tokens(target, features, [LISTED + 7, 3], Needs(next_tokens=2))
    assert found is not None and found.ids.shape == (2, LISTED, 2)
    for row, last in ((0, LISTED + 7), (1, 3)):
        wanted = features[row, max(0, last - LISTED) : last].log_softmax(-1).topk(2)
        count = len(wanted.values)
        assert found.ids[row, -count:].equal(wanted.indices)
        torch.testing.assert_close(found.log_p[row, -count:], wanted.values)
    assert list_next_tokens(target, features, [3, 3], Needs()) is None
    none = list_next_tokens(target, features[:, :0], [0, 0], Needs(next_tokens=2))
    assert none is None, "a prompt of one token has no list"
    tapped = Needs(features=True, taps=(1,), next_tokens=2)
    assert list_next_tokens(target, features, [3, 3], tapped) is None, "taps are no states of the last layer"


@pytest.mark.parametrize(
    ("rows", "alike", "once"), [(2, SHARED, True), (2, SHARED - 1, False), (1, SHARED, False)]
)
@torch.inference_mode()
def test_a_beginning_is_read_once_where_it_is_long_and_shared(
    rows: int, alike: int, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt shares nothing with itself: it needs no row beside its own."""
    target, alone = TargetModel(tiny_model()), []
    another = TargetSession.another
    monkeypatch.setattr(TargetSession, "another", lambda *given: alone.append(given[1:]) or another(*given))
    tokens = torch.tensor(prompts_of([SHARED + 5]) * rows)
    tokens[-1, alike:] = (tokens[-1, alike:] + 1) % 50
    read_prompts(tokens, [SHARED + 5] * rows, TargetSession(target, rows, 128))
    assert alone == ([(1, SHARED)] if once else [])


@pytest.mark.parametrize("drafts", ["with a head", "by looking up", "not at all"])
@torch.inference_mode()
def test_features_of_a_part_go_once_the_drafter_has_read_them(
    drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it reads none: those of a long prompt take more memory than its keys and values."""
    target, made, read = TargetModel(tiny_model()), list[weakref.ref[Tensor]](), TargetSession.prefill

    def noted(*given: object) -> Tensor:
        features = read(*given)
        made.append(weakref.ref(features))
        return features

    monkeypatch.setattr(TargetSession, "prefill", noted)
    head = EagleSpec.for_target(tiny_head(), target)
    specs = {"with a head": head, "by looking up": with_lookup(None, target)}
    drafter = specs.get(drafts, NoDrafter(VOCAB)).make(1, 32, TreeConfig(8, 3, 3))
    reader = PromptReader(torch.tensor(prompts_of([13])), TargetSession(target, 1, 32), drafter)
    while reader.left:
        assert reader.read(4) == 4
        assert made[-1]() is None
    assert len(made) == 3


@pytest.mark.parametrize("needed", [True, False])
@torch.inference_mode()
def test_features_are_shown_to_a_drafter_that_needs_them(needed: bool) -> None:
    """A token stands beside the feature before it: there is none before the first one."""
    target, shown = TargetModel(tiny_model()), list[Seen]()
    drafter = SimpleNamespace(needs=Needs(features=needed), begin=shown.append)
    tokens = torch.tensor(prompts_of([6]))
    roots = prefill(tokens, [6], TargetSession(target, 1, 16), drafter)
    wanted = TargetSession(target, 1, 16).prefill(tokens[:, :-1], [5])
    assert roots.tolist() == [int(tokens[0, -1])] and shown[0].tokens.equal(tokens)
    if needed:
        torch.testing.assert_close(shown[0].features[:, 1:], wanted)
        assert not shown[0].features[:, 0].any()
    else:
        assert shown[0].features is None
