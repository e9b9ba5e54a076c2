"""Acceptance length by prompt set and rule: run every cell of a grid, keep its raw row, print a table.

A cell is (prompt set, temperature, rule). Rows go to a JSONL file as they are made and are not made twice, so
that an interrupted run resumes; tables come from the rows alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.markdown_table import table_lines
from eagle_fsd.evaluation.prompt_sets import batches
from eagle_fsd.evaluation.rows import rows_by
from eagle_fsd.files.jsonl import append_row, drop_torn_line


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
        """What a row must share to stand for this cell: the settings, the models' weights and the prompts."""
        made_by = [engine.identity(), list(map(list, prompts))]
        return hashlib.sha256(json.dumps([asdict(self), made_by], sort_keys=True).encode()).hexdigest()[:16]


def measure(
    engine: EagleFSD, cell: Cell, prompts: Sequence[Sequence[int]], batch_size: int
) -> dict[str, object]:
    """Run one cell over its prompts (token ids); its row is the cell and the sums of its statistics.

    Prompts are batched by length; prompt i draws from the stream (seed, i) whatever its batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    stats: list[GenerationStats] = []
    for places in batches(len(order), batch_size):
        rows = [order[place] for place in places]
        ids, mask = pad_left([prompts[row] for row in rows], engine.pad_token_id)
        output = engine.generate(
            ids,
            mask,
            max_new_tokens=cell.max_new_tokens,
            rule=cell.rule(),
            tree=cell.tree,
            seed=[(cell.seed, row) for row in rows],
            **asdict(cell.sampling),
        )
        stats.append(GenerationStats.total(output.stats, concurrent=True))
    total = GenerationStats.total(stats)
    return {**asdict(cell), **total.to_dict(), "batch_size": batch_size}


def run(
    engine: EagleFSD,
    cells: Iterable[Cell],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    output: Path,
    batch_size: int,
    provenance: Mapping[str, object],
) -> list[dict[str, object]]:
    """Measure the cells that `output` lacks, append their rows to it; returns all cells' rows in order."""
    drop_torn_line(output)
    done = rows_by(output, "key")
    rows = []
    for cell in tqdm(list(cells), desc="cells", unit="cell"):
        ids = prompts[cell.prompts][: cell.prompt_count]
        key = cell.key(engine, ids)
        if (key,) not in done:
            row = measure(engine, cell, ids, batch_size)
            row |= {"key": key, "base_model": engine.base_model, "ea_model": engine.ea_model}
            row |= {"draft_vocab_size": engine.draft_vocab_size, **provenance}
            append_row(output, row)
            done[key,] = row
        rows.append(done[key,])
    return rows


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table of tau: a line per tree, temperature and rule, by prompt set and over all.

    "vs lossless" compares with the lossless line of the same tree and temperature.
    """
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    titles = ["tree", "temperature", "divergence", "mode", "child", "T", *sets]
    titles += ["all", "vs lossless", "fuzzy / step"]
    lines = []
    groups: dict[tuple[object, ...], list[Mapping[str, object]]] = {}
    for row in rows:
        rule = (row["divergence"], row["mode"], row["child"], row["threshold"])
        setting = (str(TreeConfig(**row["tree"])), row["sampling"]["temperature"])
        groups.setdefault((*setting, *rule), []).append(row)
    lossless: dict[object, float] = {}
    for (tree, temperature, divergence, mode, child, threshold), members in groups.items():
        steps = sum(row["steps"] for row in members)
        tau = sum(row["new_tokens"] for row in members) / steps
        if divergence is None:
            lossless[tree, temperature] = tau
        by_set = {row["prompts"]: row["tau"] for row in members}
        known = lossless.get((tree, temperature))
        gain = f"{tau / known - 1:+.0%}" if known else ""
        fuzzy = sum(row["fuzzy_accepts"] for row in members) / steps
        cells = [
            tree,
            f"{temperature:g}",
            divergence or "lossless",
            mode or "",
            child or "",
            f"{threshold:g}",
        ]
        cells += [f"{by_set[name]:.2f}" if name in by_set else "" for name in sets]
        lines.append([*cells, f"{tau:.2f}", gain, f"{fuzzy:.2f}"])
    return "\n".join(table_lines(titles, lines))
