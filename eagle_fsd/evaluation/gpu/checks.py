"""The parts of the GPU check, in their order, run one after the other within a time budget, and its table.

A part that raises has failed, and the next one runs. A part that does not fit into what is left of the budget
is left out, with the reason, and so is one that raises LeftOut.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from eagle_fsd.core.checks import one_line, require_choice, require_number
from eagle_fsd.evaluation.cli import mistakes_on_one_line, say
from eagle_fsd.evaluation.gpu import steps, target, texts
from eagle_fsd.evaluation.gpu.bench import Bench, Findings, LeftOut
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.provenance import provenance

FRAMES = 4  # of a traceback that are kept, the innermost ones


class Part(NamedTuple):
    """One part of a check. seconds: an estimate of what it takes at most; it is left out where less is left.
    run: takes the bench and returns its findings."""

    name: str
    seconds: float
    run: Callable[[Bench], Findings]


# What may spoil the device for the parts behind it comes last.
PARTS = (
    Part("equality", 60, texts.equality),
    Part("equality of the target", 60, target.equality),
    Part("distribution", 30, texts.distribution),
    Part("host waits", 20, steps.host_waits),
    Part("half precision", 15, texts.half_precision),
    Part("recordings", 60, steps.recordings),
    Part("costs, bfloat16", 60, functools.partial(target.costs, dtype="bfloat16")),
    Part("costs, float32", 60, functools.partial(target.costs, dtype="float32")),
    Part("flash-attn", 20, steps.flash_attention),
    Part("threads", 30, texts.threads),
    Part("failed capture", 20, steps.failed_capture),
)


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Run the parts that the arguments ask for, write what they found, and exit with the verdict."""
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        said = f"no CUDA device: torch {torch.__version__} sees none, so nothing was checked; "
        parser.exit(2, f"{parser.prog}: {said}--device cpu runs what a CPU can show\n")
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the result's, whatever a library prints
        with mistakes_on_one_line(parser):
            require_number("seconds", arguments.seconds, 1, 86400, "460 leaves some of eight minutes")
            for name in arguments.only or ():
                require_choice("part", name, [part.name for part in PARTS])
            parts = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
            bench = Bench.make(arguments.device, arguments.target, arguments.head, arguments.quick)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
        made = {"machine": machine(bench), "quick": arguments.quick, "budget": arguments.seconds}

        def note(result: dict[str, Any], line: str) -> None:
            sys.stderr.write(f"{line}\n")
            if arguments.output:
                write_atomically(arguments.output, json.dumps(made | result, indent=1) + "\n")

        result = made | run_parts(parts, bench, arguments.seconds, note)
    if arguments.output:
        say(table(result))
    else:
        sys.stderr.write(table(result) + "\n")
        say(json.dumps(result, indent=1))
    sys.exit(0 if result["ok"] else 1)


def run_parts(
    parts: Sequence[Part], bench: Bench, seconds: float, note: Callable[[dict[str, Any], str], None]
) -> dict[str, Any]:
    """Run the parts in their order; returns {"ok", "seconds", "parts", "left_out"}, ready for JSON.

    seconds: the budget of all parts together. note: is shown, after every part, that result as it stands and
    a line on what is new in it.
    """
    start = time.monotonic()
    result: dict[str, Any] = {"ok": True, "seconds": 0.0, "parts": [], "left_out": []}
    for part in parts:
        left = seconds - (time.monotonic() - start)
        record: dict[str, Any] = {"name": part.name}
        try:
            if part.seconds > left:
                said = f"it may take {part.seconds:.0f} s and {max(left, 0.0):.2f} s of {seconds:g} are left"
                raise LeftOut(said)
            findings = dict(part.run(bench))
            record |= {"ok": bool(findings.pop("ok")), "summary": findings.pop("summary")}
            record["findings"] = findings
        except LeftOut as error:
            reason = one_line(error, 300)
            result["left_out"].append({"part": part.name, "reason": reason})
            line = f"left out: {reason}"
        # A part may fail in any way, and the next one must run.
        except Exception as error:  # noqa: BLE001
            record |= {"ok": False, "summary": f"{type(error).__name__}: {one_line(error, 300)}"}
            record["traceback"] = traceback.format_exc(limit=-FRAMES).splitlines()
        gc.collect()  # what is left in cycles may hold a device's memory
        before, result["seconds"] = result["seconds"], round(time.monotonic() - start, 2)
        if "ok" in record:
            result["parts"].append({**record, "seconds": round(result["seconds"] - before, 2)})
            result["ok"] &= record["ok"]
            line = f"{verdict(record)}: {record['summary']}"
        note(result, f"[{result['seconds']:6.1f} s] {part.name}: {line}")
    return result


def verdict(record: Mapping[str, Any]) -> str:
    return "passed" if record["ok"] else "FAILED"


def machine(bench: Bench) -> dict[str, Any]:
    """Record where and by what the check runs, ready for JSON."""
    made: dict[str, Any] = provenance(bench.device)
    if bench.on_gpu:
        free, total = torch.cuda.mem_get_info(bench.device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(bench.device)))
        made |= {"memory": total, "free_memory": free, "capability": capability, "cuda": torch.version.cuda}
    return made


def table(result: Mapping[str, Any]) -> str:
    """Write Markdown of a whole check: the machine, a line for every part, and the parts' own tables."""
    machine = result["machine"]
    facts = [str(machine["device"]), f"torch {machine['torch']}", f"transformers {machine['transformers']}"]
    facts += [f"{name} {machine[name]}" for name in ("cuda", "commit") if machine.get(name)]
    rows = [
        [part["name"], verdict(part), f"{part['seconds']:.1f}", part["summary"]] for part in result["parts"]
    ]
    rows += [[one["part"], "left out", "", one["reason"]] for one in result["left_out"]]
    lines = [", ".join(facts), "", markdown_table(["part", "verdict", "seconds", "what was found"], rows)]
    for part in result["parts"]:
        if "table" in part.get("findings", ()):
            lines += ["", f"{part['name']}:", "", part["findings"]["table"]]
    return "\n".join(lines)
