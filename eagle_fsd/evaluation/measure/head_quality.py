"""What a draft head is worth in use: right drafts by depth, calibrated confidence, tau, tokens per second.

EAGLE-2 grows and prunes its trees by the draft's own probabilities, taking them for chances of acceptance. So
every drafted node is a sample of that: its confidence, q of its token at its parent, and whether the target,
greedy, takes the token there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.measure.observers import TimedObserver
from eagle_fsd.evaluation.prompt_sets import answer_all

BINS = 10
TOP = (1, 3)  # how many of the draft's best tokens count as right


class DraftObserver(TimedObserver):
    """An observer of lossless texts that notes how the drafts compare with the target's choice.

    confidence, taken: of every drafted node. reached, right: by depth, the nodes on the target's own path
    that have a draft distribution, and in how many the target's token is among the draft's best TOP.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.confidence: list[Tensor] = []
        self.taken: list[Tensor] = []
        self.reached = torch.zeros(depth, dtype=torch.int64)
        self.right = torch.zeros(len(TOP), depth, dtype=torch.int64)

    def observe(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        tree = verified.tree
        wanted = verified.logits.argmax(-1)  # [B, N] the target's token at every node
        parents = tree.parents.clamp(min=0)
        taken = tree.tokens == wanted.gather(1, parents)  # [B, N]
        drafted = tree.parents >= 0
        self.confidence.append(tree.node_log_q().exp()[drafted].cpu())
        self.taken.append(taken[drafted].cpu())
        on_path = torch.zeros_like(taken)
        on_path[:, 0] = True
        for _ in range(tree.depth):  # parents come first, but one level at a time is enough
            on_path[:, 1:] = (taken & on_path.gather(1, parents))[:, 1:]
        owners = tree.owners.clamp(min=0)  # [B, M]
        live = (tree.owners >= 0) & on_path.gather(1, owners)
        depths = tree.depths.gather(1, owners)[live].cpu()
        self.reached += torch.bincount(depths, minlength=self.depth)
        best = tree.log_q[live].topk(min(max(TOP), tree.log_q.shape[-1]), dim=-1).indices  # [L, 3]
        best = best if tree.drafted is None else tree.drafted[best]
        hits = (best == wanted.gather(1, owners)[live][:, None]).cpu()
        for row, count in enumerate(TOP):
            self.right[row] += torch.bincount(depths[hits[:, :count].any(-1)], minlength=self.depth)


@dataclass(frozen=True)
class HeadReport:
    """What the drafts of a head came to.

    right: for each of TOP the share by depth, given that the depth was reached; reached: how often it was.
    bins: rows of (mean confidence, share taken, nodes). error: the expected calibration error.
    """

    right: dict[int, list[float]]
    reached: list[int]
    bins: list[tuple[float, float, int]]
    error: float
    tau: float
    tokens_per_second: float
    accept_histogram: list[int]


def observe(
    engine: EagleFSD, prompts: Sequence[Sequence[int]], tree: TreeConfig, max_new_tokens: int, batch_size: int
) -> tuple[HeadReport, list[list[int]]]:
    """Answer the prompts (token ids) greedily and losslessly; returns a report on the drafts, and answers."""
    seen = DraftObserver(tree.reach)
    options = {"max_new_tokens": max_new_tokens, "tree": tree, "observer": seen}
    answers, total = answer_all(engine, prompts, batch_size, "prompts", **options)
    bins, error = calibration(torch.cat(seen.confidence), torch.cat(seen.taken))
    shares = seen.right / seen.reached.clamp(min=1)
    right = {count: shares[row].tolist() for row, count in enumerate(TOP)}
    total.seconds -= seen.seconds
    speed = (total.tau, total.tokens_per_second, total.accept_histogram)
    return HeadReport(right, seen.reached.tolist(), bins, error, *speed), answers


def calibration(
    confidence: Tensor, taken: Tensor, count: int = BINS
) -> tuple[list[tuple[float, float, int]], float]:
    """Return bins of confidence [n] in 0..1 against taken [n] bool, and the expected calibration error.

    Bins are of equal width, and empty ones are left out. The error is the mean gap of the two, weighted by
    nodes (Guo et al., arXiv 1706.04599).
    """
    place = (confidence * count).long().clamp(max=count - 1)
    nodes = place.bincount(minlength=count)
    sums = [place.bincount(weights=each.double(), minlength=count) for each in (confidence, taken)]
    mean, share = (each / nodes for each in sums)
    gap = float((sums[0] - sums[1]).abs().sum()) / max(len(confidence), 1)
    bins = zip(mean.tolist(), share.tolist(), nodes.tolist(), strict=True)
    return [one for one in bins if one[2]], gap
