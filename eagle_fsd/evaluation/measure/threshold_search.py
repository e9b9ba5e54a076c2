"""Search the largest threshold within a quality budget: run, halve what is left, try on prompts not seen.

The further a rule may go, the further its distribution is from the target's. So the largest threshold inside
a budget is found by halves, each of which is run. Thresholds are of the E12 series, so that splits and
budgets share their runs.
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

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.calibration import CalibratedThreshold, Calibration, Kind
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Sums, estimates
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.sweep import Cell, run

E12 = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
LADDER = tuple(round(step * 10.0**power, 6) for power in range(-4, 2) for step in E12)
Row = Mapping[str, Any]
Run = Callable[[AcceptanceRule], Sequence[Row]]  # the rows of all prompts under a rule


@dataclass(frozen=True)
class Search:
    """What thresholds are chosen by: runs, each made once, and the confidence of their bounds."""

    run: Run
    confidence: float

    def largest(self, kind: Kind, budget: float, places: Sequence[int]) -> CalibratedThreshold | None:
        """Find the largest threshold of the ladder that was run on these prompts and stayed in the budget.

        None where even the least leaves the budget.
        """
        best, low, high = None, 0, len(LADDER)
        while low < high:
            middle = (low + high) // 2
            tried = self.measured(kind, LADDER[middle], places)
            if tried.bound <= budget:
                best, low = tried, middle + 1
            else:
                high = middle
        return best

    def measured(self, kind: Kind, threshold: float, places: Sequence[int]) -> CalibratedThreshold:
        """Return what a run says of a threshold on some of its prompts."""
        whole = (self.run(rule) for rule in (fuzzy(kind, threshold), Lossless()))
        mine, lossless = ([rows[place] for place in places] for rows in whole)
        tv, upper = bound(tv_of(mine), self.confidence)
        *how, min_gain = kind
        return CalibratedThreshold(*how, threshold, tv, upper, tau_of(mine), tau_of(lossless), min_gain)

    def splits(self, kind: Kind, budget: float, count: int) -> list[dict[str, Any]]:
        """Calibrate on a random half of the prompts and look at the other half, `count` times.

        Each trial has what one half chose, None for no threshold, and its TV on the other half.
        """
        trials = []
        random = np.random.default_rng(0)
        for split in range(count):
            order = random.permutation(len(self.run(Lossless()))).tolist()
            mine, others = order[: len(order) // 2], order[len(order) // 2 :]
            trial = dict.fromkeys(("kind", "budget", "split", "chosen", "tv", "inside"))
            trial |= {"kind": kind, "budget": budget, "split": split}
            chosen = self.largest(kind, budget, mine)
            if chosen is not None:
                tv = self.measured(kind, chosen.threshold, others).tv
                trial |= {"chosen": asdict(chosen), "tv": tv, "inside": tv <= budget}
            trials.append(trial)
        return trials


def fuzzy(kind: Kind, threshold: float) -> Fuzzy:
    """Return the rule of a kind with this threshold."""
    divergence, mode, child, min_gain = kind
    return Fuzzy(threshold, divergence, mode=mode, child=child, min_gain=min_gain)


def tau_of(rows: Sequence[Row]) -> float:
    return sum(row["new_tokens"] for row in rows) / sum(row["steps"] for row in rows)


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


def runs(engine: EagleFSD, cell: Cell, rows: Path, batch_size: int, made: Mapping[str, object]) -> Run:
    """Return what runs the cell under any rule, once, where the file has not its rows yet."""

    @functools.cache
    def run_rule(rule: AcceptanceRule) -> list[dict[str, Any]]:
        asked = replace(cell, rule=rule)
        return asked.rows(engine, run(engine, [asked], rows, batch_size, made))

    return run_rule


def calibrate(
    engine: EagleFSD,
    cell: Cell,
    search: Search,
    kinds: Sequence[Kind],
    budgets: Sequence[float],
    split_count: int,
    made: Mapping[str, object],
) -> tuple[Calibration, list[dict[str, Any]]]:
    """Find the largest threshold of every kind for every budget, and what splits of the prompts say of it."""
    lossless = search.run(Lossless())
    found: dict[tuple[Kind, float], CalibratedThreshold] = {}
    trials: list[dict[str, Any]] = []
    for kind, budget in product(kinds, budgets):
        best = search.largest(kind, budget, range(len(lossless)))
        if best is not None:
            found[kind, best.threshold] = best
        trials += search.splits(kind, budget, split_count)
    about = {"prompts": cell.questions.task.name, "max_new_tokens": cell.max_new_tokens}
    about["new_tokens"] = sum(row["new_tokens"] for row in lossless)
    calibration = Calibration(
        models=engine.identity(),
        sampling=cell.sampling,
        tree=cell.tree,
        confidence=search.confidence,
        prompts=len(lossless),
        thresholds=list(found.values()),
        made={**about, **made},
    )
    return calibration, trials


KIND = ("divergence", "mode", "child", "min gain")


def calibration_table(calibration: Calibration) -> str:
    """Write a Markdown table of what was found."""
    rows = []
    for one in calibration.thresholds:
        numbers = (f"{one.threshold:g}", f"{one.tv:.4f}", f"{one.bound:.4f}")
        rows.append([*map(str, one.kind), *numbers, f"{one.tau:.2f}", f"{one.lossless_tau:.2f}"])
    bounds = f"bound at {calibration.confidence:.0%}"
    return markdown_table((*KIND, "threshold", "TV per token", bounds, "tau", "lossless"), rows)


def trial_table(trials: Sequence[Row]) -> str:
    """Write a Markdown table of the splits: how often the other half stayed inside the budget."""
    rows = []
    for kind, budget in dict.fromkeys((trial["kind"], trial["budget"]) for trial in trials):
        mine = [trial for trial in trials if (trial["kind"], trial["budget"]) == (kind, budget)]
        run = [trial for trial in mine if trial["chosen"]]
        inside = f"{sum(trial['inside'] for trial in run)} of {len(run)}"
        inside += f" (of {len(mine)} splits)" if len(run) < len(mine) else ""
        thresholds = ", ".join(f"{trial['chosen']['threshold']:g}" for trial in run)
        tvs = ", ".join(f"{trial['tv']:.4f}" for trial in run)
        rows.append([*map(str, kind), f"{budget:g}", inside, thresholds, tvs])
    return markdown_table((*KIND, "budget", "inside", "thresholds", "TV per token, unseen"), rows)
