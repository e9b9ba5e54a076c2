"""Search the boldest rule within a quality budget: predict, run, correct, try on prompts not seen.

A dial is a row of settings from mild to bold: growing thresholds of one kind of rule, or falling prices of a
plan, whose gate is open. A lossless pass records what every setting is expected to do in its steps, in closed
form. That predicts each one's TV, and says which is faster: on the same trees, and without the luck of texts.
Text that follows the draft visits other contexts, which is why a predicted setting is then run, and its TV
counts. Thresholds are of the E12 series, so that splits and budgets share their runs.
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
from eagle_fsd.acceptance.calibration import CalibratedThreshold, Calibration
from eagle_fsd.acceptance.divergence import largest_value
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import AutoThreshold, Kind
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.analysis.bootstrap import Array, Bootstrap, Sums, estimates
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.sweep import Cell, run
from eagle_fsd.evaluation.rows import tau_of

E12 = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
LADDER = tuple(round(step * 10.0**power, 6) for power in range(-4, 2) for step in E12)
# Finest below whole numbers: a draft that is all but certain is worth nearly as many tokens as it is long.
PRICES: tuple[float, ...] = (5.0, 4.5, 4.0, 3.9, 3.75, 3.5, 3.35, 3.25, 3.1, 3.0)
PRICES += (2.95, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2, 2.1)
PRICES += (2.0, 1.95, 1.9, 1.8, 1.7, 1.6, 1.5, 1.25, 1.0, 0.95, 0.9, 0.75, 0.5)
ROUNDS = 4  # settings that are run for one budget
Row = Mapping[str, Any]
Setting = tuple[Kind, float]  # and its threshold


def dials_of(kinds: Sequence[Kind]) -> list[list[Setting]]:
    """Return a dial for every kind without a price, and one for all that differ in their price alone.

    Thresholds end at the first one that lets every child through: larger ones are the same rule.
    """
    plans: dict[Kind, list[Setting]] = {}
    for kind in sorted(kinds, key=lambda kind: -kind.price):
        if kind.price:
            plans.setdefault(kind._replace(price=0.0), []).append((kind, math.inf))
    ladders = {kind: largest_value(kind.divergence) for kind in kinds if not kind.price}
    steps = {kind: sum(t < most for t in LADDER) + 1 for kind, most in ladders.items()}
    return [*([(kind, t) for t in LADDER[:count]] for kind, count in steps.items()), *plans.values()]


@dataclass(frozen=True)
class Work:
    """One calibration under way: the prompts, how they are run, and where its rows are kept."""

    engine: EagleFSD
    # Lossless, with draws that are independent of the trees, as what is predicted from them needs. A
    # threshold's cell is the same under another rule.
    cell: Cell
    folder: Path
    batch_size: int
    confidence: float
    provenance: Mapping[str, object]

    def record(self, settings: Sequence[Setting]) -> Search:
        """Run the lossless pass, resumed at the first prompt that is missing."""
        rules: list[AcceptanceRule] = [Lossless(), *(fuzzy(*setting) for setting in settings)]
        rows = self.rows_of(self.cell, "records.jsonl", rules)
        by_prompt = [[(one["new_tokens"], one["law"]["tv"]) for one in row["expected"]] for row in rows]
        lossless, *others = np.array(by_prompt).swapaxes(0, 1)  # [rules, prompts, 2]
        expected = dict(zip(settings, others, strict=True))
        once = functools.cache(self.run)  # budgets and splits share runs
        return Search(rows, expected, lossless[:, 0], once, self.confidence)

    def run(self, kind: Kind, threshold: float) -> list[dict[str, Any]]:
        """Return the rows of all prompts under a threshold."""
        return self.rows_of(replace(self.cell, rule=fuzzy(kind, threshold)), "rows.jsonl")

    def rows_of(self, cell: Cell, name: str, expected: Sequence[AcceptanceRule] = ()) -> list[dict[str, Any]]:
        """Run a cell where it has not been run; returns the rows of all prompts, in their order."""
        file = self.folder / name
        return run(self.engine, [cell], file, self.batch_size, self.provenance, expected, timed=False)[0]


def fuzzy(kind: Kind, threshold: float) -> Fuzzy:
    """Return the rule of a kind with this threshold."""
    return Fuzzy(threshold, **kind._asdict())


@dataclass(frozen=True)
class Search:
    """What settings are chosen by: what the lossless pass says of every prompt, and what runs say.

    rows: of the lossless texts. expected: what a setting is expected to have in their steps, by prompt: the
    tokens, and the sum of TV, [prompts, 2]. lossless: the tokens of lossless decoding there, [prompts].
    run: gives the rows of all prompts under a setting.
    """

    rows: Sequence[Row]
    expected: Mapping[Setting, Array]
    lossless: Array
    run: Callable[[Kind, float], Sequence[Row]]
    confidence: float

    def predicted(self, kind: Kind, threshold: float, places: Sequence[int]) -> Sums:
        """Return the sums of TV and of tokens of these prompts, with the trees of the lossless texts."""
        return self.expected[kind, threshold][list(places), None, ::-1]

    def boldest(
        self, dial: Sequence[Setting], budget: float, places: Sequence[int]
    ) -> CalibratedThreshold | None:
        """Find the boldest setting of a dial that was run on these prompts and stayed in the budget.

        The first to be run is the boldest whose predicted bound is inside; each further one is corrected by
        the ratio of what was run to what was predicted. None where even the mildest leaves the budget.
        """
        tried: dict[int, CalibratedThreshold] = {}
        bounds = [bound(self.predicted(*one, places), self.confidence)[1] for one in dial]
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
        mine, lossless = ([of[place] for place in places] for of in (rows, self.rows))
        tv, upper = bound(tv_of(mine), self.confidence)
        tokens = self.expected[kind, threshold][list(places), 0]  # on the trees of lossless texts
        ratio = float(tokens.sum() / self.lossless[list(places)].sum())
        found = (threshold, tv, upper, tau_of(mine), tau_of(lossless))
        return CalibratedThreshold(*kind[:3], *found, *kind[3:], ratio)

    def splits(self, dials: Sequence[Sequence[Setting]], budget: float, count: int) -> list[dict[str, Any]]:
        """Choose among these dials on a random half of the prompts and look at the other half, `count` times.

        Each trial has the fastest of the dials' boldest settings, None for nothing, and its TV on the other
        half.
        """
        trials = []
        random = np.random.default_rng(0)
        for split in range(count):
            order = random.permutation(len(self.rows)).tolist()
            mine, others = order[: len(order) // 2], order[len(order) // 2 :]
            trial: dict[str, Any] = {"form": form_of(dials[0]), "budget": budget, "split": split}
            trial |= {"chosen": None, "tv": None, "inside": None}
            found = filter(None, (self.boldest(dial, budget, mine) for dial in dials))
            if chosen := max(found, key=CalibratedThreshold.speed, default=None):
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
    """Return the ratio of the sums and its one-sided upper bound: infinity for a lone prompt."""
    if not sums[..., 0].any():
        return 0.0, 0.0
    found = estimates({"tv": sums}, Bootstrap(2000, 2 * confidence - 1))["tv"]
    return found.value, math.inf if found.high is None else found.high


def tv_of(rows: Sequence[Row]) -> Sums:
    return np.array([[(row["law"]["tv"], row["new_tokens"])] for row in rows], dtype=float)


def calibrate(
    work: Work, kinds: Sequence[Kind], budgets: Sequence[float], split_count: int, device: str = "cpu"
) -> tuple[Calibration, list[dict[str, Any]]]:
    """Find the boldest setting of every dial for every budget, and what splits of the prompts say of it."""
    dials = dials_of(kinds)
    search = work.record([setting for dial in dials for setting in dial])
    places = range(len(search.rows))
    found: dict[Setting, CalibratedThreshold] = {}
    trials: list[dict[str, Any]] = []
    for dial, budget in product(dials, budgets):
        if best := search.boldest(dial, budget, places):
            found[best.kind, best.threshold] = best
    for form, budget in product(dict.fromkeys(map(form_of, dials)), budgets):
        trials += search.splits([dial for dial in dials if form_of(dial) == form], budget, split_count)
    cell, shared = work.cell, 0.0
    if cell.sampling.warm:  # lossless texts whose draft knows the noise of the draws
        shared = tau_of(work.rows_of(replace(cell, rule=Lossless()), "rows.jsonl")) / tau_of(search.rows)
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
            "new_tokens": sum(row["new_tokens"] for row in search.rows),
            **work.provenance,
        },
        shared_ratio=shared,
        device=device,
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
