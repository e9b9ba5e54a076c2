"""Which path of a verified tree is accepted: the rules' protocol, and the walk that applies a rule.

At every node the target draws one token, x ~ p after the user's warpers (argmax at temperature 0). A walk
from the root then follows, at each node, the child that equals the draw (exact accept), or another child that
the rule lets through (fuzzy accept), or it stops. The draw at the last node of the path is emitted too. No
node is ever drawn from twice, which is what makes the lossless rule lossless. Shapes: B rows, N nodes, M
draft distributions, V vocabulary, W drafted tokens. Knows no model.
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
    accept. asked: [B, depth + 1] bool, whether the rule was asked at that node (see max_consecutive,
    exact_prefix). finite: [B] bool, whether the target's logits give a distribution at every node of the
    path. chances: [B, N], what `AcceptanceRule.chances` returned.
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
    """What a rule may look at: a tree, and the target's distributions at its nodes.

    logits: [B, N, V] float32, the target's raw logits. probs: [B, N, V] float32, p after temperature, top-k
    and top-p; None when greedy, which warps nothing. eos: [E] token ids that end a text.
    """

    tree: DraftTree
    logits: Tensor
    probs: Tensor | None
    eos: Tensor
    sampling: SamplingConfig

    @classmethod
    def from_logits(cls, tree: DraftTree, logits: Tensor, sampling: SamplingConfig, eos: Tensor) -> Verified:
        """Build it from a tree and the target's logits [B, N, V] float32, under the user's sampling."""
        return cls(tree, logits, None if sampling.greedy else warp(logits, sampling), eos, sampling)

    def at_token(self, table: Tensor) -> Tensor:
        """Return a table's [B, N, V] entry for each node's token at its parent: [B, N].

        The root has no parent, so its entry means nothing.
        """
        rows = torch.arange(len(table), device=table.device)[:, None]
        return table[rows, self.tree.parents.clamp(min=0), self.tree.tokens]

    def at_parent(self, table: Tensor) -> Tensor:
        """Return a table's [B, N] entry for each node's parent: [B, N]; the root's entry means nothing."""
        return table.gather(1, self.tree.parents.clamp(min=0))

    def log_p(self) -> Tensor:
        """Return raw log p [B, N] of every node's token at its parent."""
        # Only N entries are read, so one log-sum-exp is cheaper than a log_softmax over [B, N, V].
        return self.at_token(self.logits) - self.at_parent(self.logits.logsumexp(-1))

    def gains(self) -> Tensor:
        """Return how many drafted tokens the target's draws are expected to accept below each node: [B, N].

        p is known at every node, so there is a closed form: a node's gain is the sum over its children of
        p(child) * (1 + the child's gain), with p after the user's warpers.
        """
        if self.probs is None:
            p = (self.at_parent(self.logits.argmax(-1)) == self.tree.tokens).float()
        else:
            p = self.at_token(self.probs)
        below = self.tree.children.to(p.dtype)  # [B, N, N]
        gains = torch.zeros_like(p)
        for _ in range(self.tree.depth):  # each round carries gains one level up
            gains = (below * (p * (1 + gains))[:, None, :]).sum(-1)
        return gains

    def allowed(self, exact_eos: bool) -> Tensor:
        """Return the nodes that a relaxed rule may follow: [B, N] bool.

        They must have p > 0 after the user's warpers; when greedy, the raw p counts. exact_eos: rule out end
        tokens.
        """
        if self.probs is None:
            allowed = self.at_token(self.logits) > -torch.inf
        else:
            allowed = self.at_token(self.probs) > 0
        if exact_eos:
            # torch.isin would make the host wait for the device if there are more than a few end tokens.
            allowed &= ~(self.tree.tokens[..., None] == self.eos).any(-1)
        return allowed & (self.tree.parents >= 0)


class AcceptanceRule(Protocol):
    """Decides when a drafted token may be emitted although the target did not draw it.

    mode: "hybrid" asks the rule only where the draw is not a child; "paper" asks it first.
    max_consecutive: the most relaxed accepts in a row; the target's draw that ends a step resets the count.
    exact_prefix: how many tokens at the start of a text are the target's draws only.
    """

    @property
    def mode(self) -> str: ...

    @property
    def max_consecutive(self) -> int | None: ...

    @property
    def exact_prefix(self) -> int: ...

    def chances(self, verified: Verified) -> Tensor | None:
        """Return the probability that the rule, asked at a node's parent, follows that node: [B, N].

        The chances of siblings sum to at most 1; with the remaining probability the rule follows none of
        them. None means that the rule follows no node at all.
        """


@dataclass(frozen=True)
class Lossless:
    """Follows only the target's own draw. The text has exactly the target's distribution."""

    mode: ClassVar[str] = HYBRID
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    def chances(self, verified: Verified) -> None:
        return None


def scatter_to_owners(tree: DraftTree, values: Tensor, missing: float | bool) -> Tensor:
    """Move values [B, M] of draft distributions to the nodes that own them: [B, N]; `missing` elsewhere."""
    nodes = tree.tokens.shape[1]
    table = values.new_full((len(values), nodes + 1), missing)  # padded owners go to a column that is cut off
    return table.scatter_(1, torch.where(tree.owners >= 0, tree.owners, nodes), values)[:, :nodes]


def likeliest_chances(tree: DraftTree, eligible: Tensor, scores: Tensor) -> Tensor:
    """Return the chances [B, N] of a rule that follows the eligible sibling [B, N] with the largest score."""
    eligible = tree.children & eligible[:, None, :]  # [B, N, N]
    # -inf marks ineligible nodes, so an eligible node's score must be above it.
    ranked = scores.nan_to_num(nan=-torch.inf)[:, None, :].clamp(min=torch.finfo(scores.dtype).min)
    best = ranked.expand_as(eligible).masked_fill(~eligible, -torch.inf).argmax(-1)  # [B, N]
    # A node without an eligible child points at the root, which is nobody's child.
    return torch.zeros_like(scores).scatter_(1, torch.where(eligible.any(-1), best, 0), 1.0)


def proportional_chances(tree: DraftTree, eligible: Tensor, log_q: Tensor) -> Tensor:
    """Return the chances [B, N] of a rule that draws from q among eligible siblings [B, N]."""
    eligible = tree.children & eligible[:, None, :]  # [B, N, N]
    weights = log_q[:, None, :].expand_as(eligible).masked_fill(~eligible, -torch.inf)
    possible = (weights > -torch.inf).any(-1, keepdim=True)  # a child of q = 0 is never drawn
    # q must be renormalised over the eligible children. A softmax does it without underflow; exp would not.
    return torch.where(possible, torch.where(possible, weights, 0.0).softmax(-1), 0.0).sum(1)


def choose(tree: DraftTree, chances: Tensor, uniforms: Tensor) -> Tensor:
    """Draw the child that a rule follows at every node, -1 for none: chances, uniforms [B, N] -> [B, N]."""
    running = (tree.children * chances[:, None, :]).cumsum(-1)  # [B, N, N]
    whole = running[..., -1:]
    # If the chances sum to 1 up to rounding, rounding must not leave a chance of following none.
    running = torch.where(whole > 1 - 1e-5, running / whole, running)
    hit = running > uniforms[..., None]  # inverse CDF: the first child whose running sum exceeds u
    return torch.where(hit.any(-1), hit.to(torch.uint8).argmax(-1), -1)


def accept(rule: AcceptanceRule, verified: Verified, random: Uniforms, emitted: Tensor) -> Verdict:
    """Draw the target's token at every node and walk the tree under the rule.

    emitted: [B] tokens emitted so far, for exact_prefix. Every row uses the same number of its own random
    numbers each step, whatever the other rows do and however many nodes this tree has.
    """
    tree, probs = verified.tree, verified.probs
    nodes, most = tree.tokens.shape[1], tree.largest  # a tree may have fewer nodes than the largest one
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
    """Follow exact or relaxed children [B, N] from the root to the end, in the order of the rule's mode."""
    # All rows take tree.depth steps: rows that have stopped are masked, so the host never waits for a length.
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
        by_rule = alive & (child != match)  # a relaxed choice that equals the draw counts as exact
        in_a_row = torch.where(by_rule, in_a_row + 1, 0)
        node = torch.where(alive, child, node)
        children.append(child)
        followed.append(by_rule)
    asked.append(torch.zeros_like(alive))  # the deepest nodes have no children to ask about
    path = torch.stack(children, dim=1)  # [B, depth + 1]
    length = (path >= 0).sum(1)
    next_token = draws.gather(1, node[:, None])[:, 0]
    tokens = torch.where(path >= 0, tree.tokens.gather(1, path.clamp(min=0)), -1)
    # The root was emitted by the step before, so all tokens move up one place and the draw comes last.
    tokens = torch.cat((tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)), dim=1)
    tokens = tokens.scatter(1, length[:, None] - 1, next_token[:, None])
    fuzzy = torch.stack(followed, dim=1)
    # The largest logit is enough: NaN, +inf, or nothing but -inf among the logits makes it non-finite.
    rows = torch.arange(len(path), device=path.device)[:, None]
    finite = verified.logits[rows, path.clamp(min=0)].amax(-1).isfinite().all(1)  # of [B, depth + 1, V]
    return Verdict(path, length, tokens, next_token, fuzzy, torch.stack(asked, dim=1), finite)


def require_guards(mode: object, max_consecutive: object, exact_prefix: object) -> None:
    """Raise ValueError unless these are valid values of the fields that every acceptance rule has."""
    require_choice("mode", mode, (HYBRID, PAPER))
    if max_consecutive is not None:
        require_integer("max_consecutive", max_consecutive, 0, "None turns the guard off")
    require_integer("exact_prefix", exact_prefix, 0, "0 turns the guard off")
