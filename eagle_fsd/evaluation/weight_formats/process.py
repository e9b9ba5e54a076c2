"""A process of its own for a part of a measurement, whose memory is then that part's alone.

Imports no torch: a process loads what its function needs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a module's function in a fresh process, and return its result or raise its ValueError or OSError.

    Raises ValueError if the process ends in any other way before the function does; its own traceback has
    gone to stderr then. The process does not outlive this one for longer than the function runs.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_result, args=(sender, work, arguments), daemon=True)
    process.start()
    sender.close()  # so that the process's own end is the only one, and its death is noticed
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        raise ValueError(
            f"the process of {work.__name__} ended early, with exit code {process.exitcode}: it must run to "
            "its end; free some memory, or see its error above, and start again, which keeps its rows"
        ) from None
    process.join()
    if error is not None:
        raise error
    return result


def send_result(sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a function, and send its result and None, or None and the user's mistake."""
    try:
        result, mistake = work(*arguments), None
    except (ValueError, OSError) as error:
        result, mistake = None, error
    sender.send((result, mistake))
