"""Where the nodes of a batch's trees are, for layers that run level by level and for those that do not.

Shapes: B rows of the batch, N nodes, M nodes of one level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import ancestors


@dataclass(frozen=True)
class Level:
    """The nodes of one depth in the trees of a batch. A node's place is its number among them.

    rows, nodes: [M], in order. parents: [M], their parents' places in the level before.
    """

    rows: Tensor
    nodes: Tensor
    parents: Tensor

    def to(self, device: torch.device) -> Level:
        """Return the level on a device."""
        return Level(self.rows.to(device), self.nodes.to(device), self.parents.to(device))


class TreePlan:
    """The trees of a batch. parents, depths: [B, N]; see DraftTree."""

    def __init__(self, parents: Tensor, depths: Tensor) -> None:
        self.parents, self.depths = parents, depths
        self._lines: dict[int, Tensor] = {}

    @cached_property
    def relation(self) -> Tensor:
        """[B, N, N] bool: whether a node is another one or its ancestor."""
        return ancestors(self.parents, self.parents.shape[1] - 1)

    @cached_property
    def levels(self) -> list[Level]:
        """The levels of all trees together, roots first."""
        found = []
        for rows, nodes in self._by_depth:
            found.append(Level(rows, nodes, self.places[rows, self.parents[rows, nodes]]))
        return found

    @cached_property
    def places(self) -> Tensor:
        """[B, N], of each node among those of its level."""
        places = torch.zeros_like(self.depths)
        for rows, nodes in self._by_depth:
            places[rows, nodes] = torch.arange(len(rows), device=places.device)
        return places

    @cached_property
    def _by_depth(self) -> list[tuple[Tensor, ...]]:
        """The rows and nodes [M] of each depth. The host waits for the depths."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for row, depths in enumerate(self.depths.tolist()):
            for node, depth in enumerate(depths):
                rows, nodes = found.setdefault(depth, ([], []))
                rows.append(row)
                nodes.append(node)
        device = self.depths.device
        return [tuple(on_device(part, device) for part in found[depth]) for depth in range(len(found))]

    def lines(self, size: int) -> Tensor:
        """Return where the last `size` inputs up to each node are, [size, B, N], the oldest first.

        They are counted over all rows, each of which has the last `size` inputs before the tree and then its
        nodes.
        """
        if size not in self._lines:
            batch, nodes = self.parents.shape
            before = torch.arange(-1, size - 1, device=self.parents.device).clamp(min=0)
            above = torch.where(self.parents < 0, size - 1, self.parents + size)
            above = torch.cat((before.expand(batch, -1), above), dim=1)  # [B, size + N], of each input
            line = [torch.arange(size, size + nodes, device=above.device).expand(batch, -1)]
            for _ in range(size - 1):
                line.insert(0, above.gather(1, line[0]))
            rows = torch.arange(batch, device=above.device)[:, None]
            self._lines[size] = torch.stack(line) + rows * (size + nodes)
        return self._lines[size]
