"""A report of raw rows: what was run, tables, winners in plain sentences, plots, and what the data cannot say.

Everything comes from the rows: the same rows give the same files, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_fsd import __version__
from eagle_fsd.evaluation.bootstrap import Bootstrap
from eagle_fsd.evaluation.caveats import caveats
from eagle_fsd.evaluation.frontier import (
    LOSSES,
    Quality,
    Winner,
    quality_named,
    speed_title,
    speedup,
    winners,
)
from eagle_fsd.evaluation.frontier_plots import plot_frontier
from eagle_fsd.evaluation.measures import SPEED
from eagle_fsd.evaluation.points import Models, Panel, panels
from eagle_fsd.evaluation.rows import Row
from eagle_fsd.evaluation.rule_labels import LOSSLESS
from eagle_fsd.evaluation.tables import csv_text, flat_rows, quality_table, speed_table, spoken, table_lines
from eagle_fsd.files import write_atomically

QUALITIES = ("log_p", "law_tv")
COMMANDS = 10  # most commands that are listed
VERSIONS = ("commit", "eagle_fsd", "python", "torch", "transformers", "device", "threads")


@dataclass(frozen=True)
class Report:
    """What is asked of a report. speed: tokens_per_second or tau; losses: the levels of the winners."""

    qualities: Sequence[str] = QUALITIES
    speed: str = SPEED
    losses: Sequence[float] = LOSSES
    how: Bootstrap = field(default_factory=Bootstrap)

    def __post_init__(self) -> None:
        for loss in self.losses:
            if not 0 <= loss < 1:
                raise ValueError(f"losses has {loss}: a loss must be at least 0 and below 1; 0.01 is 1 %")
        speed_title(self.speed)


def write_report(rows: Sequence[Row], asked: Report, folder: Path, sources: Mapping[str, int]) -> Path:
    """Write report.md, table.json, table.csv and the plots to the folder; the path of report.md.

    sources: how many rows came from each file. ValueError for rows that cannot stand in one report.
    """
    if not rows:
        raise ValueError(f"no rows in {', '.join(sources)}: a report needs raw rows; run eval/sweep.py first")
    found = panels(rows, asked.how)
    qualities = [quality_named(name, found) for name in dict.fromkeys(asked.qualities)]
    folder.mkdir(parents=True, exist_ok=True)
    sections: dict[Models, list[Panel]] = {}
    for panel in found:
        sections.setdefault(panel.models, []).append(panel)
    text = ["# Quality against speed", "", *made_from(rows, asked, sources)]
    for number, (models, members) in enumerate(sections.items(), 1):
        suffix = f"_{number}" if len(sections) > 1 else ""
        text += section(models, members, rows, qualities, asked, folder, suffix)
    text += [
        "",
        "## What the data cannot say",
        "",
        *(f"- {line}" for line in caveats(rows, found, asked.how)),
    ]
    table = flat_rows(found)
    write_atomically(folder / "table.json", json.dumps(table, indent=1) + "\n")
    write_atomically(folder / "table.csv", csv_text(table))
    write_atomically(folder / "report.md", "\n".join(text) + "\n")
    return folder / "report.md"


def made_from(rows: Sequence[Row], asked: Report, sources: Mapping[str, int]) -> list[str]:
    """The paragraph on the report itself: its rows, and how to read its numbers."""
    files = ", ".join(f"{name} ({count:,} rows)" for name, count in sources.items())
    return [
        f"Made by eagle_fsd {__version__} from the raw rows of {files}; no model was asked again. Brackets are "
        f"{asked.how.confidence:.0%} intervals of a bootstrap over samples ({asked.how.resamples:,} resamples, seed "
        f"{asked.how.seed}); what is held against lossless is so on the same samples and seeds, in pairs, and "
        "`pairs` says how many there are. tau, lengths and scores are ratios of sums; log p, agreement and the "
        "law's distances are means over tokens. law TV and law KL are the distances of the rule's own "
        "next-token law from the target's, after temperature, top-k and top-p. Loss of log p is a share of "
        "lossless's; other losses are differences. `plain` is decoding without a draft.",
    ]


def section(
    models: Models,
    members: Sequence[Panel],
    rows: Sequence[Row],
    qualities: Sequence[Quality],
    asked: Report,
    folder: Path,
    suffix: str,
) -> list[str]:
    """What is said of one pair of models and one tree."""
    mine = [row for row in rows if Models.of(row) == models]
    text = ["", f"## {models.base_model}, tree {models.tree}", "", *what_was_run(models, mine)]
    for quality in qualities:
        names = [f"frontier_{quality.title.replace(' ', '_')}{suffix}.{kind}" for kind in ("png", "svg")]
        if plot_frontier(members, quality, asked.speed, [folder / name for name in names]):
            text += ["", f"![{quality.title} against {speed_title(asked.speed)}]({names[0]})"]
            text += ["", f"([the same as SVG]({names[1]}))"]
    for panel in members:
        text += [
            "",
            f"### {panel.task.title}",
            "",
            f"{panel.task.details[0].upper()}{panel.task.details[1:]}.",
        ]
        for quality in qualities:
            text += winner_lines(panel, quality, asked)
        text += ["", speed_table(panel), "", quality_table(panel, qualities, asked.speed)]
    return text


def what_was_run(models: Models, rows: Sequence[Row]) -> list[str]:
    """Models, versions and commands, as far as the rows know them."""
    head = models.ea_model or "none"
    if models.draft_vocab_size is not None:
        head += f", drafting {models.draft_vocab_size:,} tokens"
    lines = [f"- Target {models.base_model}, draft head {head}, {models.dtype}, tree {models.tree}."]
    cells, samples = len({row.key for row in rows}), len({(row.task, row.sample) for row in rows})
    lines.append(f"- {len(rows):,} rows: {cells} cells, {samples} samples.")
    for name in VERSIONS:
        values = sorted({str(row.provenance[name]) for row in rows if name in row.provenance})
        if values:
            lines.append(f"- {name.replace('_', ' ')}: {', '.join(values)}")
    sizes = sorted({row.batch_size for row in rows})
    lines.append(f"- batch size: {', '.join(map(str, sizes))}")
    dates = sorted(str(row.provenance["date"]) for row in rows if "date" in row.provenance)
    if dates:
        lines.append(f"- date: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""))
    commands = list(
        dict.fromkeys(str(row.provenance["command"]) for row in rows if "command" in row.provenance)
    )
    if commands:
        more = [f"# and {len(commands) - COMMANDS} more"] if len(commands) > COMMANDS else []
        lines += ["", "```bash", *commands[:COMMANDS], *more, "```"]
    return lines


def winner_lines(panel: Panel, quality: Quality, asked: Report) -> list[str]:
    """Which family is the fastest at each level of loss: sentences, then the same as a table."""
    found = winners(panel, quality, asked.speed, asked.losses, asked.how)
    if not found:
        return []
    lines = ["", f"**By {quality.title}.**", ""]
    titles = ["loss at most", "counting", "winner", speed_title(asked.speed), "loss", "next family"]
    titles += ["winner / next", "intervals overlap"]
    table = []
    for level in dict.fromkeys(winner.level for winner in found):
        measured, assured = (
            [one for one in found if one.level == level and one.assured is kind] for kind in (False, True)
        )
        lines.append(f"- {sentence(measured[0], assured[0], quality, asked.speed)}")
        table += [winner_cells(one, quality, asked.speed) for one in (*measured, *assured)]
    plain = speedup(panel.plain, asked.speed) if panel.plain else None
    if plain is not None:
        lines.append(f"- Plain decoding, without a draft, is at {spoken(plain, '.2f')} times lossless.")
    return [*lines, "", *table_lines(titles, table)]


def sentence(measured: Winner, assured: Winner, quality: Quality, speed: str) -> str:
    """A level's winner in words: by the measured loss, and with its whole interval within the level."""
    level = f"At most {amount(measured.level, quality)} lost"
    if measured.point.family == LOSSLESS:
        return f"{level}: no rule is faster than lossless."
    text = f"{level}: {measured.point.label} is the fastest, {spoken(speedup(measured.point, speed), '.2f')} times "
    text += f"lossless, and loses {spoken_loss(measured, quality)}"
    if measured.runner_up is not None and measured.ratio is not None:
        text += (
            f"; that is {spoken(measured.ratio, '.2f')} times the next family's {measured.runner_up.label}"
        )
        text += ", which cannot be told from it" if tied(measured) else ""
        overlap = {True: "overlap", False: "do not overlap"}.get(measured.overlap)
        text += f" (the intervals of their speedups {overlap})" if overlap else ""
    if assured.point.label == measured.point.label:
        return f"{text}. The whole interval of its loss stays within."
    if assured.point.family == LOSSLESS:
        return f"{text}. Of no faster rule does the whole interval of the loss stay within."
    return (
        f"{text}. With the whole interval of the loss within, it is {assured.point.label}, "
        f"{spoken(speedup(assured.point, speed), '.2f')} times lossless."
    )


def tied(winner: Winner) -> bool:
    """Whether the interval of winner / next holds 1."""
    ratio = winner.ratio
    return (
        ratio is not None
        and ratio.low is not None
        and ratio.high is not None
        and ratio.low <= 1 <= ratio.high
    )


def winner_cells(winner: Winner, quality: Quality, speed: str) -> list[str]:
    overlap = {True: "yes", False: "no"}.get(winner.overlap, "")
    return [
        amount(winner.level, quality),
        "worse end of the interval" if winner.assured else "measured",
        winner.point.label,
        "1" if winner.point.family == LOSSLESS else spoken(speedup(winner.point, speed), ".2f"),
        "0" if winner.point.family == LOSSLESS else spoken_loss(winner, quality),
        winner.runner_up.label if winner.runner_up else "",
        spoken(winner.ratio, ".2f"),
        overlap,
    ]


def amount(level: float, quality: Quality) -> str:
    return f"{100 * level:g} % of log p" if quality.relative else f"{level:g} of {quality.title}"


def spoken_loss(winner: Winner, quality: Quality) -> str:
    return spoken(quality.loss(winner.point), ".1%" if quality.relative else ".4f")
