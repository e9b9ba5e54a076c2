"""Thresholds by quality budget: reads, checks and writes the `calibration.json` beside a draft head.

The file holds a calibration for each way to draft with the head, alone or with looked-up drafts beside it,
for each sampling that was measured, and for each kind of device, since a GPU has larger trees.

The budget bounds TV: the total variation distance between the rule's distribution of the next token and the
target's (after the user's warpers), averaged over the tokens of the text. It is the share of tokens that an
optimal coupling would have to change; 0 is lossless. A threshold is calibrated for one target, head and
sampling, and for one kind of rule: divergence, mode, child, min_gain, price and cost. It means nothing under
another kind. Under a colder sampling it moves less as a rule, so that a sampling which was not measured takes
the thresholds of the next warmer one. Greedy text does not: a token of it that changes counts whole, which
may be more than sampled text was measured to move. And it belongs to a tree. The larger a tree is, the more a
plan moves, which looks for paths that are worth it, and the less a rule without a plan does, which is asked
where no child was drawn. So a plan holds for trees up to the measured one, and a rule without from there on.
Either moves more where as many nodes leave out fewer that are unlikely, by their min_confidence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import format_value, one_line, require_choice, require_integer, require_number
from eagle_fsd.core.config import AutoThreshold, Kind, SamplingConfig, TreeConfig
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.fingerprints import differences

FILE = "calibration.json"
DEVICES = ("cpu", "cuda")
VERSION = 3  # older ones name the models by digests that only one dtype has
OPEN = "inf"
REMEDY = "calibrate it with eval/calibrate.py, or give a threshold in its place"
AGAIN = "make the file again"


class TooWarm(ValueError):
    """No calibration is as warm as the sampling that is asked for."""


@dataclass(frozen=True)
class CalibratedThreshold:
    """A threshold that was run on the calibration prompts, and what was measured.

    tv: the mean per token; bound: its upper confidence bound; tau, lossless_tau: tokens per step with the
    threshold and without, each in its own texts; tau_ratio: the first over the second, expected on the trees
    of the lossless texts, which tells settings apart that lie close together; 0 in older files.
    """

    divergence: str
    mode: str
    child: str
    threshold: float
    tv: float
    bound: float
    tau: float
    lossless_tau: float
    min_gain: float = 0.0
    price: float = 0.0
    cost: str = "tokens"
    tau_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("divergence", "mode", "child", "cost"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {format_value(getattr(self, name))}: it must be a name; {AGAIN}")
        for name in ("threshold", "tv", "bound", "tau", "lossless_tau", "min_gain", "price", "tau_ratio"):
            require_number(name, getattr(self, name), 0.0, math.inf, AGAIN)

    @property
    def kind(self) -> Kind:
        return Kind(*(getattr(self, name) for name in Kind._fields))

    def holds(self, measured: TreeConfig, tree: TreeConfig) -> bool:
        """Return whether it moves about as much with a tree as with the one that was measured, or less."""
        if self.price:
            return plan_holds(measured, tree)
        if tree.total_tokens == measured.total_tokens and tree.min_confidence < measured.min_confidence:
            return False
        more = tree.total_tokens > measured.total_tokens and tree.top_k >= measured.top_k
        return tree.holds(measured) or more

    def speed(self) -> tuple[float, float, float]:
        """Return how fast it is, as a key to sort by."""
        return self.tau_ratio, self.tau, self.threshold


@dataclass(frozen=True)
class Calibration:
    """The result of eval/calibrate.py.

    models: `models_identity` of the target and head. shared_ratio: tau of lossless texts whose draft knows
    the noise of the draws, over tau of those whose draft does not (see core/randomness/noise.py); 0: it was
    not measured. device: "cpu" or "cuda", the kind of device that its tree is for, wherever it was made.
    made: how, when and from which prompts it was made.
    """

    models: Mapping[str, Any]
    sampling: SamplingConfig
    tree: TreeConfig
    confidence: float
    prompts: int
    thresholds: Sequence[CalibratedThreshold]
    made: Mapping[str, Any] = field(default_factory=dict)
    shared_ratio: float = 0.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_choice("device", self.device, DEVICES)
        require_number("confidence", self.confidence, 0.0, 1.0, AGAIN)
        require_number("shared_ratio", self.shared_ratio, 0.0, math.inf, AGAIN)
        require_integer("prompts", self.prompts, 0, AGAIN)
        if not (isinstance(self.models, Mapping) and isinstance(self.models.get("target"), Mapping)):
            raise ValueError(
                f"models is {format_value(self.models)}: it must name a target and a head; {AGAIN}"
            )
        if not isinstance(self.made, Mapping):
            raise ValueError(f"made is {format_value(self.made)}: it must be an object; {AGAIN}")

    @property
    def weight_format(self) -> str:
        """The format of the target's weights that it was made with."""
        return str(self.made.get("weight_format", self.models["target"].get("dtype")))

    def find(self, wanted: AutoThreshold) -> CalibratedThreshold:
        """Return the fastest threshold among those whose bound is inside the budget.

        Raises ValueError if there is none.
        """
        mine = [one for one in self.thresholds if wanted.takes(one.kind)]
        if not mine:
            kinds = sorted({str(one.kind) for one in self.thresholds})
            raise ValueError(
                f"quality_budget is {wanted.quality_budget:g} for {wanted}: it was calibrated for "
                f"{'; '.join(kinds)}; ask for that, {REMEDY}"
            )
        inside = [one for one in mine if one.bound <= wanted.quality_budget]
        if not inside:
            least = min(one.bound for one in mine)
            raise ValueError(
                f"quality_budget is {wanted.quality_budget:g}: the smallest bound that {wanted} was "
                f"calibrated to is {least:.3g}; raise the budget, or calibrate for this one with "
                "eval/calibrate.py"
            )
        return max(inside, key=CalibratedThreshold.speed)

    def fitting(self, wanted: AutoThreshold | None, tree: TreeConfig | None) -> list[CalibratedThreshold]:
        """Return the thresholds of the kinds wanted that hold for a tree. None: of any kind, for mine."""
        kinds = [one for one in self.thresholds if wanted is None or wanted.takes(one.kind)]
        return [one for one in kinds if tree is None or one.holds(self.tree, tree)]

    def for_tree(self, wanted: AutoThreshold, tree: TreeConfig | None) -> Calibration:
        """Return it with the thresholds that hold for a tree alone, or whole if none does."""
        return replace(self, thresholds=self.fitting(wanted, tree) or self.thresholds)

    def lossless_is_fastest(self, wanted: AutoThreshold, sampling: SamplingConfig) -> bool:
        """Return whether lossless text is faster than the best rule inside the budget.

        A rule that is asked for by its mode, price or cost competes with nothing, and how fast lossless text
        is was measured at one sampling alone.
        """
        mine = [one for one in self.thresholds if wanted.takes(one.kind)]
        if not (mine and wanted.free and sampling.warm and sampling == self.sampling):
            return False
        inside = (one.tau_ratio for one in mine if one.bound <= wanted.quality_budget)
        return self.shared_ratio > max(inside, default=0.0)

    def is_for(self, models: Mapping[str, Any]) -> bool:
        """Return whether it was made with this target and this way to draft, in float32 or bfloat16."""
        return weights_alone(self.models) == weights_alone(models)


def plan_holds(measured: TreeConfig, tree: TreeConfig) -> bool:
    """Return whether a plan moves about as much with a tree as with the one that was measured, or less."""
    return measured.holds(tree) and tree.min_confidence >= measured.min_confidence


def find_calibration(
    calibrations: Sequence[Calibration],
    models: Mapping[str, Any],
    sampling: SamplingConfig,
    device: str,
    wanted: AutoThreshold | None = None,
    tree: TreeConfig | None = None,
) -> Calibration:
    """Return the calibration of these models with this sampling, or with the next warmer one.

    device: one of DEVICES. A calibration for this kind comes before one for the other, unless only the other
    has rules of the kind that is wanted. Greedy text has only its own. tree: of the text, whatever the
    device: of the calibrations that have a rule for it inside the budget, the one with the nearest tree is
    taken. None: the text takes the calibration's. Raises TooWarm if there is none so warm, and ValueError if
    there is none of these models at all, or none of greedy text.
    """

    def order(one: Calibration) -> tuple[float, ...]:
        fitting = one.fitting(wanted, tree)
        its = one.sampling
        warmth = its != sampling, its.temperature, its.top_p, its.top_k or math.inf, -its.min_p
        if tree is None:
            return *warmth, not fitting, one.device != device
        # How fast rules are was measured on trees of their own, so that of two trees the nearer one is taken.
        budget = math.inf if wanted is None else wanted.quality_budget
        inside = [each for each in fitting if each.bound <= budget]
        plans = any(each.price for each in inside)
        near = one.tree != tree, not plans, abs(one.tree.total_tokens - tree.total_tokens)
        return not inside, not fitting, *warmth, *near, one.device != device

    mine = [one for one in calibrations if one.is_for(models)]
    if not mine:
        found = [differences(weights_alone(one.models), weights_alone(models)) for one in calibrations]
        nearest = min(found, key=len, default="it is empty")
        if models["target"].get("dtype") == "float16":
            nearest += "; float16 rounds weights in another way, so load them in float32 or bfloat16"
        raise ValueError(
            f"quality_budget: {FILE} was made for another target or head ({one_line(nearest, 300)}); {REMEDY}"
        )
    warmer = [one for one in mine if one.sampling.keeps_all_of(sampling)]
    if not warmer:
        known = ", ".join(format_sampling(one.sampling) for one in mine)
        if sampling.greedy:
            raise ValueError(
                f"quality_budget: it was calibrated at {known}, and not for greedy text, where it may "
                f"move more; sample as it was calibrated, {REMEDY}"
            )
        raise TooWarm(
            f"quality_budget: it was calibrated at {known}, none of which is as warm as "
            f"{format_sampling(sampling)}; sample as it was calibrated, {REMEDY}"
        )
    return min(warmer, key=order)


def device_kind(device: str) -> str:
    """Return which of DEVICES a type of device, such as "cuda" or "mps", counts as."""
    return "cpu" if device == "cpu" else "cuda"


def with_calibration(calibrations: Sequence[Calibration], new: Calibration) -> list[Calibration]:
    """Return the calibrations with a new one, in the place of that of its models, sampling and device."""
    setting = (new.sampling, new.device)
    others = [
        one for one in calibrations if not (one.is_for(new.models) and (one.sampling, one.device) == setting)
    ]
    return [*others, new]


def write_calibrations(path: Path, calibrations: Sequence[Calibration]) -> None:
    """Write calibrations to a JSON file, atomically."""
    data: dict[str, Any] = {"version": VERSION, "calibrations": [asdict(one) for one in calibrations]}
    for one in (one for each in data["calibrations"] for one in each["thresholds"]):
        if one["threshold"] == math.inf:  # of a plan, whose price is the dial; JSON has no such number
            one["threshold"] = OPEN
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def read_calibrations(path: Path) -> list[Calibration]:
    """Read a file of `write_calibrations`. Raises ValueError if it is missing, broken or another version."""
    if not path.is_file():
        raise ValueError(f"quality_budget: there is no {FILE} beside the head ({path.parent}); {REMEDY}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("version")
        if version != VERSION:
            raise ValueError(f"its version is {format_value(version)}: it must be {VERSION}")
        return [read_one(one) for one in data["calibrations"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: is not a calibration ({one_line(error, 200)}); delete it, then {REMEDY}"
        ) from error


def read_one(data: dict[str, Any]) -> Calibration:
    """Return the calibration that a part of a file holds."""
    given = [dict(one) for one in data["thresholds"]]
    for one in given:
        one["threshold"] = math.inf if one["threshold"] == OPEN else one["threshold"]
    thresholds = tuple(CalibratedThreshold(**one) for one in given)
    sampling, tree = SamplingConfig(**data["sampling"]), TreeConfig(**data["tree"])
    return Calibration(**{**data, "sampling": sampling, "tree": tree, "thresholds": thresholds})


def weights_alone(models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of an identity, which are the same under another name, in float32 and bfloat16."""
    return {"target": {"weights": models["target"].get("weights")}, "head": models.get("head")}


def format_sampling(sampling: SamplingConfig) -> str:
    """Return a sampling as SamplingConfig.parse reads it: temperature/top_k/top_p, and /min_p if it is on."""
    sizes = [sampling.temperature, sampling.top_k, sampling.top_p]
    if sampling.min_p:
        sizes.append(sampling.min_p)
    return "/".join(str(size).removesuffix(".0") for size in sizes)
