"""Trees that were grown on the host, as the tensors of a DraftTree.

Where a head drafted too, its own rows of q are taken, and copies are mixed in.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import MutableMapping, Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import HEAD, DraftTree, root_only, take_rows
from eagle_fsd.drafting.lookup.text_memory import GrownTree

STEP = 64  # with fixed shapes, the number of tokens that no head drafts is a multiple of this


class Vocabulary:
    """The tokens that a head drafts.

    drafted: their ids [W], empty where there is no head; None: all of vocab_size, in order. listed: a
    vocabulary of the first ones of them.
    """

    def __init__(self, drafted: Tensor | None, vocab_size: int, listed: Vocabulary | None = None) -> None:
        self.drafted, self.size = drafted, vocab_size
        self.width = vocab_size if drafted is None else len(drafted)
        self.columns: MutableMapping[int, int] | None = None
        if drafted is not None:
            first = 0 if listed is None else listed.width
            places = {token: column for column, token in enumerate(drafted[first:].tolist(), first)}
            known = None if listed is None else listed.columns
            self.columns = places if known is None else ChainMap(places, known)

    def column(self, token: int) -> int | None:
        """Return the place of a token in the head's rows, None if it has none."""
        return token if self.columns is None else self.columns.get(token)

    def tokens(self, columns: Tensor) -> Tensor:
        """Return the tokens at these places."""
        return columns if self.drafted is None else self.drafted.take(columns)


def pack_trees(
    trees: Sequence[GrownTree],
    roots: Tensor,
    vocabulary: Vocabulary,
    most: int,
    depth: int,
    log_q: Sequence[Tensor] = (),
    with_rest: bool = True,
    filled: bool = False,
    recorded: bool = False,
) -> DraftTree:
    """Return the trees of all rows below roots [B].

    most, depth: of trees of this config. log_q: [B, W] of each node that a head expanded. with_rest: whether
    q may have mass outside its tokens. filled: fill every tree up to the most nodes. recorded: also fill up
    all else, so that few shapes occur.
    """
    nodes = most if filled else max(len(tree.tokens) for tree in trees)
    if nodes == 1:
        return root_only(roots, vocabulary.size, most)
    shape = (len(trees), nodes)
    # A filler has its root's token, and is nobody's child.
    tokens = np.repeat([[tree.tokens[0]] for tree in trees], nodes, axis=1)  # [B, N]
    parents, depths, columns = np.full(shape, -1), np.zeros(shape, int), np.zeros(shape, int)
    sources, chances = np.full(shape, HEAD), np.zeros(shape)
    owned = [sorted(set(tree.parents) - {-1}) for tree in trees]
    owners = np.full((len(trees), nodes - 1 if recorded else max(map(len, owned))), -1)  # [B, M]
    places, kept = np.zeros_like(owners), np.zeros(owners.shape)  # which of log_q, and its weight
    rest = np.zeros(owners.shape)
    extra: dict[int, int] = {}  # columns of tokens that the head does not draft
    entries: list[tuple[int, int, int, float]] = []  # row, its distribution, column, q

    def column_of(token: int) -> int:
        column = vocabulary.column(token)
        return extra.setdefault(token, vocabulary.width + len(extra)) if column is None else column

    for row, tree in enumerate(trees):
        count = len(tree.tokens)
        tokens[row, :count], parents[row, :count] = tree.tokens, tree.parents
        depths[row, :count], sources[row, :count] = tree.depths, tree.sources
        chances[row, :count] = tree.chances
        owners[row, : len(owned[row])] = owned[row]
        for number, owner in enumerate(owned[row]):
            mixture = tree.mixtures.get(owner)
            if mixture is None:
                q, rest[row, number] = tree.proposals[owner].q()
                entries += [(row, number, column_of(token), prob) for token, prob in q.items()]
            else:
                places[row, number], kept[row, number] = mixture.place, mixture.kept
                for token in mixture.weights:
                    entries.append((row, number, column_of(token), tree.probs[owner, token]))
        columns[row, 1:count] = [column_of(token) for token in tree.tokens[1:]]
    device, drafted = roots.device, vocabulary.drafted

    def moved(array: np.ndarray) -> Tensor:
        if array.dtype.kind == "i":  # on Windows numpy's own integers may have 32 bits, which index nothing
            array = array.astype(np.int64, copy=False)
        return torch.from_numpy(array).to(device, non_blocking=True)  # else the host waits for the device

    if recorded and drafted is not None:
        fill_up(extra, vocabulary)
    if log_q:
        table = take_rows(log_q, moved(places))  # [B, M, W]
        if bool((kept != 1.0).any()) or recorded:
            weights = moved(kept.astype(np.float32))[:, :, None]
            # Where the head has no part its row may hold anything, NaN too.
            table = torch.where(weights > 0, table + weights.log(), -math.inf)
    else:
        size = (*owners.shape, vocabulary.width)
        table = torch.full(size, -math.inf, dtype=torch.float32, device=device)
    if extra:
        table = torch.constant_pad_nd(table, (0, len(extra)), -math.inf)
        assert drafted is not None
        drafted = torch.cat((drafted, on_device(list(extra), device)))
    if entries:
        *at, probs = zip(*entries, strict=True)
        index = tuple(on_device(one, device) for one in at)
        table[index] = moved(np.array(probs, dtype=np.float32)).log()
    if with_rest and drafted is None:  # a row with a rest lists its tokens; see DraftTree
        drafted = torch.arange(vocabulary.width, device=device)
    with np.errstate(divide="ignore"):
        scores, log_rest = np.log(chances), np.log(rest)

    return DraftTree(
        tokens=moved(tokens),
        parents=moved(parents),
        depths=moved(depths),
        log_q=table,
        owners=moved(owners),
        depth=depth if recorded else int(depths.max()),
        drafted=drafted,
        columns=None if drafted is None else moved(columns),
        most=most,
        rest=moved(log_rest.astype(np.float32)) if with_rest else None,
        scores=moved(scores.astype(np.float32)),
        sources=moved(sources),
    )


def fill_up(extra: dict[int, int], vocabulary: Vocabulary) -> None:
    """Add tokens that the head does not draft until a multiple of STEP are there, or all."""
    wanted = min(-(-max(len(extra), 1) // STEP) * STEP, vocabulary.size - vocabulary.width)
    token = 0
    while len(extra) < wanted:
        if vocabulary.column(token) is None and token not in extra:
            extra[token] = vocabulary.width + len(extra)
        token += 1
