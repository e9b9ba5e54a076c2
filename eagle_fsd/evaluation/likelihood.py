"""How likely the target finds a text: the mean log-probability of its tokens, at temperature 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagle_fsd.target import TargetModel, TargetSession


@torch.inference_mode()
def log_likelihood(target: TargetModel, prompt: Sequence[int], tokens: Sequence[int]) -> float | None:
    """Mean log p of the tokens after the prompt, in nats, by the target's raw law; None for no tokens.

    It flatters a rule that picks likely tokens: text sharper than the target's own scores higher than it.
    """
    if not tokens:
        return None
    text = torch.tensor([[*prompt, *tokens]], device=target.device)
    session = TargetSession(target, 1, text.shape[1])
    features = session.prefill(text[:, :-1], [text.shape[1] - 1])[0, len(prompt) - 1 :]
    log_p = target.logits(features).log_softmax(-1)
    return float(log_p.gather(1, text[0, len(prompt) :, None]).mean())
