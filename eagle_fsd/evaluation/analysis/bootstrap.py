"""Bootstrap intervals of what is measured sample by sample, alone and against a baseline on the same samples.

Every quantity is a ratio of sums over the samples: tau is tokens / steps, a mean score is scores / 1, a mean
log p per token is weighted by tokens. So a sample's numerator and denominator are drawn together, and the
ratio is taken inside each resample, never averaged over samples.

Intervals are percentile intervals, expanded for few samples (Hesterberg, arXiv 1411.5279): plain percentiles
are too narrow by the factor sqrt((n - 1) / n) and for want of Student's t, which at a dozen samples makes
91 % of a promised 95 %. Percentiles rather than BCa: a ratio and its logarithm, or a loss and a gain, get the
same interval; it stays within what the data can give; and it exists where BCa's corrections do not, such as
scores that are all equal. What skewness costs at few samples is the price.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from eagle_fsd.core.checks import require_integer, require_number

Array = NDArray[np.float64]
Sums = Array  # [n, k, 2]: by sample, numerator and denominator of k quantities; 0 in both: it has no part
COUNTS = 2**24  # that are multiplied at once: 128 MB in float64


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: resamples of the samples, the confidence, and the seed of the draws."""

    resamples: int = 10_000
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        require_integer("resamples", self.resamples, 100, "10000 makes intervals steady")
        require_number("confidence", self.confidence, 1e-6, 1 - 1e-6, "0.95 is usual")


@dataclass(frozen=True)
class Estimate:
    """A value and its interval over a number of samples; `f"{estimate:.2f}"` is `1.15 (1.13 to 1.17)`.

    low, high: None for a single sample, which says nothing of the spread.
    """

    value: float
    low: float | None
    high: float | None
    samples: int

    def __format__(self, form: str) -> str:
        ends = "" if self.low is None or self.high is None else f" ({self.low:{form}} to {self.high:{form}})"
        return f"{self.value:{form}}{ends}"

    def scaled(self, factor: float, shift: float = 0.0) -> Estimate:
        """Return factor * (estimate + shift); a negative factor swaps the interval's ends."""
        low, high = (None if end is None else factor * (end + shift) for end in (self.low, self.high))
        ends = (high, low) if factor < 0 else (low, high)
        return Estimate(factor * (self.value + shift), *ends, self.samples)


@dataclass(frozen=True)
class Change:
    """A quantity against its baseline's: difference, and ratio (None where the baseline is 0)."""

    difference: Estimate
    ratio: Estimate | None


def is_known(sums: Sums) -> bool:
    """Return whether every quantity has a denominator."""
    return bool((sums[..., 1].sum(0) != 0).all())


def samples_of(sums: Sums) -> int:
    """Return the number of samples that have a part in the first quantity."""
    return int(np.count_nonzero(sums[:, 0].any(-1)))


def estimates(quantities: Mapping[str, Sums], how: Bootstrap) -> dict[str, Estimate]:
    """Estimate every quantity over the same n samples; one that no sample knows is left out."""
    known = {name: sums for name, sums in quantities.items() if is_known(sums)}
    columns = resampled(list(known.values()), how).T
    return {
        name: interval(column, samples_of(sums), how)
        for (name, sums), column in zip(known.items(), columns, strict=True)
    }


def changes(quantities: Mapping[str, Sums], how: Bootstrap) -> dict[str, Change]:
    """Compare pairs, a quantity and its baseline, if both are known.

    A sample is the same one, with the same seed, on both sides: a resample draws pairs, so that what makes a
    sample hard or long cancels out.
    """
    known = {name: sums for name, sums in quantities.items() if is_known(sums)}
    columns = resampled(list(known.values()), how).T
    found = {}
    for (name, sums), own, base in zip(known.items(), columns[0::2], columns[1::2], strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = interval(own / base, samples_of(sums), how) if base[0] != 0 else None
        found[name] = Change(interval(own - base, samples_of(sums), how), ratio)
    return found


def resampled(quantities: Sequence[Sums], how: Bootstrap) -> Array:
    """Return the values in row 0, and those of every resample: [1 + R, k], NaN where nothing was drawn."""
    if not quantities:
        return np.zeros((1 + how.resamples, 0))
    columns = np.concatenate(quantities, axis=1).reshape(len(quantities[0]), -1)  # [n, 2k]
    counts = draw_counts(len(columns), how.resamples, how.seed)
    parts = np.array_split(counts, -(-counts.size // COUNTS) or 1)  # [R / parts, n] each
    totals = [part.astype(np.float64) @ columns for part in parts]
    totals = np.concatenate([columns.sum(0)[None], *totals])  # [1 + R, 2k]
    with np.errstate(divide="ignore", invalid="ignore"):
        return totals[:, 0::2] / totals[:, 1::2]


@functools.lru_cache(maxsize=8)
def draw_counts(samples: int, resamples: int, seed: int) -> NDArray[np.uint16]:
    """Count how often each sample is in each resample: [R, n], the same for all quantities of n samples."""
    random = np.random.default_rng(seed)
    counts = np.empty((resamples, samples), dtype=np.uint16)
    for row in counts:
        row[:] = np.bincount(random.integers(0, samples, samples), minlength=samples)  # with replacement
    counts.flags.writeable = False  # all callers share it
    return counts


def interval(column: Array, samples: int, how: Bootstrap) -> Estimate:
    """Return a column of `resampled` as a value and expanded percentiles, without resamples of nothing.

    Percentiles are taken outwards to the next resample, so that an infinite one is never averaged.
    """
    value, drawn = float(column[0]), np.sort(column[1:][~np.isnan(column[1:])])
    if samples < 2 or not len(drawn):
        return Estimate(value, None, None, samples)
    tail = expanded_tail((1 - how.confidence) / 2, samples)
    below = int(np.floor(tail * (len(drawn) - 1)))
    return Estimate(value, float(drawn[below]), float(drawn[len(drawn) - 1 - below]), samples)


def expanded_tail(tail: float, samples: int) -> float:
    """Return the share of resamples to cut off at an end, so that normal samples get Student's t interval."""
    t = student_t(tail, samples - 1) * (samples / (samples - 1)) ** 0.5
    return NormalDist().cdf(t)


def student_t(tail: float, freedom: int) -> float:
    """Return the quantile of Student's t, negative for a lower tail: Fisher's expansion of the normal one.

    Abramowitz and Stegun, 26.7.5; within 1 % of the true value from 2 degrees of freedom on, at a tail of
    2.5 %. With 1 it falls short, where the outermost resample is the bound anyway.
    """
    z = NormalDist().inv_cdf(tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
