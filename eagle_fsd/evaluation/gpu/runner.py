"""Runs the parts of a check one after the other within a time budget. It knows no GPU and no torch.

A part that raises has failed, and the next one runs. A part that does not fit into what is left of the budget
is left out, with the reason, and so is one that raises LeftOut.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.core.checks import one_line

OVERRUN = 3.0  # times its estimate after which a part is stopped
FRAMES = 4  # of a traceback that are kept, the innermost ones


class LeftOut(Exception):
    """Raised by a part that cannot run here; its text is the reason."""


class Overrun(BaseException):
    """Raised within a part whose time is up; no part's own `except Exception` keeps it."""


Findings = dict[str, Any]  # ready for JSON


@dataclass(frozen=True)
class Part:
    """One part of a check.

    seconds: an estimate of what it takes at most; it is left out where less is left. run: called with the
    check's context; its docstring's first line says what it does. It returns its findings: `ok` (bool) and
    `summary` (one line) must be among them, `left_out` may list the reasons for what it did not do, and
    `table` hold {"titles", "rows"} for a reader.
    """

    name: str
    seconds: float
    run: Callable[[Any], Findings]

    @property
    def shows(self) -> str:
        return (self.run.__doc__ or "").partition("\n")[0]


def run_parts(
    parts: Sequence[Part],
    context: object,
    seconds: float,
    note: Callable[[dict[str, Any], dict[str, Any]], None] = lambda result, newest: None,
    broken: Callable[[], str | None] = lambda: None,
) -> dict[str, Any]:
    """Run the parts in their order; returns {"ok", "seconds", "parts", "left_out"}, ready for JSON.

    seconds: the budget of all parts together. note: is shown, after every part, that result as it stands and
    what is new in it. broken: asked after a part that failed whether the machine no longer works, and why;
    the rest is then left out.
    """
    start = time.monotonic()
    result: dict[str, Any] = {"ok": True, "seconds": 0.0, "parts": [], "left_out": []}
    stop: str | None = None
    for part in parts:
        left = seconds - (time.monotonic() - start)
        reason = stop
        if reason is None and part.seconds > left:
            reason = f"it may take {part.seconds:.0f} s and {max(left, 0.0):.2f} s of {seconds:g} are left"
        record = None
        if reason is None:
            record, reason = run_part(part, context, min(left, OVERRUN * part.seconds))
        if record is None:
            newest = {"part": part.name, "reason": reason}
            result["left_out"].append(newest)
        else:
            newest = record
            result["parts"].append(record)
            result["left_out"] += [{"part": part.name, "reason": one} for one in record.pop("left_out")]
            if not record["ok"]:
                result["ok"] = False
                problem = broken()
                stop = None if problem is None else f"after {part.name} failed: {problem}"
        result["seconds"] = round(time.monotonic() - start, 2)
        note(result, newest)
    return result


def run_part(part: Part, context: object, limit: float) -> tuple[dict[str, Any] | None, str | None]:
    """Run a part; returns its record, or the reason for which it left itself out."""
    start = time.monotonic()
    record: dict[str, Any] = {"name": part.name, "shows": part.shows}
    findings: Findings = {}
    try:
        with time_limit(limit):
            findings = dict(part.run(context))
        record |= {"ok": bool(findings.pop("ok")), "summary": findings.pop("summary")}
    except LeftOut as error:
        return None, one_line(error, 300)
    # A part may fail in any way, and the next one must run.
    except (Exception, Overrun) as error:  # noqa: BLE001
        record |= {"ok": False, "summary": f"{type(error).__name__}: {one_line(error, 300)}"}
        record["traceback"] = traceback.format_exc(limit=-FRAMES).splitlines()
    gc.collect()  # what is left in cycles may hold a device's memory
    record["left_out"] = findings.pop("left_out", [])
    return {**record, "seconds": round(time.monotonic() - start, 2), "findings": findings}, None


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Overrun within, between two instructions of Python, once the time is up.

    It works in the main thread of a system with SIGALRM, and does nothing elsewhere.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Overrun(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
