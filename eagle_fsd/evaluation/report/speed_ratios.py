"""What a race of methods says: sums and ratios by context, batch size and method, as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.core.stats import PHASES
from eagle_fsd.evaluation.markdown_table import table_lines
from eagle_fsd.evaluation.measure.speed import HUGGING_FACE

BASELINES = ("hf", "hf-compiled", "plain", "lossless")  # what the others are compared with, where they ran
ORDER = (
    *("context", "batch", "method", "tree", "tokens/s", "tau"),
    *("prefill s", *(f"{phase} ms" for phase in PHASES[1:]), "peak GB"),
    *(*(f"vs {base}" for base in BASELINES), "log p"),
)


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


def results(rows: Sequence[Mapping[str, Any]]) -> list[Result]:
    """The rows of one run, summed up by context, batch size and method."""
    found = []
    for context, size in dict.fromkeys((row["context"], row["batch_size"]) for row in rows):
        mine: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if (row["context"], row["batch_size"]) == (context, size):
                mine.setdefault(row["method"], []).append(row)
        for name, runs in mine.items():
            runs = sorted(runs, key=lambda row: row["prompts"])
            ratios = {}
            for base in BASELINES:
                if base in mine and base != name:
                    others = sorted(mine[base], key=lambda row: row["prompts"])
                    single = [rate([a]) / rate([b]) for a, b in zip(runs, others, strict=True)]
                    low, _, high = quartiles(single)
                    ratios[base] = (rate(runs) / rate(others), low, high)
            steps = sum(row["steps"] for row in runs)
            batch_steps = sum(row["batch_steps"] for row in runs)
            likelihoods = [row["log_likelihood"] for row in runs if row.get("log_likelihood") is not None]
            found.append(
                Result(
                    method=name,
                    tree="; ".join(dict.fromkeys(row["tree"] for row in runs if row["tree"])) or None,
                    batch_size=size,
                    context=context,
                    tokens_per_second=rate(runs),
                    tau=sum(row["new_tokens"] for row in runs) / max(steps, 1),
                    milliseconds={
                        phase: 1000 * sum(row[f"{phase}_seconds"] for row in runs) / max(batch_steps, 1)
                        for phase in PHASES[1:]
                    },
                    prefill_seconds=sum(row["prefill_seconds"] for row in runs) / len(runs),
                    ratios=ratios,
                    peak_memory=max(row["peak_memory"] for row in runs),
                    log_likelihood=statistics.fmean(likelihoods) if likelihoods else None,
                )
            )
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3


def rate(rows: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second of runs one after the other."""
    return sum(row["new_tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def table(found: Sequence[Result]) -> str:
    """Markdown: speed, tau, a step's milliseconds by phase, ratios with the quartiles of single batches.

    Columns that would be empty are left out.
    """
    rows = [cells(one) for one in found]
    titles = [title for title in ORDER if any(row.get(title) for row in rows)]
    return "\n".join(table_lines(titles, ([row.get(title, "") for title in titles] for row in rows)))


def cells(one: Result) -> dict[str, str]:
    """A line of the table by column."""
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
    return row | {
        f"vs {base}": f"{middle:.2f} ({low:.2f} to {high:.2f})"
        for base, (middle, low, high) in one.ratios.items()
    }
