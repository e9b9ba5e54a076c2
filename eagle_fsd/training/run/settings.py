"""The settings of a training run as options of a command, with the values of each kind of head."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from eagle_fsd.core.checks import flag_of
from eagle_fsd.training.cli import settle_dtypes
from eagle_fsd.training.loss import LossWeights
from eagle_fsd.training.schedule import TrainConfig

# What EAGLE-3's authors take: seven steps from the start, each weighing 0.8 of the one before.
OF_EAGLE3 = {"unroll": 7, "unroll_after": 0.0, "decay": 0.8}
SETTINGS = {
    "epochs": "how often the data is seen",
    "minutes": "end the schedule after MINUTES, if the epochs take longer; 0: off",
    "batch_tokens": "tokens of a padded batch",
    "accumulate": "batches that each process adds up for one update",
    "learning_rate": "the highest learning rate",
    "warmup": "share of the run in which the rate grows",
    "weight_decay": "weight decay of the matrices after fc",
    "clip": "largest norm of the gradient",
    "noise": "width of the uniform noise on features, in stds; EAGLE-1 takes 0.2",
    "unroll": "drafting steps per batch",
    "unroll_after": "share of the run with one drafting step, which is more than twice as fast",
    "eval_every": "steps between held-out evaluations",
    "checkpoint_every": "steps between checkpoints",
    "seed": "seed of the order, the noise and a new head",
}
LOSS_SETTINGS = {
    "regression": "weight of SmoothL1 on features, as in EAGLE-1",
    "cross_entropy": "weight of the soft cross-entropy",
    "decay": "weight of a drafting step relative to the one before",
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for every setting. Those that differ for EAGLE-3 stay None if they are not given."""
    usual = usual_settings()
    for name, text in (SETTINGS | LOSS_SETTINGS).items():
        value, differs = usual[name], name in OF_EAGLE3
        shown = f"{value}, with --eagle3 {OF_EAGLE3[name]}" if differs else "%(default)s"
        parser.add_argument(
            flag_of(name),
            type=type(value),
            default=None if differs else value,
            help=f"{text}; default: {shown}",
        )


def settle_defaults(args: argparse.Namespace) -> None:
    """Give the settings that were left open the values of EAGLE-3, or the usual ones, and the fast dtypes."""
    settle_dtypes(args)
    for name, value in OF_EAGLE3.items():
        if getattr(args, name) is None:
            setattr(args, name, value if args.eagle3 else usual_settings()[name])


def usual_settings() -> dict[str, Any]:
    """Return the values of all settings that are not given, by name."""
    return asdict(TrainConfig()) | asdict(LossWeights())
