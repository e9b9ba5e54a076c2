"""Find the largest threshold inside a quality budget, for each kind of rule: calibration.json.

    python eval/calibrate.py --prompts data/prompts_*.jsonl --limit 10 --output runs/calibration --install
    python -m eagle_fsd.generate --threshold auto --temperature 0.6 --top-k 50 --top-p 0.9 "Tell me a story."

The budget bounds the mean total variation between the rule's next-token distribution and the target's: the
share of tokens that would have to be other ones. Growing thresholds are run, and falling prices of plans, and
the calibration keeps the boldest of each whose upper confidence bound is inside. --install writes it beside
the head, where `--threshold auto` finds it; what is there for other samplings, for another kind of device, or
for drafting with or without --lookup, stays. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.calibration import (
    DEVICES,
    FILE,
    Calibration,
    device_kind,
    read_calibrations,
    with_calibration,
    write_calibrations,
)
from eagle_fsd.core.checks import require_integer, require_number
from eagle_fsd.core.config import CHILDREN, COSTS, HYBRID, MODES, SWAP, Kind, SamplingConfig, TreeConfig
from eagle_fsd.evaluation.cli import check_sizes, load_engine, parsed, parser_of, say
from eagle_fsd.evaluation.measure import threshold_search as search
from eagle_fsd.evaluation.measure.sweep import Cell, Questions
from eagle_fsd.evaluation.rows import sole_writer
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.places import require_folder
from eagle_fsd.files.provenance import provenance


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(max_new_tokens=128)
    add = parser.add_argument
    budgets = [0.01, 0.02, 0.05]
    add("--quality-budget", nargs="+", type=float, default=budgets, metavar="B", help="default: %(default)s")
    add("--confidence", type=float, default=0.95, help="one-sided, of every bound; default: %(default)s")
    add("--divergence", nargs="+", default=["js", "reverse_kl"], metavar="D", help="default: %(default)s")
    modes = "default: hybrid without a price, swap with one"
    add("--mode", nargs="+", choices=MODES, help=modes)
    add("--child", nargs="+", default=["draft"], choices=CHILDREN)
    add("--min-gain", nargs="+", type=float, default=[0.0], metavar="G", help="guards; default: 0, none")
    prices = "of plans, all of one dial, beside rules without one (0); default: 0 and some from 5 to 0.5"
    add("--price", nargs="+", type=float, default=[0.0, *search.PRICES], metavar="X", help=prices)
    add("--cost", nargs="+", default=["tokens"], choices=COSTS, help="of plans; default: tokens")
    add("--sampling", default="0.6/50/0.9", metavar="T[/TOP_K[/TOP_P]]", help="default: %(default)s")
    add("--tree", default="16/5/8", help=f"{TreeConfig.FORM}; default: %(default)s")
    add("--batch-size", type=int, default=4, help="default: %(default)s")
    halves = "also calibrate on N random halves and try the others"
    add("--splits", type=int, default=0, metavar="N", help=halves)
    add("--seed", type=int, default=0)
    add("--output", type=Path, required=True, help="folder of rows, calibration.json and splits.json")
    add("--for-device", choices=DEVICES, help="kind of device that the tree is for (default: --device)")
    add("--install", action="store_true", help="write calibration.json beside the head, too")
    with parsed(parser, argv) as arguments:
        check_sizes(arguments, arguments.batch_size)
        require_folder("--output", arguments.output)
        require_integer("seed", arguments.seed, 0, "any will do")
        require_integer("splits", arguments.splits, 0, "0 makes none")
        require_number("confidence", arguments.confidence, 0.501, 0.999, "0.95 is usual")
        for budget in arguments.quality_budget:
            require_number("quality_budget", budget, 0.0, 1.0, "0.02 changes about one token in fifty")
        kinds = kinds_of(arguments)
        rules = [search.fuzzy(kind, 1.0) for kind in kinds]
        sampling, tree = SamplingConfig.parse(arguments.sampling), TreeConfig.parse(arguments.tree)
        engine = load_engine(arguments)
        for rule in rules:
            engine.settler.require_rule(rule)
        if arguments.install:
            kept_in(engine.head_folder)  # before the work: what cannot be read ends it
        most = arguments.max_new_tokens
        questions = Questions.of_prompts(arguments.prompts, engine, arguments.limit, arguments.skip, most)
        if arguments.splits and len(questions.samples) < 2:
            raise ValueError(f"splits is {arguments.splits}: one prompt cannot be halved; give more prompts")
        cell = Cell(questions, Lossless(share_noise=False), sampling, tree, most, arguments.seed)
        made = {**provenance(engine.device), "weight_format": engine.weight_format}
        work = search.Work(engine, cell, arguments.output, arguments.batch_size, arguments.confidence, made)
        device = arguments.for_device or device_kind(engine.device.type)
        budgets = sorted(set(arguments.quality_budget))
        with sole_writer(arguments.output / FILE):
            calibration, trials = search.calibrate(work, kinds, budgets, arguments.splits, device)
            write_calibrations(arguments.output / FILE, [calibration])
            splits = arguments.output / "splits.json"
            splits.unlink(missing_ok=True)  # of an earlier calibration
            if trials:
                write_atomically(splits, json.dumps(trials, indent=1) + "\n")
        if arguments.install:
            install(engine.head_folder, calibration)
    say(search.calibration_table(calibration))
    if trials:
        say("\n" + search.trial_table(trials))


def kinds_of(arguments: argparse.Namespace) -> list[Kind]:
    """Return all kinds of rules that the arguments name; of plans those that choose the child themselves."""
    kinds, modes, dials = [], arguments.mode or [None], (arguments.price, arguments.cost)
    asked = product(arguments.divergence, modes, arguments.child, arguments.min_gain, *dials)
    for divergence, mode, child, gain, price, cost in asked:
        cost = cost if price else "tokens"
        mode = mode or (SWAP if price and cost != "kl" else HYBRID)
        impossible = child != "draft" if price else mode == SWAP
        if not (impossible or (mode == SWAP and cost == "kl")):
            kinds.append(Kind(divergence, mode, child, gain, price, cost))
    return list(dict.fromkeys(kinds))


def install(folder: Path | None, calibration: Calibration) -> None:
    """Add the calibration to those beside the head. Raises ValueError if it has no threshold."""
    if not calibration.thresholds:
        raise ValueError("install: no threshold stays inside the budget, so none is; raise --quality-budget")
    file, kept = kept_in(folder)
    write_calibrations(file, with_calibration(kept, calibration))


def kept_in(folder: Path | None) -> tuple[Path, list[Calibration]]:
    """Return the file beside a head, and the calibrations in it, if there are any.

    Raises ValueError for a file that has none, and for a head that came from no folder.
    """
    if folder is None:
        raise ValueError("install: the head was not loaded from a folder; copy calibration.json by hand")
    file = folder / FILE
    return file, read_calibrations(file) if file.exists() else []
