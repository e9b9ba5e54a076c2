"""The frontier of quality against speed: which points nothing dominates, and which is fastest at which loss.

Quality is one measure, held against lossless; its loss is 0 or less where nothing was lost. Speed is tokens
per second or tau, as a ratio to lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_fsd.core.checks import require_choice
from eagle_fsd.evaluation.analysis.bootstrap import Estimate
from eagle_fsd.evaluation.analysis.points import MEASURES, SCORE, Panel, Point

LOSSES = (0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True)
class Quality:
    """A measure as quality, by the word for it on the command line and in file names.

    relative: the loss is a share of lossless's value. is_distance: it is a distance from the target's
    distribution, of which lossless has none, and more of it is worse.
    """

    name: str
    measure: str
    title: str
    relative: bool = False
    is_distance: bool = False

    def amount(self, level: float) -> str:
        """Say a level of loss in words."""
        if self.is_distance:
            return f"{level:g} {self.title}"
        return f"{100 * level:g} % of log p lost" if self.relative else f"{level:g} of {self.title} lost"

    def loss(self, point: Point) -> Estimate | None:
        """Return what the point loses against lossless; nothing for lossless itself."""
        if point.is_lossless:
            return Estimate(0.0, 0.0, 0.0, point.samples)
        change = point.changes.get(self.measure)
        if change is None:
            return None
        if not self.relative:
            return change.difference.scaled(1 if self.is_distance else -1)
        # Of a negative measure, log p, more of lossless's is worse.
        return None if change.ratio is None else change.ratio.scaled(1, shift=-1.0)


QUALITIES = {
    "log_p": Quality("log_p", "log_p", "log p per token", relative=True),
    "law_tv": Quality("law_tv", "law_tv", "TV per token", is_distance=True),
    "law_kl": Quality("law_kl", "law_kl", "KL per token", is_distance=True),
}


def quality_named(name: str, panels: Sequence[Panel]) -> Quality:
    """Return the quality of this name, of QUALITIES or a task's score. Raises ValueError for another one."""
    if name in QUALITIES:
        return QUALITIES[name]
    scores = dict.fromkeys(score for panel in panels for score in panel.scores)
    require_choice("quality", name, (*QUALITIES, *scores))
    return Quality(name, SCORE + name, name)


def speedup(point: Point, speed: str) -> Estimate | None:
    """Return the point's tokens per second, or tau, as a ratio to lossless's; 1 for lossless itself."""
    if point.is_lossless:
        return Estimate(1.0, 1.0, 1.0, 0) if speed in point.values else None
    change = point.changes.get(speed)
    return change.ratio if change else None


Placed = tuple[Point, Estimate, Estimate]  # a point, its speed and its loss


def placed(points: Sequence[Point], quality: Quality, speed: str) -> list[Placed]:
    """Return the points whose speed and loss are known, with these."""
    found = [(point, speedup(point, speed), quality.loss(point)) for point in points]
    return [(point, fast, loss) for point, fast, loss in found if fast and loss]


def undominated(points: Sequence[Point], quality: Quality, speed: str) -> list[Point]:
    """Return the points that no other equals in speed and quality and beats in one, slowest first."""
    places = [(fast.value, loss.value, point) for point, fast, loss in placed(points, quality, speed)]
    places.sort(key=lambda place: place[:2])
    return [
        point
        for fast, loss, point in places
        if not any(f >= fast and lost <= loss and (f > fast or lost < loss) for f, lost, _ in places)
    ]


def winners(points: Sequence[Point], quality: Quality, speed: str) -> list[Point]:
    """Return the fastest point, or lossless, for every level of LOSSES; none where nothing is compared."""
    known = placed(points, quality, speed)
    if {point.is_lossless for point, *_ in known} != {True, False}:
        return []
    within = ([one for one in known if one[2].value <= level] for level in LOSSES)
    return [max(some, key=lambda one: one[1].value)[0] for some in within]


def speed_title(speed: str) -> str:
    """Return what a table or an axis calls the ratio to lossless."""
    return f"{MEASURES[speed].title} / lossless"
