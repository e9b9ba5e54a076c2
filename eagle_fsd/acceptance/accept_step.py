"""The accept phase of a step: draws the target's tokens, walks the verified tree under a rule, says how far.

See acceptance/accept.py for what a draw, an exact and a fuzzy accept are. Shapes: B rows, N nodes.
"""

from __future__ import annotations

from dataclasses import fields, replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified, choices_of
from eagle_fsd.core.config import FIRST_FAILURE, PAPER
from eagle_fsd.core.devices import host_can_read
from eagle_fsd.core.randomness.streams import Uniforms
from eagle_fsd.core.sampling import Warped
from eagle_fsd.core.tree import DraftTree, with_last, with_root
from eagle_fsd.runtime.step_recorder import EAGER, Stepper, copied

FEW_ROWS = 64  # whose walks take the host less time than draws at all nodes
FEW_SIZES = 8  # up to this many rows a part of a batch is recorded: larger ones have a new size in most steps


def choose(tree: DraftTree, chances: Tensor, uniforms: Tensor) -> Tensor:
    """Draw the child that a rule follows at every node, -1 for none: chances, uniforms [B, N] -> [B, N]."""
    running = (tree.children * chances[:, None, :]).cumsum(-1)  # [B, N, N]
    whole = running[..., -1:]
    # If the chances sum to 1 up to rounding, rounding must not leave a chance of following none.
    running = torch.where(whole > 1 - 1e-5, running / whole, running)
    hit = running > uniforms[..., None]  # inverse CDF: the first child whose running sum exceeds u
    return torch.where(hit.any(-1), hit.to(torch.uint8).argmax(-1), -1)


def accept(
    rule: AcceptanceRule,
    verified: Verified,
    random: Uniforms,
    emitted: Tensor,
    noise: Tensor | None = None,
) -> Verdict:
    """Draw the target's token at every node and walk the tree under the rule.

    random: each row's stream. emitted: [B] tokens emitted so far, for exact_prefix. noise: [B, depth + 1, V],
    draws the tokens at each depth (see core/randomness/noise.py); None: uniform numbers do.
    """
    return accept_by(rule, verified, draw_uniforms(verified, random), emitted, noise)


def draw_uniforms(verified: Verified, random: Uniforms) -> Tensor | None:
    """Draw a step's uniform random numbers [B, 2 * largest], two for each node; None if it is greedy.

    Every row uses the same number of its own random numbers each step, whatever the other rows do and however
    many nodes this tree has: it may have fewer than the largest one.
    """
    return None if verified.sampling.greedy else random.uniform(2 * verified.tree.largest)


def accept_by(
    rule: AcceptanceRule,
    verified: Verified,
    uniforms: Tensor | None,
    emitted: Tensor,
    noise: Tensor | None = None,
) -> Verdict:
    """Do what `accept` does with the numbers of `draw_uniforms`: recorded work cannot draw any itself."""
    tree = verified.tree
    nodes, most = tree.tokens.shape[1], tree.largest
    (chances, weak), relaxed = choices_of(rule, verified), None
    if uniforms is None:
        draws = verified.best[1]  # [B, N]
    elif chances is None and nodes > 1 and len(tree.tokens) <= FEW_ROWS and host_can_read(verified.logits):
        draws = draws_on_path(verified, uniforms, noise)
    else:
        draws = draws_of(verified.warped, uniforms[:, :nodes], noise, tree.depths)
    if chances is not None:
        second = torch.zeros_like(chances) if uniforms is None else uniforms[:, most : most + nodes]
        relaxed = choose(tree, chances, second)
    verdict = walk(rule, verified, draws, relaxed, weak, emitted)
    return replace(verdict, chances=chances, weak=weak)


def draws_of(warped: Warped, uniforms: Tensor, noise: Tensor | None, depths: Tensor) -> Tensor:
    """Draw a token from each distribution: [B, N]. uniforms, depths: [B, N]. noise: see `accept`."""
    return warped.draw(uniforms) if noise is None else warped.drawn_by(noise, depths)


def draws_on_path(verified: Verified, uniforms: Tensor, noise: Tensor | None) -> Tensor:
    """Draw the tokens [B, N] at the nodes that a walk by the draws alone reaches; -1 elsewhere.

    The warpers take longer than the walk, and most nodes are not reached.
    """
    tree = verified.tree
    draws = torch.full_like(tree.tokens, -1)
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        place = slice(row, row + 1)
        mine = None if noise is None else noise[place]
        node: int | None = 0
        while node is not None:
            here = slice(node, node + 1)
            warped = Warped.from_logits(verified.logits[place, here], verified.sampling)
            drawn = draws_of(warped, uniforms[place, here], mine, tree.depths[place, here])
            draws[place, here] = drawn
            token = int(drawn)
            below = (child for child in range(node + 1, len(tokens)) if parents[child] == node)
            node = next((child for child in below if tokens[child] == token), None)
    return draws


def drawn_children(tree: DraftTree, draws: Tensor) -> Tensor:
    """Return the first child of every node whose token is the node's draw; N where none is: [B, N + 1].

    The last entry is that of N itself, which stands for no node.
    """
    nodes = draws.shape[1]
    parents = tree.parents.clamp(min=0)
    drawn = (tree.parents >= 0) & (tree.tokens == draws.gather(1, parents))
    number = torch.arange(nodes, device=draws.device)
    none = draws.new_full((len(draws), nodes + 1), nodes)
    return none.scatter_reduce(1, parents, torch.where(drawn, number, nodes), "amin")


def walk(
    rule: AcceptanceRule,
    verified: Verified,
    draws: Tensor,
    relaxed: Tensor | None,
    weak: Tensor | None,
    emitted: Tensor,
) -> Verdict:
    """Walk every row's tree from the root to the end.

    draws: [B, N] the target's tokens. relaxed: [B, N] the child that the rule would follow at each node, -1
    for none; None: none anywhere. weak: see Choices.
    """
    tree = verified.tree
    exact = drawn_children(tree, draws)  # [B, N + 1]
    stop = draws.shape[1]  # no node: its own child, so that rows that have stopped need no mask
    table, limit = next_states(rule, exact, relaxed, weak, tree.depth)  # [B, 1 or 2, S]
    may_ask = emitted[:, None] + torch.arange(1, tree.depth + 1, device=emitted.device) > rule.exact_prefix
    offsets = may_ask * table.shape[-1] if table.shape[1] == 2 else None
    # One table look-up a level. All rows take tree.depth steps, so the host never waits for a length.
    table = table.flatten(1)
    state = torch.zeros_like(emitted)[:, None]
    states = [state]
    for level in range(tree.depth):
        state = table.gather(1, state if offsets is None else state + offsets[:, level : level + 1])
        states.append(state)
    whole = torch.cat(states, dim=1)  # [B, depth + 1]
    in_a_row, path = whole // (stop + 1), whole % (stop + 1)
    alive = path < stop
    length = alive.sum(1)
    by_draw = exact.gather(1, path[:, :-1])
    fuzzy = with_root(0, alive[:, 1:] & (path[:, 1:] != by_draw))
    # The deepest nodes have no children to ask about.
    asked = with_last(alive[:, :-1] & may_ask & (in_a_row[:, :-1] < limit), 0)
    last = path.gather(1, length[:, None] - 1)
    next_token = draws.gather(1, last)
    # The root was emitted by the step before, so all tokens move up one place and the draw comes last.
    tokens = with_last(tree.tokens, -1).gather(1, with_last(path[:, 1:], stop))
    tokens = tokens.scatter(1, length[:, None] - 1, next_token)
    # The largest logit is enough: NaN, +inf, or nothing but -inf among the logits makes it non-finite.
    finite = with_last(verified.largest.isfinite(), 0).gather(1, path)
    path = torch.where(alive, path, -1)
    return Verdict(path, length, tokens, next_token[:, 0], fuzzy, asked, finite.long().cumprod(1).sum(1))


def next_states(
    rule: AcceptanceRule, exact: Tensor, relaxed: Tensor | None, weak: Tensor | None, depth: int
) -> tuple[Tensor, int]:
    """Return the walk as a table of states, and how many fuzzy accepts in a row it allows.

    exact: [B, N + 1], the child at each node that was drawn, N for none. relaxed, weak: see `walk`. State
    c * (N + 1) + n is node n after c fuzzy accepts in a row; c stays 0 where nothing limits it. The table
    [B, 1 or 2, S] has each state's next one; of two lines, the first is for where the rule may not be asked.
    """
    width = exact.shape[1]  # N + 1
    limit = depth if rule.max_consecutive is None else rule.max_consecutive
    if relaxed is None or limit == 0:
        return exact[:, None], limit
    relaxed = with_last(relaxed, -1)
    if rule.mode == PAPER:
        followed = torch.where(relaxed < 0, exact, relaxed)
    elif rule.mode == FIRST_FAILURE:
        followed = torch.where(relaxed < 0, width - 1, relaxed)
    else:
        open_to_rule = exact == width - 1
        if weak is not None:
            open_to_rule = open_to_rule | with_last(weak, False).gather(1, exact)
        followed = torch.where(open_to_rule & (relaxed >= 0), relaxed, exact)
    asked, unasked = followed[:, None], exact[:, None]
    if limit < depth:
        # A relaxed choice that equals the draw counts as exact, and an exact accept sets the count to 0.
        counts = torch.arange(1, limit + 1, device=exact.device)[:, None] * width  # [limit, 1]
        asked = torch.cat((asked + (followed != exact)[:, None] * counts, unasked), dim=1)
        unasked = unasked.expand_as(asked)
    asked, unasked = asked.flatten(1), unasked.flatten(1)
    if not rule.exact_prefix:
        return asked[:, None], limit
    return torch.stack((unasked, asked), dim=1), limit


class AcceptStep:
    """Applies acceptance rules to verified trees. stepper: runs the work, recorded or not."""

    def __init__(self, stepper: Stepper = EAGER) -> None:
        self.stepper = stepper
        self._accept_recorded = stepper.wrap(accept_anew)
        # Apart from the above, whose recordings read logits where a forward leaves them: changed logits would
        # be copied there, over the target's own.
        self._accept_changed = stepper.wrap(accept_anew)

    def __call__(
        self,
        rule: AcceptanceRule,
        verified: Verified,
        random: Uniforms,
        emitted: Tensor,
        noise: Tensor | None = None,
        several: bool = False,
        changed: bool = False,
    ) -> Verdict:
        """Do what `accept` does, recorded where that is possible.

        several: whether other trees are accepted before this verdict is read. It is then copied out of memory
        that recordings share. changed: whether the logits are other ones than the target's own.
        """
        recurs = not several or len(emitted) <= FEW_SIZES
        if not (self.stepper.records and recurs and is_immutable(rule)):
            return accept(rule, verified, random, emitted, noise)
        run = self._accept_changed if changed else self._accept_recorded
        verdict = run(rule, verified, draw_uniforms(verified, random), emitted, noise)
        return copied(verdict) if several else verdict


def accept_anew(
    rule: AcceptanceRule, verified: Verified, uniforms: Tensor | None, emitted: Tensor, noise: Tensor | None
) -> Verdict:
    """Do what `accept_by` does, for a recording, which would miss what `verified` has already computed."""
    return accept_by(rule, replace(verified), uniforms, emitted, noise)


def is_immutable(thing: Any) -> bool:
    """Return whether this cannot change, and everything equal to it behaves alike, as a recording needs.

    True for numbers, strings, None, tuples of such things, and frozen dataclasses that hold only fields of
    such things. Any other object may change between two calls.
    """
    if thing is None or isinstance(thing, (Number, str, bytes)):
        return True
    if type(thing) is tuple:
        return all(map(is_immutable, thing))
    settings = vars(type(thing)).get("__dataclass_params__")  # its own, not those of a class it derives from
    if settings is None or not (settings.frozen and settings.eq):
        return False
    names = {field.name for field in fields(thing) if field.compare}
    held = set(getattr(thing, "__dict__", names)) | {field.name for field in fields(thing)}
    return held == names and all(is_immutable(getattr(thing, name)) for name in names)
