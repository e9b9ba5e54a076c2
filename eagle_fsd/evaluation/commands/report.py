"""Report on raw rows: quality against speed, with intervals, winners, plots. No model is loaded.

    python eval/report.py --rows runs/sweep/*.jsonl --output runs/report --quality log_p law_tv strict

Writes report.md and frontier_*.png to the folder; the same rows give the same files, byte for byte. Rows of
several models or trees become sections of one report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.evaluation.analysis.bootstrap import Array, Bootstrap, Estimate, interval
from eagle_fsd.evaluation.analysis.frontier import (
    LOSSES,
    Quality,
    quality_named,
    speed_title,
    speedup,
    undominated,
    winners,
)
from eagle_fsd.evaluation.analysis.points import (
    MEASURES,
    SCORE,
    SECTION,
    SECTION_FIELDS,
    SPEED,
    TAU,
    Panel,
    Point,
    drawn_by_rule,
    machine,
    panels,
    score,
    score_weights,
    titles_apart,
    under_one_name,
)
from eagle_fsd.evaluation.cli import parsed, rows_parser, say
from eagle_fsd.evaluation.markdown_table import filled_columns, markdown_table
from eagle_fsd.evaluation.plots import plot_frontier, require_matplotlib
from eagle_fsd.evaluation.rows import PROVENANCE, Row, read_raw_rows
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.places import require_folder
from eagle_fsd.version import __version__

QUALITIES = ("log_p", "law_tv")
FEW = 30  # samples below which intervals are rough
MANY_AT_LIMIT = 0.1
PREDICTORS = ("law_tv", "law_kl", "log_p", "length")
FEWEST = 4  # rules, below which a correlation over rules says nothing
ALWAYS = (
    "KL is missing where it is infinite: the rule can emit what the target, after temperature, top-k and "
    "top-p, cannot; at temperature 0 that is every relaxed rule.",
    "Tokens per second are of answers made one after the other, in turns of the rules that a run was asked "
    "for: what else the machine did meanwhile is in them. tau does not depend on it.",
    "log p per token rewards rules that pick likely tokens: text sharper than the target's own scores higher "
    "than it. TV and KL do not: they are 0 for the target's own distribution alone.",
    "The fastest rules are chosen on the samples that their numbers come from, and by the measured loss, "
    "whatever its interval, so the numbers flatter them a little: confirm a choice on other samples.",
)
COMMANDS = 10  # most commands that are listed
# A column: title, measure, whether its value or how it changed from lossless's, and a number's form.
Column = tuple[str, str, str, str]
SPEED_COLUMNS: tuple[Column, ...] = (
    ("tau", TAU, "value", ".2f"),
    ("tau / lossless", TAU, "ratio", ".2f"),
    ("tokens/s", SPEED, "value", ".1f"),
    ("tokens/s / lossless", SPEED, "ratio", ".2f"),
    ("fuzzy share", "fuzzy_share", "value", ".1%"),
    ("fuzzy run", "fuzzy_run", "value", ".2f"),
    ("repeated", "repeated", "value", ".1%"),
    ("in a loop", "loops", "value", ".1%"),
    ("length", "length", "value", ".0f"),
    ("length / lossless", "length", "ratio", ".2f"),
    ("at the limit", "limit_rate", "value", ".0%"),
    ("more at the limit", "limit_rate", "difference", "+.0%"),
)
QUALITY_COLUMNS: tuple[Column, ...] = (
    ("log p", "log_p", "value", ".3f"),
    ("log p - lossless", "log_p", "difference", "+.3f"),
    ("TV", "law_tv", "value", ".4f"),
    ("KL", "law_kl", "value", ".4f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = rows_parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the report")
    known = f"log_p, law_tv, law_kl or a task's score; default: {' '.join(QUALITIES)}"
    add("--quality", nargs="+", default=list(QUALITIES), help=known)
    add("--tau", action="store_true", help="speed is tokens per step, not tokens per second")
    with parsed(parser, argv) as arguments:
        require_matplotlib()
        require_folder("--output", arguments.output)
        how = Bootstrap(arguments.resamples, seed=arguments.seed)
        files = read_raw_rows(arguments.rows)
        alone = len({path.name for path in files}) == len(files)
        sources = {path.name if alone else str(path): len(rows) for path, rows in files.items()}
        rows = [row for rows in files.values() for row in rows]
        speed = TAU if arguments.tau else SPEED
        say(write_report(rows, arguments.output, sources, how, arguments.quality, speed))


def write_report(
    rows: Sequence[Row],
    folder: Path,
    sources: Mapping[str, int],
    how: Bootstrap,
    names: Sequence[str] = QUALITIES,
    speed: str = SPEED,
) -> Path:
    """Write report.md and the plots to the folder; returns the path of report.md.

    sources: how many rows came from each file. names: the qualities, see `quality_named`; speed:
    tokens_per_second or tau. Raises ValueError for rows that cannot stand in one report.
    """
    rows = under_one_name(rows)
    found = panels(rows, how)
    qualities = [quality_named(name, found) for name in dict.fromkeys(names)]
    folder.mkdir(parents=True, exist_ok=True)
    files = ", ".join(f"{name} ({count:,} rows)" for name, count in sources.items())
    text = [
        "# Quality against speed",
        "",
        f"Made by eagle_fsd {__version__} from raw rows alone: {files}. Brackets are {how.confidence:.0%} "
        f"intervals of a bootstrap over samples ({how.resamples:,} resamples, seed {how.seed}). What is held "
        "against lossless is so on the same samples and seeds, in pairs; `pairs` says how many there are. "
        "tau, lengths and scores are ratios of sums; log p, TV and KL are means over tokens. TV "
        "and KL are the distances of the rule's own next-token distribution from the target's, after "
        "temperature, top-k and top-p. What is lost of log p is a share of lossless's; of other measures it "
        "is the difference.",
    ]
    sections = [(shared, list(members)) for shared, members in groupby(found, lambda one: SECTION(one.row))]
    for number, (shared, members) in enumerate(sections, 1):
        text += ["", f"## {section_title(shared, [one for one, _ in sections])}", ""]
        text += what_was_run([row for row in rows if SECTION(row) == shared])
        suffix = f"_{number}" if len(sections) > 1 else ""
        text += section(members, qualities, speed, folder, suffix, how)
    text += ["", "## What the data cannot say", "", *(f"- {line}" for line in caveats(rows, found, how))]
    write_atomically(folder / "report.md", "\n".join(text) + "\n")
    return folder / "report.md"


def section_title(shared: tuple[Any, ...], sections: Sequence[tuple[Any, ...]]) -> str:
    """Name a section by its target and tree, and by what else tells it from others of the same two."""
    mine, *others = (dict(zip(SECTION_FIELDS, one, strict=True)) for one in (shared, *sections))
    named = {name: mine[name] for name in ("base_model", "tree")}
    alike = [other for other in others if named.items() <= other.items()]
    apart = [f"{name} {mine[name]}" for name in mine if any(other[name] != mine[name] for other in alike)]
    return ", ".join([named["base_model"], f"tree {named['tree']}", *apart])


def section(
    members: Sequence[Panel],
    qualities: Sequence[Quality],
    speed: str,
    folder: Path,
    suffix: str,
    how: Bootstrap,
) -> list[str]:
    """Write what is said of one pair of models and one tree: plots, winners at a glance, then every panel."""
    text = []
    for quality in qualities:
        plot = folder / f"frontier_{quality.name}{suffix}.png"
        if plot_frontier(members, quality, speed, plot):
            text += ["", f"![{quality.title} against {speed_title(speed)}]({plot.name})"]
        best = [winners(panel.points, quality, speed) for panel in members]
        lines = [
            [title, *(f"{point.label}: {speedup(point, speed):.2f}" for point in points)]
            for title, points in zip(titles_apart(members), best, strict=True)
            if points
        ]
        titles = [f"at most {quality.amount(level)}" for level in LOSSES]
        text += ["", markdown_table([f"fastest: {speed_title(speed)}", *titles], lines)] if lines else []
    for panel in members:
        text += ["", f"### {panel.title}", "", f"{panel.details.capitalize()}."]
        text += ["", speed_table(panel), "", quality_table(panel, qualities, speed)]
        text += predictors_table(panel, how)
    return text


def speed_table(panel: Panel) -> str:
    """Write how fast each rule is, and what becomes of the lengths."""
    rows = []
    for point in panel.points:
        counts = {"rule": point.label, "rows": str(point.samples), "pairs": str(point.pairs or "")}
        rows.append(counts | cells(point, SPEED_COLUMNS))
    return filled_columns(rows)


def quality_table(panel: Panel, qualities: Sequence[Quality], speed: str) -> str:
    """Write what each rule does to the text; the last column says on which qualities' frontier it is."""
    best = {quality.title: undominated(panel.points, quality, speed) for quality in qualities}
    columns = list(QUALITY_COLUMNS)
    for name in panel.scores:
        columns += [(name, SCORE + name, "value", ".3f")]
        columns += [(f"{name} - lossless", SCORE + name, "difference", "+.3f")]
    rows = [
        {"rule": point.label}
        | cells(point, columns)
        | {"on the frontier of": ", ".join(title for title, points in best.items() if point in points)}
        for point in panel.points
    ]
    return filled_columns(rows)


def predictors_table(panel: Panel, how: Bootstrap) -> list[str]:
    """Write how a change of each score goes with what else changes, over the rules; nothing if unknown."""
    title = "over the rules, correlation of the change from lossless"
    rows = [
        {title: name} | {MEASURES[other].title: f"{r:+.2f}" for other, r in found.items()}
        for name, found in score_predictors(panel, how).items()
    ]
    return ["", filled_columns(rows)] if rows else []


def score_predictors(panel: Panel, how: Bootstrap) -> dict[str, dict[str, Estimate]]:
    """Return the correlation over rules of what becomes of each score with each of PREDICTORS.

    Scores and measures are differences from lossless's. Empty where rules are few or have other samples.
    """
    lossless = panel.lossless
    points = [one for one in panel.points if lossless and one.pairs == lossless.samples == one.samples]
    if lossless is None or len(points) < FEWEST:
        return {}
    weights = score_weights(panel.row.task)
    measures = {name: MEASURES[name] for name in PREDICTORS}
    measures |= {name: score(name, weights.get(name)) for name in panel.scores}
    drawn = {name: drawn_by_rule([*points, lossless], measure, how) for name, measure in measures.items()}
    changed = {name: one[:, :-1] - one[:, -1:] for name, one in drawn.items() if not np.isnan(one[0]).any()}
    samples, known = len({row.sample for row in lossless.rows}), [one for one in PREDICTORS if one in changed]
    return {
        name: {one: interval(correlation(changed[name], changed[one]), samples, how) for one in known}
        for name in panel.scores
        if name in changed and known
    }


def correlation(a: Array, b: Array) -> Array:
    """Return Pearson's correlation of the rows of a and b, [R, k]: [R]; NaN where values are all equal."""
    a, b = (side - side.mean(1, keepdims=True) for side in (a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def cells(point: Point, columns: Sequence[Column]) -> dict[str, str]:
    """Write a point's cells by their titles; what it does not know is empty."""
    made = {}
    for title, measure, what, form in columns:
        found = point.values.get(measure)
        if what != "value":
            found = getattr(point.changes.get(measure), what, None)
        made[title] = "" if found is None else f"{found:{form}}"
    return made


def what_was_run(rows: Sequence[Row]) -> list[str]:
    """List the models that the rows share, versions and commands, as far as the rows know them."""
    first = rows[0]
    head = first.ea_model or "none"
    if first.draft_vocab_size is not None:
        head += f", drafting {first.draft_vocab_size:,} tokens"
    made = first.dtype + (f", weights {first.weight_format}" if first.weight_format != first.dtype else "")
    lines = [f"- Target {first.base_model}, draft head {head}, {made}, tree {first.tree}."]
    cells, samples = len({row.key for row in rows}), len({(row.task, row.sample) for row in rows})
    lines.append(f"- rows: {len(rows):,}; cells: {cells}; samples: {samples}")
    for name in PROVENANCE[:-2]:
        values = sorted({str(row.provenance[name]) for row in rows if name in row.provenance})
        if values:
            lines.append(f"- {name.replace('_', ' ')}: {', '.join(values)}")
    lines.append(f"- batch size: {', '.join(map(str, sorted({row.batch_size for row in rows})))}")
    dates = sorted(str(row.provenance["date"]) for row in rows if "date" in row.provenance)
    lines += [f"- date: {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"] if dates else []
    known = (row.provenance.get("command") for row in rows)
    commands = [str(command) for command in dict.fromkeys(known) if command]
    if commands:
        more = [f"# and {len(commands) - COMMANDS} more"] if len(commands) > COMMANDS else []
        lines += ["", "```bash", *commands[:COMMANDS], *more, "```"]
    return lines


def caveats(rows: Sequence[Row], panels: Sequence[Panel], how: Bootstrap) -> list[str]:
    """List in sentences what the rows lack, then what holds of any such report."""
    rules = [(panel, point) for panel in panels for point in panel.points if not point.is_lossless]
    lines = []
    bare = [panel for panel in panels if panel.lossless is None]
    if bare:
        lines.append(f"No lossless rows, so nothing to compare with: {titles_of(bare)}.")
    gaps = [point for panel, point in rules if panel.lossless and point.pairs < panel.lossless.samples]
    if gaps:
        least = min(point.pairs for point in gaps)
        lines.append(
            f"{len(gaps)} of {len(rules)} rules lack samples that lossless has; the least has {least} pairs. "
            "Their values are over other samples than lossless's: only what is said against lossless, over "
            "the pairs, compares like with like."
        )
    few = min((point.pairs for _, point in rules if point.pairs), default=FEW)
    if few < FEW:
        lines.append(f"Intervals over fewer than {FEW} pairs are rough; the least number here is {few}.")
    if len(set(map(machine, rows))) > 1:
        lines.append(
            "Rows come from several machines, runtimes, thread counts or batch sizes. Tokens per second are "
            "left out where a comparison would mix them; tau and quality are not concerned."
        )
    for name in ("commit", "torch", "transformers"):
        if len({row.provenance.get(name) for row in rows}) > 1:
            lines.append(f"Rows were made with more than one {name}.")
    limited = [p for p in panels if p.lossless and p.lossless.values["limit_rate"].value > MANY_AT_LIMIT]
    if limited:
        lines.append(
            f"More than {MANY_AT_LIMIT:.0%} of lossless's answers reach the length limit and are cut in "
            f"{titles_of(limited)}: scores there are of cut answers, and lengths are bounded."
        )
    chance = f"Each interval is a {how.confidence:.0%} one by itself; among {len(rules)} rules some miss."
    return [*lines, *ALWAYS, chance]


def titles_of(panels: Sequence[Panel]) -> str:
    return "; ".join(dict.fromkeys(panel.title for panel in panels))
