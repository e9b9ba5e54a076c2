"""Which path of a verified tree is accepted: the rules, and the walk that applies them. Knows no model.

At every node the target draws one token, x ~ p after the user's warpers (argmax at temperature 0). A walk
from the root then follows, at each node, the child that equals the draw (exact accept), or a child that the
rule lets through although it does not (fuzzy accept), or stops. The draw at the last node of the path is
emitted too: no node is ever drawn from twice, which is what makes the lossless rule lossless. Shapes: B rows,
N nodes, M draft distributions, V vocabulary, W drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from eagle_fsd.core.checks import require_choice, require_integer
from eagle_fsd.core.config import HYBRID, PAPER, SamplingConfig
from eagle_fsd.core.sampling import Uniforms, draw, warp
from eagle_fsd.core.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """The accepted path of one step.

    path: [B, depth + 1] node indices, root first, -1 padded. length: [B], nodes on the path, which is also
    the number of tokens that the step emits. tokens: [B, depth + 1] the emitted tokens, -1 padded: the path's
    drafted tokens, then next_token [B]. fuzzy: [B, depth + 1] bool, whether that node of the path was a fuzzy
    accept. asked: [B, depth + 1] bool, whether the rule had a say at that node (see max_consecutive,
    exact_prefix). finite: [B] bool, whether the target's logits are those of a distribution at every node of
    the path. chances: [B, N], the rule's own; None where it has none.
    """

    path: Tensor
    length: Tensor
    tokens: Tensor
    next_token: Tensor
    fuzzy: Tensor
    asked: Tensor
    finite: Tensor
    chances: Tensor | None = None


@dataclass(frozen=True)
class Verified:
    """What a rule may look at: a tree and what the target says of it.

    logits: [B, N, V] float32, the target's, raw. probs: [B, N, V] float32, p after temperature, top-k and
    top-p; None when greedy, which warps nothing. eos: [E] token ids that end a text.
    """

    tree: DraftTree
    logits: Tensor
    probs: Tensor | None
    eos: Tensor
    sampling: SamplingConfig

    @classmethod
    def from_logits(cls, tree: DraftTree, logits: Tensor, sampling: SamplingConfig, eos: Tensor) -> Verified:
        """What a target's logits [B, N, V] float32 say of a tree, under the user's sampling."""
        return cls(tree, logits, None if sampling.greedy else warp(logits, sampling), eos, sampling)

    def at_token(self, table: Tensor) -> Tensor:
        """What a table [B, N, V] has for each node's token at its parent: [B, N]; of the root nothing."""
        rows = torch.arange(len(table), device=table.device)[:, None]
        return table[rows, self.tree.parents.clamp(min=0), self.tree.tokens]

    def at_parent(self, table: Tensor) -> Tensor:
        """What a table [B, N] has for each node's parent: [B, N]; of the root nothing."""
        return table.gather(1, self.tree.parents.clamp(min=0))

    def log_p(self) -> Tensor:
        """Raw log p [B, N] of every node's token at its parent."""
        return self.at_token(self.logits) - self.at_parent(self.logits.logsumexp(-1))

    def gains(self) -> Tensor:
        """How many drafted tokens the target's own draws are expected to accept below every node: [B, N].

        In closed form, for p is known at every node: the sum over a node's children of p(child) (1 + its
        gain), p after the user's warpers.
        """
        if self.probs is None:
            p = (self.at_parent(self.logits.argmax(-1)) == self.tree.tokens).float()
        else:
            p = self.at_token(self.probs)
        below = self.tree.children.to(p.dtype)  # [B, N, N]
        gains = torch.zeros_like(p)
        for _ in range(self.tree.depth):
            gains = (below * (p * (1 + gains))[:, None, :]).sum(-1)
        return gains

    def allowed(self, exact_eos: bool) -> Tensor:
        """[B, N] bool: the nodes that a relaxed rule may follow.

        They must have p > 0 after the user's warpers; when greedy, the raw p decides.
        """
        if self.probs is None:
            allowed = self.at_token(self.logits) > -torch.inf
        else:
            allowed = self.at_token(self.probs) > 0
        if exact_eos:
            # torch.isin makes the host wait for the device where there are more than a few end tokens.
            allowed &= ~(self.tree.tokens[..., None] == self.eos).any(-1)
        return allowed & (self.tree.parents >= 0)


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

    def chances(self, verified: Verified) -> Tensor | None:
        """How likely the rule, asked at a node's parent, follows that node: [B, N]; None: never any.

        Siblings' chances sum to at most 1; with the rest the rule follows none.
        """


@dataclass(frozen=True)
class Lossless:
    """Follow the target's own draw only. The text has exactly the target's law, at every temperature."""

    mode: ClassVar[str] = HYBRID
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    def chances(self, verified: Verified) -> None:
        return None


def scatter_to_owners(tree: DraftTree, values: Tensor, missing: float | bool) -> Tensor:
    """What a table [B, M] has for each draft distribution, at its node: [B, N]; `missing` at the others."""
    nodes = tree.tokens.shape[1]
    table = values.new_full((len(values), nodes + 1), missing)  # padded owners fall into the last column
    return table.scatter_(1, torch.where(tree.owners >= 0, tree.owners, nodes), values)[:, :nodes]


def likeliest_chances(tree: DraftTree, eligible: Tensor, scores: Tensor) -> Tensor:
    """Chances [B, N] of a rule that follows, of eligible siblings [B, N], the one of the largest score."""
    eligible = tree.children & eligible[:, None, :]  # [B, N, N]
    ranked = scores.nan_to_num(nan=-torch.inf)[:, None, :].clamp(min=torch.finfo(scores.dtype).min)
    best = ranked.expand_as(eligible).masked_fill(~eligible, -torch.inf).argmax(-1)  # [B, N]
    # A node without such a child points at the root, which is nobody's child.
    return torch.zeros_like(scores).scatter_(1, torch.where(eligible.any(-1), best, 0), 1.0)


def proportional_chances(tree: DraftTree, eligible: Tensor, log_q: Tensor) -> Tensor:
    """Chances [B, N] of a rule that draws from q among eligible siblings [B, N]."""
    eligible = tree.children & eligible[:, None, :]  # [B, N, N]
    weights = log_q[:, None, :].expand_as(eligible).masked_fill(~eligible, -torch.inf)
    possible = (weights > -torch.inf).any(-1, keepdim=True)  # a child of q = 0 is never drawn
    # softmax, not exp: restricted q may underflow as it is
    return torch.where(possible, torch.where(possible, weights, 0.0).softmax(-1), 0.0).sum(1)


def choose(tree: DraftTree, chances: Tensor, uniforms: Tensor) -> Tensor:
    """The child that a rule follows at every node, -1 for none: chances, uniforms [B, N] -> [B, N]."""
    running = (tree.children * chances[:, None, :]).cumsum(-1)  # [B, N, N]
    whole = running[..., -1:]
    # Chances that sum to 1 but for rounding leave nothing to the other side.
    running = torch.where(whole > 1 - 1e-5, running / whole, running)
    hit = running > uniforms[..., None]
    return torch.where(hit.any(-1), hit.to(torch.uint8).argmax(-1), -1)


def accept(rule: AcceptanceRule, verified: Verified, random: Uniforms, emitted: Tensor) -> Verdict:
    """Draw the target's token at every node and walk the tree under the rule.

    emitted: [B] tokens emitted so far, for exact_prefix. Every row uses the same count of its own random
    numbers each step, whatever the other rows do and however many nodes this tree has.
    """
    tree, probs = verified.tree, verified.probs
    nodes, most = tree.tokens.shape[1], tree.largest
    if probs is None:
        uniforms = torch.zeros(len(emitted), 2 * most, device=emitted.device)
        draws = verified.logits.argmax(-1)  # [B, N]
    else:
        uniforms = random.uniform(2 * most)
        draws = draw(probs, uniforms[:, :nodes])
    matches = tree.children & (tree.tokens[:, None, :] == draws[:, :, None])
    exact = torch.where(matches.any(-1), matches.to(torch.uint8).argmax(-1), -1)
    chances = rule.chances(verified)
    relaxed = torch.full_like(exact, -1)
    if chances is not None:
        relaxed = choose(tree, chances, uniforms[:, most : most + nodes])
    return replace(walk(rule, verified, draws, exact, relaxed, emitted), chances=chances)


def walk(
    rule: AcceptanceRule, verified: Verified, draws: Tensor, exact: Tensor, relaxed: Tensor, emitted: Tensor
) -> Verdict:
    """Follow exact or relaxed children [B, N] from the root, as the rule's mode says, to the end."""
    tree = verified.tree
    node = torch.zeros_like(emitted)  # [B]
    alive = torch.ones_like(emitted, dtype=torch.bool)
    in_a_row = torch.zeros_like(emitted)
    limit = tree.depth if rule.max_consecutive is None else rule.max_consecutive
    children, followed, asked = [node], [torch.zeros_like(alive)], []  # of every level, [B] each
    for level in range(1, tree.depth + 1):
        match, choice = (table.gather(1, node[:, None])[:, 0] for table in (exact, relaxed))
        asked.append(alive & (emitted + level > rule.exact_prefix) & (in_a_row < limit))
        choice = torch.where(asked[-1], choice, -1)
        first, second = (choice, match) if rule.mode == PAPER else (match, choice)
        child = torch.where(alive, torch.where(first >= 0, first, second), -1)
        alive = child >= 0
        by_rule = alive & (child != match)
        in_a_row = torch.where(by_rule, in_a_row + 1, 0)
        node = torch.where(alive, child, node)
        children.append(child)
        followed.append(by_rule)
    asked.append(torch.zeros_like(alive))  # the deepest nodes have no children
    path = torch.stack(children, dim=1)  # [B, depth + 1]
    length = (path >= 0).sum(1)
    next_token = draws.gather(1, node[:, None])[:, 0]
    tokens = torch.where(path >= 0, tree.tokens.gather(1, path.clamp(min=0)), -1)
    tokens = torch.cat((tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)), dim=1)
    tokens = tokens.scatter(1, length[:, None] - 1, next_token[:, None])
    fuzzy = torch.stack(followed, dim=1)
    # What NaN, +inf or nothing but -inf does to a node's logits, it does to the largest of them.
    rows = torch.arange(len(path), device=path.device)[:, None]
    finite = verified.logits[rows, path.clamp(min=0)].amax(-1).isfinite().all(1)  # of [B, depth + 1, V]
    return Verdict(path, length, tokens, next_token, fuzzy, torch.stack(asked, dim=1), finite)


def require_guards(mode: object, max_consecutive: object, exact_prefix: object) -> None:
    """Raise ValueError unless these are what any acceptance rule may have."""
    require_choice("mode", mode, (HYBRID, PAPER))
    if max_consecutive is not None:
        require_integer("max_consecutive", max_consecutive, 0, "None turns the guard off")
    require_integer("exact_prefix", exact_prefix, 0, "0 turns the guard off")
