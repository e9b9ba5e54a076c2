"""Search the largest threshold within a quality budget: predict, run, correct, try on prompts not seen.

A lossless pass records, in every context that got a token, how far p and q are by each divergence and how
far the rule's distribution would move if it followed the draft there (a move is a mode, a child and a least
gain). From these any threshold's TV can be predicted. Text that follows the draft visits other contexts,
which is why a predicted threshold is then run. Thresholds are of the E12 series, so that splits and budgets
share their runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_fsd.acceptance.accept import Verdict, Verified, choices_of
from eagle_fsd.acceptance.calibration import CalibratedThreshold, Calibration
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.output_distribution import distances, path_distributions
from eagle_fsd.core.config import Kind
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Sums, estimates
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.observers import Meter
from eagle_fsd.evaluation.measure.sweep import Cell, run

E12 = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
LADDER = tuple(round(step * 10.0**power, 6) for power in range(-4, 2) for step in E12)
ROUNDS = 4  # thresholds that are run for one budget
Row = Mapping[str, Any]


def move_of(kind: Kind) -> Kind:
    """Return what a kind moves if any divergence will do: the same for all, but where it is the cost."""
    return kind if kind.price and kind.cost == "divergence" else kind._replace(divergence="tv")


class Recorder(Meter):
    """A meter of a lossless batch: of every token's context each divergence, and each move's TV.

    moves: kinds as `move_of` returns them. found: by row, a list of [divergences] + [moves] for each token;
    infinite where the context has no draft.
    """

    def __init__(self, divergences: Sequence[str], moves: Sequence[Kind], mode: str, rows: int) -> None:
        self.divergences, self.moves = divergences, moves
        self.found: list[list[list[float]]] = [[] for _ in range(rows)]

    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        nodes = verdict.path.clamp(min=0)
        everywhere = replace(verdict, asked=torch.ones_like(verdict.asked))
        columns = [Fuzzy(1.0, name).node_divergences(verified).gather(1, nodes) for name in self.divergences]
        for move in self.moves:
            chances, weak = choices_of(fuzzy(move, math.inf), verified)
            moved = replace(everywhere, chances=chances, weak=weak)
            columns.append(distances(*path_distributions(verified, moved, move.mode))[1])
        table = torch.stack(columns, dim=-1).cpu()  # [B, D, columns]
        for place, (row, count) in enumerate(emitted.items()):
            self.found[row] += table[place, :count].tolist()

    def row(self, row: int) -> dict[str, Any]:
        """Return JSON as Python writes and reads it: an infinite divergence is Infinity."""
        return {"seen": self.found[row]}


@dataclass(frozen=True)
class Records:
    """What the lossless pass says of every prompt: [tokens, divergences + moves] each, and its steps."""

    divergences: Sequence[str]
    moves: Sequence[Kind]
    tables: Sequence[NDArray[np.float64]]
    taus: Sequence[tuple[int, int]]  # new tokens, steps

    def predicted(self, kind: Kind, threshold: float, places: Sequence[int]) -> Sums:
        """Sum the TV of these prompts as if the rule had been asked in the lossless texts' contexts."""
        column = self.divergences.index(kind.divergence)
        move = len(self.divergences) + self.moves.index(move_of(kind))
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

    def record(self, divergences: Sequence[str], moves: Sequence[Kind]) -> Records:
        """Run the lossless pass, resumed at the first prompt that is missing."""
        meter = functools.partial(Recorder, divergences, moves)
        rows = self.rows_of(self.cell, "records.jsonl", meter, [list(divergences), list(map(list, moves))])
        tables = [np.array(row["seen"], dtype=float).reshape(row["new_tokens"], -1) for row in rows]
        return Records(divergences, moves, tables, [(row["new_tokens"], row["steps"]) for row in rows])

    def run(self, kind: Kind, threshold: float) -> list[dict[str, Any]]:
        """Return the rows of all prompts under a threshold."""
        return self.rows_of(replace(self.cell, rule=fuzzy(kind, threshold)), "rows.jsonl")

    def rows_of(self, cell: Cell, file: str, *meter: Any) -> list[dict[str, Any]]:
        """Run a cell where it has not been run; returns the rows of all prompts, in their order."""
        made = run(self.engine, [cell], self.folder / file, self.batch_size, self.provenance, *meter)
        return cell.rows(self.engine, made, *meter[1:])


def fuzzy(kind: Kind, threshold: float) -> Fuzzy:
    """Return the rule of a kind with this threshold."""
    return Fuzzy(threshold, **kind._asdict())


@dataclass(frozen=True)
class Search:
    """What thresholds are chosen by: records predict them, `run` gives the rows of all prompts under one."""

    records: Records
    run: Callable[[Kind, float], Sequence[Row]]
    confidence: float

    def largest(self, kind: Kind, budget: float, places: Sequence[int]) -> CalibratedThreshold | None:
        """Find the largest threshold of the ladder that was run on these prompts and stayed in the budget.

        The first to be run is the largest whose predicted bound is inside; each further one is corrected by
        the ratio of what was run to what was predicted. None where even the least leaves the budget.
        """
        tried: dict[float, CalibratedThreshold] = {}
        bounds = {t: bound(self.records.predicted(kind, t, places), self.confidence)[1] for t in LADDER}
        aim = budget
        for _ in range(ROUNDS):
            fits = [t for t in LADDER if bounds[t] <= aim]
            if not fits or fits[-1] in tried:
                break
            threshold = fits[-1]
            tried[threshold] = ran = self.measured(kind, threshold, places)
            if bounds[threshold] == 0 or ran.bound == 0:
                break
            aim = budget * bounds[threshold] / ran.bound
        # The last correction may have gone one step too far: the step below is the cautious one.
        while tried and min(one.bound for one in tried.values()) > budget and len(tried) < 2 * ROUNDS:
            below = LADDER.index(min(tried)) - 1
            if below < 0:
                break
            tried[LADDER[below]] = self.measured(kind, LADDER[below], places)
        inside = [one for one in tried.values() if one.bound <= budget]
        return max(inside, key=lambda one: one.threshold, default=None)

    def measured(self, kind: Kind, threshold: float, places: Sequence[int]) -> CalibratedThreshold:
        """Return what a run says of a threshold on some of its prompts."""
        rows = self.run(kind, threshold)
        mine = [rows[place] for place in places]
        tv, upper = bound(tv_of(mine), self.confidence)
        tokens, steps = (sum(self.records.taus[place][i] for place in places) for i in (0, 1))
        tau = sum(row["new_tokens"] for row in mine) / sum(row["steps"] for row in mine)
        found = (threshold, tv, upper, tau, tokens / steps)
        return CalibratedThreshold(*kind[:3], *found, *kind[3:])

    def fastest(
        self, kinds: Sequence[Kind], budget: float, places: Sequence[int]
    ) -> CalibratedThreshold | None:
        """Return the threshold of largest tau among the largest of every kind: what a budget alone finds."""
        found = filter(None, (self.largest(kind, budget, places) for kind in kinds))
        return max(found, key=lambda one: (one.tau, one.threshold), default=None)

    def splits(self, kinds: Sequence[Kind], budget: float, count: int) -> list[dict[str, Any]]:
        """Choose among these kinds on a random half of the prompts and look at the other half, `count` times.

        Each trial has what one half chose, None for no threshold, and its TV on the other half.
        """
        trials = []
        random = np.random.default_rng(0)
        for split in range(count):
            order = random.permutation(len(self.records.tables)).tolist()
            mine, others = order[: len(order) // 2], order[len(order) // 2 :]
            trial: dict[str, Any] = {"form": unpriced(kinds[0]), "budget": budget, "split": split}
            trial |= {"chosen": None, "tv": None, "inside": None}
            if chosen := self.fastest(kinds, budget, mine):
                rows = self.run(chosen.kind, chosen.threshold)
                tv = bound(tv_of([rows[place] for place in others]), self.confidence)[0]
                trial |= {"chosen": asdict(chosen), "tv": tv, "inside": tv <= budget}
            trials.append(trial)
        return trials


def unpriced(kind: Kind) -> str:
    """Return a kind in words without its price: those that differ in nothing else compete for a budget."""
    return str(kind._replace(price=0.0))


def bound(sums: Sums, confidence: float) -> tuple[float, float]:
    """Return the ratio of the sums and its one-sided upper bound at this confidence.

    A lone prompt has no bound: infinity.
    """
    if not sums.numerator.any():
        return 0.0, 0.0
    found = estimates({"tv": sums}, Bootstrap(2000, 2 * confidence - 1))["tv"]
    return found.value, math.inf if found.high is None else found.high


def tv_of(rows: Sequence[Row]) -> Sums:
    tokens = [float(row["new_tokens"]) for row in rows]
    return Sums(np.array([row["law"]["tv"] for row in rows]), np.array(tokens))


def calibrate(
    work: Work, kinds: Sequence[Kind], budgets: Sequence[float], split_count: int
) -> tuple[Calibration, list[dict[str, Any]]]:
    """Find the largest threshold of every kind for every budget, and what splits of the prompts say of it."""
    divergences = list(dict.fromkeys(kind.divergence for kind in kinds))
    records = work.record(divergences, list(dict.fromkeys(map(move_of, kinds))))
    search = Search(records, functools.cache(work.run), work.confidence)  # budgets and splits share runs
    places = range(len(records.tables))
    found: dict[tuple[Kind, float], CalibratedThreshold] = {}
    trials: list[dict[str, Any]] = []
    groups: dict[str, list[Kind]] = {}
    for kind in kinds:
        groups.setdefault(unpriced(kind), []).append(kind)
    for kind, budget in product(kinds, budgets):
        if best := search.largest(kind, budget, places):
            found[kind, best.threshold] = best
    for group, budget in product(groups.values(), budgets):
        trials += search.splits(group, budget, split_count)
    cell = work.cell
    calibration = Calibration(
        models=work.engine.identity(),
        sampling=cell.sampling,
        tree=cell.tree,
        confidence=work.confidence,
        prompts=len(places),
        thresholds=list(found.values()),
        made={
            "prompts": cell.questions.task.name,
            "max_new_tokens": cell.max_new_tokens,
            "new_tokens": sum(tokens for tokens, _ in records.taus),
            **work.provenance,
        },
    )
    return calibration, trials


def calibration_table(calibration: Calibration) -> str:
    """Write a Markdown table of what was found."""
    rows = []
    for one in calibration.thresholds:
        numbers = (f"{one.threshold:g}", f"{one.tv:.4f}", f"{one.bound:.4f}")
        rows.append([str(one.kind), *numbers, f"{one.tau:.2f}", f"{one.lossless_tau:.2f}"])
    bounds = f"bound at {calibration.confidence:.0%}"
    return markdown_table(("rule", "threshold", "TV per token", bounds, "tau", "lossless"), rows)


def trial_table(trials: Sequence[Row]) -> str:
    """Write a Markdown table of the splits: how often the other half stayed inside the budget."""
    rows = []
    for form, budget in dict.fromkeys((trial["form"], trial["budget"]) for trial in trials):
        mine = [trial for trial in trials if (trial["form"], trial["budget"]) == (form, budget)]
        run = [trial for trial in mine if trial["chosen"]]
        inside = f"{sum(trial['inside'] for trial in run)} of {len(run)}"
        inside += f" (of {len(mine)} splits)" if len(run) < len(mine) else ""
        chosen = [trial["chosen"] for trial in run]
        thresholds = ", ".join(f"{one['threshold']:g} at price {one['price']:g}" for one in chosen)
        tvs = ", ".join(f"{trial['tv']:.4f}" for trial in run)
        rows.append([form, f"{budget:g}", inside, thresholds, tvs])
    return markdown_table(("rule", "budget", "inside", "thresholds", "TV per token, unseen"), rows)
