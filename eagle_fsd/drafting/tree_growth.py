"""The growth of an EAGLE-2 tree (arXiv 2406.16858, section 4.1) with any network that predicts tokens.

A `Predictor` scores the next token and reads one level of tokens at a time. `BeamDrafter` uses it to grow
trees level by level, from the nodes with the most probable paths, and then keeps the best nodes of all.
Shapes: B rows, K top_k, W drafted tokens, d the width of a predictor's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import host_can_read
from eagle_fsd.core.long_rows import topk
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import Candidates, DraftTree, build_tree, root_only
from eagle_fsd.drafting.draft_vocabulary import OwnTokens
from eagle_fsd.drafting.drafter import Drafter, Needs, Seen
from eagle_fsd.drafting.text_tokens import TextTokens
from eagle_fsd.runtime.kv_cache import KVCache, SavedRow
from eagle_fsd.runtime.step_recorder import EAGER, Stepper, moved

NO_LIMIT = 2**31 - 1  # positions of a predictor that reads texts of any length
LOWEST = -1e30  # the score of what is never drafted is below it, any other is above it


class Predictor(Protocol):
    """A network that predicts tokens from committed text and from drafted tokens after it.

    A state [..., d] is its output at one token; `log_q` reads the next token's distribution from it.
    needs: see Needs. drafted: the target's ids [W] of the tokens that it proposes; None: all, in order.
    own: remembers what each text has drafted beside these; None: nothing.
    cache: its own cache, which holds the committed text and after it a growing tree. behind: how many slots
    fewer it takes than a text has tokens. width: d. longest: how many tokens it can read; nothing is drafted
    for a text that has more.
    """

    needs: Needs
    cache: KVCache
    drafted: Tensor | None
    behind: int
    width: int

    @property
    def own(self) -> TextTokens | None: ...

    @property
    def longest(self) -> int: ...

    def commit(self, seen: Seen, first: bool) -> Tensor:
        """Read committed text and return the state [B, d] at each row's root. first: prompts, or parts."""

    def log_q(self, states: Tensor, own: OwnTokens | None = None) -> Tensor:
        """Return log-probabilities [..., W] at temperature 1, float32, from states [..., d].

        own: what `own.now()` returned, of as many rows as states [B, n, d] have; W is then own.drafted's.
        """

    def step(self, tokens: Tensor, parents: Tensor, level: int, visible: Tensor) -> Tensor:
        """Read one level of drafted tokens [B, K], `level` tokens below the root, and return their states.

        parents: [B, K, d], the state at each token's parent. visible: [B, K, S], the slots of the cache that
        each token sees. The tokens' own keys go to the slots that the caller placed.
        """


@dataclass(frozen=True)
class Grown:
    """All that was drafted for a tree, before its best nodes are chosen. E nodes were expanded.

    pool: the candidates, top_k of each expanded node, in the order of `expanded` [B, E], which are their
    parents. log_q: [B, W] of each expanded node. depth: the most drafted tokens on a path.
    """

    pool: Candidates
    log_q: tuple[Tensor, ...]
    expanded: Tensor
    depth: int


class BeamDrafter:
    """A drafter that grows EAGLE-2 trees with a predictor, for one batch of texts.

    stepper: runs the growth. whole_trees: whether all trees of a config must have the same shapes, as they
    have wherever the host cannot read scores. They are filled with the next best nodes then, also with those
    below min_confidence. If the predictor is on another device than the roots, its trees are brought to
    theirs.
    """

    def __init__(self, predictor: Predictor, stepper: Stepper = EAGER, whole_trees: bool = False) -> None:
        self.predictor = predictor
        self.cache = predictor.cache
        self.needs = predictor.needs
        self.root_states = self._no_states()
        self._grow = stepper.wrap(self.grow, self.cache)
        self._grow_candidates = stepper.wrap(self.grow_candidates, self.cache)
        self._fixed_shapes = stepper.records
        self._whole_trees = whole_trees or stepper.records

    @property
    def rows(self) -> int:
        return self.cache.rows

    def begin(self, seen: Seen) -> None:
        self.root_states = self.predictor.commit(seen, first=True)

    def read_on(self, seen: Seen) -> None:
        self.root_states = self.predictor.commit(seen, first=True)

    def extend(self, seen: Seen) -> None:
        if not self._fixed_shapes:  # the tokens of a step are padded to the tree's depth
            seen = seen.without_padding()
        self.root_states = self.predictor.commit(seen, first=False)

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        """Propose a tree below roots [B]. Its log_q are those of the target's draws where noise is shared."""
        tree: DraftTree | None = self._run(self._grow, roots, config, noise)
        if tree is None:
            tree = root_only(roots, 0, config.total_tokens)
        return tree.filled_up() if self._whole_trees else tree

    def candidates(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> Grown | None:
        """Draft as `draft` does, for a caller that chooses the best nodes itself; None: nothing fits.

        The candidates are on the roots' device.
        """
        grown: Grown | None = self._run(self._grow_candidates, roots, config, noise)
        return grown

    def _run(
        self, grow: Callable[..., Any], roots: Tensor, config: TreeConfig, noise: DraftNoise | None
    ) -> Any:
        """Grow for the rows whose text the predictor can read; None if there are none.

        The predictor may be on another device than the roots; what it made is brought to theirs.
        """
        fits = [length <= self.predictor.longest for length in self.cache.row_lengths]
        if not any(fits):
            return None
        self.cache.reserve(slots_for_beams(config))
        some = None if all(fits) else on_device(fits, self.cache.device).bool()
        if noise is not None and roots.device != self.cache.device:
            noise = moved(noise, self.cache.device)
        own = None if self.predictor.own is None else self.predictor.own.now()
        made = grow(roots.to(self.cache.device), self.root_states, config, some, noise, own)
        return made if roots.device == self.cache.device else moved(made, roots.device)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        if self.predictor.own is not None:
            self.predictor.own.select(rows)
        self.root_states = self.root_states[on_device(rows, self.root_states.device)]

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        assert isinstance(other, BeamDrafter)
        self.cache.replace(rows, other.cache)
        if self.predictor.own is not None and other.predictor.own is not None:
            self.predictor.own.replace(rows, other.predictor.own)
        self.root_states = self.root_states.to(other.root_states.dtype)  # those of no text yet are float32
        self.root_states[on_device(rows, self.root_states.device)] = other.root_states

    def save_row(self, row: int, tokens: int) -> tuple[SavedRow, ...] | None:
        count = tokens - self.predictor.behind
        # A text that began with one token has a slot more, see `new_pairs`: no other text is read so.
        if self.cache.row_lengths[row] != count:
            return None
        return (self.cache.save_row(row, count),)

    def load_row(self, row: int, saved: tuple[SavedRow, ...], tokens: Sequence[int]) -> None:
        self.cache.load_row(row, saved[0], len(tokens) - self.predictor.behind)
        if self.predictor.own is not None:
            self.predictor.own.load_row(row, tokens)

    def reset(self, longest: int, tree: TreeConfig) -> None:
        self.cache.reset(slots_per_row(longest, tree))
        self.root_states = self._no_states()
        if self.predictor.own is not None:
            self.predictor.own.reset(self.cache.rows)

    def _no_states(self) -> Tensor:
        """Return states [rows, d] of rows that hold no text yet."""
        return torch.zeros(self.cache.rows, self.predictor.width, device=self.cache.device)

    def grow(
        self,
        roots: Tensor,
        root_states: Tensor,
        config: TreeConfig,
        fits: Tensor | None = None,
        noise: DraftNoise | None = None,
        own: OwnTokens | None = None,
    ) -> DraftTree:
        """Grow candidates below root_states [B, d], and keep the best nodes of all; see grow_candidates."""
        grown = self.grow_candidates(roots, root_states, config, fits, noise, own)
        least = config.min_score
        if config.min_confidence and (self._whole_trees or not host_can_read(grown.pool.scores)):
            least = LOWEST  # all nodes are paid for, and unlikely ones do more than fillers
        return build_tree(
            roots,
            grown.pool,
            config.total_tokens,
            grown.depth,
            grown.log_q,
            grown.expanded,
            self.predictor.drafted if own is None else own.drafted,
            # Which tokens would fill up a tree without probability may depend on what other texts have.
            least if fits is None and own is None else max(least, LOWEST),
        )

    def grow_candidates(
        self,
        roots: Tensor,
        root_states: Tensor,
        config: TreeConfig,
        fits: Tensor | None = None,
        noise: DraftNoise | None = None,
        own: OwnTokens | None = None,
    ) -> Grown:
        """Grow levels of `top_k` beam nodes by cumulative log-probability.

        root_states: [B, d]. fits: [B] bool, whether the predictor can read a row's text; other rows get no
        nodes. None: it reads all. noise: see `Drafter.draft`. own: see `Predictor.log_q`. The ancestors of a
        kept node are kept, so no node beyond level `config.reach` could be in the tree.
        """
        predictor, cache = self.predictor, self.cache
        drafted = predictor.drafted if own is None else own.drafted
        top_k, depth, batch = config.top_k, config.reach, len(roots)
        committed = torch.arange(cache.view, device=roots.device) < cache.lengths[:, None]  # [B, S]
        first_of_row = torch.arange(batch, device=roots.device)[:, None] * top_k  # in beams of all rows

        def log_q_of(states: Tensor, level: int) -> Tensor:
            log_q = predictor.log_q(states, own)
            return log_q if noise is None else noise.condition(log_q, level, drafted)

        log_q = log_q_of(root_states[:, None], 0)  # [B, 1, W]
        scores, columns = (best[:, 0] for best in best_children(log_q, top_k))  # [B, K] of the beam
        if fits is not None:
            scores = scores.masked_fill(~fits[:, None], -torch.inf)
        pool_scores, pool_columns, log_qs, beams = [scores], [columns], [log_q], []
        beam = torch.arange(top_k, device=roots.device).expand(batch, -1)  # [B, K] indices of candidates
        parents = root_states[:, None].expand(-1, top_k, -1)  # [B, K, d], of each beam node's parent
        seen = committed[:, None].expand(-1, top_k, -1)  # [B, K, S], what each beam node's parent sees
        for level in range(1, depth):
            # No child scores above its parent. Once the beam's best node is too unlikely, so are all below.
            done = scores[:, :1] < config.min_parent_score if config.min_confidence else None  # [B, 1]
            if done is not None and host_can_read(done) and bool(done.all()):
                depth = level
                break
            # The keys of a level follow those of the levels above it. All are past the committed text, so
            # that the next commit overwrites them. Each node sees what its parent sees, and itself.
            slots = cache.place(top_k, offset=(level - 1) * top_k)  # [B, K]
            visible = seen.scatter(2, slots[:, :, None], True)
            tokens = columns if drafted is None else drafted.take(columns)
            states = predictor.step(tokens, parents, level, visible)  # [B, K, d]

            log_q = log_q_of(states, level)  # [B, K, W]
            child_scores, children = best_children(log_q, top_k)  # [B, K, K]
            # A path's log-probability is its parent's plus its own; K children of K nodes compete.
            flat_scores = (scores[:, :, None] + child_scores).flatten(1)  # [B, K * K]
            if done is not None:
                # Other rows of a batch may go on: the nodes that a finished row adds must never be chosen.
                flat_scores = flat_scores.masked_fill(done, -torch.inf)
            flat_columns = children.flatten(1)
            pool_scores.append(flat_scores)
            pool_columns.append(flat_columns)
            log_qs.append(log_q)
            beams.append(beam)

            if level + 1 == depth:
                break
            # A stable sort, and not topk, so that equal scores are taken in one order on every machine.
            scores, picked = (x[:, :top_k] for x in flat_scores.sort(dim=1, descending=True, stable=True))
            columns = flat_columns.gather(1, picked)
            # Level 1 has top_k candidates, and each level below it top_k**2.
            beam = picked + (top_k + (level - 1) * top_k**2)
            parent = (picked // top_k + first_of_row).flatten()  # [B * K], of the beams of all rows
            parents, seen = (x.flatten(0, 1).index_select(0, parent).view_as(x) for x in (states, visible))

        expanded = torch.cat([torch.full_like(columns[:, :1], -1), *beams], dim=1)  # [B, E], -1 is the root
        parents = expanded.repeat_interleave(top_k, dim=1)  # [B, C], each has top_k children
        pool = Candidates(
            columns=torch.cat(pool_columns, dim=1),
            parents=parents,
            scores=torch.cat(pool_scores, dim=1),
            depths=(torch.arange(parents.shape[1], device=roots.device) - top_k) // top_k**2 + 2,
        )
        return Grown(pool, tuple(log_q for level in log_qs for log_q in level.unbind(1)), expanded, depth)


def slots_per_row(tokens: int, tree: TreeConfig) -> int:
    """Return the slots that a row needs for a text of up to `tokens` tokens and a growing tree after it."""
    return tokens + tree.total_tokens + slots_for_beams(tree)


def slots_for_beams(tree: TreeConfig) -> int:
    """Return the slots that a growing tree needs: a beam for each level that has children."""
    return tree.top_k * max(tree.reach - 1, 0)


def read_view(cache: KVCache, width: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place `width` tokens of a text, `start` slots past the committed ones. A text's token t is in slot t.

    Returns their slots [B, width], which slots each of them sees, [B, width, S] bool: all up to its own, and
    the position of every slot, [B, S].
    """
    slots = cache.place(width, offset=start)
    slot_positions = torch.arange(cache.view, device=slots.device).expand(len(slots), -1)
    return slots, slot_positions[:, None, :] <= slots[:, :, None], slot_positions


def level_positions(cache: KVCache, tokens: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Return the positions [B, K] of a level of drafted tokens, and of all slots: [B, S].

    What was committed last is the root's, so its children, level 1, are at the first position behind it.
    Every level takes K slots behind the committed ones.
    """
    committed, top_k = cache.lengths[:, None], tokens.shape[1]
    slots = torch.arange(cache.view, device=tokens.device)
    below = (slots - committed).clamp(min=0) // top_k
    slot_positions = torch.where(slots < committed, slots, committed + below)
    return (committed + level - 1).expand_as(tokens), slot_positions


def best_children(log_q: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the top_k most likely tokens of log_q [..., W]: log-probabilities and columns, [..., top_k]."""
    values, columns = topk(log_q, top_k)
    return torch.nan_to_num(values, nan=-torch.inf), columns  # all of a row is NaN, or none of it
