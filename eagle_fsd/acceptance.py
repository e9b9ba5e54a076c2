"""Which path of a verified tree is accepted: the rules, and the walk that applies them. Knows no model.

At every node the target draws one token, x ~ p after the user's warpers (argmax at temperature 0). A walk
from the root then follows, at each node, the child that equals the draw (exact accept), or a child that the
rule lets through although it does not (fuzzy accept), or stops. The draw at the last node of the path is
emitted too: no node is ever drawn from twice, which is what makes the lossless rule lossless. Shapes: B rows,
N nodes, M draft distributions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from eagle_fsd.config import CHILDREN, SamplingConfig, require_choice, require_integer, require_number
from eagle_fsd.divergence import divergence_named
from eagle_fsd.sampling import RowRandom, draw, warp
from eagle_fsd.tree import DraftTree

HYBRID, PAPER = "hybrid", "paper"


@dataclass(frozen=True)
class Verdict:
    """The accepted path of one step.

    path: [B, depth + 1] node indices, root first, -1 padded. length: [B], nodes on the path, which is also
    the number of tokens that the step emits. tokens: [B, depth + 1] the emitted tokens, -1 padded: the path's
    drafted tokens, then next_token [B]. fuzzy: [B, depth + 1] bool, whether that node of the path was a fuzzy
    accept.
    """

    path: Tensor
    length: Tensor
    tokens: Tensor
    next_token: Tensor
    fuzzy: Tensor


@dataclass(frozen=True)
class Verified:
    """What a rule may look at: a tree, what the target says of it, and one uniform number per node.

    logits: [B, N, V] float32, the target's, raw. probs: [B, N, V] float32, p after temperature, top-k and
    top-p; None when greedy, which warps nothing. uniforms: [B, N]. eos: [E] token ids that end a text.
    """

    tree: DraftTree
    logits: Tensor
    probs: Tensor | None
    uniforms: Tensor
    eos: Tensor
    sampling: SamplingConfig

    def node_log_probs(self) -> Tensor:
        """Raw log p [B, N] of every node's token at its parent; the root's is meaningless."""
        parents, tokens = self.tree.parents.clamp(min=0), self.tree.tokens
        norm = self.logits.logsumexp(-1).gather(1, parents)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        return self.logits[rows, parents, tokens] - norm

    def allowed_children(self, exact_eos: bool) -> Tensor:
        """[B, N, N] bool: the children that a relaxed rule may choose among.

        A child must have p > 0 after the user's warpers; when greedy, the raw p decides.
        """
        parents, tokens = self.tree.parents.clamp(min=0), self.tree.tokens
        support, floor = (self.logits, -torch.inf) if self.probs is None else (self.probs, 0.0)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        allowed = support[rows, parents, tokens] > floor  # [B, N]
        if exact_eos:
            allowed &= ~torch.isin(tokens, self.eos)
        return self.tree.children & allowed[:, None, :]


class AcceptanceRule(Protocol):
    """When a drafted token that the target did not draw may be emitted all the same.

    mode: "hybrid" asks the rule only where the draw is not a child; "paper" asks it first.
    max_consecutive: most relaxed accepts in a row (a step always ends with a draw of the target's, which
    starts a new row). exact_prefix: how many first tokens of a text take the draw only.
    """

    @property
    def mode(self) -> str: ...

    @property
    def max_consecutive(self) -> int | None: ...

    @property
    def exact_prefix(self) -> int: ...

    def follow(self, verified: Verified) -> Tensor | None:
        """The child [B, N] that the rule would follow at each node, -1 for none; None: never any."""


@dataclass(frozen=True)
class Lossless:
    """Follow the target's own draw only. The text has exactly the target's law, at every temperature."""

    mode: ClassVar[str] = HYBRID
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    def follow(self, verified: Verified) -> None:
        return None


@dataclass(frozen=True)
class Fuzzy:
    """Follow the draft where divergence(p, q) <= threshold (FSD, Holsman et al., arXiv 2502.20704).

    threshold: in nats of `divergence` (a name of DIVERGENCES), on raw temperature-1 distributions; 0 is
      lossless. A threshold means nothing without its divergence.
    mode: "hybrid" keeps a child that the target drew and relaxes only a rejection; "paper" follows the draft
      first.
    child: which child is followed. "draft": drawn from q over the allowed children, when greedy the largest
      q. "likeliest": the largest q, also when sampling, which leads to where the tree is deepest (the FSD
      authors' code drafts greedily). "target": the largest p.

    Guards narrow the children that may be chosen. Always on: p > 0 after the user's warpers. min_p: p >=
    min_p * max p. max_overshoot: q <= max_overshoot * p. exact_eos: an end token is only ever emitted by the
    target. max_consecutive, exact_prefix: see AcceptanceRule. p and q of these guards are raw, at temperature
    1, like the divergence.
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

    def __post_init__(self) -> None:
        require_number(
            "threshold", self.threshold, 0.0, math.inf, "0 is lossless, inf always follows the draft"
        )
        divergence_named(self.divergence)
        require_choice("mode", self.mode, (HYBRID, PAPER))
        require_choice("child", self.child, CHILDREN)
        require_number("min_p", self.min_p, 0.0, 1.0, "0 turns the guard off")
        require_number("max_overshoot", self.max_overshoot, 0.0, math.inf, "inf turns the guard off")
        if self.max_consecutive is not None:
            require_integer("max_consecutive", self.max_consecutive, 0, "None turns the guard off")
        require_integer("exact_prefix", self.exact_prefix, 0, "0 turns the guard off")

    def follow(self, verified: Verified) -> Tensor | None:
        # T = 0 must stay lossless where a perfect head makes the divergence exactly 0, so it is a switch,
        # not a bound.
        if self.threshold == 0 or not verified.tree.owners.shape[1]:
            return None
        eligible = verified.allowed_children(self.exact_eos)  # [B, N, N]
        eligible &= self.close_nodes(verified)[:, :, None]
        log_p, log_q = verified.node_log_probs(), verified.tree.node_log_q()  # [B, N]
        if self.min_p > 0:
            best = verified.logits.amax(-1) - verified.logits.logsumexp(-1)  # [B, N] of each node
            best = best.gather(1, verified.tree.parents.clamp(min=0))
            eligible &= (log_p >= best + math.log(self.min_p))[:, None, :]
        if self.max_overshoot < math.inf:
            eligible &= (log_q.exp() <= self.max_overshoot * log_p.exp())[:, None, :]
        if self.child == "target":
            return likeliest_child(eligible, log_p)
        if self.child == "likeliest" or verified.sampling.greedy:
            return likeliest_child(eligible, log_q)
        return drawn_child(eligible, log_q, verified.uniforms)

    def close_nodes(self, verified: Verified) -> Tensor:
        """[B, N] bool: the nodes whose draft is within the threshold; a NaN divergence is not."""
        owners = verified.tree.owners  # [B, M]
        rows = torch.arange(len(owners), device=owners.device)[:, None]
        measured = divergence_named(self.divergence)(
            verified.logits[rows, owners.clamp(min=0)], verified.tree.log_q
        )
        close = (measured <= self.threshold) & (owners >= 0)  # [B, M]
        nodes = torch.zeros_like(verified.tree.tokens).scatter_add_(1, owners.clamp(min=0), close.long())
        return nodes > 0


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (Cai et al., arXiv 2401.10774, section 2.3.1), on competing siblings.

    A child is typical when p(x) > min(epsilon, delta * exp(-H(p))), H the entropy in nats; of several the
    likeliest is taken. p is at the sampling temperature, before top-k and top-p; when greedy, at temperature
    1. mode and the guards as in Fuzzy.
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
        require_choice("mode", self.mode, (HYBRID, PAPER))
        if self.max_consecutive is not None:
            require_integer("max_consecutive", self.max_consecutive, 0, "None turns the guard off")
        require_integer("exact_prefix", self.exact_prefix, 0, "0 turns the guard off")

    def follow(self, verified: Verified) -> Tensor | None:
        temperature = 1.0 if verified.sampling.greedy else verified.sampling.temperature
        log_p = (verified.logits / temperature).log_softmax(-1)  # [B, N, V]
        entropy = torch.special.entr(log_p.exp()).sum(-1)  # [B, N]
        bound = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        parents, tokens = verified.tree.parents.clamp(min=0), verified.tree.tokens
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        log_p = log_p[rows, parents, tokens]  # [B, N]
        typical = log_p.exp() > bound.gather(1, parents)
        return likeliest_child(verified.allowed_children(self.exact_eos) & typical[:, None, :], log_p)


def likeliest_child(eligible: Tensor, scores: Tensor) -> Tensor:
    """Every node's eligible child [B, N, N] of the largest score [B, N]: [B, N], -1 for none."""
    ranked = scores.nan_to_num(nan=-torch.inf)[:, None, :].clamp(min=torch.finfo(scores.dtype).min)
    best = ranked.expand_as(eligible).masked_fill(~eligible, -torch.inf).argmax(-1)
    return torch.where(eligible.any(-1), best, -1)


def drawn_child(eligible: Tensor, log_q: Tensor, uniforms: Tensor) -> Tensor:
    """Every node's child drawn from q among the eligible ones [B, N, N]: [B, N], -1 for none."""
    weights = log_q[:, None, :].expand_as(eligible).masked_fill(~eligible, -torch.inf)
    possible = (weights > -torch.inf).any(-1)  # a child of q = 0 is never drawn
    weights = torch.where(possible[..., None], weights, 0.0)
    weights = weights.softmax(-1)  # not exp: restricted q may underflow as it is
    return torch.where(possible, draw(weights, uniforms), -1)


def accept(
    rule: AcceptanceRule,
    tree: DraftTree,
    logits: Tensor,
    sampling: SamplingConfig,
    random: RowRandom,
    emitted: Tensor,
    eos: Tensor,
) -> Verdict:
    """Draw the target's token at every node and walk the tree under the rule.

    logits: [B, N, V] float32, the target's. emitted: [B] tokens emitted so far, for exact_prefix. eos: [E]
    token ids. Every row uses the same count of its own random numbers each step, whatever the other rows do.
    """
    nodes = tree.tokens.shape[1]
    if sampling.greedy:
        probs, uniforms = None, torch.zeros(len(emitted), 2 * nodes, device=logits.device)
        draws = logits.argmax(-1)  # [B, N]
    else:
        probs, uniforms = warp(logits, sampling), random.uniform(2 * nodes)
        draws = draw(probs, uniforms[:, :nodes])
    matches = tree.children & (tree.tokens[:, None, :] == draws[:, :, None])
    exact = torch.where(matches.any(-1), matches.to(torch.uint8).argmax(-1), -1)
    relaxed = rule.follow(Verified(tree, logits, probs, uniforms[:, nodes:], eos, sampling))
    return walk(
        rule, tree, draws, exact, exact.new_full(exact.shape, -1) if relaxed is None else relaxed, emitted
    )


def walk(
    rule: AcceptanceRule, tree: DraftTree, draws: Tensor, exact: Tensor, relaxed: Tensor, emitted: Tensor
) -> Verdict:
    """Follow exact or relaxed children [B, N] from the root, as the rule's mode says, to the end."""
    node = torch.zeros_like(emitted)  # [B]
    alive = torch.ones_like(emitted, dtype=torch.bool)
    in_a_row = torch.zeros_like(emitted)
    limit = tree.depth if rule.max_consecutive is None else rule.max_consecutive
    path, fuzzy = [node], [torch.zeros_like(alive)]
    for level in range(1, tree.depth + 1):
        match, choice = (table.gather(1, node[:, None])[:, 0] for table in (exact, relaxed))
        choice = torch.where((emitted + level > rule.exact_prefix) & (in_a_row < limit), choice, -1)
        first, second = (choice, match) if rule.mode == PAPER else (match, choice)
        child = torch.where(alive, torch.where(first >= 0, first, second), -1)
        alive = child >= 0
        by_rule = alive & (child != match)
        in_a_row = torch.where(by_rule, in_a_row + 1, 0)
        node = torch.where(alive, child, node)
        path.append(child)
        fuzzy.append(by_rule)
    path = torch.stack(path, dim=1)  # [B, depth + 1]
    length = (path >= 0).sum(1)
    next_token = draws.gather(1, node[:, None])[:, 0]
    tokens = torch.where(path >= 0, tree.tokens.gather(1, path.clamp(min=0)), -1)
    tokens = torch.cat((tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)), dim=1)
    tokens = tokens.scatter(1, length[:, None] - 1, next_token[:, None])
    return Verdict(path, length, tokens, next_token, torch.stack(fuzzy, dim=1))
