"""Compute what an EAGLE-3 head learns from: the training-time test, over the tokens that the head drafts.

The head is unrolled on its own states over several drafting steps (arXiv 2503.01840, section 3.2). At every
step the goal is the target's distribution, restricted to the draft vocabulary and renormalised on it. A
position whose best token for the target is not in that vocabulary has no goal. No loss is on features.
Shapes are those of training.loss; W tokens are drafted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.target.architecture import LogitsTransform
from eagle_fsd.training.held_out import Best
from eagle_fsd.training.loss import (
    Batch,
    LossWeights,
    embed,
    learned_places,
    rows_at_once,
    soft_cross_entropy,
    target_probabilities,
    unroll,
)
from eagle_fsd.training.readout import Readout


def eagle3_loss(
    head: Eagle3Head, batch: Batch, embedding: Tensor, readout: Readout, steps: int, weights: LossWeights
) -> tuple[Tensor, Tensor]:
    """Compute the weighted mean of the steps' cross-entropies, and each step's own [steps].

    Step k = 0, 1, ... has the weight decay^k, and is a mean over the positions that have a goal. embedding
    [V, d] is the target's table, and readout the target's for all V tokens. Both are constant.
    """
    features, embeddings = batch.features.detach().float(), embed(head, batch.next_tokens, embedding)
    predictions = unroll(head, features, embeddings, steps)
    goals = batch.goals.detach().flatten(0, 1)  # [B n, d]
    places = learned_places(batch.learn, steps, goals.device)
    p, kept = drafted_probabilities(goals[places[0][0]], readout, head.draft_tokens)
    own = own_readout(head).to(readout.weight.dtype)
    # Depends on the whole head even if nothing is learned: data-parallel processes wait for its gradients.
    total = sum(one.sum() for one in head.parameters() if one.requires_grad) * 0.0
    scale = torch.zeros((), device=p.device)
    entropies = []
    for step, (prediction, (here, row)) in enumerate(zip(predictions, places, strict=True)):
        rows_kept = kept[row]  # [N_k]
        cross_entropy = soft_cross_entropy(
            head.readout(prediction.flatten(0, 1)[here]),
            p if step == 0 else p[row],
            own,
            trained=head.lm_head.weight,
            kept=rows_kept,
        )
        some = (rows_kept.sum() > 0).float()
        total = total + weights.decay**step * weights.cross_entropy * cross_entropy
        scale = scale + weights.decay**step * some
        entropies.append(torch.where(some > 0, cross_entropy.detach(), math.nan))
    return total / scale.clamp_min(1e-9), torch.stack(entropies)


@torch.no_grad()
def drafted_probabilities(
    features: Tensor, readout: Readout, drafted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return p [N, W] over the drafted tokens for true features [N, d], and which rows [N] have a goal.

    drafted: the ids [W] of the tokens; None for all of the readout's. The second result is 1 for a row whose
    best token is drafted, else 0.
    """
    count = len(features)
    if drafted is None:
        return target_probabilities(features, readout), torch.ones(count, device=features.device)
    p = torch.empty(count, len(drafted), dtype=readout.weight.dtype, device=features.device)
    kept = torch.empty(count, device=features.device)
    rows = rows_at_once(features.device, len(readout.weight))
    for start in range(0, count, rows):
        block = slice(start, start + rows)
        logits = readout.logits(features[block])  # over the whole vocabulary: the best token may be any
        some = logits[:, drafted]
        p[block] = some.softmax(-1).to(p.dtype)
        kept[block] = (some.amax(-1) == logits.amax(-1)).float()
    return p, kept


def own_readout(head: Eagle3Head) -> Readout:
    """Return the head's lm_head as a constant readout of its normed states. It has no target's transform."""
    return Readout(head.lm_head.weight.detach(), None, LogitsTransform(scale=head.config.logit_scale))


def best_drafted(head: Eagle3Head) -> Best:
    """Return the function that ranks the head's states by its logits, as ids of the target's tokens.

    Where k is above the number of drafted tokens, all of them are returned.
    """

    def best(states: Tensor, k: int) -> Tensor:
        logits = own_readout(head).logits(head.readout(states))
        places = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
        return places if head.draft_tokens is None else head.draft_tokens[places]

    return best
