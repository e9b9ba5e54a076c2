"""A tree's size measured once and remembered, for one target and head on one machine.

What was chosen lies in a file of the user's cache (EAGLE_FSD_CACHE, else XDG's), under a key of all that it
depends on; a file that cannot be read or written costs the measurement, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from eagle_fsd import __version__
from eagle_fsd.acceptance import AcceptanceRule, Lossless
from eagle_fsd.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.files import write_atomically
from eagle_fsd.head import DraftHead
from eagle_fsd.identity import models_identity
from eagle_fsd.measuring import BEAMS, WIDE, WIDTHS, MakeDrafter, bucket, measure_costs, observe
from eagle_fsd.packing import libraries_of
from eagle_fsd.provenance import processor
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import Choice, Observation, choose

logger = logging.getLogger(__name__)

FILE = "trees.json"
NARROW = 4  # beams up to here a relaxed rule is watched with one by one


class TreeChooser:
    """Chooses for one target and head. make_drafter: of a batch size and a capacity."""

    def __init__(
        self, target: TargetModel, head: DraftHead, make_drafter: MakeDrafter, drafted: int, name: str
    ) -> None:
        self.target, self.make_drafter, self.drafted = target, make_drafter, drafted
        device = target.device
        cpu = device.type == "cpu"
        self.asks = cpu  # elsewhere the host would have to wait for the device; see graphs.may_ask
        name_of = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
        self.made_by = {
            "version": __version__,
            "torch": torch.__version__,
            **models_identity(name, target.model, head),
            "layers": sorted({type(layer).__name__ for layer in target.model.modules()}),  # quantised, say
            "packed": libraries_of(target.model),
            "attention": target.config._attn_implementation,
            "device": [device.type, name_of, platform.node()],
            "placed": str(getattr(target.model, "hf_device_map", None)),
            "threads": torch.get_num_threads() if cpu else None,
        }
        self.observed: dict[object, list[Observation]] = {}
        self.chosen: dict[str, Choice] = {}  # by key, so that the file is read once for each

    def __call__(
        self,
        wanted: AutoTree,
        prompts: Callable[[], Sequence[Sequence[int]]],
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        batch: int,
        context: int,
    ) -> Choice:
        """The best tree for texts of about `context` tokens, `batch` at a time.

        prompts: the texts (token ids) that the head is watched on, asked for where nothing is remembered.
        """
        if wanted.depth is not None and wanted.depth >= max(WIDTHS):
            raise ValueError(
                f"depth is {wanted.depth}: a measured tree has at most {max(WIDTHS)} nodes, the root among "
                "them; lower depth, or give total_tokens"
            )
        batch, context = 2 ** (batch - 1).bit_length(), bucket(context)
        setting = [repr(wanted), repr(rule), repr(sampling), batch, context]
        key = hashlib.sha256(json.dumps([self.made_by, setting], sort_keys=True).encode()).hexdigest()[:24]
        if key not in self.chosen:
            self.chosen[key] = read_choices().get(key) or self.new(
                key, wanted, prompts, rule, sampling, batch, context
            )
        return self.chosen[key]

    def new(
        self,
        key: str,
        wanted: AutoTree,
        prompts: Callable[[], Sequence[Sequence[int]]],
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        batch: int,
        context: int,
    ) -> Choice:
        """A choice that nothing remembers: measured and, where that can be, remembered."""
        if not (texts := prompts()):
            raise ValueError("prompts are empty: a tree is chosen on texts; give some, as token ids")
        logger.warning("measuring this target, head and machine once, to choose the draft tree's size ...")
        try:
            choice = self.measured(wanted, texts, rule, sampling, batch, context)
        except torch.OutOfMemoryError:
            logger.warning("out of memory while measuring: taking tree %s", TreeConfig())
            return Choice(TreeConfig(), math.nan, math.nan, math.nan)
        if " at 0x" not in repr(rule):  # an address, which tells no rule from another
            remember(key, choice)
        return choice

    def measured(
        self,
        wanted: AutoTree,
        texts: Sequence[Sequence[int]],
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        batch: int,
        context: int,
    ) -> Choice:
        """The choice by measurements made now."""
        beams = [beam for beam in BEAMS if beam <= self.drafted] if wanted.top_k is None else [wanted.top_k]
        costs = measure_costs(self.target, self.make_drafter, beams, batch, context, rule, sampling)
        nodes, depth, widest = WIDE
        observed = {}
        for beam in beams:
            if isinstance(rule, Lossless) or beam > NARROW:
                wide = TreeConfig.within(nodes, depth, min(widest, self.drafted))
            else:
                wide = TreeConfig.within(nodes // 2, depth, beam)
            about = (repr(rule), sampling, wide)
            if about not in self.observed:
                self.observed[about] = observe(self.target, self.make_drafter, texts, rule, sampling, wide)
            observed[beam] = self.observed[about]
        return choose(costs, observed, wanted, batch, self.asks)


def cache_file() -> Path:
    """Where choices are remembered."""
    root = os.environ.get("EAGLE_FSD_CACHE")
    if root:
        return Path(root) / FILE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd" / FILE


def read_choices() -> dict[str, Choice]:
    """All that is remembered; nothing where the file is absent or damaged."""
    try:
        records = json.loads(cache_file().read_text(encoding="utf-8"))
        return {key: Choice(**{**one, "tree": TreeConfig(**one["tree"])}) for key, one in records.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        logger.info("%s is not read: %s", FILE, error)
        return {}


def remember(key: str, choice: Choice) -> None:
    """Add a choice to the file; a reader sees the old file or the new one."""
    try:
        file = cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        records = {old: asdict(one) for old, one in read_choices().items()} | {key: asdict(choice)}
        write_atomically(file, json.dumps(records, indent=1) + "\n")
    except (OSError, RuntimeError, TypeError) as error:
        logger.info("the tree is not remembered: %s", error)
