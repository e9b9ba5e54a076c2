"""Fold the bias of a head's `fc` into its weights, for engines whose `fc` has no bias.

Some engines (vLLM) build `fc` without a bias and ignore the one in a file. But features come out of the
target's final norm, so there is a direction u in which nearly every input x = concat(embedding, feature) has
u.x = 1. Then W x + b = (W + b u^T) x, and the bias is no longer needed. u is the least-squares solution of
u.x = 1 over real inputs, in closed form from their second moments: the error of `fc`'s output is
b (u.x - 1), so E|error|^2 = |b|^2 E(u.x - 1)^2. Dropping the bias has E|error|^2 = |b|^2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.loss import learn_masks, unroll

RIDGE = 1e-6  # relative to the inputs' sizes: far below their variation, far above float64's rounding


@dataclass(frozen=True)
class Moments:
    """First and second moments of `count` inputs of `fc`, in float64: mean [2 d], product [2 d, 2 d]."""

    mean: Tensor
    product: Tensor
    count: int

    @classmethod
    def from_inputs(cls, inputs: Tensor) -> Moments:
        """Compute the moments of inputs [N, 2 d], at least one."""
        rows = inputs.double()
        return cls(rows.mean(0), rows.T @ rows / len(rows), len(rows))

    def mix(self, other: Moments, share: float) -> Moments:
        """Return the moments of a mixture: `share` of the other distribution, the rest of this one."""
        mean, product = (
            torch.lerp(mine, its, share)
            for mine, its in ((self.mean, other.mean), (self.product, other.product))
        )
        return Moments(mean, product, self.count + other.count)

    def join(self, other: Moments) -> Moments:
        """Return the moments of the rows of both."""
        return self.mix(other, other.count / (self.count + other.count))

    def unit_direction(self) -> Tensor:
        """Return the u [2 d] that minimises E(u.x - 1)^2, with a small preference for a short u."""
        sizes = self.product.diagonal().sqrt()
        sizes = torch.where(sizes > 0, sizes, 1.0)  # u is 0 in a dimension that is always 0
        scaled = self.product / sizes[:, None] / sizes
        scaled.diagonal().add_(RIDGE)
        factor = torch.linalg.cholesky(scaled)
        return torch.cholesky_solve((self.mean / sizes)[:, None], factor).squeeze(1) / sizes

    def residual(self, direction: Tensor) -> float:
        """Return E(u.x - 1)^2 for u = direction: 0 is an exact fold, 1 no better than dropping the bias."""
        squared = direction @ self.product @ direction - 2 * direction @ self.mean + 1
        return max(float(squared), 0.0)


@dataclass(frozen=True)
class Folded:
    """A head without a bias, and the share of the bias's effect E|b|^2 that is lost, by kind of input."""

    head: DraftHead
    true: float
    predicted: float
    inputs: int

    def __str__(self) -> str:
        return (
            f"folded over {self.inputs:,} inputs; of the bias's effect on fc, {100 * (1 - self.true):.2f} % "
            f"is kept on true features and {100 * (1 - self.predicted):.2f} % on predicted ones (R^2)"
        )


@torch.no_grad()
def fc_inputs(
    head: DraftHead, sequence: FeatureSequence, embedding: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Return what `fc` reads while drafting along a sequence: true [N, 2 d] and predicted [M, 2 d] features.

    Only positions that are learned count. Predicted features are those of drafting steps 2 to `steps`.
    embedding: the target's table [V, d].
    """
    features = sequence.features[None, :-1].float()
    embeddings = F.embedding(sequence.tokens[None, 1:], embedding).float()
    read: list[Tensor] = []
    hook = head.fc.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))
    try:
        unroll(head, features, embeddings, steps)
    finally:
        hook.remove()
    masks = learn_masks(sequence.learn[None, 1:], steps)
    true, *predicted = (rows[mask[0]] for rows, mask in zip(read, masks, strict=True))
    return true, torch.cat(predicted) if predicted else true[:0]


def input_moments(
    head: DraftHead, sequences: Iterable[FeatureSequence], embedding: Tensor, steps: int
) -> tuple[Moments, Moments]:
    """Compute the moments of `fc`'s inputs over sequences: of true features, and of predicted ones."""
    found: dict[int, Moments] = {}
    for sequence in sequences:
        for kind, rows in enumerate(fc_inputs(head, sequence, embedding, steps)):
            if len(rows):
                new = Moments.from_inputs(rows)
                found[kind] = found[kind].join(new) if kind in found else new
    if len(found) < 2:
        raise ValueError("no inputs to fold the bias over: give sequences with something to learn")
    return found[0], found[1]


@torch.no_grad()
def fold_bias(head: DraftHead, true: Moments, predicted: Moments) -> Folded:
    """Return a copy of a head without the bias of `fc`, as close to the head as possible on these inputs.

    true, predicted: moments of inputs with the target's features and with the head's own. Both have the same
    weight: a draft's first step reads the former, all others the latter.
    """
    direction = true.mix(predicted, 0.5).unit_direction()  # [2 d]
    made = copy.deepcopy(head)
    made.fc.weight.copy_(head.fc.weight.double() + torch.outer(head.fc.bias.double(), direction))
    drop_bias(made)
    count = true.count + predicted.count
    return Folded(made, true.residual(direction), predicted.residual(direction), count)


def drop_bias(head: DraftHead) -> None:
    """Take the bias of `fc` from a head, if it has one, in place."""
    head.fc.bias = None
    head.config = replace(head.config, fc_bias=False)
