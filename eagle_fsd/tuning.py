"""A tree chosen by cost: what a step takes by the tree's size, and what a head gets accepted by it.

Observations are the steps of a few texts decoded with one wide tree. What a smaller tree would have got
accepted follows from the same steps, since the better-scored nodes of the wide tree are its own (some of a
tree that is nearly as wide and much shallower are not in the wide one; it is thought a little worse than it
is). That holds for the target's own draws; a relaxed rule that misses a child may take another and do nearly
as well with a narrow tree, so it is watched with each narrow beam. The size with the most tokens per second
is taken, or plain decoding where drafting does not pay. measuring.py takes both measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eagle_fsd.acceptance import Verdict, Verified
from eagle_fsd.config import AutoTree, TreeConfig
from eagle_fsd.tree import DraftTree

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
MARGIN = 1.03  # drafting must promise so much more than plain decoding, or it is left out


@dataclass(frozen=True)
class Observation:
    """One step of one text with a wide tree: its nodes, root first, and the drafted ones on the path taken.

    scores: cumulative log q. Lists, for what follows is a walk over some fifty nodes.
    """

    parents: list[int]
    depths: list[int]
    scores: list[float]
    path: list[int]


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's parts, for one batch size and context.

    verify: by width, 1 among them. draft: by beam, of the first level and of each further one. rest: accept
    and keep; plain: a whole step without a draft.
    """

    verify: dict[int, float]
    draft: dict[int, tuple[float, float]]
    rest: float
    plain: float

    def step(self, tree: TreeConfig) -> float:
        first, further = self.draft[tree.top_k]
        return first + further * (tree.reach - 1) + self.verify[tree.total_tokens] + self.rest


@dataclass(frozen=True)
class Choice:
    """The tree taken, its expected tokens per step and per second and row, and plain decoding's."""

    tree: TreeConfig
    tau: float
    tokens_per_second: float
    plain_tokens_per_second: float

    def __str__(self) -> str:
        gain = self.tokens_per_second / self.plain_tokens_per_second
        if self.tree.total_tokens == 1:
            return "plain decoding: no draft tree is expected to pay here"
        return f"tree {self.tree}: tau {self.tau:.2f} and {gain:.2f} times plain decoding expected"


def choose(costs: Costs, observed: Mapping[int, Sequence[Observation]], wanted: AutoTree) -> Choice:
    """The tree of the most tokens per second; ties go to the smaller one. observed: by beam."""
    best = Choice(TreeConfig(1), 1.0, 1 / costs.plain, 1 / costs.plain)
    depths = DEPTHS if wanted.depth is None else (wanted.depth,)
    beams = [beam for beam in costs.draft if wanted.top_k in (None, beam)]
    for depth in depths:
        for beam in beams:
            taus = expected_tau(observed[beam], depth, beam, list(costs.verify))
            for width, tau in taus.items():
                if not depth < width <= 1 + beam + (depth - 1) * beam**2:
                    continue  # a deeper tree than nodes, or more nodes than candidates
                tree = TreeConfig(int(width), int(depth), int(beam))
                speed = tau / costs.step(tree)
                least = MARGIN if best.tree.total_tokens == 1 else 1.0
                if speed > least * best.tokens_per_second:
                    best = Choice(tree, tau, speed, 1 / costs.plain)
    return best


def expected_tau(
    observations: Sequence[Observation], depth: int, top_k: int, widths: Sequence[int]
) -> dict[int, float]:
    """Tokens per step of trees of these widths, had they been grown where the wide ones were."""
    ranks = [path_ranks(one, depth, top_k) for one in observations]
    return {
        width: 1 + sum(rank < width - 1 for path in ranks for rank in path) / max(len(ranks), 1)
        for width in widths
    }


def path_ranks(one: Observation, depth: int, top_k: int) -> list[int]:
    """The places that the path's nodes take among a narrower tree's candidates, as far as it has them.

    They rise along the path: no node scores better than its parent.
    """
    eligible: list[int] = []
    beam = {0}
    for level in range(1, depth + 1):
        nodes = []
        for parent in beam:
            born = [node for node, mine in enumerate(one.parents) if mine == parent]
            nodes += sorted(born, key=lambda node: (-one.scores[node], node))[:top_k]
        nodes.sort(key=lambda node: (-one.scores[node], node))
        eligible += nodes
        beam = set(nodes[:top_k])
        assert all(one.depths[node] == level for node in nodes)
    order = sorted(eligible, key=lambda node: (-one.scores[node], node))
    place = {node: rank for rank, node in enumerate(order)}
    ranks = []
    for node in one.path:
        if node not in place:
            break
        ranks.append(place[node])
    return ranks


@dataclass
class Witness:
    """An observer of `decode` that notes every tree and the path that was taken in it."""

    observations: list[Observation] = field(default_factory=list)

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        tree = verified.tree
        noted = (tree.parents, tree.depths, path_scores(tree), verdict.path, verdict.length)
        for parents, depths, scores, path, length in zip(*(part.tolist() for part in noted), strict=True):
            self.observations.append(Observation(parents, depths, scores, path[1:length]))


def path_scores(tree: DraftTree) -> Tensor:
    """The cumulative log q [B, N] of every node's path; 0 at the root."""
    own = tree.node_log_q().masked_fill(tree.depths == 0, 0.0)
    total, above = own, tree.parents
    for _ in range(tree.depth):
        total = total + own.gather(1, above.clamp(min=0)).masked_fill(above < 0, 0.0)
        above = tree.parents.gather(1, above.clamp(min=0)).masked_fill(above < 0, -1)
    return total
