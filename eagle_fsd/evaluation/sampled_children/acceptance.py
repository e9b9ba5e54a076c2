"""The chance that one of K children is accepted at a node, from p and q, for K = 1 ... count.

Every way below is lossless: the next token has the distribution p. The ways differ in how the children are
chosen, and in how p's token is brought together with them.

`likeliest`: the K likeliest tokens of q, and one draw from p. This is what the package does.
`without_replacement`: K draws from q without replacement, tried one after the other (EAGLE, arXiv 2401.15077;
sequential draws, arXiv 2402.14160).
`likeliest_and_one_drawn`: the K - 1 likeliest tokens of q and one draw from the rest of q, accepted as well
as transport can (the greedy draft of arXiv 2502.18779).

One after the other means: child x is accepted with probability min(1, p(x) / q(x)). If it is refused,
p becomes (p - q)+, normalised, and q becomes q without x, normalised.

Shapes: n nodes, W tokens that q can draw. p, q, scores: [n, W]. q sums to 1. p may sum to less, if it has
mass on tokens that q never draws. Results: float64 [n, count]. They are exact but for `without_replacement`
with more than two children.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.core.sampling import draw

_TINY = torch.finfo(torch.float64).tiny


def likeliest(p: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return p of the K tokens with the largest scores: q, or anything that orders tokens as q does."""
    return p.double().gather(-1, scores.topk(count, dim=-1).indices).cumsum(-1)


def one_try(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Try one child of q. Return the chance that it is accepted [...], p afterwards, and who was refused.

    p, q, and the last two: [..., W]. The last is (q - p)+, the chance of each token to be drawn and refused.
    """
    common = torch.minimum(p, q)
    chance = common.sum(-1).clamp(max=1.0)
    # p's mass on tokens that q never draws stays, so the norm is not the sum of what is left here.
    left = (p - common) / (1 - chance).clamp_min(_TINY)[..., None]
    return chance, left, q - common


@dataclass(frozen=True)
class Estimated:
    """Means over random draws, and the variance of each mean, 0 where it is exact: [n, count]."""

    mean: Tensor
    variance: Tensor


def without_replacement(
    p: Tensor, q: Tensor, count: int, draws: int, random: np.random.Generator
) -> Estimated:
    """Return the acceptance of K draws without replacement, tried one after the other.

    One and two children are exact. More are estimated from `draws` runs, at least 2, in which every child is
    refused: a run draws the next child from those that would be refused, and multiplies the exact chances of
    refusal. That varies far less than counting accepted children.
    """
    p, q = p.double(), q.double()
    exact = two_without_replacement(p, q)[:, :count]
    if count <= 2:
        return Estimated(exact, torch.zeros_like(exact))
    p, q = (each[:, None].expand(-1, draws, -1) for each in (p, q))  # [n, S, W]
    refused = torch.ones_like(p[..., 0])  # [n, S]
    runs = []
    for _ in range(count):
        chance, p, left = one_try(p, q)
        refused = refused * (1 - chance)
        runs.append(1 - refused)
        child = draw(left, torch.from_numpy(random.random(refused.shape)).to(left.device))
        # If q has no other token, nothing is drawn any more, and nothing more is accepted.
        q = q.scatter(-1, child[..., None], 0.0)
        q = q / q.sum(-1, keepdim=True).clamp_min(_TINY)
    found = torch.stack(runs, dim=-1)  # [n, S, count]
    mean, variance = found.mean(1), found.var(1) / draws
    mean[:, :2], variance[:, :2] = exact, 0.0
    return Estimated(mean, variance)


def two_without_replacement(p: Tensor, q: Tensor) -> Tensor:
    """Return the acceptance of one and of two draws without replacement: [n, 2]. p, q: float64.

    Once x was refused, the second child is accepted with the chance sum_y min(p'(y), c q(y)), where p' is p
    after the first try and c = 1 / (1 - q(x)). In the order of p' / q that is two running sums for every c.
    """
    first, after, left = one_try(p, q)
    ratio, order = torch.where(q > 0, after / q.clamp_min(_TINY), torch.inf).sort(dim=-1)
    zero = torch.zeros_like(p[:, :1])
    below = torch.cat((zero, after.gather(-1, order).cumsum(-1)), dim=-1)  # of p', where p' <= c q
    above = torch.cat((q.gather(-1, order).flip(-1).cumsum(-1).flip(-1), zero), dim=-1)  # of q, elsewhere
    # 1 - q would lose what little a very sure q leaves to the others.
    likeliest_token = q.argmax(-1, keepdim=True)
    rest = (1 - q).scatter(-1, likeliest_token, q.scatter(-1, likeliest_token, 0.0).sum(-1, keepdim=True))
    scale = 1 / rest.clamp_min(_TINY)
    place = torch.searchsorted(ratio, scale, right=True)
    second = below.gather(-1, place) + scale * above.gather(-1, place)  # [n, W], for every x
    # A q of one token has no second one. Rounding may leave a little of p where all of it was accepted.
    second = torch.where(rest > 0, second, 0.0).clamp(max=1.0)
    # x itself was refused, so p'(x) = 0, and it adds nothing to either sum.
    return torch.stack((first, first + (left * second).sum(-1)), dim=-1).clamp(max=1.0)


def likeliest_and_one_drawn(p: Tensor, q: Tensor, count: int) -> Tensor:
    """Return the acceptance of the K - 1 likeliest tokens of q and one draw from the rest of q.

    The draw y is accepted with the chance min(1, p(y) / q'(y)), q' the rest of q, normalised. If it is
    refused, one draw from (p - q')+ is compared with the K - 1 others, whose p it holds whole.
    """
    p, q = p.double(), q.double()
    fixed = torch.zeros_like(p[:, 0])
    accepted = []
    for token in q.topk(count, dim=-1).indices.unbind(-1):
        rest = q / q.sum(-1, keepdim=True).clamp_min(_TINY)
        accepted.append(fixed + torch.minimum(p, rest).sum(-1))
        fixed = fixed + p.gather(-1, token[:, None]).squeeze(-1)
        p, q = (each.scatter(-1, token[:, None], 0.0) for each in (p, q))
    return torch.stack(accepted, dim=-1).clamp(max=1.0)
