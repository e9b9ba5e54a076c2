"""Acceptance length by prompt set and rule: run every cell of a grid, keep its raw row, print a table.

A cell is (prompt set, temperature, rule). Rows go to a JSONL file as they are made and are not made twice, so
that an interrupted run resumes; tables come from the rows alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.prompt_sets import answer, batches
from eagle_fsd.evaluation.rows import digest, rows_by
from eagle_fsd.files.jsonl import append_row, drop_torn_line

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One measurement. divergence, mode and child are None for lossless, whose threshold is 0."""

    prompts: str
    prompt_count: int
    max_new_tokens: int
    sampling: SamplingConfig
    tree: TreeConfig
    threshold: float = 0.0
    divergence: str | None = None
    mode: str | None = None
    child: str | None = None
    seed: int = 0
    dtype: str = "float32"

    def rule(self) -> Fuzzy | Lossless:
        if self.divergence is None:
            return Lossless()
        return Fuzzy(self.threshold, self.divergence, mode=self.mode or "hybrid", child=self.child or "draft")

    def key(self, engine: EagleFSD, prompts: Sequence[Sequence[int]]) -> str:
        """Return what a row must share to stand for this cell: settings, the models' weights, the prompts."""
        return digest([asdict(self), [engine.identity(), list(map(list, prompts))]])


def measure(engine: EagleFSD, cell: Cell, prompts: Sequence[Sequence[int]], batch_size: int) -> Row:
    """Run one cell over its prompts (token ids); its row is the cell and the sums of its statistics.

    Prompts are batched by length; prompt i draws from the stream (seed, i) whatever its batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    settings = {"max_new_tokens": cell.max_new_tokens, "rule": cell.rule(), "tree": cell.tree}
    stats: list[GenerationStats] = []
    for rows in batches(order, batch_size):
        seeds = [(cell.seed, row) for row in rows]
        output = answer(engine, [prompts[row] for row in rows], cell.sampling, seed=seeds, **settings)
        stats.append(GenerationStats.total(output.stats, concurrent=True))
    return {**asdict(cell), **GenerationStats.total(stats).to_dict(), "batch_size": batch_size}


def run(
    engine: EagleFSD,
    cells: Iterable[Cell],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    output: Path,
    batch_size: int,
    provenance: Row,
) -> list[Row]:
    """Measure the cells that `output` lacks, append their rows to it; returns all cells' rows in order."""
    drop_torn_line(output)
    done: dict[tuple[str], Row] = rows_by(output, "key")
    rows = []
    for cell in tqdm(list(cells), desc="cells", unit="cell"):
        ids = prompts[cell.prompts][: cell.prompt_count]
        key = cell.key(engine, ids)
        if (key,) not in done:
            models = {"base_model": engine.base_model, "ea_model": engine.ea_model}
            models |= {"draft_vocab_size": engine.draft_vocab_size}
            row = {**measure(engine, cell, ids, batch_size), "key": key, **models, **provenance}
            append_row(output, row)
            done[key,] = row
        rows.append(done[key,])
    return rows


def table(rows: Sequence[Row]) -> str:
    """Write a Markdown table of tau: a line per tree, temperature and rule, by prompt set and over all.

    "vs lossless" compares with the lossless line of the same tree and temperature.
    """
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    titles = ["tree", "temperature", "divergence", "mode", "child", "T", *sets]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        rule = [row["divergence"] or "lossless", row["mode"] or "", row["child"] or "", row["threshold"]]
        setting = (str(TreeConfig(**row["tree"])), row["sampling"]["temperature"], *rule)
        groups.setdefault(setting, []).append(row)
    lossless: dict[tuple[str, float], float] = {}
    lines = []
    for (tree, temperature, divergence, mode, child, threshold), members in groups.items():
        steps = sum(row["steps"] for row in members)
        tau = sum(row["new_tokens"] for row in members) / steps
        if divergence == "lossless":
            lossless[tree, temperature] = tau
        base = lossless.get((tree, temperature))
        fuzzy = sum(row["fuzzy_accepts"] for row in members) / steps
        by_set = {row["prompts"]: f"{row['tau']:.2f}" for row in members}
        cells = [tree, f"{temperature:g}", divergence, mode, child, f"{threshold:g}"]
        cells += [by_set.get(name, "") for name in sets]
        lines.append([*cells, f"{tau:.2f}", f"{tau / base - 1:+.0%}" if base else "", f"{fuzzy:.2f}"])
    return markdown_table([*titles, "all", "vs lossless", "fuzzy / step"], lines)
