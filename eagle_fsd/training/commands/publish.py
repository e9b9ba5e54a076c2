"""Publish a trained head: write a model card from the records of its runs, and push both to the Hub.

    eagle-fsd train publish --head runs/head/export --run runs/head --tau runs/tau.jsonl --dry-run \\
        --base-model owner/target --repo-id me/EAGLE-target --data "The target's answers to ..., MIT."

The head, the run and the rows of tau must be of one another: what they say of head and target is compared.
So must a calibration.json beside the head, which is published with it.
With --dry-run the repository is only written to --output, and the command lines that its card shows are
printed to stderr: the recorded ones without directories and secrets. An earlier repository in --output is
replaced. If its card was different, it is kept as OUTPUT.README.md.old.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.acceptance.calibration import FILE
from eagle_fsd.evaluation.cli import plain_parser, say
from eagle_fsd.evaluation.commands.tau import summed_up, table
from eagle_fsd.files.places import require_room
from eagle_fsd.hub.head_checkpoint import read_config
from eagle_fsd.training.cli import run_command
from eagle_fsd.training.run.card_calibrations import read_own
from eagle_fsd.training.run.card_records import (
    card_target,
    compare_run,
    compare_target,
    compare_tau,
    read_tau,
    read_training,
    refuse_mixed_rows,
)
from eagle_fsd.training.run.model_card import Card, bias_warning, push, write_repository

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    parser.add_argument("--head", type=Path, required=True, help="folder that `train head --export` wrote")
    parser.add_argument("--run", type=Path, required=True, help="the --output of `train head`")
    parser.add_argument("--tau", type=Path, required=True, help="rows of `eagle-fsd eval tau`")
    parser.add_argument("--base-model", required=True, help="the target's Hub id")
    parser.add_argument(
        "--data", required=True, help="a sentence: what text it was trained on, and its licence"
    )
    parser.add_argument("--license", default="apache-2.0", help="of the head; default: %(default)s")
    parser.add_argument("--repo-id", required=True, help="OWNER/NAME on the Hub")
    parser.add_argument(
        "--custom-generate",
        action="store_true",
        help="add a folder by which Hugging Face's generate(custom_generate=REPO_ID) decodes with the head",
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--output", type=Path, help="folder of the repository (default: HEAD/../publish)")
    parser.add_argument("--dry-run", action="store_true", help="write the folder, push nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    output, base_model = args.output or args.head.parent / "publish", card_target(args.base_model)
    require_room("--output", output, output.parent)  # where the repository is made before it is moved
    rows = summed_up(read_tau(args.tau))
    refuse_mixed_rows(rows, args.tau)
    config = read_config(args.head, "draft head")
    training = read_training(args.run)
    own = read_own(args.head)
    named = [one.calibration.models["target"].get("name") for one in own]
    targets = [(args.run, training.get("base_model")), (args.tau, rows[0]["base_model"])]
    targets += [(args.head / FILE, name) for name in named]
    for unknown in (
        *compare_tau(args.head, args.tau, rows),
        *compare_run(args.head, args.run, training),
        *compare_target(base_model, targets),
    ):
        logger.warning("not compared: %s", unknown)
    about = (base_model, args.license, args.data)
    card = Card(*about, training, rows, table(rows), config, args.custom_generate, own)
    folder = write_repository(args.head, card, args.repo_id, output)
    if warning := bias_warning(folder):
        logger.warning(warning)
    if args.dry_run:
        for command in card.commands():
            logger.info("the card shows: %s", command)
    say(folder if args.dry_run else push(folder, args.repo_id, args.private))
