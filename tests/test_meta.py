"""A whole step on the device "meta", where no tensor holds anything.

No part of it may ask what a tensor holds, take a shape from that, or mix in a tensor of the host's. What
passes here makes no accelerator wait, and can be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.drafters import eagle_drafter, feed
from support.every_rule import RULES
from support.op_recorder import Capturing, NoAnswers
from support.tiny_models import FAMILIES, VOCAB, attention_of, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import Fuzzy, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified
from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.acceptance.rule_names import RULES as NAMED
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.loop import keep
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

META = torch.device("meta")
BATCH, TREE = 3, TreeConfig(8, 3, 3)
EXPERTS = {
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
}  # whose product of groups takes no float32 on this device

SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(1.0),
    SamplingConfig(0.7, top_p=0.9),
    SamplingConfig(1e-4, top_k=20, top_p=0.95),
]


class Captured:
    """A Stepper that runs each piece of work as if it were being captured."""

    view, records = 16, True

    def wrap(
        self, work: Callable[..., Any], cache: object = None, repeatable: bool = True, by_view: bool = True
    ) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with NoAnswers(), Capturing():
                return work(*arguments)

        return run


class Numbers:
    """Random numbers of which nothing is known."""

    def uniform(self, n: int) -> Tensor:
        return torch.rand(BATCH, n, device=META)


@functools.cache
def target_of(family: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    """Admitted where tensors hold something, then moved."""
    attention = attention_of(family)
    target = TargetModel(tiny_model(family, attention).to(dtype), Captured())
    target.model.to(META)
    target.device = META
    return target


def pieces(target: TargetModel, drafted: int | None) -> tuple[TargetSession, BeamDrafter]:
    """A session and a drafter that have read prompts of 5, 1 and 3 tokens but for the last of each."""
    head = tiny_head().restrict(None if drafted is None else torch.arange(drafted)).to(META, target.dtype)
    vocabulary = target if drafted is None else DraftVocabulary(target, head.draft_tokens, target.dtype)
    session = TargetSession(target, BATCH, 8)
    drafter = eagle_drafter(head, vocabulary, BATCH, 8, META, target.stepper)
    tokens = torch.zeros(BATCH, 4, dtype=torch.int64, device=META)
    feed(drafter, session.prefill(tokens, [4, 0, 2]), tokens, [4, 1, 2])
    return session, drafter


@functools.cache
def verified(drafted: int | None) -> tuple[DraftTree, Tensor]:
    """A tree and what a target says of it."""
    session, drafter = pieces(target_of("llama"), drafted)
    tree = drafter.draft(roots(), TREE)
    return tree, session.verify(tree)[0]


def roots() -> Tensor:
    return torch.zeros(BATCH, dtype=torch.int64, device=META)


def judged(
    rule: AcceptanceRule, sampling: SamplingConfig, ends: int, tree: DraftTree, logits: Tensor
) -> Verdict:
    eos, emitted = torch.arange(ends, device=META), roots()
    return AcceptStep(Captured())(rule, Verified(tree, logits, sampling, eos), Numbers(), emitted)


def step(target: TargetModel, drafted: int | None = None) -> None:
    """Two steps, the second one with one row that is done, then one of fewer rows."""
    session, drafter = pieces(target, drafted)
    newest = roots()
    for counts in ([1, 2, 4], [3, 0, 1]):
        tree = drafter.draft(newest, TREE)
        logits, features = session.verify(tree)
        verdict = judged(Fuzzy(0.5), SAMPLINGS[3], 40, tree, logits)
        assert logits.shape == (BATCH, 8, VOCAB) and verdict.path.shape == (BATCH, 4)
        newest = keep(session, drafter, verdict, features, [[0] * count for count in counts])
    assert session.cache.row_lengths == [8, 2, 7] and session.cache.lengths.device == META
    for part in (session, drafter):
        part.select([0, 2])
    session.verify(drafter.draft(newest[:2], TREE))


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_asks_nothing(family: str) -> None:
    step(target_of(family, torch.bfloat16 if family in EXPERTS else torch.float32))


@pytest.mark.covering(1)
@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("drafted", [None, 40])
def test_a_step_in_bfloat16_and_with_a_draft_vocabulary_asks_nothing(
    family: str, drafted: int | None
) -> None:
    step(target_of(family, torch.bfloat16), drafted)


def test_all_rules_that_have_a_name_are_run() -> None:
    assert {type(rule) for rule in RULES} == set(NAMED.values())


@pytest.mark.covering(1)
@torch.inference_mode()
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_rule_asks_anything(rule: AcceptanceRule, sampling: SamplingConfig) -> None:
    """With one end token and with forty, over all tokens and over a draft vocabulary."""
    for drafted in (None, 40):
        for ends in (1, 40):
            assert judged(rule, sampling, ends, *verified(drafted)).next_token.device == META


@torch.inference_mode()
def test_a_question_or_a_tensor_of_the_hosts_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    target, forward = target_of("llama"), TargetModel.features

    def asks(self: TargetModel, tokens: Tensor, *rest: Any) -> Tensor:
        return forward(self, tokens[tokens >= 0].view(tokens.shape), *rest)

    def mixes(self: TargetModel, tokens: Tensor, *rest: Any) -> Tensor:
        return forward(self, torch.arange(VOCAB)[tokens], *rest)

    for wrong in (asks, mixes):
        session, drafter = pieces(target, None)
        tree = drafter.draft(roots(), TREE)
        with monkeypatch.context() as patch:
            patch.setattr(TargetModel, "features", wrong)
            with pytest.raises((RuntimeError, NotImplementedError)):
                session.verify(tree)
