"""The draft tree and pure tensor functions on it: rerank, ancestors, children, attention masks.

Node 0 is the root, parents come before their children, and every tensor has a leading batch dimension.
Shapes: B rows, N nodes (TreeConfig.total_tokens), C candidates, M rows of draft distributions, V vocabulary,
W the tokens that are drafted (all V, or a list of frequent ones), S cache slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_fsd.core.devices import host_can_read


@dataclass(frozen=True)
class DraftTree:
    """The tree of one step.

    tokens, parents, depths: [B, N] int64; the root has parent -1 and depth 0. A filler has them too. It fills
      up a row that has fewer nodes than another row of the batch; as nobody's child it is never reached.
    log_q: [B, M, W] float32, the draft's log-probabilities at the nodes that have children.
    owners: [B, M] int64, the node that each row of log_q belongs to; -1 marks an unused row.
    depth: the most drafted tokens on a path, so that a walk has static length.
    drafted: [W] int64, the tokens that log_q covers; all others have q = 0. None: all V, in order.
      A drafter that copies tokens lists those that it copied, and its log_q is 0 at one token, else -inf.
    columns: [B, N] int64, the column of each node's token in log_q; None if the column is the token's id.
    most: the number of nodes that the tree's config allows, if this tree may have fewer.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_q: Tensor
    owners: Tensor
    depth: int
    drafted: Tensor | None = None
    columns: Tensor | None = None
    most: int = 0

    @property
    def largest(self) -> int:
        """The number of nodes that this step might have had. It draws random numbers for that many nodes."""
        return max(self.most, self.tokens.shape[1])

    def filled_up(self) -> DraftTree:
        """Return the trees with fillers up to the most nodes: a runtime may pay for every other shape."""
        more = self.largest - self.tokens.shape[1]
        if not more:
            return self
        return replace(
            self,
            tokens=torch.cat((self.tokens, self.tokens[:, :1].expand(-1, more)), dim=1),
            parents=torch.constant_pad_nd(self.parents, (0, more), -1),
            depths=torch.constant_pad_nd(self.depths, (0, more), 0),
            columns=None if self.columns is None else torch.constant_pad_nd(self.columns, (0, more), 0),
        )

    def select(self, rows: Sequence[int]) -> DraftTree:
        """Return the trees of these rows of the batch."""
        index = list(rows)
        return replace(
            self,
            tokens=self.tokens[index],
            parents=self.parents[index],
            depths=self.depths[index],
            log_q=self.log_q[index],
            owners=self.owners[index],
            columns=None if self.columns is None else self.columns[index],
        )

    @property
    def children(self) -> Tensor:
        """[B, N, N] bool: whether node m (last) is a child of node n (second)."""
        return children(self.parents)

    def node_log_q(self) -> Tensor:
        """Return log q of every node's token at its parent: [B, N]; -inf at the root."""
        parents, owners = self.parents, self.owners
        columns = self.tokens if self.columns is None else self.columns
        owned = (owners[:, None, :] == parents[:, :, None]) & (owners >= 0)[:, None, :]  # [B, N, M]
        # A parent owns at most one row, and argmax finds it; without one it returns 0, which is masked below.
        row = owned.to(torch.uint8).argmax(-1) if owners.shape[1] else torch.zeros_like(parents)
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        return torch.where(owned.any(-1), self.log_q[rows, row, columns], -torch.inf)

    def whole_log_q(self, vocab_size: int) -> Tensor:
        """Return log_q over the whole vocabulary: [B, M, V], -inf at tokens that are not drafted."""
        if self.drafted is None:
            return self.log_q
        whole = self.log_q.new_full((*self.log_q.shape[:-1], vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.drafted, self.log_q)


@dataclass(frozen=True)
class Candidates:
    """All drafted tokens that compete for a place, level by level, so that a parent precedes its children.

    columns, parents: [B, C] int64. A column is a token's place in log_q. A parent is the index of a
    candidate, or -1 for the root. scores: [B, C] float32, the cumulative log-probability of the path.
    depths: [C] int64, at least 1.
    """

    columns: Tensor
    parents: Tensor
    scores: Tensor
    depths: Tensor


def root_only(roots: Tensor, vocab_size: int, most: int = 0) -> DraftTree:
    """Return the tree of plain decoding, which has the roots [B] and no other node. most: see DraftTree."""
    tokens = roots[:, None]
    zeros = torch.zeros_like(tokens)
    return DraftTree(
        tokens=tokens,
        parents=zeros - 1,
        depths=zeros,
        log_q=torch.empty(len(roots), 0, vocab_size, device=roots.device),
        owners=torch.empty(len(roots), 0, dtype=torch.int64, device=roots.device),
        depth=0,
        most=most,
    )


def rerank(scores: Tensor, count: int) -> Tensor:
    """Return the `count` best candidates of scores [B, C], as ascending indices [B, count].

    This is the rerank of EAGLE-2, section 4.2. The sort is stable, so a tie goes to the earlier, shallower
    candidate. No score exceeds its parent's, so a candidate is never selected without its parent, not even
    when a draft probability of exactly 1 ties the two.
    """
    ranked = torch.nan_to_num(scores, nan=-torch.inf).sort(dim=1, descending=True, stable=True).indices
    return ranked[:, :count].sort(dim=1).values


def build_tree(
    roots: Tensor,
    pool: Candidates,
    total_tokens: int,
    depth: int,
    log_q: Tensor,
    owners: Tensor,
    drafted: Tensor | None = None,
    min_score: float = -torch.inf,
) -> DraftTree:
    """Build the tree of the best total_tokens - 1 candidates below roots [B] that score at least min_score.

    log_q: [B, E, W] for the E expanded nodes; owners: [B, E], the candidate index of each, -1 for the root;
    drafted, depth: see DraftTree.
    Expanded nodes that lost their children in the rerank lose their rows of log_q too, so that
    M = min(E, total_tokens - 1) rows suffice. If the host can read the tensors for free, M is only the rows
    that the tree needs, and N only the nodes of the row with the most nodes; fillers fill up the other rows.
    """
    count = total_tokens - 1
    if min_score > -torch.inf and host_can_read(pool.scores):
        count = min(count, int((pool.scores >= min_score).sum(1).amax()))
    kept = rerank(pool.scores, count)  # [B, N-1] candidate indices
    # No score exceeds its parent's, so all nodes below a filler are fillers. They go last, so that the other
    # nodes of the row have the same numbers as without them.
    filler, order = (pool.scores.gather(1, kept) < min_score).sort(dim=1, stable=True)
    kept = kept.gather(1, order)
    node_of = torch.full_like(pool.columns, -1)  # [B, C] node index of a candidate
    node_of.scatter_(1, kept, torch.arange(1, count + 1, device=kept.device).expand_as(kept))

    def with_root(root: Tensor, rest: Tensor) -> Tensor:
        return torch.cat((root[:, None], rest), dim=1)

    above = nodes_of_candidates(pool.parents.gather(1, kept), node_of)
    parents = with_root(torch.full_like(roots, -1), above.masked_fill(filler, -1))
    depths = pool.depths.expand_as(pool.columns).gather(1, kept)
    expanded = nodes_of_candidates(owners, node_of)  # [B, E]
    has_children = children(parents).any(-1)  # [B, N]
    # Only rows of log_q whose node was kept and still has children are needed; they go first.
    used = (expanded >= 0) & has_children.gather(1, expanded.clamp(min=0))
    needed = int(used.sum(1).amax()) if host_can_read(used) else min(owners.shape[1], count)
    rows = used.sort(dim=1, descending=True, stable=True).indices[:, :needed]
    columns = pool.columns.gather(1, kept)
    return DraftTree(
        tokens=with_root(roots, columns if drafted is None else drafted[columns]),
        parents=parents,
        depths=with_root(torch.zeros_like(roots), depths.masked_fill(filler, 0)),
        log_q=log_q.gather(1, rows[:, :, None].expand(-1, -1, log_q.shape[-1])),
        owners=torch.where(used, expanded, -1).gather(1, rows),
        depth=depth,
        drafted=drafted,
        columns=None if drafted is None else with_root(torch.zeros_like(roots), columns),
        most=total_tokens,
    )


def nodes_of_candidates(candidates: Tensor, node_of: Tensor) -> Tensor:
    """Return the node indices of candidates [B, X]: 0 for the root, which is -1 here; -1 if not kept."""
    return torch.where(candidates < 0, 0, node_of.gather(1, candidates.clamp(min=0)))


def children(parents: Tensor) -> Tensor:
    """Return [B, N, N] bool from parents [B, N]: whether node m (last) is a child of node n (second)."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    return parents[:, None, :] == nodes[:, None]


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """Return [B, N, N] bool from parents [B, N]: whether m (last) is n or an ancestor of n."""
    reached = (
        torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
        .expand(len(parents), -1, -1)
        .clone()
    )
    # Every pass moves all nodes one step up and marks where they are: `depth` passes reach every root.
    current = parents
    for _ in range(depth):
        reached.scatter_(2, current.clamp(min=0)[:, :, None], True)  # past the root, mark the root again
        current = torch.where(current < 0, -1, parents.gather(1, current.clamp(min=0)))
    return reached


def visible_slots(lengths: Tensor, slots: Tensor, relation: Tensor, view: int) -> Tensor:
    """Return which slots each new token sees, [B, q, view] bool: all committed ones, and its own path.

    lengths: [B], the number of committed slots. slots: [B, n], the slots of the n related tokens.
    relation: [B, q, n] bool, whether query q sees related token n.
    """
    committed = torch.arange(view, device=lengths.device) < lengths[:, None]  # [B, S]
    visible = committed[:, None, :].expand(-1, relation.shape[1], -1).clone()
    return visible.scatter_(2, slots[:, None, :].expand_as(relation), relation)


def within_window(visible: Tensor, query_positions: Tensor, slot_positions: Tensor, window: int) -> Tensor:
    """Return visible [B, q, S] narrowed to a sliding window of positions, not of slots.

    Siblings have different slots but the same position. query_positions: [B, q]; slot_positions: [B, S]. A
    key is seen if query position - key position < window.
    """
    return visible & (query_positions[:, :, None] - slot_positions[:, None, :] < window)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask [B, 1, q, S] in the model's dtype: 0 where visible, else the lowest number.

    Eager attention would add a bool mask to its scores, which is silently wrong. -inf would give NaN on rows
    that see nothing.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
