"""What a race of methods says: sums and ratios by context, batch size and method, as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.core.stats import PHASES
from eagle_fsd.evaluation.markdown_table import filled_columns
from eagle_fsd.evaluation.measure.speed import HUGGING_FACE

BASELINES = ("hf", "hf-compiled", "plain", "lossless")  # what the others are compared with, where they ran
ORDER = (
    *("context", "batch", "method", "tree", "tokens/s", "tau"),
    *("prefill s", *(f"{phase} ms" for phase in PHASES[1:]), "peak GB"),
    *(*(f"vs {base}" for base in BASELINES), "log p"),
)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """One method at one batch size. ratios: by baseline, of the sums, and the quartiles over batches."""

    method: str
    tree: str | None
    batch_size: int
    context: int | None
    tokens_per_second: float
    tau: float
    milliseconds: dict[str, float]  # a step's, by phase, prefill left out
    prefill_seconds: float
    ratios: dict[str, tuple[float, float, float]]
    peak_memory: int
    log_likelihood: float | None


def results(rows: Sequence[Row]) -> list[Result]:
    """Sum up the rows of one run by context, batch size and method."""
    groups: dict[tuple[Any, int], dict[str, list[Row]]] = {}
    for row in rows:
        methods = groups.setdefault((row["context"], row["batch_size"]), {})
        methods.setdefault(row["method"], []).append(row)
    return [result(name, mine) for mine in groups.values() for name in mine]


def result(name: str, methods: Mapping[str, Sequence[Row]]) -> Result:
    """Sum up one method's rows, beside those of the others at the same context and batch size."""
    ordered = {other: sorted(runs, key=lambda row: row["prompts"]) for other, runs in methods.items()}
    runs = ordered[name]
    ratios = {}
    for base in BASELINES:
        if base in ordered and base != name:
            single = [rate([a]) / rate([b]) for a, b in zip(runs, ordered[base], strict=True)]
            low, _, high = quartiles(single)
            ratios[base] = (rate(runs) / rate(ordered[base]), low, high)
    batch_steps = max(sum(row["batch_steps"] for row in runs), 1)
    times = {phase: sum(row[f"{phase}_seconds"] for row in runs) for phase in PHASES[1:]}
    likelihoods = [row["log_likelihood"] for row in runs if row.get("log_likelihood") is not None]
    return Result(
        method=name,
        tree="; ".join(dict.fromkeys(row["tree"] for row in runs if row["tree"])) or None,
        batch_size=runs[0]["batch_size"],
        context=runs[0]["context"],
        tokens_per_second=rate(runs),
        tau=sum(row["new_tokens"] for row in runs) / max(sum(row["steps"] for row in runs), 1),
        milliseconds={phase: 1000 * seconds / batch_steps for phase, seconds in times.items()},
        prefill_seconds=sum(row["prefill_seconds"] for row in runs) / len(runs),
        ratios=ratios,
        peak_memory=max(row["peak_memory"] for row in runs),
        log_likelihood=statistics.fmean(likelihoods) if likelihoods else None,
    )


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3


def rate(rows: Sequence[Row]) -> float:
    """Return the tokens per second of runs one after the other."""
    return sum(row["new_tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def table(found: Sequence[Result]) -> str:
    """Write speed, tau, a step's milliseconds by phase, ratios with the quartiles of single batches.

    Columns that would be empty are left out.
    """
    return filled_columns(ORDER, [cells(one) for one in found])


def cells(one: Result) -> dict[str, str]:
    """Return a line of the table by column."""
    row = {
        "context": str(one.context or ""),
        "batch": str(one.batch_size),
        "method": one.method,
        "tree": one.tree or "",
        "tokens/s": f"{one.tokens_per_second:.1f}",
        "tau": "" if one.method in HUGGING_FACE else f"{one.tau:.2f}",  # lookup's steps are not told
        "prefill s": f"{one.prefill_seconds:.2f}" if one.prefill_seconds else "",
        "peak GB": f"{one.peak_memory / 1e9:.2f}",
        "log p": "" if one.log_likelihood is None else f"{one.log_likelihood:.3f}",
    }
    row |= {f"{phase} ms": f"{value:.1f}" if value else "" for phase, value in one.milliseconds.items()}
    for base, (middle, low, high) in one.ratios.items():
        row[f"vs {base}"] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return row
