"""A parser with errors of one line and presets, and the types of flags that take more than a number."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from eagle_fsd.core.config import FSD_PAPER_SAMPLING, FSD_PAPER_TREE
from eagle_fsd.core.process.signals import EXIT_USAGE

AUTO = "auto"
# The names in acceptance.rule_names and drafting.drafter, repeated here because these import torch.
RULE_NAMES = (
    "fuzzy", "lossless", "typical", "relaxed_topk", "sglang", "cactus", "ensemble", "fly", "fsd_paper",
)  # fmt: skip
NO_HEAD = "none"

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
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (--help lists the flags)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the flags. What a preset says are defaults, which other flags override."""
        given = {} if namespace is None else dict(vars(namespace))
        found, unknown = self.parse_known_args(args, argparse.Namespace(**given))
        if unknown:
            self.refuse(unknown)
        if getattr(found, "preset", None) is not None:  # what a namespace holds is a default to argparse
            found, _ = self.parse_known_args(args, argparse.Namespace(**{**PRESETS[found.preset], **given}))
        return found

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Name the arguments that no flag takes, and what was probably meant.

        If there are flags among them, other words are likely to be their values, or a prompt in whose place
        such a value was taken.
        """
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            of_prompt = any(action.dest == "text" for action in self._get_positional_actions())
            remedy = "put the prompt in quotes" if of_prompt else "leave them out"
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {remedy}")
        known = [name for action in self._actions for name in action.option_strings]
        near = [name for flag in flags for name in nearest(flag, known)]
        remedy = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(flags)}{remedy}")


def nearest(flag: str, known: Sequence[str]) -> list[str]:
    """Return the flags that a wrong one may stand for: those that it begins, else the one most like it."""
    begun = [name for name in known if name.startswith(flag) and flag.startswith("--") and flag != "--"]
    words = {name.lstrip("-"): name for name in known}  # else all would be alike in their dashes
    return begun[:3] or [words[word] for word in get_close_matches(flag.lstrip("-"), words, 1)]


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
