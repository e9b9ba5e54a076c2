"""The rule of Fuzzy Speculative Decoding: follow the draft where its distribution is near the target's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import (
    Choices,
    Verified,
    likeliest_chances,
    proportional_chances,
    require_guards,
    scatter_to_owners,
)
from eagle_fsd.acceptance.divergence import get_divergence, largest_value, sparse_divergence
from eagle_fsd.acceptance.planned import planned_chances
from eagle_fsd.core.checks import plain_numbers, require_boolean, require_choice, require_number
from eagle_fsd.core.config import CHILDREN, COSTS, HYBRID, MODES, SWAP, AutoThreshold, Kind, require_bound


class Threshold(Protocol):
    @property
    def threshold(self) -> float: ...
    @property
    def kind(self) -> Kind: ...


class Thresholds(Protocol):
    """Looks up thresholds by quality budget: a `Calibration`."""

    def find(self, wanted: AutoThreshold) -> Threshold: ...


@dataclass(frozen=True)
class Fuzzy:
    """Follow the draft where divergence(p, q) <= threshold (FSD, Holsman et al., arXiv 2502.20704).

    threshold: in the unit of `divergence` (a name of DIVERGENCES): nats, but a probability for tv. It applies
      to the distributions at temperature 1, p's after penalties and bans, which q knows nothing of; 0 is
      lossless. It means nothing without its divergence.
    mode: "hybrid" keeps a child that the target drew and relaxes only a rejection; "paper" follows the draft
      first; "swap", with a price only, keeps a drawn child unless another is worth more by the price.
    price: above 0, the rule plans: it follows the child that is best for the whole tree, if that brings at
      least `price` more tokens for each unit of cost; see acceptance/planned.py. inf is lossless. The
      threshold still says where a child may be followed at all; inf lets the price alone decide.
    cost: what the price is paid for: "tokens" (the share of probability that is moved, that is total
      variation), "kl" (of the rule's distribution from the target's), or "divergence".
    child: which child is followed if there is no price. "draft": drawn from q over the allowed children, when
      greedy the largest q. "likeliest": the largest q, also when sampling, which leads to where the tree is
      deepest (the FSD authors' code drafts greedily). "target": the largest p.

    Guards narrow the children that may be chosen. Always on: p > 0 after the user's warpers. min_p: p >=
    min_p * max p. max_overshoot: q <= max_overshoot * p. min_gain: the target's own draws are expected to
    accept at least this many more tokens of the tree below the child (`Verified.gains`); following a child
    that leads nowhere changes the text as much and saves less. exact_eos: only the target emits end tokens.
    max_consecutive, exact_prefix: see AcceptanceRule. p and q of min_p and max_overshoot are those of the
    divergence, at temperature 1.
    """

    threshold: float = 0.3
    divergence: str = "js"
    mode: str = HYBRID
    child: str = "draft"
    min_p: float = 0.0
    max_overshoot: float = math.inf
    max_consecutive: int | None = None
    exact_eos: bool = True
    exact_prefix: int = 0
    min_gain: float = 0.0
    price: float = 0.0
    cost: str = "tokens"

    def __post_init__(self) -> None:
        require_bound(self.threshold)
        get_divergence(self.divergence)
        require_choice("child", self.child, CHILDREN)
        require_number("min_p", self.min_p, 0.0, 1.0, "0 turns the guard off")
        require_number("max_overshoot", self.max_overshoot, 0.0, math.inf, "inf turns the guard off")
        require_number("min_gain", self.min_gain, 0.0, math.inf, "0 turns the guard off")
        require_number("price", self.price, 0.0, math.inf, "0 turns planning off, 1.5 is usual")
        require_choice("cost", self.cost, COSTS)
        require_boolean("exact_eos", self.exact_eos)
        if self.price and self.child != "draft":
            raise ValueError(
                f"child is {self.child!r} with a price of {self.price:g}: the plan chooses the child; leave "
                "it out"
            )
        if self.mode == SWAP and (not self.price or self.cost == "kl"):
            remedy = "take one of these" if self.price else "give a price such as 1.5"
            raise ValueError(
                f"mode is 'swap' with a price of {self.price:g} of {self.cost}: it swaps children by a plan "
                f"whose cost is tokens or divergence; {remedy}, or mode hybrid"
            )
        require_guards(self.mode, self.max_consecutive, self.exact_prefix, MODES)
        plain_numbers(self)

    @property
    def exact(self) -> bool:
        """Whether it follows nothing but the target's own draws."""
        return self.threshold == 0 or self.price == math.inf

    @classmethod
    def from_calibration(
        cls, calibration: Thresholds, quality_budget: float = 0.02, divergence: str = "js", **wanted: Any
    ) -> Fuzzy:
        """Return the fastest rule that a calibration puts inside the budget.

        wanted: further fields of AutoThreshold.
        """
        found = calibration.find(AutoThreshold(quality_budget, divergence, **wanted))
        return cls(found.threshold, **found.kind._asdict())

    def chances(self, verified: Verified) -> Tensor | Choices | None:
        # T = 0 must stay lossless even where a perfect head makes the divergence exactly 0. So it turns the
        # rule off instead of being compared.
        if self.exact or not verified.tree.owners.shape[1]:
            return None
        eligible = verified.allowed(self.exact_eos) & verified.at_parent(self.is_close(verified))  # [B, N]
        if self.min_p > 0:  # the norm cancels out in the ratio to the largest p
            gap = verified.at_token(verified.logits) - verified.at_parent(verified.largest)
            eligible &= gap >= math.log(self.min_p)
        if self.max_overshoot < math.inf:
            eligible &= verified.tree.node_log_q().exp() <= self.max_overshoot * verified.log_p().exp()
        if self.min_gain > 0:
            eligible &= verified.gains() >= self.min_gain
        if self.price > 0:
            measured = self.node_divergences(verified) if self.cost == "divergence" else None
            fixed = verified.ends if self.exact_eos else None
            return planned_chances(verified, eligible, self.price, self.cost, self.mode, measured, fixed)
        if self.child == "target":  # siblings share one softmax, so their logits are in the order of p
            return likeliest_chances(verified.tree, eligible, verified.at_token(verified.logits))
        log_q = verified.tree.node_log_q()
        if self.child == "likeliest" or verified.sampling.greedy:
            return likeliest_chances(verified.tree, eligible, log_q)
        return proportional_chances(verified.tree, eligible, log_q)

    def is_close(self, verified: Verified) -> Tensor:
        """Return where divergence(p, q) <= threshold: [B, N] bool; False where p or q is no distribution.

        If the divergence cannot exceed the threshold, it is not computed: only finite logits are checked.
        """
        if self.threshold < largest_value(self.divergence):
            return self.node_divergences(verified) <= self.threshold
        drafted = scatter_to_owners(verified.tree, verified.tree.log_q.amax(-1).isfinite(), False)
        return drafted & verified.largest.isfinite()

    def node_divergences(self, verified: Verified) -> Tensor:
        """Return divergence(p, q) at every node [B, N]; infinite where nothing was drafted."""
        if self.divergence in verified.divergences:
            return verified.divergences[self.divergence]
        tree = verified.tree
        # Only M of N nodes own a draft distribution, so p is taken at these before the work over V.
        p = verified.at_owners()
        measured = sparse_divergence(self.divergence, p, tree.log_q, tree.drafted, tree.rest)
        found = scatter_to_owners(tree, measured, torch.inf)
        verified.divergences[self.divergence] = found
        return found
