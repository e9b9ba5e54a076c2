"""The calibrations that are published with a head: its own among those beside it, without what is private."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch

from eagle_fsd.acceptance.calibration import FILE, Calibration, read_calibrations
from eagle_fsd.drafting.eagle3.config import Reading, layer_fields, possible_readings
from eagle_fsd.drafting.eagle_drafter import head_identity
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import COPIES, merged_identity
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.files.fingerprints import digest_json, digest_weights
from eagle_fsd.files.provenance import public_command
from eagle_fsd.hub.eagle3_checkpoint import is_eagle3, read_eagle3_head
from eagle_fsd.hub.head_checkpoint import find_head_file, read_config, read_head

logger = logging.getLogger(__name__)

MOST_LAYERS = 256  # of a target
DEVICES = {"cpu": "CPU", "cuda": "GPU"}


@dataclass(frozen=True)
class OwnCalibration:
    """A calibration of the head that it is published with. lookup: whether that drafted beside lookup."""

    calibration: Calibration
    lookup: bool

    @property
    def command(self) -> str:
        """The command that made it, without what is private; empty if nobody noted it."""
        made = self.calibration.made.get("command")
        return public_command(made) if isinstance(made, str) else ""

    def published(self, base_model: str) -> Calibration:
        """Return what others may see of it: with the target's Hub id as its name, and no private command."""
        made = dict(self.calibration.made) | ({"command": self.command} if self.command else {})
        models = self.calibration.models
        target = {**models["target"], "name": base_model}
        return replace(self.calibration, models={**models, "target": target}, made=made)

    def smallest_budget(self) -> float:
        """Return the smallest budget that something is inside of, in hundredths."""
        return math.ceil(100 * min(one.bound for one in self.calibration.thresholds)) / 100

    def row(self) -> list[str]:
        """Return its row of the card's table."""
        one = self.calibration
        sampling = one.sampling
        shown = f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}"
        drafts = "head, --lookup" if self.lookup else "head"
        return [drafts, DEVICES[one.device], shown, str(one.tree), f"{self.smallest_budget():g}"]

    def flags(self) -> str:
        """Return flags of `generate` that ask for it."""
        sampling = self.calibration.sampling
        flags = f"--quality-budget {self.smallest_budget():g} --temperature {sampling.temperature:g}"
        if not sampling.greedy:
            flags += f" --top-k {sampling.top_k} --top-p {sampling.top_p:g}"
        return flags + (f" --min-p {sampling.min_p:g}" if sampling.min_p else "") + " --lookup" * self.lookup


def read_own(head: Path) -> list[OwnCalibration]:
    """Return the calibrations beside a head that are of it; none if there is no file.

    Those of other heads, which were in the folder before, are left out. Raises ValueError if the file is
    broken, or has none of this head.
    """
    path = head / FILE
    if not path.is_file():
        return []
    alone, beside = draft_identities(head)
    known = read_calibrations(path)
    drafted = ((one, one.models.get("head")) for one in known if one.thresholds)
    found = [OwnCalibration(one, by in beside) for one, by in drafted if by in alone or by in beside]
    if not found:
        raise ValueError(
            f"{path} has no calibration of the head beside it: what is published must be of one head; "
            "calibrate this one with eval/calibrate.py --install, or remove the file"
        )
    if len(found) < len(known):
        logger.warning("%s: %d calibrations of other heads are left out", path, len(known) - len(found))
    return found


def draft_identities(head: Path) -> tuple[set[str], set[str]]:
    """Return by what a head is known in calibrations, for every way to draft with it: alone, with lookup."""
    file, name, data = find_head_file(head, str(head)), str(head), read_config(head, "draft head")
    layer = layer_fields(data)
    width, vocab_size = layer.get("hidden_size", 0), layer.get("vocab_size", 0)
    if is_eagle3(file, name):
        alone = eagle3_identities(file, name, data.get("target_hidden_size") or width, vocab_size)
    else:
        loaded = read_head(file, name, width, vocab_size)
        alone = {head_identity(loaded, own) for own in (0, loaded.config.draft_text_tokens or 0)}
        alone.add(head_identity(loaded.restrict(None), 0))  # as --full-vocabulary drafts
    lookup = LookupSpec(vocab_size, torch.device("cpu"), sources=COPIES)
    return alone, {merged_identity(one, lookup) for one in alone}


def eagle3_identities(file: Path, name: str, width: int, vocab_size: int) -> set[str]:
    """Return the identities of an EAGLE-3 head in all its readings, for any number of the target's layers."""
    data = read_config(file.parent, "draft head")
    head = read_eagle3_head(file, name, width, vocab_size, MOST_LAYERS)
    weights = digest_weights([*head.parameters(), *head.buffers()])
    readings: set[Reading] = set()
    for layers, normed in product(range(1, MOST_LAYERS + 1), (False, True)):
        with contextlib.suppress(ValueError):  # of a target with fewer layers than taps
            readings.update(possible_readings(data, head.config.fc_inputs, width, layers, None, normed))
    configs = (replace(head.config, taps=one.taps, norm_output=one.norm_output) for one in readings)
    return {digest_json(weights, asdict(config)) for config in configs}


def described(calibrations: Sequence[OwnCalibration], command: str) -> str:
    """Write the section of a card on quality budgets. command: of `generate`, with this head."""
    titles = ("drafts", "device", "sampling", "tree", "smallest budget")
    table = markdown_table(titles, [one.row() for one in calibrations])
    commands = "\n".join(dict.fromkeys(one.command for one in calibrations if one.command))
    return (
        f"`{FILE}` says which rule is fastest where a share of the tokens may differ from the target's, the "
        f"quality budget:\n\n```bash\n{command} {calibrations[0].flags()} "
        f'"Tell me a story."\n```\n\n{table}\n\nIt was made with:\n\n```bash\n{commands}\n```'
    )
