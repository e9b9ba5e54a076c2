"""What the head is taught: pairing, the unrolled forward on its own predictions, and EAGLE-1's loss.

Pairing: index j takes (feature f_j, embedding of x_{j+1}) at position j and predicts f_{j+1}; the target's
readout turns that into the distribution of x_{j+2}. Shapes: B sequences, n = tokens - 1 pairs, d features, N
positions that carry loss, S tokens in the softmax. Pure functions, no files, no text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.architecture import PLAIN
from eagle_fsd.config import require_number
from eagle_fsd.head import DraftHead
from eagle_fsd.training.readout import Readout


@dataclass(frozen=True)
class Batch:
    """Padded sequences, paired.

    features [B, n, d]; next_tokens [B, n]; goals [B, n, d], f_{j+1}; learn [B, n], of token j+1.
    """

    features: Tensor
    next_tokens: Tensor
    goals: Tensor
    learn: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(*(part.to(device) for part in (self.features, self.next_tokens, self.goals, self.learn)))


def pair(tokens: Tensor, features: Tensor, learn: Tensor) -> Batch:
    """Pair padded sequences: tokens [B, n + 1], features [B, n + 1, d], learn [B, n + 1] (no padding)."""
    return Batch(features[:, :-1], tokens[:, 1:], features[:, 1:], learn[:, 1:])


class UnrollAttention:
    """The `attend` of several drafting steps over one sequence at once.

    Cf. HASS (arXiv 2408.15766) and EAGLE-3's training-time test.

    At step k the query of position t stands for a draft that left the true features k - 1 positions ago. It
    sees the keys of step 1 (made from true features) up to position t - k + 1 and the key of step i at
    position t - (k - i) for i = 2..k, itself included. Rows with t < k - 1 have no such past; they come out
    finite and carry no loss.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        step = len(self.keys)
        batch, heads, length, width = q.shape
        groups = k.shape[1]
        # One query head group per key head, so that keys are never copied: [B, Hkv, H / Hkv, n, D]
        q = q.view(batch, groups, heads // groups, length, width) * width**-0.5
        scores = torch.matmul(q.flatten(2, 3), self.keys[0].transpose(2, 3)).view(*q.shape[:4], length)
        time = torch.arange(length, device=q.device)
        scores = scores.masked_fill(time > time[:, None] - (step - 1), torch.finfo(scores.dtype).min)
        later = range(1, step)
        diagonals = [(q * shift(self.keys[i], step - 1 - i)[:, :, None]).sum(-1, keepdim=True) for i in later]
        weights = (
            torch.cat([scores, *diagonals], dim=-1).softmax(-1).to(v.dtype)
        )  # [B, Hkv, H / Hkv, n, n + step - 1]
        mixed = torch.matmul(weights[..., :length].flatten(2, 3), self.values[0]).view_as(q)
        for column, i in enumerate(later):
            mixed = (
                mixed + weights[..., length + column, None] * shift(self.values[i], step - 1 - i)[:, :, None]
            )
        return mixed.reshape(batch, heads, length, width)


def shift(x: Tensor, steps: int) -> Tensor:
    """Move the positions (dimension -2) later by `steps`, zeros in front."""
    return F.pad(x, (0, 0, steps, 0))[..., : x.shape[-2], :] if steps else x


def unroll(head: DraftHead, features: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
    """The head's predictions [B, n, d] at drafting steps 1..steps.

    Step 1 reads true features, each later step what the one before it predicted.
    Entry k - 1 holds at index j the prediction of f_{j+1} by a draft that left the true features at position
    j - k + 1.
    """
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    attend = UnrollAttention()
    predictions: list[Tensor] = []
    inputs = features
    for _ in range(steps):
        predictions.append(head(inputs, embeddings, positions, attend))
        # The input of position j at the next step is what was just predicted for it, at index j - 1;
        # position 0 keeps its true feature.
        inputs = torch.cat((features[:, :1].to(predictions[-1].dtype), predictions[-1][:, :-1]), dim=1)
    return predictions


def learn_masks(learn: Tensor, steps: int) -> list[Tensor]:
    """Which indices [B, n] carry loss at steps 1..steps: all tokens from the draft's root on are marked.

    At step k index j belongs to a draft whose root (the last emitted token) is x_{j-k+2}. A draft that would
    pass an unmarked token is none: there an answer ended, and nothing is drafted across its end.
    """
    masks = [learn]
    for _ in range(1, steps):
        masks.append(learn & F.pad(masks[-1], (1, 0))[:, :-1])
    return masks


class SoftCrossEntropy(torch.autograd.Function):
    """Mean over N of -sum_x p(x) log softmax(t)(x); the logits t [N, S] never exist as a whole.

    t is the readout of the predicted feature g: W g + b, scaled and soft-capped as the target's is. The
    gradient ((softmax(t) - p) * dt/dz) W / N is taken in the same pass, where dt/dz is the transform's slope;
    the readout is frozen. Cf. EAGLE (arXiv 2401.15077), section 4.2, L_cls.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, predicted: Tensor, p: Tensor, readout: Readout, rows: int
    ) -> Tensor:
        weight, transform = readout.weight, readout.transform
        total = torch.zeros((), dtype=torch.float32, device=predicted.device)
        gradient = torch.empty_like(predicted)
        for start in range(0, len(predicted), rows):
            block = slice(start, start + rows)
            logits = readout.logits(predicted[block])
            log_q = logits.log_softmax(-1)
            goal = p[block].float()
            total -= torch.dot(goal.flatten(), log_q.flatten())
            error = log_q.exp_().sub_(goal)
            if transform != PLAIN:
                error *= transform.slope(logits)
            gradient[block] = (error.to(weight.dtype) @ weight).to(predicted.dtype)
        count = max(len(predicted), 1)
        ctx.save_for_backward(gradient / count)
        return total / count

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, upstream: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * upstream.to(gradient.dtype), None, None, None


def soft_cross_entropy(predicted: Tensor, p: Tensor, readout: Readout, rows: int = 256) -> Tensor:
    """predicted [N, d], p [N, S], readout of S tokens -> the mean cross-entropy, a scalar."""
    return SoftCrossEntropy.apply(predicted, p, readout, rows)


@torch.no_grad()
def target_probabilities(features: Tensor, readout: Readout, rows: int = 256) -> Tensor:
    """p over the readout's S tokens for true features [N, d], kept in its weight's dtype: [N, S]."""
    weight = readout.weight
    p = torch.empty(len(features), len(weight), dtype=weight.dtype, device=features.device)
    for start in range(0, len(features), rows):
        block = slice(start, start + rows)
        p[block] = readout.logits(features[block]).softmax(-1).to(weight.dtype)
    return p


@dataclass(frozen=True)
class LossWeights:
    """Factors of the loss's parts, none negative.

    regression: SmoothL1 on features over their std, of no use to tau where it was measured
    (train/EXPERIMENTS.md). cross_entropy: the soft one. decay: the weight of each further step over the one
    before.
    """

    regression: float = 0.0
    cross_entropy: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        for name in ("regression", "cross_entropy", "decay"):
            value, remedy = getattr(self, name), f"change --{name.replace('_', '-')}"
            require_number(name, value, 0.0, math.inf, remedy)
            if math.isinf(value):
                raise ValueError(f"{name} is {value!r}: it must be finite; {remedy}")


def head_loss(
    head: DraftHead,
    batch: Batch,
    embedding: Tensor,
    readout: Readout,
    feature_std: float,
    steps: int,
    weights: LossWeights,
) -> tuple[Tensor, Tensor]:
    """EAGLE-1's loss, averaged over the drafting steps; also the cross-entropy [steps] of each for the log.

    embedding [V, d] is the target's table, readout what it makes of features, for the S tokens of the
    softmax. Whatever comes of the target is a constant: gradients reach the head alone.
    """
    # The head's own dtype; autocast lowers it where it is on.
    features = batch.features.detach().float()
    embeddings = F.embedding(batch.next_tokens, embedding.detach()).float()
    goals = batch.goals.detach()
    predictions = unroll(head, features, embeddings, steps)
    p = target_probabilities(goals[batch.learn], readout)  # [N, S], a row for each index of the first mask
    row_of = torch.full(batch.learn.shape, -1, device=p.device)
    row_of[batch.learn] = torch.arange(len(p), device=p.device)
    # Bound to the head even where nothing is learned: data-parallel processes all wait for its gradients.
    total = predictions[-1].sum() * 0.0
    scale = 0.0
    entropies = torch.full((steps,), math.nan, device=p.device)
    for step, (prediction, mask) in enumerate(zip(predictions, learn_masks(batch.learn, steps), strict=True)):
        if not mask.any():
            continue
        predicted = prediction[mask]  # [N_k, d]
        goal_p = p if step == 0 else p[row_of[mask]]
        cross_entropy = soft_cross_entropy(predicted, goal_p, readout)
        regression = F.smooth_l1_loss(predicted.float() / feature_std, goals[mask].float() / feature_std)
        factor = weights.decay**step
        total = total + factor * (weights.cross_entropy * cross_entropy + weights.regression * regression)
        scale += factor
        entropies[step] = cross_entropy.detach()
    return total / max(scale, 1e-9), entropies
