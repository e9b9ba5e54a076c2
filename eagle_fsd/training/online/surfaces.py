"""The flags --adapt and --adapt-save, for the programs that answer prompts."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_fsd.cli.flag_types import AUTO

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.training.online.adapter import HeadAdapter


def check_adaptation(args: Namespace) -> None:
    """Raise ValueError for flags that do not fit --adapt, before anything is loaded."""
    if not args.adapt:
        if args.adapt_save is not None:
            raise ValueError("--adapt-save without --adapt: nothing would be learned; give both")
        return
    if args.tp_plan is not None:
        raise ValueError("--adapt with --tp-plan: a head adapts in one process only; leave one of them out")
    if args.threshold == AUTO or args.quality_budget is not None:
        raise ValueError(
            "--adapt with a calibrated threshold: a calibration holds for the head as it was; give "
            "--threshold a number"
        )
    if args.adapt_save is not None and Path(args.adapt_save).exists():
        raise ValueError(f"--adapt-save names {args.adapt_save}, which exists: name a new folder")


def make_adapter(args: Namespace, model: EagleFSD) -> HeadAdapter | None:
    """Return what adapts the head, if that is asked for. Raises ValueError if there is no head for it."""
    if not args.adapt:
        return None
    from eagle_fsd.training.online.adapter import HeadAdapter

    return HeadAdapter(model)


def save_adapted(args: Namespace, adapter: HeadAdapter | None) -> None:
    """Write the adapted head where --adapt-save says."""
    if adapter is not None and args.adapt_save is not None:
        folder = adapter.save(args.adapt_save)
        sys.stderr.write(f"kept the adapted head in {folder}: --ea-model {folder} drafts with it\n")
