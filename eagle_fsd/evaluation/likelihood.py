"""What the target says of a text that is not drawn from it: how likely it is, how often it is the argmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle_fsd.target import TargetModel, TargetSession


@dataclass(frozen=True)
class Judgement:
    """Of a text's new tokens, by the target's raw law at temperature 1.

    log_p: their mean log-probability, in nats. It flatters a rule that picks likely tokens: text sharper than
    the target's own scores higher than it. agreement: the share that is the argmax of its context.
    """

    log_p: float
    agreement: float


@torch.inference_mode()
def judged(target: TargetModel, prompt: Sequence[int], tokens: Sequence[int]) -> Judgement | None:
    """What the target says of the tokens after the prompt (ids); None for no tokens."""
    if not tokens:
        return None
    text = torch.tensor([[*prompt, *tokens]], device=target.device)
    session = TargetSession(target, 1, text.shape[1])
    features = session.prefill(text[:, :-1], [text.shape[1] - 1])[0, len(prompt) - 1 :]
    logits, new = target.logits(features), text[0, len(prompt) :]
    log_p = logits.log_softmax(-1).gather(1, new[:, None])
    return Judgement(float(log_p.mean()), float((logits.argmax(-1) == new).float().mean()))
