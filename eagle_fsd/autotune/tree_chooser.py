"""Choose a tree's size from measurements that are made once and remembered on disk.

Three things are measured separately, since each depends on less than the choice does:

- The time of a step's forwards, by width and depth. It depends on the machine, the models, the batch size
  and the context, and neither on the rule nor on the sampling.
- The overhead of a step: the time of accept and keep. It depends on the kind of rule and on which warpers
  are on (greedy, sampled, with top-k, with top-p), and not on their values.
- The tokens that the head gets accepted. They are observed on a few texts, on any machine, for each kind of
  rule: once greedy and once sampled, at the first temperature, top-k and top-p asked for. A rule's numbers,
  such as a threshold, are rounded to powers of two, as batch sizes and contexts are: observations at 0.3
  serve 0.31 too.

The choice follows from the three by arithmetic. Times taken on a busy machine are used by this process but
not remembered. Where nobody should wait for measurements, `remembered` does without.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.autotune.on_disk import (
    choice_from_json,
    forwards_from_json,
    forwards_to_json,
    observations_from_json,
    observations_to_json,
    overhead_from_json,
    overhead_to_json,
)
from eagle_fsd.autotune.step_costs import (
    BEAMS,
    WIDE,
    disturbance,
    measure_forwards,
    measure_overhead,
    observe,
    round_context,
)
from eagle_fsd.autotune.tree_search import Choice, Forwards, Observation, StepOverhead, choose, usual_tree
from eagle_fsd.core.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.core.devices import ran_out_of_memory
from eagle_fsd.decoding.request import Terms
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.files.fingerprints import models_identity
from eagle_fsd.files.provenance import cores, processor
from eagle_fsd.files.records import recall, record_key, remember
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.packed_linear import backend_names
from eagle_fsd.runtime.timing import BUSY
from eagle_fsd.target.model import TargetModel
from eagle_fsd.version import __version__

logger = logging.getLogger(__name__)

NARROW = 4  # a relaxed rule is observed separately with each beam up to this width
METHOD = 9  # raise it when forwards are measured, or trees chosen, in another way: older values are dropped

Measured = TypeVar("Measured")


class NotMeasured(Exception):
    """A choice needs a measurement, and none may be made now."""


class PutOff(Exception):
    """A measurement is to be made another time: other work slows it down, or somebody waits for an answer."""


def runtime_parts(target: TargetModel) -> list[object]:
    """Return what a target's times depend on, of the runtime that computes it."""
    if target.graphs is None:
        return []
    runtime = target.graphs.runtime
    return [runtime.name, library.version(), target.graphs.cache.__name__, runtime.operators]


class TreeChooser:
    """Chooses trees for one target and drafter. name: what the target was loaded from."""

    def __init__(self, target: TargetModel, drafting: DrafterSpec, name: str) -> None:
        self.target, self.drafting = target, drafting
        device = target.device
        cpu = device.type == "cpu"
        # The host reads nothing where it would have to wait for the device; see host_can_read.
        self.reading = {"host_reads": cpu, "whole_trees": target.stepper.records}
        identity = models_identity(target.identity(name), drafting)
        del identity["target"]["name"]  # the same weights may have been loaded from elsewhere
        self.models = [__version__, identity]
        name_of = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
        self.machine = {
            "torch": torch.__version__,
            "layers": target.layer_classes,  # quantised, say
            "packed": backend_names(target.held),
            "runtime": [target.weight_format, *runtime_parts(target)],
            "attention": target.config._attn_implementation,
            "device": [device.type, name_of, cores()],
            "placed": str(getattr(target.held, "hf_device_map", None)),
            "threads": torch.get_num_threads() if cpu else None,
        }
        if target.ranks.several:
            self.machine["ranks"] = target.ranks.size
        self.known: dict[str, Any] = {}  # by key: all that this process has measured, read or chosen
        self.announced = self.told_busy = False
        self.may_measure = True
        self.goes_on: Callable[[], bool] | None = None  # what ends a measurement that nobody waits for
        self.may_remember = True  # whether choices may be: all measurements so far were reliable

    def __call__(
        self,
        wanted: AutoTree,
        prompts: Callable[[], Sequence[Sequence[int]]],
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        batch: int,
        context: int,
    ) -> Choice:
        """Choose the best tree for texts of about `context` tokens, `batch` at a time.

        prompts: returns the texts (token ids) to observe the head on; called only if nothing is remembered.
        """
        batch, context = 2 ** (batch - 1).bit_length(), round_context(context)
        widest, device = self.drafting.tokens, self.target.device.type
        beams = [beam for beam in BEAMS if beam <= widest] if wanted.top_k is None else [wanted.top_k]

        def choose_now() -> tuple[Choice, bool]:
            try:
                observed = {beam: self.observations(prompts, rule, sampling, beam) for beam in beams}
                forwards = self.forwards(beams, batch, context)
                costs = forwards.with_overhead(self.overhead(max(beams), batch, rule, sampling))
                choice = choose(costs, observed, wanted, batch, **self.reading)
            except (MemoryError, RuntimeError) as error:
                if not ran_out_of_memory(error):
                    raise
                # Texts that did not wait go on with the tree that they have.
                tree = TreeConfig() if self.goes_on is None else usual_tree(wanted, device, widest)
                logger.warning("out of memory while measuring: taking tree %s", tree)
                return Choice(tree, math.nan, math.nan, math.nan), False
            return choice, self.may_remember

        setting = (repr(wanted), observation_kind(rule), warpers(rule, sampling), batch, context)
        key = record_key(f"choice {METHOD}", self.models, self.machine, *setting)
        return self.recall_or_measure(key, choose_now, dataclasses.asdict, choice_from_json)

    def remembered(self, *asked: Any) -> Choice | None:
        """Return the choice for what a call is asked if nothing has to be measured for it, else None."""
        self.may_measure = False
        try:
            return self(*asked)
        except NotMeasured:
            return None
        finally:
            self.may_measure = True

    def if_quiet(self, *asked: Any, goes_on: Callable[[], bool], more: str) -> Choice | None:
        """Return the choice for what a call is asked; None as soon as other work slows measurements down.

        So it is once goes_on() is false. What was measured by then serves the next try. more: of the line
        that says why nothing happens.
        """
        self.goes_on = goes_on
        try:
            if self.slowed_down(disturbance(self.target, self.check)):
                return None
            self.announce(more)
            return self(*asked)
        except PutOff:
            return None
        finally:
            self.goes_on = None

    def observations(
        self,
        prompts: Callable[[], Sequence[Sequence[int]]],
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        beam: int,
    ) -> list[Observation]:
        """Return the steps of the observed texts with a tree that is wide enough for this beam."""
        nodes, depth, widest = WIDE
        if isinstance(rule, Lossless) or beam > NARROW:
            wide = TreeConfig.within(nodes, depth, min(widest, self.drafting.tokens))
        else:
            wide = TreeConfig.within(nodes // 2, depth, beam)

        def measure() -> tuple[list[Observation], bool]:
            if not (texts := prompts()):
                raise ValueError("prompts are empty: a tree is chosen on texts; give some, as token ids")
            self.announce()
            steps = observe(self.target, self.drafting, texts, rule, sampling, wide, self.check)
            return steps, has_stable_repr(rule)

        key = record_key(
            "observations",
            self.models,
            self.target.weight_format,
            observation_kind(rule),
            (sampling.greedy, Terms((), rule, sampling).shares_noise),
            str(wide),
        )
        return self.recall_or_measure(key, measure, observations_to_json, observations_from_json)

    def forwards(self, beams: Sequence[int], batch: int, context: int) -> Forwards:
        """Return the time of the forwards on this machine."""

        def measure() -> tuple[Forwards, bool]:
            self.announce()
            found, spread = measure_forwards(self.target, self.drafting, beams, batch, context, self.check)
            return found, self.is_idle(spread)

        key = record_key(f"forwards {METHOD}", self.models, self.machine, list(beams), batch, context)
        return self.recall_or_measure(key, measure, forwards_to_json, forwards_from_json)

    def overhead(self, beam: int, batch: int, rule: AcceptanceRule, sampling: SamplingConfig) -> StepOverhead:
        """Return the time of accept and keep on this machine."""

        def measure() -> tuple[StepOverhead, bool]:
            self.announce()
            found, spread = measure_overhead(
                self.target, self.drafting, beam, batch, rule, sampling, self.check
            )
            return found, self.is_idle(spread) and has_stable_repr(rule)

        setting = (min(8, beam), batch, overhead_kind(rule), warpers(rule, sampling))
        key = record_key("overhead", self.models, self.machine, *setting)
        return self.recall_or_measure(key, measure, overhead_to_json, overhead_from_json)

    def announce(self, more: str = "") -> None:
        """Log once in a process why nothing happens for a while. Raises NotMeasured if nothing may happen."""
        if not self.may_measure:
            raise NotMeasured
        if not self.announced:
            logger.warning(
                "measuring this target, head and machine once, to choose the draft tree's size: a minute or "
                "two; a size of your own does without (--total-tokens 8)%s ...",
                more,
            )
            self.announced = True

    def slowed_down(self, spread: float) -> bool:
        """Say whether other work slowed timings down by more than is usual. Rank 0 answers for all."""
        return self.target.ranks.lead(spread > BUSY)

    def check(self, spread: float) -> None:
        """Raise PutOff if nobody waits for a measurement, and it is slowed down or is not to go on."""
        if self.goes_on is not None and (self.slowed_down(spread) or not self.goes_on()):
            raise PutOff

    def is_idle(self, spread: float) -> bool:
        """Say whether the machine had no other work while it timed repeats that disagree by `spread`."""
        self.check(spread)
        if spread > BUSY and not self.told_busy:  # one choice takes several measurements
            self.told_busy = True
            logger.warning(
                "the machine is busy (other work slows timings down by about %.0f %%): this choice is not "
                "remembered, and the next start measures again",
                100 * spread,
            )
        return spread <= BUSY

    def recall_or_measure(
        self,
        key: str,
        measure: Callable[[], tuple[Measured, bool]],
        pack: Callable[[Measured], Any],
        unpack: Callable[[Any], Measured],
    ) -> Measured:
        """Return a value that this process knows or the file holds, else measure it.

        measure: returns the value and whether it is reliable, and so worth remembering in the file.
        """
        if key not in self.known:
            ranks = self.target.ranks
            found = ranks.lead(recall(key, unpack) if ranks.leads else None)
            if found is None:
                found, reliable = measure()
                if reliable and ranks.leads:
                    remember(key, pack(found))
                elif not reliable:
                    self.may_remember = False
            self.known[key] = found
        return self.known[key]


# --- what a measurement depends on ---


def observation_kind(rule: AcceptanceRule) -> str:
    """Return the key of a rule's observations: the rule with its numbers rounded down to powers of two."""

    def power(value: float) -> float:
        return 2.0 ** math.floor(math.log2(value)) if 0 < value < math.inf else value

    return format_rule(rule, power)


def overhead_kind(rule: AcceptanceRule) -> str:
    """Return the key of a rule's overhead: the rule with each number reduced to on or off."""
    return format_rule(rule, lambda value: 0 < value < math.inf)


def format_rule(rule: AcceptanceRule, number: Callable[[float], object]) -> str:
    """Write a rule as its class and fields, each float replaced by number(float).

    A rule that is no dataclass is written as its repr.
    """
    if not dataclasses.is_dataclass(rule):
        return repr(rule)
    fields = {}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        is_float = isinstance(value, float) or (isinstance(value, int) and isinstance(field.default, float))
        fields[field.name] = number(float(value)) if is_float else value
    return f"{type(rule).__module__}.{type(rule).__qualname__} {fields}"


def has_stable_repr(rule: AcceptanceRule) -> bool:
    """Say whether the rule's repr identifies it in another process too: one with an address does not."""
    return " at 0x" not in repr(rule)


def warpers(rule: AcceptanceRule, sampling: SamplingConfig) -> list[bool]:
    """Return whether sampling is greedy, and if not, which warpers are on, and whether noise is shared."""
    if sampling.greedy:
        return [True]
    return [False, sampling.top_k > 0, sampling.top_p < 1, Terms((), rule, sampling).shares_noise]
