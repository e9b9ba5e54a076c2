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


@dataclass(frozen=True)
class Measure:
    """A quantity of a table. parts: a row's numerator and denominator, None where the row does not know it.

    whole: it is unknown for all samples where one does not know it: a sum with an infinite term.
    machine: it depends on the machine, and only rows of one machine can be compared.
    """

    title: str
    parts: Callable[[Row], tuple[float, float] | None]
    whole: bool = False
    machine: bool = False


def by_token(value: Callable[[Row], float | None], title: str) -> Measure:
    """A mean over tokens, of a value that each row gives as its own mean."""

    def parts(row: Row) -> tuple[float, float] | None:
        mean = value(row)
        return None if mean is None else (mean * row.new_tokens, row.new_tokens)

    return Measure(title, parts)


def law(value: Callable[[Row], float | None], title: str) -> Measure:
    """A mean over tokens, of a value that each row gives as a sum."""

    def parts(row: Row) -> tuple[float, float] | None:
        total = value(row)
        return None if total is None else (total, row.new_tokens)

    return Measure(title, parts, whole=True)


MEASURES: dict[str, Measure] = {
    TAU: Measure("tau", lambda row: (row.new_tokens, row.steps)),
    # A batch's seconds are shared out to its rows.
    SPEED: Measure("tokens/s", lambda row: (row.new_tokens, row.seconds), machine=True),
    "fuzzy_share": Measure("fuzzy share", lambda row: (row.fuzzy_accepts, row.new_tokens)),
    "length": Measure("length", lambda row: (row.new_tokens, 1)),
    "limit_rate": Measure("at the limit", lambda row: (row.finish_reason == "length", 1)),
    "law_tv": law(lambda row: row.tv, "law TV"),
    "law_kl": law(lambda row: row.kl, "law KL"),
    "log_p": by_token(lambda row: row.log_p, "log p"),
    "agreement": by_token(lambda row: row.agreement, "agreement"),
}


def score(name: str, weight: str | None = None) -> Measure:
    """A task's own score, a mean over samples; weight: the score that each is weighted by."""

    def parts(row: Row) -> tuple[float, float] | None:
        value, own = row.scores.get(name), 1.0 if weight is None else row.scores.get(weight)
        return None if value is None or own is None else (value * own, own)

    return Measure(name, parts)


def compared(
    measures: Mapping[str, Measure], pairs: Sequence[tuple[Row, Row]], how: Bootstrap
) -> dict[str, Change]:
    """Every measure of the first of each pair against the second's, where both know it."""
    both = {name: sums_of_pairs(measure, pairs) for name, measure in measures.items()}
    return changes(
        {name: mine for name, (mine, _) in both.items()},
        {name: base for name, (_, base) in both.items()},
        how,
    )


def paired(mine: Sequence[Row], base: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The rows of the same samples and seeds, in the order of samples and seeds."""
    partners = {(row.sample, row.seed): row for row in base}
    known = [row for row in mine if (row.sample, row.seed) in partners]
    return [
        (row, partners[row.sample, row.seed]) for row in sorted(known, key=lambda row: (row.sample, row.seed))
    ]


def sums_of(measure: Measure, rows: Sequence[Row]) -> Sums:
    """A measure's sums by sample: a sample's seeds belong together, and are drawn together."""
    parts = [measure.parts(row) for row in rows]
    if refused(measure, rows, parts):
        parts = [None] * len(rows)
    return by_sample(rows, parts)


def sums_of_pairs(measure: Measure, pairs: Sequence[tuple[Row, Row]]) -> tuple[Sums, Sums]:
    """The sums of both sides, of the pairs in which both know the measure."""
    rows = [row for row, _ in pairs]
    parts = [(measure.parts(row), measure.parts(partner)) for row, partner in pairs]
    if refused(measure, [row for pair in pairs for row in pair], [part for both in parts for part in both]):
        parts = [(None, None)] * len(pairs)
    known = [(None, None) if None in both else both for both in parts]
    return by_sample(rows, [mine for mine, _ in known]), by_sample(rows, [base for _, base in known])


def refused(measure: Measure, rows: Sequence[Row], parts: Sequence[tuple[float, float] | None]) -> bool:
    """Whether the rows give no value together: a term of a sum is missing, or there are several machines."""
    if measure.whole and None in parts:
        return True
    return measure.machine and len({machine(row) for row in rows}) > 1


def machine(row: Row) -> tuple[object, ...]:
    """What seconds depend on beside the cell."""
    return row.provenance.get("device"), row.provenance.get("threads"), row.batch_size


def by_sample(rows: Sequence[Row], parts: Sequence[tuple[float, float] | None]) -> Sums:
    """Numerators and denominators added up by sample, in the order of samples' names."""
    places = {name: place for place, name in enumerate(sorted({row.sample for row in rows}))}
    sums = np.zeros((len(places), 2))
    where = np.array([places[row.sample] for row in rows], dtype=np.int64)
    added = np.array([(0.0, 0.0) if part is None else part for part in parts], dtype=np.float64)
    np.add.at(sums, where, added.reshape(-1, 2))
    return Sums(sums[:, 0], sums[:, 1])
