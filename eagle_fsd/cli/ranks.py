"""Programs on several ranks: torchrun starts the same command in each process, and rank 0 speaks."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eagle_fsd.core.process.signals import EXIT_USAGE
from eagle_fsd.core.process.streams import tell

# torch takes seconds to import. It is imported only to run a model, so that --help answers at once.
if TYPE_CHECKING:
    from eagle_fsd.runtime.ranks import Ranks

Program = Callable[..., int]  # of argv, None for the own words of the process
FLAG = "--tp-plan"
GRACE = 5.0  # seconds for rank 0 to report what is wrong on all ranks: then torchrun ends the others


def add_split_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag that splits a target among ranks."""
    group.add_argument(
        FLAG,
        choices=("auto",),
        help="split the target among the processes of torchrun --nproc-per-node N -m eagle_fsd.generate (or "
        "eagle_fsd.serve), by transformers' tensor parallel plan (default: one process holds it)",
    )


def join(args: argparse.Namespace, module: str) -> Ranks | None:
    """Join the other ranks if the target is to be split among them; None: there are none.

    Raises ValueError if this process was not started by torchrun. module: of eagle_fsd, for the message.
    """
    if args.tp_plan is None:
        return None
    command = f"torchrun --nproc-per-node N -m eagle_fsd.{module} {FLAG} {args.tp_plan} ..."
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise ValueError(
            f"{FLAG} in a single process: each part of the target has its own; run {command}, N of at least 2"
        )
    from eagle_fsd.runtime.ranks import join_ranks

    return join_ranks(command)


def on_every_rank(program: Program) -> Program:
    """Let a program, which returns its exit code, be split among ranks: only rank 0 is heard then.

    Another rank speaks up if it alone fails, so that rank 0 waits for it.
    """

    @functools.wraps(program)
    def main(argv: Sequence[str] | None = None) -> int:
        words = sys.argv[1:] if argv is None else argv
        if not any(word.partition("=")[0] == FLAG for word in words):
            return program(argv)
        if rank := int(os.environ.get("RANK", 0)):
            return in_silence(program, argv, rank)
        code = program(argv)
        leave(code)
        return code

    return main


def in_silence(program: Program, argv: Sequence[str] | None, rank: int) -> int:
    """Run a program without its output. If it fails and nobody ends it in GRACE seconds, say why.

    Ctrl-C is rank 0's: it tells the others when to stop.
    """
    said = io.StringIO()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        open(os.devnull, "w", encoding="utf-8") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(said),
    ):
        try:
            code = program(argv)
        except SystemExit as end:  # of the parser, or of a signal
            code = end.code if isinstance(end.code, int) else 0
        except Exception:
            time.sleep(GRACE)
            raise
    if code == EXIT_USAGE:
        time.sleep(GRACE)
        lines = said.getvalue().strip().splitlines()
        tell(f"rank {rank}: {lines[-1]}")
    leave(code)
    return code


def leave(code: int) -> None:
    """End the group of this process. If others may hang in it, end the process at once.

    The group's threads would abort a process that ends in the usual way beside them.
    """
    ranks = sys.modules.get("eagle_fsd.runtime.ranks")
    if ranks is None or not ranks.has_joined():
        return
    if code == 0:
        ranks.leave_ranks()
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def show_memory(memory: Sequence[dict[str, int]]) -> str:
    """Return what each rank holds, a line for each."""
    names = {"weight_bytes": "weights", "head_bytes": "head", "cache_bytes": "keys and values"}
    return "\n".join(
        f"rank {held['rank']}: "
        + ", ".join(f"{held[key] / 1e6:.2f} MB of {name}" for key, name in names.items())
        for held in memory
    )
