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
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.report.caveats import caveats
from eagle_fsd.evaluation.report.frontier_plots import plot_frontier
from eagle_fsd.evaluation.report.tables import quality_table, speed_table, with_interval
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


def write_report(rows: Sequence[Row], asked: Report, folder: Path, sources: Mapping[str, int]) -> Path:
    """Write report.md and the plots to the folder; returns the path of report.md.

    sources: how many rows came from each file. Raises ValueError for rows that cannot stand in one report.
    """
    if not rows:
        raise ValueError(f"no rows in {', '.join(sources)}: a report needs raw rows; run eval/sweep.py first")
    found = panels(rows, asked.how)
    qualities = [quality_named(name, found) for name in dict.fromkeys(asked.qualities)]
    folder.mkdir(parents=True, exist_ok=True)
    sections: dict[Models, list[Panel]] = {}
    for panel in found:
        sections.setdefault(panel.models, []).append(panel)
    text = ["# Quality against speed", "", made_from(asked, sources)]
    for number, (models, members) in enumerate(sections.items(), 1):
        mine = [row for row in rows if Models.of(row) == models]
        text += ["", f"## {models.base_model}, tree {models.tree}", "", *what_was_run(models, mine)]
        suffix = f"_{number}" if len(sections) > 1 else ""
        text += section(members, qualities, asked, folder, suffix)
    text += [
        "",
        "## What the data cannot say",
        "",
        *(f"- {line}" for line in caveats(rows, found, asked.how)),
    ]
    write_atomically(folder / "report.md", "\n".join(text) + "\n")
    return folder / "report.md"


def made_from(asked: Report, sources: Mapping[str, int]) -> str:
    """Write the paragraph on the report itself: its rows, and how to read its numbers."""
    files = ", ".join(f"{name} ({count:,} rows)" for name, count in sources.items())
    how = asked.how
    return (
        f"Made by eagle_fsd {__version__} from raw rows alone: {files}. Brackets are {how.confidence:.0%} "
        f"intervals of a bootstrap over samples ({how.resamples:,} resamples, seed {how.seed}). What is held "
        "against lossless is so on the same samples and seeds, in pairs; `pairs` says how many there are. "
        "tau, lengths and scores are ratios of sums; log p, TV and KL are means over tokens. TV "
        "and KL are the distances of the rule's own next-token distribution from the target's, after "
        "temperature, top-k and top-p. What is lost of log p is a share of lossless's; of other measures it "
        "is the difference."
    )


def section(
    members: Sequence[Panel], qualities: Sequence[Quality], asked: Report, folder: Path, suffix: str
) -> list[str]:
    """Write what is said of one pair of models and one tree: plots, winners at a glance, then every panel."""
    text = []
    details: dict[Task, list[str]] = {}
    for quality in qualities:
        plot = folder / f"frontier_{quality.name}{suffix}.png"
        if plot_frontier(members, quality, asked.speed, plot):
            text += ["", f"![{quality.title} against {speed_title(asked.speed)}]({plot.name})"]
        lines = []
        for panel in members:
            found = winners(panel, quality, asked.speed, asked.losses, asked.how)
            said = [f"- {sentence(one, quality, asked.speed)}" for one in found]
            if found:
                details.setdefault(panel.task, []).extend(["", f"**By {quality.title}.**", "", *said])
                fastest = [f"{one.point.label}: {speedup(one.point, asked.speed).value:.2f}" for one in found]
                lines.append([panel.task.title, *fastest])
        titles = [f"fastest: {speed_title(asked.speed)}"]
        titles += [f"at most {amount(level, quality)}" for level in asked.losses]
        text += ["", markdown_table(titles, lines)] if lines else []
    for panel in members:
        about = panel.task.details
        text += ["", f"### {panel.task.title}", "", f"{about[0].upper()}{about[1:]}."]
        text += details.get(panel.task, [])
        text += ["", speed_table(panel), "", quality_table(panel, qualities, asked.speed)]
    return text


def what_was_run(models: Models, rows: Sequence[Row]) -> list[str]:
    """List models, versions and commands, as far as the rows know them."""
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
        lines.append(f"- date: {' to '.join(dict.fromkeys((dates[0], dates[-1])))}")
    known = (row.provenance.get("command") for row in rows)
    commands = [str(command) for command in dict.fromkeys(known) if command]
    if commands:
        more = [f"# and {len(commands) - COMMANDS} more"] if len(commands) > COMMANDS else []
        lines += ["", "```bash", *commands[:COMMANDS], *more, "```"]
    return lines


def sentence(winner: Winner, quality: Quality, speed: str) -> str:
    """Say a level's winner: by the measured loss, and with its whole interval within the level."""
    level, point, second = f"At most {amount(winner.level, quality)}", winner.point, winner.runner_up
    if point.is_lossless:
        return f"{level}: no rule is faster than lossless."
    faster = with_interval(speedup(point, speed), ".2f")
    loss = with_interval(quality.loss(point), ".1%" if quality.relative else ".4f")
    text = f"{level}: {point.label} is the fastest, {faster} times lossless, and loses {loss}"
    ratio = winner.ratio
    if second is not None and second.is_lossless:
        text += "; no other family is faster than lossless there"
    elif second is not None and ratio is not None:
        text += f"; that is {with_interval(ratio, '.2f')} times the next family's, {second.label}"
        tied = ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high
        text += ", which cannot be told from it" if tied else ""
    if winner.assured == point:
        return f"{text}. The whole interval of its loss stays within."
    if winner.assured.is_lossless:
        return f"{text}. Of no faster rule does the whole interval of the loss stay within."
    return (
        f"{text}. With the whole interval of the loss within, it is {winner.assured.label}, "
        f"{with_interval(speedup(winner.assured, speed), '.2f')} times lossless."
    )


def amount(level: float, quality: Quality) -> str:
    """Say a level of loss in words."""
    if quality.is_distance:
        return f"{level:g} {quality.title}"
    return f"{100 * level:g} % of log p lost" if quality.relative else f"{level:g} of {quality.title} lost"
