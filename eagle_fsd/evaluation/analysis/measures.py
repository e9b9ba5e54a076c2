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


def mean(value: float | None, row: Row) -> Parts:
    """Return the parts of a mean over tokens, of which the row gives its own mean."""
    return None if value is None else (value * row.new_tokens, row.new_tokens)


def total(value: float | None, row: Row) -> Parts:
    """Return the parts of a mean over tokens, of which the row gives its sum."""
    return None if value is None else (value, row.new_tokens)


MEASURES: dict[str, Measure] = {
    TAU: Measure("tau", lambda row: (row.new_tokens, row.steps)),
    # A batch's seconds are shared out to its rows.
    SPEED: Measure("tokens/s", lambda row: (row.new_tokens, row.seconds), machine=True),
    "fuzzy_share": Measure("fuzzy share", lambda row: (row.fuzzy_accepts, row.new_tokens)),
    "length": Measure("length", lambda row: (row.new_tokens, 1)),
    "limit_rate": Measure("at the limit", lambda row: (row.finish_reason == "length", 1)),
    "law_tv": Measure("TV", lambda row: total(row.tv, row), whole=True),
    "law_kl": Measure("KL", lambda row: total(row.kl, row), whole=True),
    "log_p": Measure("log p", lambda row: mean(row.log_p, row)),
}


def score(name: str, weight: str | None = None) -> Measure:
    """Return a task's own score, a mean over samples; weight: the score that each is weighted by."""

    def parts(row: Row) -> Parts:
        value, own = row.scores.get(name), 1.0 if weight is None else row.scores.get(weight)
        return None if value is None or own is None else (value * own, own)

    return Measure(name, parts)


def compared(
    measures: Mapping[str, Measure], pairs: Sequence[tuple[Row, Row]], how: Bootstrap
) -> dict[str, Change]:
    """Compare every measure of the first of each pair with the second's, where both know it."""
    both = {name: sums_of_pairs(measure, pairs) for name, measure in measures.items()}
    mine, base = ({name: sides[place] for name, sides in both.items()} for place in (0, 1))
    return changes(mine, base, how)


def paired(mine: Sequence[Row], base: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pair the rows of the same samples and seeds, in the order of samples and seeds."""
    partners = {(row.sample, row.seed): row for row in base}
    known = [row for row in mine if (row.sample, row.seed) in partners]
    known.sort(key=lambda row: (row.sample, row.seed))
    return [(row, partners[row.sample, row.seed]) for row in known]


def sums_of(measure: Measure, rows: Sequence[Row]) -> Sums:
    """Sum a measure by sample: a sample's seeds belong together, and are drawn together."""
    parts = [measure.parts(row) for row in rows]
    if refused(measure, rows, parts):
        parts = [None] * len(rows)
    return by_sample(rows, parts)


def sums_of_pairs(measure: Measure, pairs: Sequence[tuple[Row, Row]]) -> tuple[Sums, Sums]:
    """Sum both sides of the pairs in which both know the measure."""
    rows = [row for row, _ in pairs]
    parts = [(measure.parts(row), measure.parts(partner)) for row, partner in pairs]
    if refused(measure, [row for pair in pairs for row in pair], [part for both in parts for part in both]):
        parts = [(None, None)] * len(pairs)
    known = [(None, None) if None in both else both for both in parts]
    return by_sample(rows, [mine for mine, _ in known]), by_sample(rows, [base for _, base in known])


def refused(measure: Measure, rows: Sequence[Row], parts: Sequence[Parts]) -> bool:
    """Return whether the rows give no value together: a term is missing, or there are several machines."""
    if measure.whole and None in parts:
        return True
    return measure.machine and len({machine(row) for row in rows}) > 1


def machine(row: Row) -> tuple[object, ...]:
    """Return what seconds depend on beside the cell."""
    return row.provenance.get("device"), row.provenance.get("threads"), row.batch_size


def by_sample(rows: Sequence[Row], parts: Sequence[Parts]) -> Sums:
    """Add up numerators and denominators by sample, in the order of samples' names."""
    places = {name: place for place, name in enumerate(sorted({row.sample for row in rows}))}
    sums = np.zeros((len(places), 2))
    where = np.array([places[row.sample] for row in rows], dtype=np.int64)
    added = np.array([(0.0, 0.0) if part is None else part for part in parts], dtype=np.float64)
    np.add.at(sums, where, added.reshape(-1, 2))
    return Sums(sums[:, 0], sums[:, 1])
