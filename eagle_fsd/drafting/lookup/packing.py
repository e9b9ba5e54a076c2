"""Trees that were grown on the host, as the tensors of a DraftTree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import HEAD, DraftTree, root_only
from eagle_fsd.drafting.lookup.text_memory import GrownTree

STEP = 64  # with fixed shapes, the number of drafted tokens is a multiple of this


def pack_trees(
    trees: Sequence[GrownTree],
    roots: Tensor,
    vocab_size: int,
    config: TreeConfig,
    fixed_shapes: bool = False,
) -> DraftTree:
    """Return the trees of all rows below roots [B], which were grown with this config.

    fixed_shapes: fill trees, distributions and drafted tokens up, so that few shapes occur.
    """
    most = config.total_tokens
    nodes = most if fixed_shapes else max(len(tree.tokens) for tree in trees)
    if nodes == 1:
        return root_only(roots, vocab_size, most)
    # A filler has its root's token, and is nobody's child.
    tokens = np.repeat([[tree.tokens[0]] for tree in trees], nodes, axis=1)  # [B, N]
    parents, depths = np.full_like(tokens, -1), np.zeros_like(tokens)
    chances, columns = np.zeros(tokens.shape, dtype=np.float32), np.zeros_like(tokens)
    sources = np.full_like(tokens, HEAD)
    owned = [sorted(set(tree.parents) - {-1}) for tree in trees]
    owners = np.full((len(trees), nodes - 1 if fixed_shapes else max(map(len, owned))), -1)  # [B, M]
    rest = np.zeros(owners.shape, dtype=np.float32)
    column_of: dict[int, int] = {}  # the drafted tokens of all rows, in the order in which they are met
    entries: list[tuple[int, int, int, float]] = []  # row, its distribution, column, q
    for row, tree in enumerate(trees):
        count = len(tree.tokens)
        tokens[row, :count], parents[row, :count] = tree.tokens, tree.parents
        depths[row, :count], chances[row, :count] = tree.depths, tree.chances
        sources[row, :count] = tree.sources
        owners[row, : len(owned[row])] = owned[row]
        for place, owner in enumerate(owned[row]):
            q, rest[row, place] = tree.proposals[owner].q()
            for token, prob in q.items():
                entries.append((row, place, column_of.setdefault(token, len(column_of)), prob))
        columns[row, 1:count] = [column_of[token] for token in tree.tokens[1:]]
    drafted = list(column_of)
    if fixed_shapes:
        unused = (token for token in range(vocab_size) if token not in column_of)
        width = min(-(-max(len(drafted), 1) // STEP) * STEP, vocab_size)
        drafted += [next(unused) for _ in range(width - len(drafted))]
    q_of = np.zeros((*owners.shape, len(drafted)), dtype=np.float32)  # [B, M, W]
    if entries:
        rows, places, cells, probs = zip(*entries, strict=True)
        q_of[rows, places, cells] = probs
    with np.errstate(divide="ignore"):
        logs = [np.log(table) for table in (q_of, rest, chances)]

    def moved(table: np.ndarray) -> Tensor:
        return torch.from_numpy(table).to(roots.device, non_blocking=True)

    return DraftTree(
        tokens=moved(tokens),
        parents=moved(parents),
        depths=moved(depths),
        log_q=moved(logs[0]),
        owners=moved(owners),
        depth=config.reach if fixed_shapes else int(depths.max()),
        drafted=torch.tensor(drafted, device=roots.device),
        columns=moved(columns),
        most=most,
        rest=moved(logs[1]),
        scores=moved(logs[2]),
        sources=moved(sources),
    )
