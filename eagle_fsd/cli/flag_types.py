"""A parser with errors of one line and presets, and the types of flags that take more than a number."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from eagle_fsd.core.config import FSD_PAPER_SAMPLING, FSD_PAPER_TREE

AUTO = "auto"
# The names in acceptance.planned, acceptance.rule_names and drafting.drafter, repeated here because these
# import torch.
COSTS = ("tokens", "kl", "divergence")
RULE_NAMES = ("fuzzy", "lossless", "typical", "relaxed_topk", "sglang", "cactus", "ensemble", "fsd_paper")
NO_HEAD = "none"
USAGE = 2  # the exit code of a user's mistake

# A preset is other defaults of some flags.
PRESETS: dict[str, dict[str, Any]] = {
    "fsd-paper": {
        "rule": "fsd_paper",
        "total_tokens": FSD_PAPER_TREE.total_tokens,
        "depth": FSD_PAPER_TREE.depth,
        "tree_top_k": FSD_PAPER_TREE.top_k,
        "temperature": FSD_PAPER_SAMPLING.temperature,
        "top_k": FSD_PAPER_SAMPLING.top_k,
        "top_p": FSD_PAPER_SAMPLING.top_p,
        "min_p": FSD_PAPER_SAMPLING.min_p,
        "lookup": False,
    }
}


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message} (--help lists the flags)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the flags. What a preset says are defaults, which other flags override."""
        given = {} if namespace is None else dict(vars(namespace))
        found = super().parse_args(args, argparse.Namespace(**given))
        if getattr(found, "preset", None) is not None:  # what a namespace holds is a default to argparse
            found = super().parse_args(args, argparse.Namespace(**{**PRESETS[found.preset], **given}))
        return found


def parse_auto_or(kind: Callable[[str], float], what: str) -> Callable[[str], float | str]:
    """Return the argparse type of a flag that takes `what`, or auto."""

    def read(text: str) -> float | str:
        if text == AUTO:
            return AUTO
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is neither {what} nor {AUTO}") from error

    return read


def parse_taps(text: str) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list of taps; an argparse type."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not I,J,K: they must be layer numbers from 1 on")
    return tuple(map(int, parts))
