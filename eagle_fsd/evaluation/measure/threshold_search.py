"""Search the boldest rule within a quality budget: predict, run, correct, try on prompts not seen.

A dial is a row of settings from mild to bold: growing thresholds of one kind of rule, or falling prices of a
plan, whose gate is open. A lossless pass records, in every context that got a token, how far p and q are by
each divergence and how far the rule's distribution would move if it followed the draft there (a move is a
mode, a child, a least gain and a price). From these any setting's TV can be predicted. Text that follows the
draft visits other contexts, which is why a predicted setting is then run. Thresholds are of the E12 series,
so that splits and budgets share their runs.
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

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.calibration import CalibratedThreshold, Calibration
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import AutoThreshold, Kind
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Sums, estimates
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.expected_steps import node_steps
from eagle_fsd.evaluation.measure.observers import Meter
from eagle_fsd.evaluation.measure.sweep import Cell, run

E12 = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
LADDER = tuple(round(step * 10.0**power, 6) for power in range(-4, 2) for step in E12)
PRICES = (5.0, 4.0, 3.5, 3.0, 2.75, 2.5, 2.25, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5)
ROUNDS = 4  # settings that are run for one budget
Row = Mapping[str, Any]
Setting = tuple[Kind, float]  # and its threshold


def dials_of(kinds: Sequence[Kind]) -> list[list[Setting]]:
    """Return a dial for every kind without a price, and one for all that differ in their price alone."""
    plans: dict[Kind, list[Setting]] = {}
    for kind in sorted(kinds, key=lambda kind: -kind.price):
        if kind.price:
            plans.setdefault(kind._replace(price=0.0), []).append((kind, math.inf))
    return [*([(kind, t) for t in LADDER] for kind in kinds if not kind.price), *plans.values()]


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
        columns = [Fuzzy(1.0, name).node_divergences(verified).gather(1, nodes) for name in self.divergences]
        for move in self.moves:
            columns.append(node_steps(fuzzy(move, math.inf), verified).tv.gather(1, nodes))
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
    """What settings are chosen by: records predict them, `run` gives the rows of all prompts under one."""

    records: Records
    run: Callable[[Kind, float], Sequence[Row]]
    confidence: float

    def boldest(
        self, dial: Sequence[Setting], budget: float, places: Sequence[int]
    ) -> CalibratedThreshold | None:
        """Find the boldest setting of a dial that was run on these prompts and stayed in the budget.

        The first to be run is the boldest whose predicted bound is inside; each further one is corrected by
        the ratio of what was run to what was predicted. None where even the mildest leaves the budget.
        """
        tried: dict[int, CalibratedThreshold] = {}
        bounds = [bound(self.records.predicted(*one, places), self.confidence)[1] for one in dial]
        aim = budget
        for _ in range(ROUNDS):
            step = max((step for step, one in enumerate(bounds) if one <= aim), default=-1)
            if step < 0 or step in tried:
                break
            tried[step] = ran = self.measured(*dial[step], places)
            if bounds[step] == 0 or ran.bound == 0:
                break
            aim = budget * bounds[step] / ran.bound
        # The last correction may have gone one step too far: the step below is the cautious one.
        while tried and min(one.bound for one in tried.values()) > budget and len(tried) < 2 * ROUNDS:
            below = min(tried) - 1
            if below < 0:
                break
            tried[below] = self.measured(*dial[below], places)
        inside = [step for step, one in tried.items() if one.bound <= budget]
        return tried[max(inside)] if inside else None

    def measured(self, kind: Kind, threshold: float, places: Sequence[int]) -> CalibratedThreshold:
        """Return what a run says of a setting on some of its prompts."""
        rows = self.run(kind, threshold)
        mine = [rows[place] for place in places]
        tv, upper = bound(tv_of(mine), self.confidence)
        tokens, steps = (sum(self.records.taus[place][i] for place in places) for i in (0, 1))
        tau = sum(row["new_tokens"] for row in mine) / sum(row["steps"] for row in mine)
        found = (threshold, tv, upper, tau, tokens / steps)
        return CalibratedThreshold(*kind[:3], *found, *kind[3:])

    def fastest(
        self, dials: Sequence[Sequence[Setting]], budget: float, places: Sequence[int]
    ) -> CalibratedThreshold | None:
        """Return the setting of largest tau among the boldest of every dial: what a budget alone finds."""
        found = filter(None, (self.boldest(dial, budget, places) for dial in dials))
        return max(found, key=lambda one: (one.tau, one.threshold), default=None)

    def splits(self, dials: Sequence[Sequence[Setting]], budget: float, count: int) -> list[dict[str, Any]]:
        """Choose among these dials on a random half of the prompts and look at the other half, `count` times.

        Each trial has what one half chose, None for nothing, and its TV on the other half.
        """
        trials = []
        random = np.random.default_rng(0)
        for split in range(count):
            order = random.permutation(len(self.records.tables)).tolist()
            mine, others = order[: len(order) // 2], order[len(order) // 2 :]
            trial: dict[str, Any] = {"form": form_of(dials[0]), "budget": budget, "split": split}
            trial |= {"chosen": None, "tv": None, "inside": None}
            if chosen := self.fastest(dials, budget, mine):
                rows = self.run(chosen.kind, chosen.threshold)
                tv = bound(tv_of([rows[place] for place in others]), self.confidence)[0]
                trial |= {"chosen": asdict(chosen), "tv": tv, "inside": tv <= budget}
            trials.append(trial)
        return trials


def form_of(dial: Sequence[Setting]) -> str:
    """Return what dials share that compete for a budget: all but the mode, the price and its cost."""
    kind = dial[0][0]
    return str(AutoThreshold(0.0, kind.divergence, child=kind.child, min_gain=kind.min_gain))


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
    """Find the boldest setting of every dial for every budget, and what splits of the prompts say of it."""
    divergences = list(dict.fromkeys(kind.divergence for kind in kinds))
    records = work.record(divergences, list(dict.fromkeys(map(move_of, kinds))))
    search = Search(records, functools.cache(work.run), work.confidence)  # budgets and splits share runs
    places = range(len(records.tables))
    found: dict[Setting, CalibratedThreshold] = {}
    trials: list[dict[str, Any]] = []
    dials = dials_of(kinds)
    groups: dict[str, list[list[Setting]]] = {}
    for dial in dials:
        groups.setdefault(form_of(dial), []).append(dial)
    for dial, budget in product(dials, budgets):
        if best := search.boldest(dial, budget, places):
            found[best.kind, best.threshold] = best
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
        dials = [("price", one["price"]) if one["price"] else ("T", one["threshold"]) for one in chosen]
        settings = ", ".join(f"{name} {value:g}" for name, value in dials)
        tvs = ", ".join(f"{trial['tv']:.4f}" for trial in run)
        rows.append([form, f"{budget:g}", inside, settings, tvs])
    return markdown_table(("rule", "budget", "inside", "chosen", "TV per token, unseen"), rows)
