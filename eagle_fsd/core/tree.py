"""The draft tree and pure tensor functions on it: rerank, ancestors, children, attention masks.

Node 0 is the root, parents come before their children, and every tensor has a leading batch dimension.
Shapes: B rows, N nodes (TreeConfig.total_tokens), C candidates, M rows of draft distributions, V vocabulary,
W the tokens that are drafted (all V, or a list of some), S cache slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from eagle_fsd.core.devices import host_can_read
from eagle_fsd.core.padding import on_device

# Where a drafted token comes from, by its number in DraftTree.sources: a network; a copy from earlier in the
# text (`copied` in drafting/lookup); or the target's likeliest tokens at an earlier place (`recycled`).
HEAD, SUFFIX, RECYCLED = range(3)
SOURCES = ("head", "suffix", "recycled")
COMMON = ("depth", "drafted", "most")  # fields of DraftTree that are of all rows alike
SINKS = 4  # first tokens of a text that a head sees from everywhere


@dataclass(frozen=True)
class DraftTree:
    """The tree of one step.

    tokens, parents, depths: [B, N] int64; the root has parent -1 and depth 0. So has a filler, a node that
      pads a row with fewer nodes than others of the batch. It is nobody's child, so it is never reached.
    log_q: [B, M, W] float32, the draft's log-probabilities at the nodes that have children.
    owners: [B, M] int64, the node that each row of log_q belongs to; -1 marks an unused row.
    depth: the most drafted tokens on a path, so that a walk has static length.
    drafted: [W] int64, the tokens that log_q covers; all others have q = 0. None: all V, in order.
      A drafter that copies tokens lists those that it copied, and its log_q is 0 at one token, else -inf.
    columns: [B, N] int64, the column of each node's token in log_q; None if the column is the token's id.
    most: the number of nodes that the tree's config allows, if this tree may have fewer.
    rest: [B, M] float32, the log of the mass that q has on tokens which log_q gives none, without saying how
      it is spread over them; None: no mass.
    scores: [B, N] float32, the log of each path's confidence, if that is not the sum of its log q; -inf at
      fillers.
    sources: [B, N] int64, where each node's token comes from, as a place in SOURCES; None: all from a head.
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
    rest: Tensor | None = None
    scores: Tensor | None = None
    sources: Tensor | None = None

    @property
    def largest(self) -> int:
        """The most nodes that this step's tree may have. Random numbers are drawn for that many nodes."""
        return max(self.most, self.tokens.shape[1])

    def filled_up(self) -> DraftTree:
        """Return the trees padded with fillers to `largest` nodes, since some runtimes pay for each shape."""
        more = self.largest - self.tokens.shape[1]
        if not more:
            return self
        return replace(
            self,
            tokens=torch.cat((self.tokens, self.tokens[:, :1].expand(-1, more)), dim=1),
            parents=torch.constant_pad_nd(self.parents, (0, more), -1),
            depths=torch.constant_pad_nd(self.depths, (0, more), 0),
            columns=None if self.columns is None else torch.constant_pad_nd(self.columns, (0, more), 0),
            scores=None if self.scores is None else torch.constant_pad_nd(self.scores, (0, more), -torch.inf),
            sources=None if self.sources is None else torch.constant_pad_nd(self.sources, (0, more), HEAD),
        )

    def select(self, rows: Sequence[int]) -> DraftTree:
        """Return the trees of these rows of the batch."""
        index = on_device(rows, self.tokens.device)
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in COMMON}
        return replace(self, **{name: part[index] for name, part in parts.items() if part is not None})

    @property
    def children(self) -> Tensor:
        """[B, N, N] bool: whether node m (last) is a child of node n (second)."""
        return children(self.parents)

    def node_log_q(self) -> Tensor:
        """Return log q of every node's token at its parent: [B, N]; -inf at the root."""
        parents, owners = self.parents, self.owners
        if not owners.shape[1]:
            return torch.full(parents.shape, -torch.inf, device=parents.device)
        columns = self.tokens if self.columns is None else self.columns
        owned = (owners[:, None, :] == parents[:, :, None]) & (owners >= 0)[:, None, :]  # [B, N, M]
        # A parent owns at most one row, and argmax finds it; without one it returns 0, which is masked below.
        row = owned.to(torch.uint8).argmax(-1)
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
    log_q: Sequence[Tensor],
    owners: Tensor,
    drafted: Tensor | None = None,
    min_score: float = -torch.inf,
) -> DraftTree:
    """Build the tree of the best total_tokens - 1 candidates below roots [B] that score at least min_score.

    log_q: [B, W] for each of E expanded nodes; owners: [B, E], the candidate index of each, -1 for the root;
    drafted, depth: see DraftTree.
    Expanded nodes that lost their children in the rerank lose their rows of log_q too, so that
    M = min(E, total_tokens - 1) rows suffice. If the host can read the tensors for free, M is only the rows
    that the tree needs, and N only the nodes of the row with the most nodes; fillers fill up the other rows.
    """
    count = total_tokens - 1
    fill = min_score > -torch.inf
    if fill and host_can_read(pool.scores):
        good = (pool.scores >= min_score).sum(1).tolist()
        count = min(count, max(good))
        fill = min(good) < count
    kept = rerank(pool.scores, count)  # [B, N-1] candidate indices
    if fill:
        # No score exceeds its parent's, so all nodes below a filler are fillers. They go last, so that the
        # other nodes of the row have the same numbers as without them.
        filler, order = (pool.scores.gather(1, kept) < min_score).sort(dim=1, stable=True)
        kept = kept.gather(1, order)
    # The node index of every candidate [B, 1 + C], -1 if it is not kept. The root comes before them all.
    numbers = torch.arange(1, count + 1, device=kept.device).expand_as(kept)
    node_of = with_root(0, torch.full_like(pool.columns, -1).scatter_(1, kept, numbers))
    above, depths = node_of.gather(1, pool.parents.gather(1, kept) + 1), pool.depths.take(kept)
    if fill:
        above, depths = above.masked_fill(filler, -1), depths.masked_fill(filler, 0)
    # Only rows of log_q whose node was kept and still has children are needed; they go first. The place after
    # the last node stands for the -1 of what was not kept, and of fillers' parents.
    expanded = node_of.gather(1, owners + 1)  # [B, E]
    has_children = torch.zeros(len(roots), count + 2, dtype=torch.bool, device=kept.device)
    has_children.scatter_(1, above % (count + 2), True)
    used = has_children.gather(1, expanded % (count + 2)) & (expanded >= 0)
    needed = int(used.sum(1).amax()) if host_can_read(used) else min(owners.shape[1], count)
    rows = used.sort(dim=1, descending=True, stable=True).indices[:, :needed]  # [B, M]
    columns = pool.columns.gather(1, kept)
    return DraftTree(
        tokens=torch.cat((roots[:, None], columns if drafted is None else drafted.take(columns)), dim=1),
        parents=with_root(-1, above),
        depths=with_root(0, depths),
        log_q=take_rows(log_q, rows),
        owners=expanded.masked_fill(~used, -1).gather(1, rows),
        depth=depth,
        drafted=drafted,
        columns=None if drafted is None else with_root(0, columns),
        most=total_tokens,
    )


def take_rows(log_q: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return rows [B, M] of log_q, which is [B, W] for each of E expanded nodes: [B, M, W]."""
    if host_can_read(rows) and rows.numel():  # E is several times M, so that few rows need a copy
        few = [log_q[place][row] for row, places in enumerate(rows.tolist()) for place in places]
        return torch.stack(few).unflatten(0, rows.shape)
    first_of_row = torch.arange(len(rows), device=rows.device)[:, None] * len(log_q)
    # A gather would read an index for every entry.
    chosen = torch.stack(list(log_q), dim=1).flatten(0, 1).index_select(0, (rows + first_of_row).flatten())
    return chosen.unflatten(0, rows.shape)


def with_root(value: int, rest: Tensor) -> Tensor:
    """Put a value for the root before those of other nodes [B, X]: [B, 1 + X]."""
    return torch.constant_pad_nd(rest, (1, 0), value)


def with_last(table: Tensor, value: int) -> Tensor:
    """Put a value behind those of a table [B, X]: [B, X + 1]."""
    return torch.constant_pad_nd(table, (0, 1), value)


def children(parents: Tensor) -> Tensor:
    """Return [B, N, N] bool from parents [B, N]: whether node m (last) is a child of node n (second)."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    return parents[:, None, :] == nodes[:, None]


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """Return [B, N, N] bool from parents [B, N]: whether m (last) is n or an ancestor of n."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    above = parents.clamp(min=0)  # as if the root were its own parent
    reached = (above[:, :, None] == nodes) | (nodes[:, None] == nodes)  # itself and its parent
    # Every pass doubles the steps, and `depth` steps reach every root.
    for _ in range(max(depth - 1, 0).bit_length()):
        reached = reached | reached.gather(1, above[:, :, None].expand_as(reached))
        above = above.gather(1, above)
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


def within_chunk(visible: Tensor, query_positions: Tensor, slot_positions: Tensor, chunk: int) -> Tensor:
    """Return visible [B, q, S] narrowed to keys of the query's own chunk: every `chunk` positions are one.

    query_positions: [B, q]; slot_positions: [B, S].
    """
    return visible & (query_positions[:, :, None] // chunk == slot_positions[:, None, :] // chunk)


def within_training(visible: Tensor, query_positions: Tensor, slot_positions: Tensor, longest: int) -> Tensor:
    """Return visible [B, q, S], narrowed for queries beyond the longest text that a head was trained on.

    From there on a token sees half as far back as in training, for few texts of a training are the longest,
    and the text's first tokens, on which attention rests (StreamingLLM, arXiv 2309.17453; here they keep
    their positions). Up to there it sees all. query_positions: [B, q]; slot_positions: [B, S].
    """
    if visible.shape[-1] <= longest:
        return visible  # no position is beyond the number of slots
    queries, slots = query_positions[:, :, None], slot_positions[:, None, :]
    return visible & ((slots > queries - max(longest // 2, 1)) | (slots < SINKS) | (queries < longest))


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask [B, 1, q, S] in the model's dtype: 0 where visible, else the lowest number.

    Eager attention would add a bool mask to its scores, which is silently wrong. -inf would give NaN on rows
    that see nothing.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
