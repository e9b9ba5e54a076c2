"""Reads p and q where lossless texts are decoded, and sums what every way of choosing children would accept.

A context is a node of the accepted path below which the tree has children: the root of every step, and the
nodes that the walk passed. Contexts whose node had no child are not among them, for no q is kept there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.core.sampling import warp
from eagle_fsd.evaluation.sampled_children.acceptance import (
    best_of_independent,
    likeliest,
    likeliest_and_one_drawn,
    with_replacement,
    without_replacement,
)

LIKELIEST, WITHOUT, WITH, MIXED, BEST = WAYS = (
    "likeliest",
    "without_replacement",
    "with_replacement",
    "likeliest_and_one_drawn",
    "best_of_independent",
)


@dataclass(frozen=True)
class Contexts:
    """Distributions in n contexts.

    rows: [n], the row of the batch. p: [n, W], the target's, after the warpers, of the tokens that the draft
    covers. q: [n, W] the draft's, warped as well. log_q: [n, W], as drafted. children: [n], how many the tree
    has there. own: [n], what p has on them.
    """

    rows: Tensor
    p: Tensor
    q: Tensor
    log_q: Tensor
    children: Tensor
    own: Tensor


def contexts(
    verified: Verified, verdict: Verdict, counts: Tensor, draft_temperature: float | None = None
) -> Contexts:
    """Read the contexts of one step.

    counts: [B], how many tokens each row emitted. draft_temperature: q's; None: p's. Raises ValueError for a
    tree of copied tokens, which were not drawn from a distribution.
    """
    tree, sampling = verified.tree, verified.sampling
    if tree.rest is not None:
        raise ValueError(
            "the drafts are looked up: a copied token has no q to draw from; leave --lookup out, name a head"
        )
    inside = torch.arange(verdict.path.shape[1], device=counts.device) < counts[:, None]  # [B, D]
    nodes = verdict.path.masked_fill(~inside, -2)  # -1 marks unused rows of log_q
    row, place, owned = (nodes[:, :, None] == tree.owners[:, None, :]).nonzero(as_tuple=True)  # n each
    node = nodes[row, place]
    p = warp(verified.logits[row, node], sampling)  # [n, V]
    log_q = tree.log_q[row, owned]  # [n, W]
    mine = tree.parents[row] == node[:, None]  # [n, N]
    own = (p.gather(1, tree.tokens[row]) * mine).sum(1)
    wanted = sampling if draft_temperature is None else replace(sampling, temperature=draft_temperature)
    drafted = p if tree.drafted is None else p[:, tree.drafted]
    return Contexts(row, drafted, warp(log_q, wanted), log_q, mine.sum(1), own)


class ChildrenMeter:
    """A meter of lossless texts: by row, sums over the contexts of what each way would accept.

    most: the largest number of children, and at least what the tree can have. draws, random: see
    `without_replacement`; all meters of a run share the random numbers.
    """

    def __init__(
        self,
        most: int,
        draws: int,
        draft_temperature: float | None,
        random: np.random.Generator,
        mode: str,
        rows: int,
    ) -> None:
        self.most, self.draws, self.random = most, draws, random
        self.draft_temperature = draft_temperature
        self.seconds = 0.0
        self.contexts = torch.zeros(rows, dtype=torch.int64)
        self.children = torch.zeros(rows, dtype=torch.int64)
        # Of the ways, and then the variance of the estimated one, by number of children. The last column is
        # for as many children as the tree has in each context.
        self.sums = torch.zeros(rows, len(WAYS) + 1, most + 1, dtype=torch.float64)

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        start = time.perf_counter()
        counts = torch.tensor(list(emitted.values()), device=verdict.path.device)
        found = contexts(verified, verdict, counts, self.draft_temperature)
        if len(found.rows):
            rows = torch.tensor(list(emitted))[found.rows.cpu()]
            self.contexts.index_add_(0, rows, torch.ones_like(rows))
            self.children.index_add_(0, rows, found.children.cpu())
            self.sums.index_add_(0, rows, self.accepted(found).cpu())
        self.seconds += time.perf_counter() - start

    def accepted(self, found: Contexts) -> Tensor:
        """Return what every way accepts, and the variance: [n, ways + 1, most + 1]."""
        p, q, most = found.p, found.q, self.most
        estimated = without_replacement(p, q, most, self.draws, self.random)
        tables = {
            LIKELIEST: likeliest(p, found.log_q, most),
            WITHOUT: estimated.mean,
            WITH: with_replacement(p, q, most),
            MIXED: likeliest_and_one_drawn(p, q, most),
            BEST: best_of_independent(p, q, most),
        }
        table = torch.stack([*(tables[way] for way in WAYS), estimated.variance], dim=1)
        place = (found.children - 1)[:, None, None].expand(-1, table.shape[1], 1)
        own = table.gather(-1, place)
        own[:, WAYS.index(LIKELIEST), 0] = found.own.double()
        return torch.cat((table, own), dim=-1)

    def row(self, row: int) -> dict[str, Any]:
        """Return the sums of a row: a list by number of children, from 1, and "tree" for the tree's own."""
        sums = {
            name: {"by_children": table[:-1], "tree": table[-1]}
            for name, table in zip((*WAYS, "variance"), self.sums[row].tolist(), strict=True)
        }
        about = {"contexts": int(self.contexts[row]), "children": int(self.children[row])}
        return {"sampled_children": {**about, **sums}}
