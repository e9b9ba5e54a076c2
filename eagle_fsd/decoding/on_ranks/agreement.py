"""Every step's decisions are rank 0's: the tree that is verified, and the path that is accepted.

The ranks draft for themselves, since a head may read a target of which each of them holds a part. They end up
with the same tree, up to what two devices make of the last bit. That bit must decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.runtime.ranks import Ranks, digest_number


def check_step(ranks: Ranks, emitted: Sequence[int]) -> None:
    """Raise RanksDiverged if another batch, or the same one at another step, is decoded elsewhere.

    It comes before the draft, in which ranks wait for each other. emitted: each row's new tokens.
    """
    if ranks.several:
        ranks.check("a decoding step", (len(emitted), digest_number(repr(list(emitted)))))


def rank_0_tree(ranks: Ranks, tree: DraftTree, most: int) -> DraftTree:
    """Return rank 0's tree on every rank. most: the most nodes that it can have.

    On other ranks it has no distributions of the draft: only rank 0 accepts.
    """
    if not ranks.several:
        return tree
    batch, nodes = tree.tokens.shape
    most, device = max(most, tree.largest), tree.tokens.device
    packed = torch.zeros(4 * batch * most + 2, dtype=torch.int64, device=device)
    parts = packed[2:].view(4, batch, most)
    if ranks.leads:
        sources = torch.zeros_like(tree.tokens) if tree.sources is None else tree.sources
        parts[:, :, :nodes] = torch.stack((tree.tokens, tree.parents, tree.depths, sources))
        packed[:2] = on_device([nodes, tree.depth], device)
        ranks.lead_tensor(packed)
        return tree
    ranks.lead_tensor(packed)
    nodes, depth = packed[:2].tolist()
    tokens, parents, depths, sources = parts[:, :, :nodes]
    return DraftTree(
        tokens, parents, depths, tree.log_q[:, :0], tree.owners[:, :0], depth, most=tree.most, sources=sources
    )


def rank_0_verdict(ranks: Ranks, tree: DraftTree, accept: Callable[[], Verdict]) -> Verdict:
    """Return rank 0's verdict on every rank. tree: rank 0's. accept: makes it, and is called there only."""
    if not ranks.several:
        return accept()
    if ranks.leads:
        verdict = accept()
        ranks.lead_tensor(pack(verdict))
        return verdict
    batch, width = len(tree.tokens), tree.depth + 1
    empty = torch.empty(batch, 4 * width + 3, dtype=torch.int64, device=tree.tokens.device)
    return unpack(ranks.lead_tensor(empty), width)


def pack(verdict: Verdict) -> Tensor:
    """Return a verdict, without the rules' chances, as one tensor [B, 4 * P + 3] of integers."""
    wide = (verdict.path, verdict.tokens, verdict.fuzzy, verdict.asked)
    single = (verdict.length, verdict.next_token, verdict.sound)
    return torch.cat([*(part.long() for part in wide), *(part.long()[:, None] for part in single)], dim=1)


def unpack(packed: Tensor, width: int) -> Verdict:
    """Return the verdict that `pack` packed; width: P."""
    path, tokens, fuzzy, asked = packed[:, : 4 * width].split(width, dim=1)
    length, next_token, sound = packed[:, 4 * width :].unbind(1)
    return Verdict(path, length, tokens, next_token, fuzzy.bool(), asked.bool(), sound)
