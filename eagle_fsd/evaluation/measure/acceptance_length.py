"""Acceptance length by prompt set and rule: run every cell of a grid, keep its raw row, print a table.

A cell is (prompt set, temperature, rule). Rows go to a JSONL file as they are made and are not made twice, so
that an interrupted run resumes; tables come from the rows alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.prompt_sets import answer, batches
from eagle_fsd.evaluation.rows import rows_by
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.jsonl import append_row, drop_torn_line

Row = Mapping[str, Any]


def rule_of(cell: Row) -> AcceptanceRule:
    """Return a cell's rule: lossless where it names no divergence."""
    if cell["divergence"] is None:
        return Lossless()
    return Fuzzy(**{name: cell[name] for name in ("threshold", "divergence", "mode", "child")})


def measure(engine: EagleFSD, cell: Row, prompts: Sequence[Sequence[int]], batch_size: int) -> Row:
    """Run one cell over its prompts (token ids); its row is the cell and the sums of its statistics.

    Prompts are batched by length; prompt i draws from the stream (seed, i) whatever its batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    options = {"max_new_tokens": cell["max_new_tokens"], "rule": rule_of(cell)}
    options["tree"], sampling = TreeConfig(**cell["tree"]), SamplingConfig(**cell["sampling"])
    stats: list[GenerationStats] = []
    for rows in batches(order, batch_size):
        seeds = [(cell["seed"], row) for row in rows]
        output = answer(engine, [prompts[row] for row in rows], sampling, seed=seeds, **options)
        stats.append(GenerationStats.total(output.stats, concurrent=True))
    return {**cell, **GenerationStats.total(stats).to_dict(), "batch_size": batch_size}


def run(
    engine: EagleFSD,
    cells: Iterable[Row],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    output: Path,
    batch_size: int,
    provenance: Row,
) -> list[Row]:
    """Measure the cells that `output` lacks, append their rows to it; returns all cells' rows in order.

    cells: the settings of single measurements, JSON-ready. divergence, mode and child are None for lossless.
    """
    drop_torn_line(output)
    done: dict[tuple[str], Row] = rows_by(output, "key")
    models = {"base_model": engine.base_model, "ea_model": engine.ea_model}
    models |= {"draft_vocab_size": engine.draft_vocab_size}
    rows = []
    for cell in tqdm(list(cells), desc="cells", unit="cell"):
        ids = prompts[cell["prompts"]]
        key = digest_json([cell, [engine.identity(), list(map(list, ids))]])
        if (key,) not in done:
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
