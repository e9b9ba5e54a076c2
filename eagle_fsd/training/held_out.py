"""Measure a head on held-out text: how often its chain of predictions names the target's token, by depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.loss import Head, embed, learn_masks, rows_at_once, unroll
from eagle_fsd.training.readout import Readout

# The k most likely tokens [N, k], best first, for a head's predictions [N, d].
Best = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class HeldOut:
    """Sequences that are never trained on, and what the target predicts for them.

    greedy: the target's best token at every position of each sequence ([n] int64). best: ranks the tokens of
    a head's predictions.
    """

    sequences: Sequence[FeatureSequence]
    greedy: Sequence[Tensor]
    best: Best
    depth: int = 5


@torch.no_grad()
def best_tokens(features: Tensor, k: int, readout: Readout) -> Tensor:
    """Return the k most likely tokens for features [N, d]: [N, k], best first; all, if they are fewer."""
    rows = rows_at_once(features.device, len(readout.weight))
    k = min(k, len(readout.weight))
    return torch.cat([readout.logits(block).topk(k, dim=-1).indices for block in features.split(rows)])


def hold_out(
    sequences: Sequence[FeatureSequence],
    readout: Readout,
    device: torch.device | str = "cpu",
    best: Best | None = None,
) -> HeldOut:
    """Prepare held-out sequences: compute the target's greedy tokens, once.

    In float32, as the head is measured: rounded to bfloat16, the best two logits are often equal. best: how a
    head's predictions are ranked; by default as the target's features are.
    """
    greedy = partial(best_tokens, readout=readout.to(device, torch.float32))
    moved = [one.to(device) for one in sequences]
    return HeldOut(moved, [greedy(one.features, 1).squeeze(1) for one in moved], best or greedy)


@torch.no_grad()
def evaluate(head: Head, held_out: HeldOut, embedding: Tensor, k: int = 8) -> dict[str, Any]:
    """Measure the accuracy of drafting along the text, by depth 1..depth.

    A draft starts at a learned position and follows the text on its own features while the positions are
    learned. Nothing is drafted across an answer's end, so what comes after it does not count.
    top1, top8 (top k): the share of the drafts that reach step d in which the target's greedy token is the
    draft's best, or among its best k.
    chain: the same for top 1, of the drafts whose earlier steps were all right and in the text.
    chain_tau: expected tokens per step of a chain draft of this depth, the target's own token included. It is
    a lower bound of what a tree gets.
    chain8_tau: the same for best-k sets, an upper bound for trees of that width.
    """
    depth = held_out.depth
    positions = torch.zeros(depth)  # drafts that reach the step
    # The others are counted where the head is, so that the host waits for little but places.
    hits = torch.zeros(2, depth, device=embedding.device)  # top1, topk
    reached = torch.zeros_like(hits)  # chains that are still right: top1, topk
    arrived = torch.zeros_like(hits[0])  # chains that were right before
    for sequence, greedy in zip(held_out.sequences, held_out.greedy, strict=True):
        if len(sequence.tokens) < 3:
            continue
        embeddings = embed(head, sequence.tokens[None, 1:], embedding)
        predictions = unroll(head, sequence.inputs[None, :-1].float(), embeddings, depth)
        masks = learn_masks(sequence.learn[None, 1:], depth)
        goal = greedy[1:]  # at index j: the target's token after x_{j+1}
        # A chain follows the text: where sampled text left the greedy path, the chain ends.
        followed = torch.ones_like(goal, dtype=torch.bool)
        followed[:-1] = sequence.tokens[2:] == goal[:-1]
        alive = followed.new_ones(2, len(goal))  # chains for top1, topk, by index j at the current step
        for step, (prediction, mask) in enumerate(zip(predictions, masks, strict=True)):
            where = mask[0].nonzero().squeeze(1)
            right = held_out.best(prediction[0, where], k) == goal[where, None]
            top = torch.stack((right[:, 0], right.any(-1)))  # [2, N]
            positions[step] += len(where)
            hits[:, step] += top.sum(1)
            arrived[step] += alive[0, where].sum()
            still = torch.zeros_like(alive)
            still[:, where] = top & alive[:, where]
            reached[:, step] += still.sum(1)
            alive = F.pad(still & followed, (1, 0))[:, :-1]  # the draft at index j is the one of j - 1 then
    hits, reached, arrived = hits.cpu(), reached.cpu(), arrived.cpu()
    hits, whole = hits / positions.clamp_min(1), reached / positions.clamp_min(1)
    rounded = lambda values: [round(float(value), 4) for value in values]  # noqa: E731
    return {
        "top1": rounded(hits[0]),
        f"top{k}": rounded(hits[1]),
        "chain": rounded(reached[0] / arrived.clamp_min(1)),
        "chain_tau": round(1 + float(whole[0].sum()), 4),
        f"chain{k}_tau": round(1 + float(whole[1].sum()), 4),
        "positions": int(positions[0]),
    }
