"""Planned acceptance: the best policy on a verified tree under a price for moving the target's distribution.

After a verify forward the target's p is known at every node of the tree. So the acceptance policy that is
best for this tree can be computed by backward induction: what a node is worth is the expected number of
drafted tokens from there on, if every later decision is the best one too, less the price of the distribution
that is moved on the way. With C the children of n, V the worth, m the probability that is moved onto a child:

    hybrid, m = 1 - p(C):
        V(n) = sum_C p(c) (1 + V(c)) + (1 - p(C)) max(0, max_c (1 + V(c) - price * unit(c)))
    paper, m = 1 - p(c):
        V(n) = max(sum_C p(c) (1 + V(c)), max_c (1 + V(c) - price * m * unit(c)))
    swap, with F = max_c (1 + V(c) - price * unit(c)), m = 1 - p(C) + p of the children b of 1 + V(b) < F:
        V(n) = sum_C p(c) max(1 + V(c), F) + (1 - p(C)) max(0, F)

In swap mode a drawn child stays only if it is worth as much as the best one is after its price. No policy at
all does better under a cost that is proportional to m, whatever the draw, so hybrid and paper mode are never
worth more. "kl" is not proportional to m, and has no swap mode.

unit(c) is the cost of a unit of probability moved onto c: 1 ("tokens": the price is of total variation),
(p(c) + m) / m * log(1 + m / p(c)) ("kl": of KL(r || p), r the next token's distribution under the policy), or
D(p, q) at n ("divergence"). The maximum over c is over the children that the rule lets through.

No policy that decides at each node from p and q has a larger V(root), for this tree and this cost. It is no
statement about later steps, whose trees depend on what is emitted now, nor about the quality of a text. The
plan does not know max_consecutive and exact_prefix, which the walk obeys. Shapes: B rows, N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Choices, Verified, likeliest_chances
from eagle_fsd.core.config import PAPER, SWAP

_LEAST = 1e-30  # probabilities below it count as this: an eligible token has p > 0, but float32 may not


def planned_chances(
    verified: Verified,
    eligible: Tensor,
    price: float,
    cost: str,
    mode: str,
    divergences: Tensor | None = None,
    fixed: Tensor | None = None,
) -> Tensor | Choices:
    """Return the chances [B, N] of the best policy: 1 at the child that it follows at a node, else 0.

    eligible: [B, N] bool, the children that may be followed. price: drafted tokens that one unit of cost must
    bring. divergences: [B, N], D(p, q) at every node, for the cost "divergence". fixed: [B, N] bool, children
    that no other may replace in swap mode.
    """
    tree, p = verified.tree, verified.drawn_p()
    children = tree.children
    weights = children.to(p.dtype)
    # When greedy the draw is certain, and a cost in KL would be infinite. So costs are of the raw p then.
    priced = verified.log_p().exp() if verified.sampling.greedy else p
    moved = 1 - priced
    if mode != PAPER:
        moved = verified.at_parent(1 - (weights * priced[:, None, :]).sum(-1))
    moved = moved.clamp(min=0.0)
    costs = price * unit_cost(verified, cost, priced, moved, divergences)
    if mode == PAPER:
        # An infinite divergence costs nothing where nothing is moved.
        costs = torch.where(moved > 0, costs * moved, 0.0)
    left = (1 - (weights * p[:, None, :]).sum(-1)).clamp(min=0.0)  # [B, N], 1 - p(C)
    worth = torch.zeros_like(p)
    follow = exact = worth
    weak = torch.zeros_like(eligible)
    for _ in range(tree.depth):  # each round carries worths one level up
        follow = torch.where(eligible, 1 + worth - costs, -torch.inf)
        best = follow[:, None, :].expand_as(children).masked_fill(~children, -torch.inf).amax(-1)
        own = 1 + worth
        if mode == SWAP:
            over = verified.at_parent(best)
            weak = over > own
            if fixed is not None:
                weak &= ~fixed
            own = torch.where(weak, over, own)
        exact = (weights * (p * own)[:, None, :]).sum(-1)
        worth = torch.maximum(exact, best) if mode == PAPER else exact + left * best.clamp(min=0.0)
    least = verified.at_parent(exact) if mode == PAPER else 0.0
    chances = likeliest_chances(tree, eligible & (follow > least), follow)
    return Choices(chances, weak & (tree.parents >= 0)) if mode == SWAP else chances


def unit_cost(verified: Verified, cost: str, p: Tensor, moved: Tensor, divergences: Tensor | None) -> Tensor:
    """Return the cost of a unit of probability moved onto each node: [B, N]. p, moved: [B, N]."""
    if cost == "kl":
        share = (moved / p.clamp(min=_LEAST)).clamp(min=1e-12)
        return (1 + share) / share * share.log1p()
    if cost == "divergence":
        assert divergences is not None
        return verified.at_parent(divergences)
    return torch.ones_like(p)
