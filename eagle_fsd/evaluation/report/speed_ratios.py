"""What a race of methods says: sums and ratios by context, batch size and method, as a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.core.stats import PHASES
from eagle_fsd.evaluation.markdown_table import filled_columns
from eagle_fsd.evaluation.measure.speed import PEERS
from eagle_fsd.evaluation.report.plots import FAINT, INK, save

BASELINES = ("hf", "hf-compiled", "llama.cpp", "plain", "lossless")  # of the others, where they ran
ORDER = (
    *("context", "batch", "method", "tree", "tokens/s", "tau"),
    *("prefill s", *(f"{phase} ms" for phase in PHASES[1:]), "peak GB"),
    *(*(f"vs {base}" for base in BASELINES), "log p"),
)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """One method at one context and batch size.

    ratios: by baseline, of the sums, and the quartiles over batches. cells: its line of the table, by column.
    """

    method: str
    tokens_per_second: float
    ratios: dict[str, tuple[float, float, float]]
    cells: dict[str, str]


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
    for base in (base for base in BASELINES if base in ordered and base != name):
        single = [rate([a]) / rate([b]) for a, b in zip(runs, ordered[base], strict=True)]
        low, high = np.quantile(single, (0.25, 0.75)).tolist()
        ratios[base] = (rate(runs) / rate(ordered[base]), low, high)

    def total(field: str) -> float:
        return sum(row[field] for row in runs)

    tau, prefill = total("new_tokens") / max(total("steps"), 1), total("prefill_seconds") / len(runs)
    likelihoods = [row["log_likelihood"] for row in runs if row.get("log_likelihood") is not None]
    cells = {
        "context": str(runs[0]["context"] or ""),
        "batch": str(runs[0]["batch_size"]),
        "method": name,
        "tree": "; ".join(dict.fromkeys(row["tree"] for row in runs if row["tree"])),
        "tokens/s": f"{rate(runs):.1f}",
        "tau": "" if name in PEERS else f"{tau:.2f}",  # lookup's steps are not told
        "prefill s": f"{prefill:.2f}" if prefill else "",
        "peak GB": f"{max(row['peak_memory'] for row in runs) / 1e9:.2f}",
        "log p": f"{statistics.fmean(likelihoods):.3f}" if likelihoods else "",
    }
    for phase in PHASES[1:]:
        milliseconds = 1000 * total(f"{phase}_seconds") / max(total("batch_steps"), 1)
        cells[f"{phase} ms"] = f"{milliseconds:.1f}" if milliseconds else ""
    for base, (middle, low, high) in ratios.items():
        cells[f"vs {base}"] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return Result(name, rate(runs), ratios, cells)


def rate(rows: Sequence[Row]) -> float:
    """Return the tokens per second of runs one after the other."""
    return sum(row["new_tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def table(found: Sequence[Result]) -> str:
    """Write speed, tau, a step's milliseconds by phase, ratios with the quartiles of single batches."""
    return filled_columns([one.cells for one in found], ORDER)


def plot_speed(found: Sequence[Result], path: Path) -> None:
    """Draw tokens per second by method, a panel for each context and batch size, to a PNG."""
    from matplotlib.figure import Figure

    groups: dict[str, list[Result]] = {}
    for one in found:
        context = one.cells["context"] and f", context {one.cells['context']}"
        groups.setdefault(f"batch {one.cells['batch']}{context}", []).append(one)
    most = max(map(len, groups.values()))
    figure = Figure(figsize=(7, len(groups) * (0.8 + 0.36 * most)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for panel, (title, members) in zip(panels, groups.items(), strict=True):
        mine = members[::-1]
        bars = panel.barh(
            [one.method for one in mine],
            [one.tokens_per_second for one in mine],
            color=[FAINT if one.method in PEERS else INK for one in mine],
            height=0.6,
        )
        panel.bar_label(bars, labels=[label(one) for one in mine], padding=3, fontsize=9)
        panel.margins(x=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlabel("delivered tokens per second")
    save(figure, path)


def label(one: Result) -> str:
    first = None if one.method == "hf" else next(iter(one.ratios.items()), None)
    return f"{one.tokens_per_second:.1f}" + (f"  ({first[1][0]:.2f} x {first[0]})" if first else "")
