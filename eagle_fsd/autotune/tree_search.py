"""Choose a tree by cost: the time of a step and the tokens accepted in it, both as functions of tree size.

Observations are the steps of a few texts, decoded with one wide tree. The same steps tell how many tokens a
smaller tree would have got accepted, since its nodes are the better-scored nodes of the wide tree. (A tree
that is nearly as wide and much shallower has a few nodes that the wide tree lacks, so it is rated slightly
too low.) This holds when the target draws the tokens. A relaxed rule that misses one child may take another
and do nearly as well with a narrow tree, so it is observed with each narrow beam separately. With a
min_confidence, every observed step has levels of its own, a size of its own unless all trees are whole, and
so a cost of its own. The size with the most tokens per second wins, or plain decoding if drafting does not
pay. step_costs.py takes both measurements.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.core.config import AutoTree, TreeConfig
from eagle_fsd.core.devices import fetch
from eagle_fsd.core.tree import DraftTree

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
CONFIDENCES = (0.0, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
MARGIN = 1.03  # drafting must promise this many times the speed of plain decoding to be chosen
# A batch lasts until its slowest text has ended, and drafted texts end far apart. By tokens and seconds of a
# step two and four texts were 1.13 and 1.02 times as fast as plain decoding; 1.10 and 0.91 times came of it.
# So every doubling of a batch asks for this much more.
MARGIN_OF_DOUBLING = 0.1


@dataclass(frozen=True)
class Observation:
    """One step of one text with a wide tree.

    parents, depths, scores: of each node, root first; a score is the cumulative log q. path: the drafted
    nodes on the accepted path. These are lists and not tensors, since a step has only some fifty nodes.
    """

    parents: list[int]
    depths: list[int]
    scores: list[float]
    path: list[int]


@dataclass(frozen=True)
class StepOverhead:
    """Seconds that accept and keep take in a step of one batch size, with a draft tree and without one.

    drafted: by the number of the tree's nodes, at least two of them.
    """

    drafted: dict[int, float]
    plain: float


@dataclass(frozen=True)
class Forwards:
    """Seconds of a step's forwards, for one batch size and context; see Costs."""

    verify: dict[int, float]
    draft: dict[int, tuple[float, float]]

    def with_overhead(self, overhead: StepOverhead) -> Costs:
        """Return the costs of whole steps."""
        return Costs(self.verify, self.draft, overhead.drafted, self.verify[1] + overhead.plain)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's parts, for one batch size and context.

    verify: by width, 1 among them. draft: by beam, of the first level and of each further one. overhead: of
    accept and keep, by width. plain: of a whole step without a draft.
    """

    verify: dict[int, float]
    draft: dict[int, tuple[float, float]]
    overhead: dict[int, float]
    plain: float

    def step_seconds(self, nodes: int, levels: int, top_k: int) -> float:
        """Return the seconds of a step that drafts `levels` levels and verifies `nodes` nodes."""
        first, further = self.draft[top_k]
        return first + further * (levels - 1) + at_width(self.verify, nodes) + at_width(self.overhead, nodes)


def at_width(measured: Mapping[int, float], width: float) -> float:
    """Return the seconds of a width, on the line through the two measured ones beside it."""
    widths = sorted(measured)
    place = min(max(bisect_left(widths, width), 1), len(widths) - 1)
    below, above = widths[place - 1], widths[place]
    part = (width - below) / (above - below)
    return max(0.0, (1 - part) * measured[below] + part * measured[above])


@dataclass(frozen=True)
class Choice:
    """The chosen tree, its expected tokens per step, and its and plain decoding's tokens per second."""

    tree: TreeConfig
    tau: float
    tokens_per_second: float
    plain_tokens_per_second: float

    def __str__(self) -> str:
        gain = self.tokens_per_second / self.plain_tokens_per_second
        if self.tree.total_tokens == 1:
            return "plain decoding: no draft tree is expected to pay here"
        return f"tree {self.tree}: tau {self.tau:.2f} and {gain:.2f} times plain decoding expected"


def usual_tree(wanted: AutoTree, device: str, widest: int) -> TreeConfig:
    """Return a tree that is fast on most machines, for texts that do not wait for measurements.

    device: its type, such as "cpu". widest: how many tokens can be drafted.
    """
    usual = TreeConfig(8, 6, 4, 0.1) if device == "cpu" else TreeConfig(60, 6, 10)
    top_k = usual.top_k if wanted.top_k is None else wanted.top_k
    tree = TreeConfig.within(usual.total_tokens, wanted.depth or usual.depth, min(top_k, widest))
    least = usual.min_confidence if wanted.min_confidence is None else wanted.min_confidence
    return replace(tree, min_confidence=least)


def choose(
    costs: Costs,
    observed: Mapping[int, Sequence[Observation]],
    wanted: AutoTree,
    batch: int = 1,
    host_reads: bool = False,
    whole_trees: bool = False,
) -> Choice:
    """Choose the tree with the most tokens per second; ties go to the smaller one.

    observed: by beam. host_reads: whether the host may read the draft's scores in a step, so that a
    min_confidence saves levels. whole_trees: whether a tree has all its nodes nevertheless; where the host
    may not read, it always has.
    """
    best = Choice(TreeConfig(1), 1.0, 1 / costs.plain, 1 / costs.plain)
    margin = MARGIN + MARGIN_OF_DOUBLING * math.log2(batch)
    depths = DEPTHS if wanted.depth is None else (wanted.depth,)
    beams = [beam for beam in costs.draft if wanted.top_k in (None, beam)]
    confidences = CONFIDENCES if host_reads else (0.0,)
    if wanted.min_confidence is not None:
        confidences = (wanted.min_confidence,)
    for depth, beam in product(depths, beams):
        drafts = [regrow(one, depth, beam) for one in observed[beam]]
        for confidence in confidences:
            shape = TreeConfig(1, depth, beam, confidence)  # of any number of nodes
            pruned = [draft.prune(shape, host_reads, whole_trees) for draft in drafts]
            for width in costs.verify:
                if not depth < width <= 1 + beam + (depth - 1) * beam**2:
                    continue  # too few nodes for the depth, or more nodes than candidates
                tree = TreeConfig(int(width), int(depth), int(beam), confidence)
                tau, seconds = predict_step(pruned, tree, costs, batch)
                least = margin if best.tree.total_tokens == 1 else 1.0
                if tau / seconds > least * best.tokens_per_second:
                    best = Choice(tree, tau, tau / seconds, 1 / costs.plain)
    return best


@dataclass(frozen=True)
class PrunedDraft:
    """A draft without the candidates that are not confident enough.

    levels: how many levels are paid for. accepted: how many drafted tokens the step would have got accepted
    from the best 0, 1, ... remaining candidates. whole: whether the tree always has its full size. rests:
    whether nothing was drafted, as where looked-up tokens were not worth a larger forward: the root is
    verified alone.
    """

    levels: int
    accepted: list[int]
    whole: bool
    rests: bool = False

    def nodes(self, tree: TreeConfig) -> int:
        """Return the number of verified nodes, root included."""
        if self.rests:
            return 1
        return tree.total_tokens if self.whole else min(tree.total_tokens, len(self.accepted))

    def tokens(self, tree: TreeConfig) -> int:
        """Return the number of tokens that the step emits."""
        return 1 + self.accepted[min(tree.total_tokens, len(self.accepted)) - 1]


@dataclass(frozen=True)
class NarrowDraft:
    """The draft that a narrower tree would have had at an observed step: its candidates, best first.

    scores: the cumulative log q of each candidate. depths: of each candidate. taken: whether it is on the
    accepted path. beams: the best score of each level's beam.
    """

    scores: list[float]
    depths: list[int]
    taken: list[bool]
    beams: list[float]

    def prune(self, tree: TreeConfig, host_reads: bool = True, whole_trees: bool = False) -> PrunedDraft:
        """Drop the candidates that the tree's min_confidence excludes, whatever its size; see `choose`."""
        levels = 1 + sum(score >= tree.min_parent_score for score in self.beams[:-1])
        # As BeamDrafter grows trees.
        whole = whole_trees or not host_reads or not tree.min_confidence
        least, accepted = -math.inf if whole else tree.min_score, [0]
        for score, depth, taken in zip(self.scores, self.depths, self.taken, strict=True):
            if depth <= levels and score >= least:
                accepted.append(accepted[-1] + taken)
        return PrunedDraft(levels if host_reads else tree.depth, accepted, whole, not self.scores)


def predict_step(
    pruned: Sequence[PrunedDraft], tree: TreeConfig, costs: Costs, batch: int = 1
) -> tuple[float, float]:
    """Return tokens per step and row, and seconds per step.

    pruned: the rows of a batch are neighbours. A batch's step is as large as the step of its largest row.
    """
    seconds = []
    for start in range(0, len(pruned), batch):
        rows = pruned[start : start + batch]
        nodes, levels = max(row.nodes(tree) for row in rows), max(row.levels for row in rows)
        seconds.append(costs.step_seconds(nodes, levels, tree.top_k))
    return statistics.fmean(draft.tokens(tree) for draft in pruned), statistics.fmean(seconds)


def regrow(one: Observation, depth: int, top_k: int) -> NarrowDraft:
    """Return the candidates that a narrower tree would have had, as far as the wide tree holds them."""
    eligible: list[int] = []
    beam, beams = {0}, []
    for level in range(1, depth + 1):
        nodes = []
        for parent in beam:
            children = [node for node, mine in enumerate(one.parents) if mine == parent]
            nodes += sorted(children, key=lambda node: (-one.scores[node], node))[:top_k]
        nodes.sort(key=lambda node: (-one.scores[node], node))
        eligible += nodes
        beam = set(nodes[:top_k])
        beams.append(max((one.scores[node] for node in beam), default=-math.inf))
        assert all(one.depths[node] == level for node in nodes)
    order = sorted(eligible, key=lambda node: (-one.scores[node], node))
    path = set(one.path)
    return NarrowDraft(
        scores=[one.scores[node] for node in order],
        depths=[one.depths[node] for node in order],
        taken=[node in path for node in order],
        beams=beams,
    )


@dataclass
class TreeObserver:
    """An observer of `decode` that records every tree and the path that was accepted in it."""

    observations: list[Observation] = field(default_factory=list)

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        tree = verified.tree
        noted = (tree.parents, tree.depths, path_scores(tree), verdict.path, verdict.length)
        for parents, depths, scores, path, length in zip(
            *(part.tolist() for part in fetch(*noted)), strict=True
        ):
            self.observations.append(Observation(parents, depths, scores, path[1:length]))


def path_scores(tree: DraftTree) -> Tensor:
    """Return the score [B, N] of every node's path, its cumulative log q unless the tree says otherwise."""
    if tree.scores is not None:
        return tree.scores.masked_fill(tree.depths == 0, 0.0)
    # Walk up from every node at once, one level per pass; `above` is -1 once a walk has passed the root.
    own = tree.node_log_q().masked_fill(tree.depths == 0, 0.0)
    total, above = own, tree.parents
    for _ in range(tree.depth):
        total = total + own.gather(1, above.clamp(min=0)).masked_fill(above < 0, 0.0)
        above = tree.parents.gather(1, above.clamp(min=0)).masked_fill(above < 0, -1)
    return total
