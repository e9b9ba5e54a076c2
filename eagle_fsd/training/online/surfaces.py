"""The flags --adapt and --adapt-save, for the programs that answer prompts."""

from __future__ import annotations

import logging
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from eagle_fsd.cli.flags.types import AUTO
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.process.streams import tell
from eagle_fsd.files.places import require_new_folder

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.training.online.adapter import HeadAdapter

logger = logging.getLogger(__name__)


class Updates(Protocol):
    """What learns from texts: a HeadAdapter, or what a server has in its place."""

    def update(self) -> Any: ...


Learning = TypeVar("Learning", bound=Updates)


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
    if args.adapt_save is not None:
        require_new_folder("--adapt-save", Path(args.adapt_save))


def make_adapter(args: Namespace, model: EagleFSD) -> HeadAdapter | None:
    """Return what adapts the head, if that is asked for. Raises ValueError if there is no head for it."""
    if not args.adapt:
        return None
    from eagle_fsd.training.online.adapter import HeadAdapter

    return HeadAdapter(model)


def save_adapted(args: Namespace, adapter: HeadAdapter | None) -> None:
    """Write the adapted head where --adapt-save says, or elsewhere if that place has gone."""
    if adapter is None or args.adapt_save is None:
        return
    try:
        folder = adapter.save(args.adapt_save)
    except OSError as error:
        tell(one_line(error))
        folder = adapter.save(Path(tempfile.mkdtemp(prefix="eagle-fsd-adapted-")) / "head")
    unchanged = "" if adapter.adapted else "; no update was used yet, so that it drafts as before"
    tell(f"kept the adapted head in {folder}: --ea-model {folder} drafts with it{unchanged}")


def update_between(learner: Learning | None) -> tuple[Learning | None, Any]:
    """Let a head learn from the texts so far; return what goes on learning, and the report if there is one.

    An update that fails ends the learning and nothing else.
    """
    if learner is None:
        return None, None
    try:
        return learner, learner.update()
    except Exception as error:
        logger.exception("the head learns no more: %s", one_line(error))
        return None, None
