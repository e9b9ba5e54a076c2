"""Options of the commands that concern EAGLE-3: what they are, what they change, and what excludes them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from eagle_fsd.cli.flags.types import parse_taps
from eagle_fsd.core.checks import flag_of
from eagle_fsd.drafting.eagle3.export import EAGLE


def add_eagle3(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --eagle3, which means `what`, and --taps."""
    parser.add_argument("--eagle3", action="store_true", help=what)
    parser.add_argument(
        "--taps",
        type=parse_taps,
        metavar="I,J,K",
        help="the target's layers whose inputs an EAGLE-3 head reads (default: 2, n/2 and n-3 of n layers, "
        "or three in a row of fewer than 7)",
    )


def taps_need_eagle3(args: argparse.Namespace) -> None:
    """Raise ValueError for --taps without --eagle3."""
    if args.taps is not None and not args.eagle3:
        raise ValueError(
            f"taps are {','.join(map(str, args.taps))} without --eagle3: only EAGLE-3 heads read them; add it"
        )


def check_training(args: argparse.Namespace) -> None:
    """Raise ValueError for options of `train head` that do not go with --eagle3, or only with it."""
    taps_need_eagle3(args)
    if not args.eagle3:
        if args.layout != EAGLE:
            raise ValueError(
                f"layout is {args.layout!r} without --eagle3: other heads have one layout; leave it out"
            )
        return
    for name in ("noise", "regression"):
        if value := getattr(args, name):
            raise ValueError(
                f"{name} is {value:g} with --eagle3: such heads learn from plain taps and from tokens alone; "
                f"leave --{name} out"
            )
    if args.init_head is not None:
        for name in ("taps", "draft_vocab_size"):
            if getattr(args, name) is not None:
                raise ValueError(f"{flag_of(name)} with --init-head: that head's own are kept; leave it out")


def refuse_other_kind(args: argparse.Namespace, run: Mapping[str, Any]) -> None:
    """Raise ValueError if the run in the folder of --output has a head of the other kind.

    run: its identity.
    """
    held = "taps" in run["head"]
    if held != args.eagle3:
        kind, flag = (
            ("an EAGLE-3 head", "add --eagle3") if held else ("an EAGLE-1/2 head", "leave --eagle3 out")
        )
        raise ValueError(
            f"--output names {args.output}, which holds the run of {kind}: a folder has one run, and its "
            f"head stays of one kind; name another folder, or {flag}"
        )
