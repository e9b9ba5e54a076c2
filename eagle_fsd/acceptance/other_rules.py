"""Relaxed acceptance rules of other papers and programs, and FSD as it was published, for comparison.

They were made for one drafted token at a time. Here siblings compete, so each docstring says what the rule
then does. A rule whose parameters make it lossless in its source is lossless here too. p is after the user's
warpers unless a rule says otherwise. As everywhere, a child needs p > 0, and with `exact_eos` only the target
emits end tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verified, likeliest_chances, require_guards, scatter_to_owners
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.checks import plain_numbers, require_boolean, require_integer, require_number
from eagle_fsd.core.config import FIRST_FAILURE, HYBRID, PAPER
from eagle_fsd.core.long_rows import logsumexp, topk
from eagle_fsd.core.sampling import temper


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (Cai et al., arXiv 2401.10774, section 2.3.1), on competing siblings.

    A child is typical when p(x) > min(epsilon, delta * exp(-H(p))), where H is the entropy in nats; the
    likeliest typical child is followed. p is at the sampling temperature, before top-k and top-p; when
    greedy, at temperature 1. mode and the guards are those of Fuzzy.
    """

    epsilon: float = 0.3
    delta: float = 0.09
    mode: str = HYBRID
    max_consecutive: int | None = None
    exact_eos: bool = True
    exact_prefix: int = 0

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, 0.0, 1.0, "Medusa uses 0.3")
        require_number("delta", self.delta, 0.0, math.inf, "Medusa uses 0.09")
        require_guards(self.mode, self.max_consecutive, self.exact_prefix)
        require_boolean("exact_eos", self.exact_eos)
        plain_numbers(self)

    def chances(self, verified: Verified) -> Tensor:
        log_p = log_p_at_temperature(verified)  # [B, N, V]
        entropy = torch.special.entr(log_p.exp()).sum(-1)  # [B, N]; entr(0) is 0, p * log p would be NaN
        bound = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        log_p = verified.at_token(log_p)  # [B, N]
        eligible = verified.allowed(self.exact_eos) & (log_p.exp() > verified.at_parent(bound))
        return likeliest_chances(verified.tree, eligible, log_p)


@dataclass(frozen=True)
class RelaxedTopK:
    """TensorRT-LLM's relaxed acceptance (relaxed_topk, relaxed_delta).

    A child qualifies when it is one of the `candidates` likeliest tokens of p and p(x) >= max p - margin; the
    likeliest such child is followed. p is at the sampling temperature, before top-k and top-p; when greedy,
    at temperature 1. candidates = 1 allows only the target's greedy choice. TensorRT-LLM follows the draft
    first, as mode "paper" does.
    """

    candidates: int = 3
    margin: float = 0.2
    mode: str = HYBRID
    max_consecutive: int | None = None
    exact_eos: bool = True
    exact_prefix: int = 0

    def __post_init__(self) -> None:
        require_integer("candidates", self.candidates, 1, "TensorRT-LLM's examples use 10")
        require_number("margin", self.margin, 0.0, 1.0, "TensorRT-LLM's examples use 0.6")
        require_guards(self.mode, self.max_consecutive, self.exact_prefix)
        require_boolean("exact_eos", self.exact_eos)
        plain_numbers(self)

    def chances(self, verified: Verified) -> Tensor:
        log_p = log_p_at_temperature(verified)  # [B, N, V]
        best, _ = topk(log_p, min(self.candidates, log_p.shape[-1]))  # [B, N, K]
        # Both conditions are lower bounds on p(x), so the larger one decides.
        bound = torch.maximum(best[..., -1].exp(), best[..., 0].exp() - self.margin)
        log_p = verified.at_token(log_p)
        eligible = verified.allowed(self.exact_eos) & (log_p.exp() >= verified.at_parent(bound))
        return likeliest_chances(verified.tree, eligible, log_p)


@dataclass(frozen=True)
class SGLang:
    """SGLang's thresholds (speculative_accept_threshold_single, speculative_accept_threshold_acc).

    Its sampler goes through the siblings in the tree's order with one uniform number u and takes the first x
    with p(x) >= single, or with u * acc <= the sum of p over the siblings so far. If it takes none, it draws
    from p without them. With both at 1 it is lossless. This rule has exactly the same distribution: its
    chances are solved so that asking the rule first and then following the draw gives it. When greedy, SGLang
    ignores both thresholds, and so does this rule.
    """

    mode: ClassVar[str] = PAPER
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    single: float = 0.5
    acc: float = 1.0
    exact_eos: bool = True

    def __post_init__(self) -> None:
        require_number("single", self.single, 0.0, 1.0, "1 turns it off")
        require_number("acc", self.acc, 1e-9, 1.0, "1 turns it off")  # SGLang clamps it to 1e-9 too
        require_boolean("exact_eos", self.exact_eos)
        plain_numbers(self)

    @property
    def exact(self) -> bool:
        """Whether it follows nothing but the target's own draws."""
        return self.single == self.acc == 1

    def chances(self, verified: Verified) -> Tensor | None:
        if verified.sampling.greedy or self.exact:
            return None
        allowed = verified.allowed(self.exact_eos)
        p = torch.where(allowed, verified.warped_p(), 0.0)  # [B, N]
        siblings = verified.tree.children  # [B, N, N]
        mine = siblings * p[:, None, :]
        through = (mine.cumsum(-1) / self.acc).clamp(max=1.0)  # probability to stop at or before a sibling
        # A token that passes by itself (p >= single) is always taken if it is reached.
        sure = (mine >= self.single) & siblings & allowed[:, None, :]
        through = torch.where(sure.cumsum(-1) > 0, 1.0, through)
        taken = through.diff(dim=-1, prepend=torch.zeros_like(through[..., :1]))  # [B, N, N]
        total, mass = taken.sum(-1, keepdim=True), mine.sum(-1, keepdim=True)
        # If SGLang takes no sibling, it draws from p without them; our draw comes from all of p. The share
        # that our draw gives a sibling is therefore subtracted from the rule's chance.
        left = torch.where(mass < 1, (1 - total) / (1 - mass).clamp(min=1e-9), 0.0).clamp(0.0, 1.0)
        return (siblings * (taken - left * mine)).clamp(min=0.0).sum(1)


@dataclass(frozen=True)
class Cactus:
    """Constrained acceptance (Cactus, Hao and Mou, arXiv 2604.04987): a bonus for the drafted token.

    Of the distributions p' with KL(p' || p) of at most about delta, the one that gives the drafted token x
    the most probability has p'(x) = min(1, p(x) + sqrt(2 delta p(x) (1 - p(x)))), and is p, rescaled,
    elsewhere. x is the child with the largest q; its siblings are only matched against the draw. delta = 0 is
    lossless, and so is greedy decoding, where p is 0 or 1.
    """

    mode: ClassVar[str] = PAPER
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    delta: float = 0.1
    exact_eos: bool = True

    def __post_init__(self) -> None:
        require_number("delta", self.delta, 0.0, math.inf, "0 is lossless")
        require_boolean("exact_eos", self.exact_eos)
        plain_numbers(self)

    @property
    def exact(self) -> bool:
        """Whether it follows nothing but the target's own draws."""
        return self.delta == 0

    def chances(self, verified: Verified) -> Tensor | None:
        if verified.sampling.greedy or self.exact:
            return None
        drafted = likeliest_chances(
            verified.tree, verified.allowed(self.exact_eos), verified.tree.node_log_q()
        )
        p = verified.warped_p().clamp(0.0, 1.0)
        # Where p is 0 or 1 there is none, and an infinite delta would make it NaN.
        bonus = torch.sqrt(2 * self.delta * p * (1 - p)).nan_to_num(nan=0.0)
        # Following x with chance c before the draw gives it probability p + c (1 - p); solve for c.
        return drafted * (bonus / (1 - p).clamp(min=1e-9)).clamp(max=1.0)


@dataclass(frozen=True)
class Ensemble:
    """The static ensemble weight * p + (1 - weight) * q as the distribution of the next token.

    Speculative decoding with an ensemble as its target is from Fu et al., arXiv 2502.01662. q is at the
    sampling temperature; the mass that it gives to tokens outside the tree, or to tokens that p rules out,
    goes to p. weight = 1 is lossless. When greedy, the token with the largest weight * p + (1 - weight) * q
    (at temperature 1) is followed if it is a child.
    """

    mode: ClassVar[str] = PAPER
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    weight: float = 0.8
    exact_eos: bool = True

    def __post_init__(self) -> None:
        require_number("weight", self.weight, 0.0, 1.0, "1 is lossless")
        require_boolean("exact_eos", self.exact_eos)
        plain_numbers(self)

    @property
    def exact(self) -> bool:
        """Whether it follows nothing but the target's own draws."""
        return self.weight == 1

    def chances(self, verified: Verified) -> Tensor | None:
        tree = verified.tree
        if self.exact or not tree.owners.shape[1]:
            return None
        allowed = verified.allowed(self.exact_eos)
        if verified.sampling.greedy:
            p = verified.at_owners().softmax(-1)
            q = tree.whole_log_q(p.shape[-1]).exp()
            best = (self.weight * p + (1 - self.weight) * q).argmax(-1)  # [B, M]
            wanted = verified.at_parent(scatter_to_owners(tree, best, -1))
            return (allowed & (wanted == tree.tokens)).float()
        # The draft's distributions are at temperature 1; temper them like the target's: [B, M, W], or W + 1
        # with the rest.
        log_q = tree.log_q if tree.rest is None else torch.cat((tree.log_q, tree.rest[..., None]), dim=-1)
        log_q = temper(log_q, verified.sampling.temperature).log_softmax(-1)
        drafted = replace(tree, log_q=log_q).node_log_q().exp()  # [B, N]
        return torch.where(allowed, (1 - self.weight) * drafted, 0.0)


@dataclass(frozen=True)
class FLy:
    """vLLM's rejection_sample_method "fly" (FLy, Li et al., arXiv 2511.22972), on competing siblings.

    Where the draw is no child and the target is unsure, a child is followed if the target's draws then accept
    `window` drafted tokens below it. Unsure: the entropy in nats of p's three likeliest tokens, as they are,
    is at least `entropy`. The child with the largest q is tried, of those that the window fits below; when
    greedy, of those that it is found below. vLLM keeps the draws that it has looked at; here the walk below
    the child goes by draws of its own, and the child is followed as often as those of vLLM would make the
    window, so that what is emitted below it has the target's distribution. When greedy, both are the same.
    """

    mode: ClassVar[str] = HYBRID
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    entropy: float = 0.3
    window: int = 3
    exact_eos: bool = True

    def __post_init__(self) -> None:
        require_number("entropy", self.entropy, 0.0, math.inf, "vLLM uses 0.3")
        require_integer("window", self.window, 1, "vLLM uses one less than the longest draft, at most 6")
        require_boolean("exact_eos", self.exact_eos)
        plain_numbers(self)

    @property
    def exact(self) -> bool:
        """Whether it follows nothing but the target's own draws."""
        return self.entropy > 3 / math.e  # no three probabilities have more

    def chances(self, verified: Verified) -> Tensor | None:
        if self.exact or self.window >= verified.tree.depth:
            return None
        # How likely the draws accept so many tokens below each node: [B, N].
        reached = verified.carried_up(self.window, 0.0, 1.0)
        unsure = verified.at_parent(entropy_of_three(verified)) >= self.entropy
        eligible = verified.allowed(self.exact_eos) & unsure & (reached > 0)
        return reached * likeliest_chances(verified.tree, eligible, verified.tree.node_log_q())


def entropy_of_three(verified: Verified) -> Tensor:
    """Return the sum of -p log p over p's three likeliest tokens at every node: [B, N], at most 3 / e."""
    greedy = verified.sampling.greedy
    table = verified.logits if greedy else verified.warped.probs
    best, _ = topk(table, min(3, table.shape[-1]))
    return torch.special.entr((best - logsumexp(table)).exp() if greedy else best).sum(-1)


def log_p_at_temperature(verified: Verified) -> Tensor:
    """Return log p [B, N, V] at the sampling temperature (1 when greedy), before top-k and top-p."""
    temperature = 1.0 if verified.sampling.greedy else verified.sampling.temperature
    return temper(verified.logits, temperature).log_softmax(-1)


@dataclass(frozen=True)
class PublishedFSD:
    """FSD as published: follow the likeliest child while divergence(p, q) <= threshold, then end the step.

    (Holsman et al., arXiv 2502.20704.) `Fuzzy` has guards, trees and a mode that keeps the target's own
    draws, and the published algorithm none of them. With a draft model, a chain of five and the sampling of
    the paper's experiments, this rule is that algorithm; see GenerationOptions.fsd_paper.

    threshold: in the unit of `divergence`, on raw distributions at temperature 1; 0 is lossless, as it is for
    Fuzzy. The token where the step ends is the target's draw, and a child that equals it is not followed any
    further. There are no guards: a drafted token may end the text, and it may be one that the user's top-k or
    top-p rule out, but not one whose logit is -inf. In a tree, only the likeliest path is followed.
    """

    mode: ClassVar[str] = FIRST_FAILURE
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    threshold: float = 0.3
    divergence: str = "js"

    def __post_init__(self) -> None:
        Fuzzy(self.threshold, self.divergence)  # raises ValueError for bad values
        plain_numbers(self)

    @property
    def exact(self) -> bool:
        """Whether it follows nothing but the target's own draws."""
        return self.threshold == 0

    def chances(self, verified: Verified) -> Tensor | None:
        tree = verified.tree
        if self.exact or not tree.owners.shape[1]:
            return None
        close = Fuzzy(self.threshold, self.divergence).is_close(verified)
        # Bans and forms are not the rule's to break.
        possible = verified.at_token(verified.logits) > -torch.inf
        eligible = verified.at_parent(close) & (tree.parents >= 0) & possible
        return likeliest_chances(tree, eligible, tree.node_log_q())
