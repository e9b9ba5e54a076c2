"""A report of raw rows: what was run, tables, winners in sentences, plots, and what the data cannot say.

Everything comes from the rows: the same rows give the same files, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.frontier import (
    LOSSES,
    Quality,
    Winner,
    quality_named,
    speed_title,
    speedup,
    winners,
)
from eagle_fsd.evaluation.analysis.measures import SPEED
from eagle_fsd.evaluation.analysis.points import Models, Panel, Task, panels
from eagle_fsd.evaluation.analysis.rule_labels import LOSSLESS
from eagle_fsd.evaluation.markdown_table import table_lines
from eagle_fsd.evaluation.report.caveats import caveats
from eagle_fsd.evaluation.report.frontier_plots import plot_frontier
from eagle_fsd.evaluation.report.tables import csv_text, flat_rows, quality_table, speed_table, spoken
from eagle_fsd.evaluation.rows import Row
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.version import __version__

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
    """Write report.md, table.csv and the plots to the folder; the path of report.md.

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
    write_atomically(folder / "table.csv", csv_text(flat_rows(found)))
    write_atomically(folder / "report.md", "\n".join(text) + "\n")
    return folder / "report.md"


def made_from(rows: Sequence[Row], asked: Report, sources: Mapping[str, int]) -> list[str]:
    """The paragraph on the report itself: its rows, and how to read its numbers."""
    files = ", ".join(f"{name} ({count:,} rows)" for name, count in sources.items())
    how = asked.how
    return [
        f"Made by eagle_fsd {__version__} from raw rows alone: {files}. Brackets are {how.confidence:.0%} "
        f"intervals of a bootstrap over samples ({how.resamples:,} resamples, seed {how.seed}). What is held "
        "against lossless is so on the same samples and seeds, in pairs; `pairs` says how many there are. "
        "tau, lengths and scores are ratios of sums; log p, agreement and the law's distances are means over "
        "tokens. law TV and law KL are the distances of the rule's own next-token law from the target's, "
        "after temperature, top-k and top-p. What is lost of log p is a share of lossless's; of other "
        "measures it is the difference. `plain` is decoding without a draft."
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
    won = {
        (panel.task, quality.name): winners(panel, quality, asked.speed, asked.losses, asked.how)
        for panel in members
        for quality in qualities
    }
    for quality in qualities:
        names = [f"frontier_{quality.name}{suffix}.{kind}" for kind in ("png", "svg")]
        if plot_frontier(members, quality, asked.speed, [folder / name for name in names]):
            text += ["", f"![{quality.title} against {speed_title(asked.speed)}]({names[0]})"]
            text += ["", f"([the same as SVG]({names[1]}))"]
        text += at_a_glance(members, quality, asked, won)
    for panel in members:
        details = panel.task.details
        text += ["", f"### {panel.task.title}", "", f"{details[0].upper()}{details[1:]}."]
        for quality in qualities:
            text += winner_lines(panel, quality, asked.speed, won[panel.task, quality.name])
        text += ["", speed_table(panel), "", quality_table(panel, qualities, asked.speed)]
    return text


def at_a_glance(
    members: Sequence[Panel], quality: Quality, asked: Report, won: Mapping[tuple[Task, str], list[Winner]]
) -> list[str]:
    """A table of the winners by the measured loss: a line for each panel, a column for each level."""
    lines = []
    for panel in members:
        found = {one.level: one.point for one in won[panel.task, quality.name] if not one.assured}
        if found:
            cells = [f"{point.label}: {speedup(point, asked.speed).value:.2f}" for point in found.values()]
            lines.append([panel.task.title, *cells])
    if not lines:
        return []
    levels = dict.fromkeys(asked.losses)
    titles = [f"fastest: {speed_title(asked.speed)}", *(f"at most {amount(one, quality)}" for one in levels)]
    return ["", *table_lines(titles, lines)]


def what_was_run(models: Models, rows: Sequence[Row]) -> list[str]:
    """Models, versions and commands, as far as the rows know them."""
    head = models.ea_model or "none"
    if models.draft_vocab_size is not None:
        head += f", drafting {models.draft_vocab_size:,} tokens"
    lines = [f"- Target {models.base_model}, draft head {head}, {models.dtype}, tree {models.tree}."]
    cells, samples = len({row.key for row in rows}), len({(row.task, row.sample) for row in rows})
    lines.append(f"- rows: {len(rows):,}; cells: {cells}; samples: {samples}")
    for name in VERSIONS:
        values = sorted({str(row.provenance[name]) for row in rows if name in row.provenance})
        if values:
            lines.append(f"- {name.replace('_', ' ')}: {', '.join(values)}")
    sizes = sorted({row.batch_size for row in rows})
    lines.append(f"- batch size: {', '.join(map(str, sizes))}")
    dates = sorted(str(row.provenance["date"]) for row in rows if "date" in row.provenance)
    if dates:
        lines.append(f"- date: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""))
    known = (row.provenance.get("command") for row in rows)
    commands = [str(command) for command in dict.fromkeys(known) if command]
    if commands:
        more = [f"# and {len(commands) - COMMANDS} more"] if len(commands) > COMMANDS else []
        lines += ["", "```bash", *commands[:COMMANDS], *more, "```"]
    return lines


def winner_lines(panel: Panel, quality: Quality, speed: str, found: Sequence[Winner]) -> list[str]:
    """Which family is the fastest at each level of loss: sentences, then the same as a table."""
    if not found:
        return []
    lines = ["", f"**By {quality.title}.**", ""]
    for level in dict.fromkeys(winner.level for winner in found):
        measured, assured = sorted((one for one in found if one.level == level), key=lambda one: one.assured)
        lines.append(f"- {sentence(measured, assured, quality, speed)}")
    plain = speedup(panel.plain, speed) if panel.plain else None
    if plain is not None:
        lines.append(f"- Plain decoding, without a draft, is at {spoken(plain, '.2f')} times lossless.")
    titles = ["at most", "counting", "winner", speed_title(speed), "loss", "next family"]
    titles += ["winner / next", "intervals overlap"]
    return [*lines, "", *table_lines(titles, [winner_cells(one, quality, speed) for one in found])]


def sentence(measured: Winner, assured: Winner, quality: Quality, speed: str) -> str:
    """A level's winner in words: by the measured loss, and with its whole interval within the level."""
    level = f"At most {amount(measured.level, quality)}"
    if measured.point.family == LOSSLESS:
        return f"{level}: no rule is faster than lossless."
    text = f"{level}: {measured.point.label} is the fastest, {spoken(speedup(measured.point, speed), '.2f')} "
    text += f"times lossless, and loses {spoken_loss(measured, quality)}"
    second = measured.runner_up
    if second is not None and second.family == LOSSLESS:
        text += "; no other family is faster than lossless there"
    elif second is not None and measured.ratio is not None:
        text += f"; that is {spoken(measured.ratio, '.2f')} times the next family's, {second.label}"
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
    if ratio is None or ratio.low is None or ratio.high is None:
        return False
    return ratio.low <= 1 <= ratio.high


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
    """A level of loss in words."""
    if quality.measure.startswith("law"):
        return f"{level:g} {quality.title}"
    return f"{100 * level:g} % of log p lost" if quality.relative else f"{level:g} of {quality.title} lost"


def spoken_loss(winner: Winner, quality: Quality) -> str:
    return spoken(quality.loss(winner.point), ".1%" if quality.relative else ".4f")
