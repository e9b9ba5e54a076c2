"""Calibration's runs: a lossless pass that predicts every threshold's TV per token, and runs of single ones.

The lossless pass records, in every context that got a token, how far p and q are by each divergence and how
far the rule's distribution would move if it followed the draft there (a move is a mode, a child and a least
gain). From these any threshold's TV can be predicted. Text that follows the draft visits other contexts,
which is why a predicted threshold is then run. Thresholds are of the E12 series, so that splits and budgets
share their runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.calibration import Kind
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.output_distribution import distances, path_distributions
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.analysis.bootstrap import Sums
from eagle_fsd.evaluation.measure.sweep import Cell, run

E12 = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
LADDER = tuple(round(step * 10.0**power, 6) for power in range(-4, 2) for step in E12)
Move = tuple[str, str, float]  # mode, child, min_gain


class Recorder:
    """A meter of a lossless batch: of every token's context each divergence, and each move's TV.

    found: by row, a list of [divergences] + [moves] for each token; infinite where the context has no draft.
    """

    def __init__(self, divergences: Sequence[str], moves: Sequence[Move], rows: int) -> None:
        self.divergences, self.moves = divergences, moves
        self.found: list[list[list[float]]] = [[] for _ in range(rows)]
        self.seconds = 0.0

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        start = time.perf_counter()
        nodes = verdict.path.clamp(min=0)
        everywhere = replace(verdict, asked=torch.ones_like(verdict.asked))
        columns = [Fuzzy(1.0, name).node_divergences(verified).gather(1, nodes) for name in self.divergences]
        for mode, child, min_gain in self.moves:
            rule = Fuzzy(math.inf, "tv", mode=mode, child=child, min_gain=min_gain)
            moved = replace(everywhere, chances=rule.chances(verified))
            columns.append(distances(*path_distributions(verified, moved, mode))[1])
        table = torch.stack(columns, dim=-1).cpu()  # [B, D, columns]
        for place, (row, count) in enumerate(emitted.items()):
            self.found[row] += table[place, :count].tolist()
        self.seconds += time.perf_counter() - start

    def row(self, row: int) -> dict[str, Any]:
        """Return JSON as Python writes and reads it: an infinite divergence is Infinity."""
        return {"seen": self.found[row]}


@dataclass(frozen=True)
class Records:
    """What the lossless pass says of every prompt: [tokens, divergences + moves] each, and its steps."""

    divergences: Sequence[str]
    moves: Sequence[Move]
    tables: Sequence[NDArray[np.float64]]
    taus: Sequence[tuple[int, int]]  # new tokens, steps

    def predicted(self, kind: Kind, threshold: float, places: Sequence[int]) -> Sums:
        """Sum the TV of these prompts as if the rule had been asked in the lossless texts' contexts."""
        column = self.divergences.index(kind[0])
        move = len(self.divergences) + self.moves.index(kind[1:])
        tables = [self.tables[place] for place in places]
        moved = [float(table[table[:, column] <= threshold, move].sum()) for table in tables]
        return Sums(np.array(moved), np.array([float(len(table)) for table in tables]))


@dataclass(frozen=True)
class Work:
    """One calibration under way: the prompts, how they are run, and where its rows are kept."""

    engine: EagleFSD
    cell: Cell  # lossless; a threshold's cell is the same under another rule
    folder: Path
    batch_size: int
    confidence: float
    provenance: Mapping[str, object]

    def record(self, divergences: Sequence[str], moves: Sequence[Move]) -> Records:
        """Run the lossless pass, resumed at the first prompt that is missing."""
        measured = [list(divergences), list(map(list, moves))]
        rows = self.rows_of(
            self.cell, "records.jsonl", lambda mode, rows: Recorder(divergences, moves, rows), measured
        )
        tables = [np.array(row["seen"], dtype=float).reshape(row["new_tokens"], -1) for row in rows]
        return Records(divergences, moves, tables, [(row["new_tokens"], row["steps"]) for row in rows])

    def run(self, kind: Kind, threshold: float) -> list[dict[str, Any]]:
        """Return the rows of all prompts under a threshold, run where they have not been."""
        return self.rows_of(replace(self.cell, rule=fuzzy(kind, threshold)), "rows.jsonl")

    def rows_of(self, cell: Cell, file: str, *meter: Any) -> list[dict[str, Any]]:
        """Run a cell where it has not been run; returns the rows of all prompts, in their order."""
        made = run(self.engine, [cell], self.folder / file, self.batch_size, self.provenance, *meter)
        return cell.rows(self.engine, made, *meter[1:])


def fuzzy(kind: Kind, threshold: float) -> Fuzzy:
    """Return the rule of a kind with this threshold."""
    divergence, mode, child, min_gain = kind
    return Fuzzy(threshold, divergence, mode=mode, child=child, min_gain=min_gain)
