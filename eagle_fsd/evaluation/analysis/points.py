"""From raw rows to points: what one rule, on one task, costs and gains, with intervals, against lossless.

A panel is what may be compared: one task and version, sampling, length limit, tree, dtype, weight format and
pair of models. In it every rule is a point, and each of its measures a ratio of two sums over rows, by
sample. A point is held against the lossless one on the samples and seeds that both have, and says how many
these are, so that a sweep that is not done yet can be read all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from eagle_fsd.evaluation.analysis.bootstrap import (
    Array,
    Bootstrap,
    Change,
    Estimate,
    Sums,
    changes,
    estimates,
    resampled,
)
from eagle_fsd.evaluation.analysis.repetition import ends_in_loop, repeated_tokens, runs
from eagle_fsd.evaluation.analysis.rule_labels import LOSSLESS, name_rule
from eagle_fsd.evaluation.rows import Row
from eagle_fsd.evaluation.tasks import TASKS

SPEED, TAU = "tokens_per_second", "tau"
SCORE = "score:"  # before the name of a task's own score
Names = tuple[str, str | None]  # of target and head
Parts = tuple[float | None, float | None]  # a row's numerator and denominator; None where it is unknown
# What the panels of a section of a report share, and what those of a panel share beside that.
SECTION_FIELDS = ("base_model", "ea_model", "draft_vocab_size", "dtype", "weight_format", "tree")
SECTION = attrgetter(*SECTION_FIELDS)
TASK = attrgetter("task", "version", "sampling", "max_new_tokens")


@dataclass(frozen=True)
class Measure:
    """A quantity of a table, from the parts that each row gives.

    whole: it is unknown for all samples where one does not know it: a sum with an infinite term.
    machine: it depends on the machine, and only rows of one machine can be compared.
    """

    title: str
    parts: Callable[[Row], Parts]
    whole: bool = False
    machine: bool = False


def in_text(
    places: list[int] | None, count: Callable[[list[int]], float], weight: Callable[[list[int]], float]
) -> Parts:
    """Return the parts of a count over a row's tokens, or over places in them, where it has kept these."""
    return (None, None) if places is None else (count(places), weight(places))


MEASURES: dict[str, Measure] = {
    TAU: Measure("tau", lambda row: (row.new_tokens, row.steps)),
    # A batch's seconds are shared out to its rows.
    SPEED: Measure("tokens/s", lambda row: (row.new_tokens, row.seconds), machine=True),
    "fuzzy_share": Measure("fuzzy share", lambda row: (row.fuzzy_accepts, row.new_tokens)),
    # Tokens of one run, on average; 1 / (1 - fuzzy share) if accepts came independently of each other.
    "fuzzy_run": Measure("fuzzy run", lambda row: in_text(row.fuzzy_at, len, runs)),
    "repeated": Measure("repeated", lambda row: in_text(row.token_ids, repeated_tokens, len)),
    "loops": Measure("in a loop", lambda row: in_text(row.token_ids, ends_in_loop, lambda _: 1)),
    "length": Measure("length", lambda row: (row.new_tokens, 1)),
    "limit_rate": Measure("at the limit", lambda row: (row.finish_reason == "length", 1)),
    "law_tv": Measure("TV", lambda row: (row.tv, row.new_tokens), whole=True),
    "law_kl": Measure("KL", lambda row: (row.kl, row.new_tokens), whole=True),
    "log_p": Measure("log p", lambda row: (row.log_p and row.log_p * row.new_tokens, row.new_tokens)),
}


def score(name: str, weight: str | None = None) -> Measure:
    """Return a task's own score, a mean over samples; weight: the score that each is weighted by."""

    def parts(row: Row) -> Parts:
        value, own = row.scores.get(name), 1.0 if weight is None else row.scores.get(weight)
        return (None if value is None or own is None else value * own), own

    return Measure(name, parts)


def score_weights(task: str) -> Mapping[str, str]:
    """Return by which scores a task's scores are weighted; none of a task that is not ours."""
    return TASKS[task].weights if task in TASKS else {}


def paired(*sides: Sequence[Row]) -> list[tuple[Row, ...]]:
    """Put together the rows of a sample and seed that every side has, in the order of samples and seeds."""
    found = [{(row.sample, row.seed): row for row in side} for side in sides]
    return [tuple(side[key] for side in found) for key in sorted(set.intersection(*map(set, found)))]


def sums_of(measure: Measure, groups: Sequence[tuple[Row, ...]]) -> Sums:
    """Sum a measure by sample, for every place in the groups of `paired`, where all of a group know it.

    A sample's seeds belong together, and are drawn together. The rows give no value together where a term is
    missing that the sum needs, or where they come from several machines.
    """
    parts = np.array([[measure.parts(row) for row in group] for group in groups], dtype=float)  # [n, k, 2]
    known = ~np.isnan(parts).any(axis=(1, 2))  # None has become NaN
    machines = {machine(row) for group in groups for row in group}
    if (measure.whole and not known.all()) or (measure.machine and len(machines) > 1):
        known[:] = False
    names, places = np.unique([group[0].sample for group in groups], return_inverse=True)
    sums = np.zeros((len(names), *parts.shape[1:]))
    np.add.at(sums, places[known], parts[known])
    return sums


def machine(row: Row) -> tuple[object, ...]:
    """Return what seconds depend on beside the cell."""
    return *map(row.provenance.get, ("device", "threads", "runtime")), row.batch_size


@dataclass(frozen=True)
class Point:
    """One rule in one panel. values: by measure, over all its rows; changes: against lossless, over `pairs`.

    A measure that its rows do not know is missing from values; one that has no pairs, from changes.
    """

    label: str
    family: str
    knobs: tuple[float, ...]
    samples: int  # rows: a sample with two seeds counts twice
    pairs: int
    values: Mapping[str, Estimate]
    changes: Mapping[str, Change]
    rows: tuple[Row, ...] = field(repr=False, compare=False)

    @property
    def is_lossless(self) -> bool:
        """Whether it draws from the target's own distribution."""
        return self.family == LOSSLESS


@dataclass(frozen=True)
class Panel:
    """What is compared: lossless, then rules by family and knobs. row: any of theirs, for what they share."""

    row: Row = field(compare=False)
    points: tuple[Point, ...]
    scores: tuple[str, ...]

    @property
    def lossless(self) -> Point | None:
        return next((point for point in self.points if point.is_lossless), None)

    @property
    def title(self) -> str:
        """Such as `ifeval, temperature 0.6`."""
        return f"{self.row.task}, temperature {self.row.sampling.temperature:g}"

    @property
    def details(self) -> str:
        """What the title leaves out of the task."""
        sampling = self.row.sampling
        words = [f"version {self.row.version}"]
        words += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        words += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        words += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
        return ", ".join([*words, f"at most {self.row.max_new_tokens} new tokens"])


def titles_apart(panels: Sequence[Panel]) -> list[str]:
    """Return the panels' titles, with the details of those whose title is another one's too."""
    titles = [panel.title for panel in panels]
    return [
        title if titles.count(title) == 1 else f"{title}, {panel.details}"
        for panel, title in zip(panels, titles, strict=True)
    ]


def under_one_name(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the same names for the same models.

    A head's name is its folder's, which differs between checkouts. Rows of one cell have the same models.
    """
    found, of_cell = list(rows), dict[str, Names]()
    same: dict[Names, Names] = {}

    def first(names: Names) -> Names:
        while same.setdefault(names, names) != names:
            names = same[names]
        return names

    for row in found:
        mine, known = first(names_of(row)), first(of_cell.setdefault(row.key, names_of(row)))
        same[mine] = known
    made = [(row, first(names_of(row))) for row in found]
    return [replace(row, base_model=target, ea_model=head) for row, (target, head) in made]


def names_of(row: Row) -> Names:
    return row.base_model, row.ea_model


def panels(rows: Iterable[Row], how: Bootstrap) -> list[Panel]:
    """Group the rows in panels by section and task. Raises ValueError where one point would mix two cells."""
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in under_one_name(rows):
        groups.setdefault((SECTION(row), TASK(row)), []).append(row)

    def order(panel: Panel) -> tuple[str, str, str, float, str]:
        row = panel.row
        return str(SECTION(row)), row.task, str(row.version), row.sampling.temperature, panel.details

    return sorted((panel_of(members, how) for members in groups.values()), key=order)


def panel_of(rows: Sequence[Row], how: Bootstrap) -> Panel:
    """Return the panel of rows that agree in all but the rule."""
    task = rows[0].task
    rules: dict[str, list[Row]] = {}
    for row in rows:
        rules.setdefault(json.dumps(row.rule, sort_keys=True), []).append(row)
    for first, *others in rules.values():
        for row in others:
            if row.key != first.key:
                raise ValueError(
                    f"{name_rule(row.rule).label} on {Panel(row, (), ()).title} has rows of two cells, "
                    f"{first.key} and {row.key}: the weights of {row.base_model} or of its head changed "
                    "in between; report them apart"
                )
    lossless = next((some for some in rules.values() if some[0].rule["name"] == LOSSLESS), [])
    weights = score_weights(task)
    names = dict.fromkeys(name for row in rows for name in row.scores if name not in weights.values())
    measures = MEASURES | {SCORE + name: score(name, weights.get(name)) for name in names}
    points = [point_of(measures, members, lossless, how) for members in rules.values()]
    points.sort(key=lambda point: (not point.is_lossless, point.family, point.knobs, point.label))
    return Panel(rows[0], tuple(points), tuple(names))


def point_of(
    measures: Mapping[str, Measure], rows: Sequence[Row], lossless: Sequence[Row], how: Bootstrap
) -> Point:
    """Return the point of one cell's rows, held against the `lossless` ones, of which there may be none."""
    rule = rows[0].rule
    alone, pairs = paired(rows), [] if rule["name"] == LOSSLESS else paired(rows, lossless)
    return Point(
        *name_rule(rule),
        samples=len(rows),
        pairs=len(pairs),
        values=estimates({name: sums_of(one, alone) for name, one in measures.items()}, how),
        changes=changes({name: sums_of(one, pairs) for name, one in measures.items() if pairs}, how),
        rows=tuple(rows),
    )


def drawn_by_rule(points: Sequence[Point], measure: Measure, how: Bootstrap) -> Array:
    """Return a measure of k rules in the data, row 0, and in R resamples: [1 + R, k]; NaN if one has none.

    All rules are on the samples and seeds that all of them have, so that luck which they share cancels out.
    """
    return resampled([sums_of(measure, paired(*(point.rows for point in points)))], how)
