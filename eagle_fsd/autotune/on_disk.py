"""Measurements and choices as JSON, as the file of what was measured holds them.

Each reader raises whatever a damaged record makes it raise; see files/records.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from eagle_fsd.autotune.step_costs import WIDTHS
from eagle_fsd.autotune.tree_search import Choice, Forwards, Observation, StepOverhead
from eagle_fsd.core.config import TreeConfig


def choice_from_json(found: dict[str, Any]) -> Choice:
    return Choice(**{**found, "tree": TreeConfig(**found["tree"])})


def forwards_to_json(found: Forwards) -> dict[str, Any]:
    return {"verify": list(found.verify.items()), "draft": list(found.draft.items())}


def forwards_from_json(found: dict[str, Any]) -> Forwards:
    verify = {int(width): positive(seconds) for width, seconds in found["verify"]}
    draft = {int(beam): (positive(first), float(further)) for beam, (first, further) in found["draft"]}
    if verify.keys() != {1, *WIDTHS} or not draft:
        raise ValueError(f"widths {sorted(verify)} and beams {sorted(draft)} are not what is measured")
    return Forwards(verify, draft)


def overhead_to_json(found: StepOverhead) -> dict[str, Any]:
    return {"drafted": list(found.drafted.items()), "plain": found.plain}


def overhead_from_json(found: dict[str, Any]) -> StepOverhead:
    drafted = {int(nodes): positive(seconds) for nodes, seconds in found["drafted"]}
    if len(drafted) < 2:
        raise ValueError(f"{sorted(drafted)} are too few sizes of trees for a line")
    return StepOverhead(drafted, positive(found["plain"]))


def positive(seconds: object) -> float:
    """Return the seconds. Raises ValueError unless they are positive and finite."""
    if not isinstance(seconds, float) or not 0 < seconds < math.inf:
        raise ValueError(f"{seconds!r} are not positive, finite seconds")
    return seconds


def observations_to_json(found: Sequence[Observation]) -> list[Any]:
    """Return observations as lists, with scores rounded to six decimals: that is a tenth of the size."""
    return [[one.parents, one.depths, [round(score, 6) for score in one.scores], one.path] for one in found]


def observations_from_json(found: list[Any]) -> list[Observation]:
    seen = [Observation(*one) for one in found]
    for one in seen:
        nodes = range(len(one.parents))
        above = all(-1 <= parent < node for node, parent in enumerate(one.parents))
        inside = all(node in nodes for node in one.path)
        if not len(one.parents) == len(one.depths) == len(one.scores) > 0 or not above or not inside:
            raise ValueError("a step's tree is damaged")
    if not seen:
        raise ValueError("there are no steps")
    return seen
