"""The slow twin of acceptance/output_distribution.py: r over the whole vocabulary, and distances by sums."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.core.config import HYBRID, SWAP
from eagle_fsd.core.sampling import warp


def path_distributions(verified: Verified, verdict: Verdict, mode: str) -> tuple[Tensor, Tensor]:
    """Return the rule's distribution r and the target's p at the accepted path's nodes: [B, depth + 1, V].

    Entries past the path's length mean nothing.
    """
    rows = torch.arange(len(verdict.path), device=verdict.path.device)[:, None]
    nodes = verdict.path.clamp(min=0)
    if verified.probs is None:
        p = warp(verified.logits[rows, nodes], verified.sampling)
    else:
        p = verified.probs[rows, nodes]
    if verdict.chances is None:
        return p, p
    children = verified.tree.children[rows, nodes] & verdict.asked[..., None]  # [B, D, N]
    follows = children * verdict.chances[:, None, :]
    tokens = verified.tree.tokens[:, None, :].expand_as(follows)
    bonus = torch.zeros_like(p).scatter_add_(-1, tokens, follows)  # [B, D, V], f on C
    asked = follows.sum(-1, keepdim=True)  # f(C)
    r = (1 - asked) * p + bonus
    if mode in (HYBRID, SWAP):
        kept = children if verdict.weak is None else children & ~verdict.weak[:, None, :]
        mine = kept * p.gather(-1, tokens)
        inside = mine.sum(-1, keepdim=True)  # p(C)
        r = (1 - asked) * p + (1 - inside) * bonus
        r = r.scatter_add(-1, tokens, asked * mine)  # on C, give back the f(C) p(x) that was taken above
    return r, p


def distances(r: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(r || p), infinite where r leaves p's support, and TV(r, p): both [...] for [..., V]."""
    ratio = torch.where(r > 0, r.log() - p.log(), 0.0)
    kl = torch.where(r > 0, r * ratio, 0.0).sum(-1).clamp(min=0.0)
    return kl, (r - p).abs().sum(-1).mul(0.5).clamp(max=1.0)
