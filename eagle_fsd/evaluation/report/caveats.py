"""What a report's data cannot say, read off the rows: gaps, mixed machines, too few samples, cut answers."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.measures import machine
from eagle_fsd.evaluation.analysis.points import Panel
from eagle_fsd.evaluation.rows import Row

FEW = 30  # samples below which intervals are rough
MANY_AT_LIMIT = 0.1
ALWAYS = (
    "KL is missing where it is infinite: the rule can emit what the target, after temperature, top-k and "
    "top-p, cannot; at temperature 0 that is every relaxed rule.",
    "Tokens per second are of cells run one after the other: what else the machine did meanwhile is in them, "
    "and in no interval. tau does not depend on it.",
    "log p per token rewards rules that pick likely tokens: text sharper than the target's own scores higher "
    "than it. TV and KL do not: they are 0 for the target's own distribution alone.",
    "The fastest rules are chosen on the samples that their numbers come from, and by the measured loss, "
    "whatever its interval, so the numbers flatter them a little: confirm a choice on other samples.",
)


def caveats(rows: Sequence[Row], panels: Sequence[Panel], how: Bootstrap) -> list[str]:
    """List in sentences what the rows lack, then what holds of any such report."""
    rules = [(panel, point) for panel in panels for point in panel.points if not point.is_lossless]
    lines = []
    bare = [panel for panel in panels if panel.lossless is None]
    if bare:
        lines.append(f"No lossless rows, so nothing to compare with: {titles(bare)}.")
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
            "Rows come from several machines, thread counts or batch sizes. Tokens per second are left out "
            "where a comparison would mix them; tau and quality are not concerned."
        )
    for name in ("commit", "torch", "transformers"):
        if len({row.provenance.get(name) for row in rows}) > 1:
            lines.append(f"Rows were made with more than one {name}.")
    limited = [p for p in panels if p.lossless and p.lossless.values["limit_rate"].value > MANY_AT_LIMIT]
    if limited:
        lines.append(
            f"More than {MANY_AT_LIMIT:.0%} of lossless's answers reach the length limit and are cut in "
            f"{titles(limited)}: scores there are of cut answers, and lengths are bounded."
        )
    chance = f"Each interval is a {how.confidence:.0%} one by itself; among {len(rules)} rules some miss."
    return [*lines, *ALWAYS, chance]


def titles(panels: Sequence[Panel]) -> str:
    return "; ".join(dict.fromkeys(panel.task.title for panel in panels))
