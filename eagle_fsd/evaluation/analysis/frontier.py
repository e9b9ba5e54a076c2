"""The frontier of quality against speed: which points nothing dominates, and which family wins at which loss.

Quality is one measure, held against lossless; its loss is 0 or less where nothing was lost. Speed is tokens
per second or tau, as a ratio to lossless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_fsd.core.checks import require_choice
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Estimate
from eagle_fsd.evaluation.analysis.measures import MEASURES, SCORE, compared, paired
from eagle_fsd.evaluation.analysis.points import Panel, Point

LOSSES = (0.005, 0.01, 0.02, 0.05)
EXACT = Estimate(1.0, 1.0, 1.0, 0)  # lossless beside itself


@dataclass(frozen=True)
class Quality:
    """A measure as quality.

    sign: of what is lost, 1 where more is worse. relative: the loss is a share of lossless's value.
    """

    measure: str
    title: str
    sign: int
    relative: bool = False

    @property
    def name(self) -> str:
        """The word for it on the command line and in file names."""
        return self.measure.removeprefix(SCORE)

    @property
    def is_distance(self) -> bool:
        """Whether it is a distance from the target's distribution, of which lossless has none."""
        return self.measure in ("law_tv", "law_kl")

    def loss(self, point: Point) -> Estimate | None:
        """Return what the point loses against lossless; nothing for lossless itself."""
        if point.is_lossless:
            return Estimate(0.0, 0.0, 0.0, point.samples)
        change = point.changes.get(self.measure)
        if change is None:
            return None
        if not self.relative:
            return change.difference.scaled(self.sign)
        # Of a negative measure, log p, more of lossless's is worse.
        return None if change.ratio is None else change.ratio.scaled(1, shift=-1.0)


QUALITIES = {
    "log_p": Quality("log_p", "log p per token", -1, relative=True),
    "law_tv": Quality("law_tv", "TV per token", 1),
    "law_kl": Quality("law_kl", "KL per token", 1),
}


def quality_named(name: str, panels: Sequence[Panel]) -> Quality:
    """Return the quality of a name of QUALITIES, or of a score that some task has.

    Raises ValueError for another name.
    """
    if name in QUALITIES:
        return QUALITIES[name]
    scores = dict.fromkeys(score for panel in panels for score in panel.scores)
    require_choice("quality", name, (*QUALITIES, *scores))
    return Quality(SCORE + name, name, -1)


def speedup(point: Point, speed: str) -> Estimate | None:
    """Return the point's tokens per second, or tau, as a ratio to lossless's; 1 for lossless itself."""
    if point.is_lossless:
        return EXACT if speed in point.values else None
    change = point.changes.get(speed)
    return change.ratio if change else None


def undominated(points: Sequence[Point], quality: Quality, speed: str) -> list[Point]:
    """Return the points that no other equals in speed and quality and beats in one, slowest first.

    Points whose loss or speed is not known are left out.
    """
    places = []
    for point in points:
        loss, fast = quality.loss(point), speedup(point, speed)
        if loss is not None and fast is not None:
            places.append((fast.value, loss.value, point))
    kept = []
    for fast, loss, point in places:
        beaten = any(f >= fast and lost <= loss and (f > fast or lost < loss) for f, lost, _ in places)
        if not beaten:
            kept.append((fast, loss, point))
    return [point for _, _, point in sorted(kept, key=lambda place: place[:2])]


@dataclass(frozen=True)
class Winner:
    """The fastest point that loses at most `level`, and the fastest one of any other family.

    assured: whether the whole interval of the loss had to stay within the level, or its middle alone.
    ratio: how much faster the first is than the second, on the samples of both; None without a second.
    """

    level: float
    assured: bool
    point: Point
    runner_up: Point | None
    ratio: Estimate | None


def winners(
    panel: Panel, quality: Quality, speed: str, levels: Sequence[float], how: Bootstrap
) -> list[Winner]:
    """Find for every level of loss the winner, by the measured loss and by its interval's worse end.

    Lossless takes part, and wins where no rule within the level is faster. Empty where the panel has no
    lossless to compare with, or does not know the quality.
    """
    known = [one for one in panel.points if not one.is_lossless and quality.measure in one.changes]
    if panel.lossless is None or not known:
        return []
    found = []
    for level in dict.fromkeys(levels):
        for assured in (False, True):
            within = [point for point in known if stays_within(quality.loss(point), level, assured)]
            best = fastest_by_family([panel.lossless, *within], speed)
            if best:
                first, second = best[0], best[1] if len(best) > 1 else None
                ratio = speed_ratio(panel, first, second, speed, how) if second else None
                found.append(Winner(level, assured, first, second, ratio))
    return found


def stays_within(loss: Estimate | None, level: float, assured: bool) -> bool:
    """Return whether a loss is at most the level: its value, or the worse end of its interval."""
    if loss is None:
        return False
    worst = loss.high if assured else loss.value
    return worst is not None and worst <= level


def fastest_by_family(points: Sequence[Point], speed: str) -> list[Point]:
    """Return the fastest point of every family, the fastest family first."""
    best: dict[str, tuple[float, Point]] = {}
    for point in points:
        fast = speedup(point, speed)
        if fast is not None and fast.value > best.get(point.family, (-math.inf,))[0]:
            best[point.family] = (fast.value, point)
    return [point for _, point in sorted(best.values(), key=lambda place: -place[0])]


def speed_ratio(panel: Panel, first: Point, second: Point, speed: str, how: Bootstrap) -> Estimate | None:
    """Return the first's speed as a ratio of the second's, on the samples and seeds that both have."""
    change = compared({speed: panel.measure(speed)}, paired(first.rows, second.rows), how).get(speed)
    return change.ratio if change else None


def speed_title(speed: str) -> str:
    """Return what a table or an axis calls the ratio to lossless."""
    return f"{MEASURES[speed].title} / lossless"
