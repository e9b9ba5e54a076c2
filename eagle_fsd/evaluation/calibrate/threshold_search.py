"""Thresholds for quality budgets: foretold by records, run, corrected; and tried on prompts not seen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from eagle_fsd.acceptance.calibration import CalibratedThreshold, Calibration, Kind
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Sums, estimates
from eagle_fsd.evaluation.calibrate.recorded_pass import LADDER, Records, Work
from eagle_fsd.evaluation.markdown_table import table_lines

ROUNDS = 4  # thresholds that are run for one budget


def bound(sums: Sums, confidence: float) -> tuple[float, float]:
    """The ratio of the sums and its one-sided upper bound at this confidence; a lone prompt has none."""
    if not sums.numerator.any():
        return 0.0, 0.0
    found = estimates({"tv": sums}, Bootstrap(2000, 2 * confidence - 1))["tv"]
    return found.value, math.inf if found.high is None else found.high


def largest(
    kind: Kind,
    budget: float,
    places: Sequence[int],
    records: Records,
    really: Callable[[Kind, float], Sequence[Mapping[str, Any]]],
    confidence: float,
) -> CalibratedThreshold | None:
    """The largest threshold of the ladder that was run on these prompts and stayed within the budget.

    The first to be run is the largest whose foretold bound is inside; each further one is corrected by the
    ratio of what was run to what was foretold. None where even the least leaves the budget.
    """
    tried: dict[float, CalibratedThreshold] = {}
    aim = budget
    for _ in range(ROUNDS):
        foretold = {t: bound(records.foretold(kind, t, places), confidence)[1] for t in LADDER}
        fits = [t for t in LADDER if foretold[t] <= aim]
        if not fits or fits[-1] in tried:
            break
        threshold = fits[-1]
        tried[threshold] = measured(kind, threshold, places, really(kind, threshold), records, confidence)
        if foretold[threshold] == 0 or tried[threshold].bound == 0:
            break
        aim = budget * foretold[threshold] / tried[threshold].bound
    inside = [one for one in tried.values() if one.bound <= budget]
    # The last correction may have gone one step too far: the step below is the cautious one.
    while tried and not inside and (below := LADDER.index(min(tried)) - 1) >= 0 and len(tried) < 2 * ROUNDS:
        threshold = LADDER[below]
        tried[threshold] = measured(kind, threshold, places, really(kind, threshold), records, confidence)
        inside = [one for one in tried.values() if one.bound <= budget]
    return max(inside, key=lambda one: one.threshold, default=None)


def measured(
    kind: Kind,
    threshold: float,
    places: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    records: Records,
    confidence: float,
) -> CalibratedThreshold:
    """What a run says of a threshold on some of its prompts."""
    mine = [rows[place] for place in places]
    tv, upper = bound(tv_of(mine), confidence)
    tokens, steps = (sum(records.taus[place][i] for place in places) for i in (0, 1))
    tau = sum(row["new_tokens"] for row in mine) / sum(row["steps"] for row in mine)
    divergence, mode, child, min_gain = kind
    return CalibratedThreshold(divergence, mode, child, threshold, tv, upper, tau, tokens / steps, min_gain)


def tv_of(rows: Sequence[Mapping[str, Any]]) -> Sums:
    return Sums(
        np.array([row["law"]["tv"] for row in rows]), np.array([float(row["new_tokens"]) for row in rows])
    )


@dataclass(frozen=True)
class Trial:
    """A split: what half of the prompts chose, and what it did on the other half. chosen: None for none."""

    kind: Kind
    budget: float
    split: int
    chosen: CalibratedThreshold | None
    tv: float | None

    @property
    def inside(self) -> bool | None:
        return None if self.tv is None else self.tv <= self.budget

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "inside": self.inside}


def splits(
    kind: Kind,
    budget: float,
    records: Records,
    really: Callable[[Kind, float], Sequence[Mapping[str, Any]]],
    confidence: float,
    count: int,
    seed: int = 0,
) -> list[Trial]:
    """Calibrate on a random half of the prompts and look at the other half, `count` times."""
    trials = []
    random = np.random.default_rng(seed)
    for split in range(count):
        order = random.permutation(len(records.tables)).tolist()
        mine, others = order[: len(order) // 2], order[len(order) // 2 :]
        chosen = largest(kind, budget, mine, records, really, confidence)
        tv = None
        if chosen is not None:
            rows = really(kind, chosen.threshold)
            tv = bound(tv_of([rows[place] for place in others]), confidence)[0]
        trials.append(Trial(kind, budget, split, chosen, tv))
    return trials


def calibrate(
    work: Work, kinds: Sequence[Kind], budgets: Sequence[float], split_count: int
) -> tuple[Calibration, list[Trial]]:
    """The largest threshold of every kind for every budget, and what splits of the prompts say of them."""
    engine, cell = work.engine, work.cell
    records = work.record(
        list(dict.fromkeys(kind[0] for kind in kinds)), list(dict.fromkeys(kind[1:] for kind in kinds))
    )
    places = range(len(records.tables))
    really = functools.cache(work.really)  # budgets and splits share thresholds
    found: dict[tuple[Kind, float], CalibratedThreshold] = {}
    trials: list[Trial] = []
    for kind, budget in product(kinds, budgets):
        best = largest(kind, budget, places, records, really, work.confidence)
        if best is not None:
            found[kind, best.threshold] = best
        trials += splits(kind, budget, records, really, work.confidence, split_count)
    calibration = Calibration(
        models=engine.identity(),
        sampling=cell.sampling,
        tree=cell.tree,
        confidence=work.confidence,
        prompts=len(places),
        thresholds=list(found.values()),
        made={
            "prompts": work.questions.task.name,
            "max_new_tokens": cell.max_new_tokens,
            "new_tokens": sum(tokens for tokens, _ in records.taus),
            **work.provenance,
        },
    )
    return calibration, trials


def table(calibration: Calibration) -> str:
    """A Markdown table of what was found."""
    titles = (
        "divergence",
        "mode",
        "child",
        "min gain",
        "threshold",
        "TV per token",
        f"bound at {calibration.confidence:.0%}",
    )
    return "\n".join(
        table_lines(
            (*titles, "tau", "lossless"),
            (
                [
                    *cells_of(one.kind),
                    f"{one.threshold:g}",
                    f"{one.tv:.4f}",
                    f"{one.bound:.4f}",
                    f"{one.tau:.2f}",
                    f"{one.lossless_tau:.2f}",
                ]
                for one in calibration.thresholds
            ),
        )
    )


def cells_of(kind: Kind) -> tuple[str, ...]:
    """A kind as a table's cells."""
    return (*kind[:3], f"{kind[3]:g}")


def trial_table(trials: Sequence[Trial]) -> str:
    """A Markdown table of the splits: how often the other half stayed inside the budget."""
    lines = []
    groups: dict[tuple[Kind, float], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.kind, trial.budget), []).append(trial)
    for (kind, budget), mine in groups.items():
        run = [trial for trial in mine if trial.chosen is not None]
        inside = f"{sum(bool(trial.inside) for trial in run)} of {len(run)}"
        cells = [
            *cells_of(kind),
            f"{budget:g}",
            inside if len(run) == len(mine) else f"{inside} (of {len(mine)} splits)",
        ]
        cells.append(", ".join(f"{trial.chosen.threshold:g}" for trial in run if trial.chosen))
        cells.append(", ".join(f"{trial.tv:.4f}" for trial in run))
        lines.append(cells)
    titles = ("divergence", "mode", "child", "min gain", "budget", "inside", "thresholds")
    return "\n".join(table_lines((*titles, "TV per token, unseen"), lines))
