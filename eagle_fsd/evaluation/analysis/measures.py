"""What is measured of a rule, as sums over rows: each measure is a ratio of two sums, by sample.

Rows know their own sums and means; a mean over tokens weighs each row by its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Change, Sums, changes
from eagle_fsd.evaluation.rows import Row

SPEED, TAU = "tokens_per_second", "tau"
SCORE = "score:"  # before the name of a task's own score
Parts = tuple[float, float] | None  # a row's numerator and denominator; None where it does not know them


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


def over(value: float | None, weight: float) -> Parts:
    """Return the parts of a row that knows this sum, None for one that does not."""
    return None if value is None else (value, weight)


MEASURES: dict[str, Measure] = {
    TAU: Measure("tau", lambda row: (row.new_tokens, row.steps)),
    # A batch's seconds are shared out to its rows.
    SPEED: Measure("tokens/s", lambda row: (row.new_tokens, row.seconds), machine=True),
    "fuzzy_share": Measure("fuzzy share", lambda row: (row.fuzzy_accepts, row.new_tokens)),
    "length": Measure("length", lambda row: (row.new_tokens, 1)),
    "limit_rate": Measure("at the limit", lambda row: (row.finish_reason == "length", 1)),
    "law_tv": Measure("TV", lambda row: over(row.tv, row.new_tokens), whole=True),
    "law_kl": Measure("KL", lambda row: over(row.kl, row.new_tokens), whole=True),
    "log_p": Measure(
        "log p", lambda row: None if row.log_p is None else (row.log_p * row.new_tokens, row.new_tokens)
    ),
}


def score(name: str, weight: str | None = None) -> Measure:
    """Return a task's own score, a mean over samples; weight: the score that each is weighted by."""

    def parts(row: Row) -> Parts:
        value, own = row.scores.get(name), 1.0 if weight is None else row.scores.get(weight)
        return None if value is None or own is None else (value * own, own)

    return Measure(name, parts)


def compared(
    measures: Mapping[str, Measure], pairs: Sequence[tuple[Row, ...]], how: Bootstrap
) -> dict[str, Change]:
    """Compare every measure of the first of each pair with the second's, where both know it."""
    both = {name: sums_of(measure, pairs) for name, measure in measures.items()}
    mine, base = ({name: sides[place] for name, sides in both.items() if pairs} for place in (0, 1))
    return changes(mine, base, how)


def paired(mine: Sequence[Row], base: Sequence[Row]) -> list[tuple[Row, ...]]:
    """Pair the rows of the same samples and seeds, in the order of samples and seeds."""
    partners = {(row.sample, row.seed): row for row in base}
    known = [row for row in mine if (row.sample, row.seed) in partners]
    known.sort(key=lambda row: (row.sample, row.seed))
    return [(row, partners[row.sample, row.seed]) for row in known]


def sums_of(measure: Measure, groups: Sequence[tuple[Row, ...]]) -> list[Sums]:
    """Sum a measure by sample, for every place in the groups: single rows, or pairs that both know it.

    A sample's seeds belong together, and are drawn together. The rows give no value together where a term is
    missing that the sum needs, or where they come from several machines.
    """
    rows = [row for group in groups for row in group]
    parts = [[measure.parts(row) for row in group] for group in groups]
    refused = measure.whole and any(None in group for group in parts)
    if refused or (measure.machine and len(set(map(machine, rows))) > 1):
        parts = [[None] for _ in groups]
    samples = sorted({row.sample for row in rows})
    places = {name: place for place, name in enumerate(samples)}
    sums = np.zeros((len(groups[0]) if groups else 1, len(samples), 2))
    for group, known in zip(groups, parts, strict=True):
        if None not in known:
            sums[:, places[group[0].sample]] += known
    return [Sums(side[:, 0], side[:, 1]) for side in sums]


def machine(row: Row) -> tuple[object, ...]:
    """Return what seconds depend on beside the cell."""
    return row.provenance.get("device"), row.provenance.get("threads"), row.batch_size
