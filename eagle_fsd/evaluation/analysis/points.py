"""From raw rows to points: what one rule, on one task, costs and gains, with intervals, against lossless.

A panel is what may be compared: one task and version, sampling, length limit, tree, dtype and pair of models.
In it every rule is a point. A point is held against the lossless one on the samples and seeds that both have,
and says how many these are, so that a sweep that is not done yet can be read all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Change, Estimate, estimates
from eagle_fsd.evaluation.analysis.measures import MEASURES, SCORE, Measure, compared, paired, score, sums_of
from eagle_fsd.evaluation.analysis.rule_labels import LOSSLESS, rule_family, rule_knobs, rule_label
from eagle_fsd.evaluation.rows import Row
from eagle_fsd.evaluation.tasks import TASKS


@dataclass(frozen=True)
class Models:
    """What a report's section is about: the models, how they are run, and the draft tree."""

    base_model: str
    ea_model: str | None
    draft_vocab_size: int | None
    dtype: str
    tree: TreeConfig

    @classmethod
    def of(cls, row: Row) -> Models:
        return cls(row.base_model, row.ea_model, row.draft_vocab_size, row.dtype, row.tree)


@dataclass(frozen=True)
class Task:
    """What a panel is about, within its section."""

    name: str
    version: int | str
    sampling: SamplingConfig
    max_new_tokens: int

    @classmethod
    def of(cls, row: Row) -> Task:
        return cls(row.task, row.version, row.sampling, row.max_new_tokens)

    @property
    def title(self) -> str:
        """Such as `ifeval, temperature 0.6`."""
        return f"{self.name}, temperature {self.sampling.temperature:g}"

    @property
    def details(self) -> str:
        """What the title leaves out."""
        words = [f"version {self.version}"]
        words += [f"top-p {self.sampling.top_p:g}"] if self.sampling.top_p < 1 else []
        words += [f"top-k {self.sampling.top_k}"] if self.sampling.top_k else []
        return ", ".join([*words, f"at most {self.max_new_tokens} new tokens"])

    @property
    def order(self) -> tuple[str, str, float, str]:
        return self.name, str(self.version), self.sampling.temperature, self.details


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
    """The points of one task, sampling, and pair of models: lossless, then by family and knobs."""

    models: Models
    task: Task
    points: tuple[Point, ...]
    scores: tuple[str, ...]

    @property
    def lossless(self) -> Point | None:
        return next((point for point in self.points if point.is_lossless), None)


def panels(rows: Iterable[Row], how: Bootstrap) -> list[Panel]:
    """Group the rows in panels, sections one after the other, tasks by name and temperature within.

    Raises ValueError where one point would mix the rows of two cells.
    """
    groups: dict[tuple[Models, Task], list[Row]] = {}
    for row in rows:
        groups.setdefault((Models.of(row), Task.of(row)), []).append(row)
    found = [panel_of(models, task, members, how) for (models, task), members in groups.items()]
    return sorted(found, key=lambda panel: (str(panel.models), panel.task.order))


def panel_of(models: Models, task: Task, rows: Sequence[Row], how: Bootstrap) -> Panel:
    """Return the panel of rows that agree in all but the rule."""
    rules: dict[str, list[Row]] = {}
    for row in rows:
        rules.setdefault(json.dumps(row.rule, sort_keys=True), []).append(row)
    for first, *others in rules.values():
        for row in others:
            if row.key != first.key:
                raise ValueError(
                    f"{rule_label(row.rule)} on {task.title} has rows of two cells, "
                    f"{first.key} and {row.key}: the weights of {row.base_model} or of its head changed "
                    "in between; report them apart"
                )
    lossless = next((some for some in rules.values() if some[0].rule["name"] == LOSSLESS), [])
    weights = TASKS[task.name].weights if task.name in TASKS else {}  # none of a task that is not ours
    names = dict.fromkeys(name for row in rows for name in row.scores if name not in weights.values())
    measures = MEASURES | {SCORE + name: score(name, weights.get(name)) for name in names}
    points = [point_of(measures, members, lossless, how) for members in rules.values()]
    points.sort(key=lambda point: (not point.is_lossless, point.family, point.knobs, point.label))
    return Panel(models, task, tuple(points), tuple(names))


def point_of(
    measures: Mapping[str, Measure], rows: Sequence[Row], lossless: Sequence[Row], how: Bootstrap
) -> Point:
    """Return the point of one cell's rows, held against the `lossless` ones, of which there may be none."""
    rule = rows[0].rule
    pairs = [] if rule["name"] == LOSSLESS else paired(rows, lossless)
    alone = [(row,) for row in rows]
    return Point(
        label=rule_label(rule),
        family=rule_family(rule),
        knobs=rule_knobs(rule),
        samples=len(rows),
        pairs=len(pairs),
        values=estimates({name: sums_of(one, alone)[0] for name, one in measures.items()}, how),
        changes=compared(measures, pairs, how),
        rows=tuple(rows),
    )
