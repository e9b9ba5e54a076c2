"""The distribution r of the next token under a rule, in closed form, and how far it is from the target's.

It follows from the rule's chances f and the target's p. At a node where the rule is asked, with C the
children, in swap mode without the weak ones,
    hybrid, swap:  r(x) = p(x) + (1 - p(C)) f(x)     on C,    r(x) = (1 - f(C)) p(x)  elsewhere;
    paper:         r(x) = f(x) + (1 - f(C)) p(x)     on C,    r(x) = (1 - f(C)) p(x)  elsewhere.
"first-failure" is as paper here, since only where the step ends is different. Where the rule is not asked, or
has no chances, r is p. r is conditional on the context and its tree: a text is drawn from it token by token.
Outside C, r is p times a number, so that the children's p is all that r and its distances need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verified
from eagle_fsd.core.config import HYBRID, SWAP


@dataclass(frozen=True)
class OutputDistribution:
    """r at every node of a tree, float64: [B, N] each.

    token: r of each node's token, in its parent's context; the root's entry means nothing. tv, kl: TV(r, p)
    and KL(r || p) of the token that follows each node. KL is infinite where r leaves p's support.
    """

    token: Tensor
    tv: Tensor
    kl: Tensor


def output_distribution(
    verified: Verified, chances: Tensor | None, weak: Tensor | None, mode: str
) -> OutputDistribution:
    """Return r of a rule of this mode, asked at every node. chances, weak: [B, N] or None, its choices."""
    tree, p = verified.tree, verified.drawn_p().double()
    family = tree.children  # [B, N, N]
    follows = torch.zeros_like(p) if chances is None else chances.double() * (tree.parents >= 0)
    kept = torch.ones_like(follows, dtype=torch.bool) if weak is None else ~weak

    def of_children(values: Tensor) -> Tensor:
        return torch.where(family, values[:, None, :], 0.0).sum(-1)

    asked = of_children(follows)  # [B, N], f(C)
    left = 1 - verified.at_parent(asked)
    if mode in (HYBRID, SWAP):
        outside = verified.at_parent(1 - of_children(p * kept)).clamp(min=0.0)
        r = torch.where(kept, p + outside * follows, left * p)
    else:
        r = follows + left * p
    tv = of_children((r - p).clamp(min=0.0))  # a rule moves probability onto children alone
    ratio = torch.where(r > 0, r * (r.log() - p.log()), 0.0)
    rest = (1 - asked).clamp(min=0.0)
    lost = torch.where(rest > 0, rest * rest.log(), 0.0) * (1 - of_children(p)).clamp(min=0.0)
    # p exceeds r by what was moved, so that rounding alone can make the sum negative.
    kl = torch.where(asked > 0, (of_children(ratio) + lost).clamp(min=0.0), 0.0)
    return OutputDistribution(r, tv, kl)
