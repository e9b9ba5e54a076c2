"""Compute what the head learns from: pairing, the unrolled forward on its own predictions, EAGLE-1's loss.

Pairing: index j takes (feature f_j, embedding of x_{j+1}) at position j and predicts f_{j+1}; the target's
readout turns that into the distribution of x_{j+2}. Shapes: B sequences, n = tokens - 1 pairs, d features, N
positions that carry loss, S tokens in the softmax. Pure functions, no files, no text. EAGLE-3 heads are
unrolled here too; what they learn from is in eagle3.loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle_fsd.core.checks import flag_of, require_number
from eagle_fsd.core.tree import within_training
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.target.architecture import PLAIN
from eagle_fsd.training.readout import Readout


@dataclass(frozen=True)
class Batch:
    """Padded sequences, paired.

    features [B, n, D], what the head reads: f_j with D = d, or the taps of token j for EAGLE-3; next_tokens
    [B, n]; goals [B, n, d], f_{j+1}; learn [B, n], of token j+1. `learn` stays on the host, which must know
    how many positions are learned without waiting for a device.
    """

    features: Tensor
    next_tokens: Tensor
    goals: Tensor
    learn: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on a device, except for `learn`."""
        moved = (moved_to(device, part) for part in (self.features, self.next_tokens, self.goals))
        return Batch(*moved, self.learn)

    def pinned(self) -> Batch:
        """Return the same batch in pinned memory, from which a GPU copies by itself."""
        parts = (part.pin_memory() for part in (self.features, self.next_tokens, self.goals))
        return Batch(*parts, self.learn)


def moved_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a tensor of the host to a device. A GPU does so while the host goes on."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # returns a pinned tensor unchanged
    return tensor.to(device, non_blocking=True)


def pair(tokens: Tensor, features: Tensor, learn: Tensor, taps: Tensor | None = None) -> Batch:
    """Pair padded sequences: tokens [B, n + 1], features [B, n + 1, d], learn [B, n + 1] (no padding).

    taps: [B, n + 1, D], read in place of the features, which remain the goals.
    """
    inputs = features if taps is None else taps
    return Batch(inputs[:, :-1], tokens[:, 1:], features[:, 1:], learn[:, 1:])


SCORES = 2**26  # attention scores held at once: 256 MB in float32
ON_A_CPU = 256  # rows of logits computed together, which stay in its caches
ON_A_GPU = 2**25  # logits held at once there: 128 MB in float32


class UnrollAttention:
    """The attention of several drafting steps over one sequence at once.

    Cf. HASS (arXiv 2408.15766) and EAGLE-3's training-time test.

    At step k the query of position t stands for a draft that left the true features k - 1 positions ago. It
    sees the keys of step 1 (made from true features) up to position t - k + 1 and the key of step i at
    position t - (k - i) for i = 2..k, itself included. Rows with t < k - 1 have no such past: their results
    are finite and carry no loss.

    The scores [B, H, n, n] of a long sequence would take gigabytes at every step, all kept for the gradient.
    More than SCORES of them are computed in blocks of queries, and again in the backward pass.
    longest: see within_training; online, texts may be longer than those that the head was trained on.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        past = tuple(self.keys), tuple(self.values), self.longest
        batch, heads, length, _ = q.shape
        rows = max(SCORES // (batch * heads * length), 1)
        if rows >= length:
            return attend_rows(q, 0, *past)
        parts = [
            checkpoint(attend_rows, q[:, :, start : start + rows], start, *past, use_reentrant=False)
            for start in range(0, length, rows)
        ]
        return torch.cat(parts, dim=2)


def attend_rows(
    q: Tensor, start: int, keys: Sequence[Tensor], values: Sequence[Tensor], longest: int
) -> Tensor:
    """Compute UnrollAttention of the queries [B, H, m, D] from position `start` on: [B, H, m, D].

    keys, values: of all steps so far, [B, Hkv, n, D] each; the queries are of the last step.
    """
    step = len(keys)
    batch, heads, count, width = q.shape
    end = start + count  # no query sees a later key
    groups = keys[0].shape[1]
    first_keys, first_values = keys[0][:, :, :end], values[0][:, :, :end]
    # One query head group per key head, so that keys are never copied: [B, Hkv, H / Hkv, m, D]
    q = q.reshape(batch, groups, heads // groups, count, width) * width**-0.5
    scores = torch.matmul(q.flatten(2, 3), first_keys.transpose(2, 3)).view(*q.shape[:4], end)
    time = torch.arange(end, device=q.device)
    visible = (time <= time[start:, None] - (step - 1))[None]  # [1, m, end]
    visible = within_training(visible, time[None, start:], time[None], longest)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    later = range(1, step)
    diagonals = [
        (q * shift(keys[i], step - 1 - i)[:, :, None, start:end]).sum(-1, keepdim=True) for i in later
    ]
    weights = torch.cat([scores, *diagonals], dim=-1).softmax(-1)  # [B, Hkv, H / Hkv, m, end + step - 1]
    weights = weights.to(values[0].dtype)
    mixed = torch.matmul(weights[..., :end].flatten(2, 3), first_values).view_as(q)
    for column, i in enumerate(later):
        shifted = shift(values[i], step - 1 - i)[:, :, None, start:end]
        mixed = mixed + weights[..., end + column, None] * shifted
    return mixed.reshape(batch, heads, count, width)


def shift(x: Tensor, steps: int) -> Tensor:
    """Move the positions (dimension -2) later by `steps`, with zeros in front."""
    return F.pad(x, (0, 0, steps, 0))[..., : x.shape[-2], :] if steps else x


Head = DraftHead | Eagle3Head


def unroll(head: Head, features: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
    """Compute the head's predictions [B, n, d] at drafting steps 1..steps.

    Step 1 reads true features, and each later step reads what the step before it predicted.
    Entry k - 1 holds at index j the prediction of f_{j+1} by a draft that left the true features at position
    j - k + 1. An EAGLE-3 head projects true features once, and its own states take their place.
    """
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    longest = head.config.longest_trained
    attend: Callable[..., Tensor] = UnrollAttention(longest)
    inputs = first = features
    if isinstance(head, Eagle3Head):
        inputs = first = head.project(features)
        layers = [UnrollAttention(longest) for _ in head.layers]
        attend = lambda number, q, k, v: layers[number](q, k, v)  # noqa: E731
    predictions: list[Tensor] = []
    for _ in range(steps):
        predictions.append(head(inputs, embeddings, positions, attend))
        # The input of position j at the next step is what was just predicted for it, at index j - 1;
        # position 0 keeps its true feature.
        inputs = torch.cat((first[:, :1].to(predictions[-1].dtype), predictions[-1][:, :-1]), dim=1)
    return predictions


def embed(head: Head, tokens: Tensor, embedding: Tensor) -> Tensor:
    """Return embeddings [..., d] float32 of tokens, constant: from the head's own table, if it has one."""
    own = head.embed_tokens if isinstance(head, Eagle3Head) else None
    return F.embedding(tokens, (embedding if own is None else own.weight).detach()).float()


def learn_masks(learn: Tensor, steps: int) -> list[Tensor]:
    """Return which indices [B, n] carry loss at steps 1..steps: those of drafts with marked tokens alone.

    At step k index j belongs to a draft whose root (the last emitted token) is x_{j-k+2}. A draft that would
    pass an unmarked token carries no loss: an answer ended there, and nothing is drafted across its end.
    """
    masks = [learn]
    for _ in range(1, steps):
        masks.append(learn & F.pad(masks[-1], (1, 0))[:, :-1])
    return masks


def learned_places(learn: Tensor, steps: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return where the drafts of steps 1..steps carry loss: their places in [B n] and their rows of p.

    Both are [N_k] and on the device. Row i of p is that of the i-th place of step 1. The host, where `learn`
    is, works them out, so that it never waits for the device.
    """
    row_of = learn.flatten().cumsum(0) - 1  # [B n]
    places = [mask.flatten().nonzero().squeeze(1) for mask in learn_masks(learn, steps)]
    return [(moved_to(device, place), moved_to(device, row_of[place])) for place in places]


class SoftCrossEntropy(torch.autograd.Function):
    """Compute the mean over N of -sum_x p(x) log softmax(t)(x), a few rows of logits t [N, S] at a time.

    t is the readout of the predicted feature g: W g + b, scaled and soft-capped as the target's is. The
    gradient ((softmax(t) - p) * dt/dz) W / N is computed in the same pass, where dt/dz is the transform's
    slope. Cf. EAGLE (arXiv 2401.15077), section 4.2, L_cls. The readout is frozen, unless its weight is given
    once more as `trained` [S, d], which then gets its gradient. kept: [N] float, 0 for the rows that do not
    count; the mean is over the others.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        predicted: Tensor,
        p: Tensor,
        trained: Tensor | None,
        kept: Tensor | None,
        readout: Readout,
        rows: int,
    ) -> Tensor:
        weight, transform = readout.weight, readout.transform
        total = torch.zeros((), dtype=torch.float32, device=predicted.device)
        gradient = torch.empty_like(predicted)
        of_weight = None if trained is None else torch.zeros_like(trained)
        for start in range(0, len(predicted), rows):
            block = slice(start, start + rows)
            logits = readout.logits(predicted[block])
            log_q = logits.log_softmax(-1)
            goal = p[block].float()
            if kept is not None:
                goal = goal * kept[block, None]
            total -= torch.dot(goal.flatten(), log_q.flatten())
            error = log_q.exp_() if kept is None else log_q.exp_().mul_(kept[block, None])
            error = error.sub_(goal)
            if transform != PLAIN:
                error *= transform.slope(logits)
            error = error.to(weight.dtype)
            gradient[block] = (error @ weight).to(predicted.dtype)
            if of_weight is not None:
                of_weight += error.T @ predicted[block].to(weight.dtype)
        count = max(len(predicted), 1) if kept is None else kept.sum().clamp_min(1.0)
        ctx.save_for_backward(gradient / count, None if of_weight is None else of_weight / count)
        return total / count

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, upstream: Tensor
    ) -> tuple[Tensor, None, Tensor | None, None, None, None]:
        gradient, of_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        scaled = None if of_weight is None else of_weight * upstream
        return gradient * upstream.to(gradient.dtype), None, scaled, None, None, None


def rows_at_once(device: torch.device, tokens: int) -> int:
    """Return how many rows of `tokens` logits are computed together on a device."""
    # On a GPU, every block costs the launches of its kernels.
    return ON_A_CPU if device.type == "cpu" else max(ON_A_CPU, ON_A_GPU // tokens)


def soft_cross_entropy(
    predicted: Tensor,
    p: Tensor,
    readout: Readout,
    trained: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy, a scalar: predicted [N, d], p [N, S], readout of S tokens.

    trained, kept: see SoftCrossEntropy.
    """
    rows = rows_at_once(predicted.device, len(readout.weight))
    return SoftCrossEntropy.apply(predicted, p, trained, kept, readout, rows)


@torch.no_grad()
def target_probabilities(features: Tensor, readout: Readout) -> Tensor:
    """Return p [N, S] over the readout's tokens for true features [N, d], in the dtype of its weight."""
    weight = readout.weight
    rows = rows_at_once(features.device, len(weight))
    p = torch.empty(len(features), len(weight), dtype=weight.dtype, device=features.device)
    for start in range(0, len(features), rows):
        block = slice(start, start + rows)
        p[block] = readout.logits(features[block]).softmax(-1).to(weight.dtype)
    return p


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss's parts, none negative.

    regression: of SmoothL1 on features divided by their std. It did not raise tau where it was measured
    (train/EXPERIMENTS.md). cross_entropy: of the soft cross-entropy. decay: the weight of a drafting step
    relative to the step before.
    """

    regression: float = 0.0
    cross_entropy: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        for name in ("regression", "cross_entropy", "decay"):
            value, remedy = getattr(self, name), f"change {flag_of(name)}"
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
    """Compute EAGLE-1's loss, averaged over the drafting steps, and each step's cross-entropy [steps].

    embedding [V, d] is the target's table; readout turns features into logits of the S tokens of the softmax.
    All that comes from the target is constant: gradients reach the head alone.
    """
    # In the head's own dtype; autocast lowers it where it is on.
    features, embeddings = batch.features.detach().float(), embed(head, batch.next_tokens, embedding)
    predictions = unroll(head, features, embeddings, steps)
    goals = batch.goals.detach().flatten(0, 1)  # [B n, d]
    places = learned_places(batch.learn, steps, goals.device)
    p = target_probabilities(goals[places[0][0]], readout)  # [N, S]
    # Depends on the head even if nothing is learned: data-parallel processes wait for its gradients.
    total = predictions[-1].sum() * 0.0
    scale = 0.0
    entropies = torch.full((steps,), math.nan, device=p.device)
    for step, (prediction, (here, row)) in enumerate(zip(predictions, places, strict=True)):
        if not len(here):
            continue
        predicted = prediction.flatten(0, 1)[here]  # [N_k, d]
        cross_entropy = soft_cross_entropy(predicted, p if step == 0 else p[row], readout)
        regression = F.smooth_l1_loss(predicted.float() / feature_std, goals[here].float() / feature_std)
        factor = weights.decay**step
        total = total + factor * (weights.cross_entropy * cross_entropy + weights.regression * regression)
        scale += factor
        entropies[step] = cross_entropy.detach()
    return total / max(scale, 1e-9), entropies
