"""The parts of the GPU check, in their order, run one after the other, and its table.

A part that raises has failed, and the next one runs. One that raises LeftOut is left out, with the reason.
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
from collections.abc import Callable, Mapping
from typing import Any

import torch

from eagle_fsd.core.checks import one_line, require_choice
from eagle_fsd.evaluation.cli import mistakes_on_one_line, say
from eagle_fsd.evaluation.gpu import steps, target, texts
from eagle_fsd.evaluation.gpu.bench import Bench, Findings, LeftOut
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.provenance import provenance
from eagle_fsd.hub.loading.progress import hide_notes_of_libraries

Part = Callable[[Bench], Findings]
FRAMES = 4  # of a traceback that are kept, the innermost ones


# What may spoil the device for the parts behind it comes last.
PARTS: dict[str, Part] = {
    "equality": texts.equality,
    "equality of the target": target.equality,
    "distribution": texts.distribution,
    "host waits": steps.host_waits,
    "half precision": texts.half_precision,
    "recordings": steps.recordings,
    "rules in turn": texts.rules_in_turn,
    "costs, bfloat16": functools.partial(target.costs, dtype="bfloat16"),
    "costs, float32": functools.partial(target.costs, dtype="float32"),
    "flash-attn": steps.flash_attention,
    "threads": texts.threads,
    "failed capture": steps.failed_capture,
}


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Run the parts that the arguments ask for, write what they found, and exit with the verdict."""
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        said = f"no CUDA device: torch {torch.__version__} sees none, so nothing was checked; "
        parser.exit(2, f"{parser.prog}: {said}--device cpu runs what a CPU can show\n")
    hide_notes_of_libraries()
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the result's, whatever a library prints
        with mistakes_on_one_line(parser):
            for name in arguments.only or ():
                require_choice("part", name, list(PARTS))
            parts = {name: part for name, part in PARTS.items() if name in (arguments.only or PARTS)}
            bench = Bench.make(arguments.device, arguments.target, arguments.head, arguments.quick)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {
            "ok": True,
            "machine": machine(bench),
            "quick": arguments.quick,
            "parts": [],
        }
        for name, part in parts.items():
            record = run_part(name, part, bench)
            result["parts"].append(record)
            result["ok"] &= record["ok"] is not False
            sys.stderr.write(f"[{record['seconds']:5.1f} s] {name}: {verdict(record)}: {record['summary']}\n")
            if arguments.output:
                write_atomically(arguments.output, json.dumps(result, indent=1) + "\n")
    if arguments.output:
        say(table(result))
    else:
        sys.stderr.write(table(result) + "\n")
        say(json.dumps(result, indent=1))
    sys.exit(0 if result["ok"] else 1)


def run_part(name: str, part: Part, bench: Bench) -> dict[str, Any]:
    """Run a part; returns its name, "ok", "summary", "seconds" and findings, ready for JSON.

    ok: None for one that was left out, whose summary is the reason. One that raises has a traceback.
    """
    start = time.monotonic()
    record: dict[str, Any] = {"name": name}
    try:
        record |= part(bench)
    except LeftOut as error:
        record |= {"ok": None, "summary": one_line(error, 300)}
    # A part may fail in any way, and the next one must run.
    except Exception as error:  # noqa: BLE001
        record |= {"ok": False, "summary": f"{type(error).__name__}: {one_line(error, 300)}"}
        record["traceback"] = traceback.format_exc(limit=-FRAMES).splitlines()
    gc.collect()  # what is left in cycles may hold a device's memory
    return {**record, "seconds": round(time.monotonic() - start, 2)}


def verdict(record: Mapping[str, Any]) -> str:
    return {True: "passed", False: "FAILED", None: "left out"}[record["ok"]]


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
    lines = [", ".join(facts), "", markdown_table(["part", "verdict", "seconds", "what was found"], rows)]
    for part in result["parts"]:
        if "table" in part:
            lines += ["", f"{part['name']}:", "", part["table"]]
    return "\n".join(lines)
