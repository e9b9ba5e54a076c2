"""Which path of a verified tree is accepted: the rules' protocol, and what they see. accept_step.py walks it.

At every node the target draws one token, x ~ p after the user's warpers (argmax at temperature 0). A walk
from the root then follows, at each node, the child that equals the draw (exact accept), or another child that
the rule lets through (fuzzy accept), or it stops. The draw at the last node of the path is emitted too. No
node is ever drawn from twice, which is what makes the lossless rule lossless. Shapes: B rows, N nodes, M
draft distributions, V vocabulary, W drafted tokens. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from eagle_fsd.core.checks import require_boolean, require_choice, require_integer
from eagle_fsd.core.config import FIRST_FAILURE, HYBRID, MODES, PAPER, SamplingConfig
from eagle_fsd.core.long_rows import first_largest, logsumexp
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.sampling import Warped
from eagle_fsd.core.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """The accepted path of one step.

    path: [B, depth + 1] node indices, root first, -1 padded. length: [B], nodes on the path, which is also
    the number of tokens that the step emits. tokens: [B, depth + 1] the emitted tokens, -1 padded: the path's
    drafted tokens, then next_token [B]. fuzzy: [B, depth + 1] bool, whether that node of the path was a fuzzy
    accept. asked: [B, depth + 1] bool, whether the rule was asked at that node (see max_consecutive,
    exact_prefix). sound: [B], how many of the tokens, from the first on, may be emitted: up to the first node
    of the path where the target's logits give no distribution. chances, weak: [B, N] each, what
    `AcceptanceRule.chances` returned.
    """

    path: Tensor
    length: Tensor
    tokens: Tensor
    next_token: Tensor
    fuzzy: Tensor
    asked: Tensor
    sound: Tensor
    chances: Tensor | None = None
    weak: Tensor | None = None

    def select(self, rows: Sequence[int]) -> Verdict:
        """Return the verdict on these rows of the batch."""
        index = on_device(rows, self.path.device)
        whole = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: one[index] for name, one in whole.items() if one is not None})


@dataclass(frozen=True)
class Verified:
    """What a rule may look at: a tree, and the target's distributions at its nodes.

    logits: [B, N, V] float32, the target's logits after penalties, bans and forms, before the temperature.
    eos: [E] token ids that end a text. What follows from the logits is computed when it is first read.
    """

    tree: DraftTree
    logits: Tensor
    sampling: SamplingConfig
    eos: Tensor

    def select(self, rows: Sequence[int]) -> Verified:
        """Return what was verified in these rows of the batch."""
        index = on_device(rows, self.logits.device)
        return replace(self, tree=self.tree.select(rows), logits=self.logits[index])

    @cached_property
    def probs(self) -> Tensor | None:
        """[B, N, V] float32, p after temperature, top-k, top-p and min-p; None when greedy.

        `warped_p` gives the nodes' own entries of it at a fraction of the time.
        """
        return None if self.sampling.greedy else self.warped.whole(self.logits.shape[-1])

    @cached_property
    def warped(self) -> Warped:
        """The same distributions, over few tokens if only those can be drawn."""
        return Warped.from_logits(self.logits, self.sampling)

    @cached_property
    def best(self) -> tuple[Tensor, Tensor]:
        """The largest raw logit at every node, and the first token that has it: [B, N] each."""
        return first_largest(self.logits)

    @cached_property
    def largest(self) -> Tensor:
        """The largest raw logit at every node: [B, N]."""
        if self.sampling.greedy:
            return self.best[0]
        return self.warped.largest if "warped" in vars(self) else self.logits.amax(-1)

    def warped_p(self) -> Tensor:
        """Return p after the user's warpers of every node's token at its parent: [B, N], not when greedy."""
        probs, ids = self.warped.probs, self.warped.ids
        if ids is None:
            return self.at_token(probs)
        mine = ids[self.rows, self.parents] == self.tree.tokens[..., None]  # [B, N, K]
        return torch.where(mine, probs[self.rows, self.parents], 0.0).sum(-1)

    def drawn_p(self) -> Tensor:
        """Return how likely the target draws every node's token at its parent: [B, N], 0 or 1 when greedy."""
        if self.sampling.greedy:
            return (self.at_parent(self.best[1]) == self.tree.tokens).float()
        return self.warped_p()

    @cached_property
    def parents(self) -> Tensor:
        """[B, N], the node whose distributions a node's token is read in; the root's is itself."""
        return self.tree.parents.clamp(min=0)

    @cached_property
    def rows(self) -> Tensor:
        """[B, 1], the number of each row."""
        return torch.arange(len(self.logits), device=self.logits.device)[:, None]

    def at_token(self, table: Tensor) -> Tensor:
        """Return a table's [B, N, V] entry for each node's token at its parent: [B, N].

        The root has no parent, so its entry means nothing.
        """
        return table[self.rows, self.parents, self.tree.tokens]

    def at_parent(self, table: Tensor) -> Tensor:
        """Return a table's [B, N] entry for each node's parent: [B, N]; the root's entry means nothing."""
        return table.gather(1, self.parents)

    def at_owners(self) -> Tensor:
        """Return the logits at the nodes that own a draft distribution: [B, M, V]."""
        owners = self.tree.owners.clamp(min=0)  # an unused row of log_q gets the root's
        places = owners + self.rows * self.logits.shape[1]
        return self.logits.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, owners.shape)

    def log_p(self) -> Tensor:
        """Return raw log p [B, N] of every node's token at its parent."""
        # Only N entries are read, so one log-sum-exp is cheaper than a log_softmax over [B, N, V].
        return self.at_token(self.logits) - self.at_parent(logsumexp(self.logits)[..., 0])

    def gains(self) -> Tensor:
        """Return how many drafted tokens the target's draws are expected to accept below each node: [B, N].

        p is known at every node, so there is a closed form: a node's gain is the sum over its children of
        p(child) * (1 + the child's gain), with p after the user's warpers.
        """
        return self.carried_up(self.tree.depth, 1.0, 0.0)

    def carried_up(self, levels: int, own: float, start: float) -> Tensor:
        """Return values of the nodes after so many rounds from `start` on: [B, N].

        In each round a node gets the sum over its children of p(child) * (own + the child's value), with p
        after the user's warpers, which carries values one level up.
        """
        p = self.drawn_p()
        below = self.tree.children.to(p.dtype)  # [B, N, N]
        values = torch.full_like(p, start)
        for _ in range(levels):
            values = (below * (p * (own + values))[:, None, :]).sum(-1)
        return values

    def allowed(self, exact_eos: bool) -> Tensor:
        """Return the nodes that a relaxed rule may follow: [B, N] bool.

        They must have p > 0 after the user's warpers; when greedy, the raw p counts. exact_eos: rule out end
        tokens.
        """
        greedy = self.sampling.greedy
        allowed = self.at_token(self.logits) > -torch.inf if greedy else self.warped_p() > 0
        if exact_eos:
            allowed &= ~self.ends
        return allowed & (self.tree.parents >= 0)

    @cached_property
    def divergences(self) -> dict[str, Tensor]:
        """Divergences of p and q at every node, by name, of the rules that have looked: [B, N] each."""
        return {}

    @cached_property
    def ends(self) -> Tensor:
        """The nodes whose token ends a text: [B, N] bool."""
        # torch.isin would make the host wait for the device if there are more than a few end tokens.
        return (self.tree.tokens[..., None] == self.eos).any(-1)


class Choices(NamedTuple):
    """What a rule may return in place of its chances if it also follows a child where another was drawn.

    chances: as of `AcceptanceRule.chances`. weak: [B, N] bool, children whose draw leaves the choice to the
    rule, as a draw does that is no child.
    """

    chances: Tensor
    weak: Tensor


class AcceptanceRule(Protocol):
    """Decides when a drafted token may be emitted although the target did not draw it.

    mode: "hybrid" asks the rule only where the draw is not a child; "swap" also where the drawn child is weak
    (see Choices); "paper" asks it first. "first-failure" asks it first as well, and where it follows no
    child, the step ends with the draw.
    max_consecutive: the most fuzzy accepts in a row; an exact accept, or the end of a step, resets the count.
    exact_prefix: how many tokens at the start of a text must be the target's own draws.

    A rule may have an attribute `exact`: whether it follows nothing but the target's own draws. Then its warm
    texts share the noise of the draws, as those of Lossless do.
    """

    @property
    def mode(self) -> str: ...

    @property
    def max_consecutive(self) -> int | None: ...

    @property
    def exact_prefix(self) -> int: ...

    def chances(self, verified: Verified) -> Tensor | Choices | None:
        """Return the probability that the rule, asked at a node's parent, follows that node: [B, N].

        The chances of siblings sum to at most 1; with the remaining probability the rule follows none of
        them. None means that the rule follows no node at all.
        """


def choices_of(rule: AcceptanceRule, verified: Verified) -> tuple[Tensor | None, Tensor | None]:
    """Return a rule's chances and its weak children: [B, N] each, or None."""
    found = rule.chances(verified)
    chances, weak = found if isinstance(found, Choices) else (found, None)
    wanted = verified.tree.tokens.shape
    for name, one in (("chances", chances), ("weak children", weak)):
        if one is not None and getattr(one, "shape", None) != wanted:
            given = f"of shape {list(one.shape)}" if hasattr(one, "shape") else type(one).__name__
            raise ValueError(
                f"the {name} of {type(rule).__name__} are {given}: they must be a tensor {list(wanted)}, one "
                "value for each node [B, N]; return None to follow none"
            )
    return chances, weak


@dataclass(frozen=True)
class Lossless:
    """Follows only the target's own draw. The text has exactly the target's distribution.

    share_noise: let the draft know the noise of the draws where that pays (see core/randomness/noise.py).
    Without it the draws are independent of the trees, which some measurements need.
    """

    share_noise: bool = True
    mode: ClassVar[str] = HYBRID
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_boolean("share_noise", self.share_noise)

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


def require_rule(rule: object) -> None:
    """Raise ValueError unless this is an AcceptanceRule."""
    if isinstance(rule, type) or not hasattr(rule, "chances"):
        raise ValueError(f"rule is {rule!r}: it must be a rule, such as Fuzzy(threshold=0.3)")
    fields = ("mode", "max_consecutive", "exact_prefix")
    if missing := [name for name in fields if not hasattr(rule, name)]:
        raise ValueError(
            f"rule is {rule!r}: it has no {', '.join(missing)}; give it what an AcceptanceRule has"
        )
    mode, max_consecutive, exact_prefix = (getattr(rule, name) for name in fields)
    require_guards(mode, max_consecutive, exact_prefix, (*MODES, FIRST_FAILURE))


def require_guards(
    mode: object, max_consecutive: object, exact_prefix: object, modes: Sequence[str] = (HYBRID, PAPER)
) -> None:
    """Raise ValueError unless these are valid values of the fields that every acceptance rule has."""
    require_choice("mode", mode, modes)
    most = 2**31 - 1  # longer than any text, and a tensor of places can be compared with it
    if max_consecutive is not None:
        require_integer("max_consecutive", max_consecutive, 0, "None turns the guard off", most)
    require_integer("exact_prefix", exact_prefix, 0, "0 turns the guard off", most)
