"""The result of a GPU check as a reader sees it: a line for every part, then their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_fsd.evaluation.markdown_table import markdown_table


def word(part: Mapping[str, Any]) -> str:
    return "passed" if part["ok"] else "FAILED"


def progress(seconds: float, newest: Mapping[str, Any]) -> str:
    """Write one line of what is new after this many seconds: a part's record, or one that was left out."""
    if "reason" in newest:
        return f"[{seconds:6.1f} s] {newest['part']}: left out: {newest['reason']}"
    return f"[{seconds:6.1f} s] {newest['name']}: {word(newest)}: {newest['summary']}"


def table(result: Mapping[str, Any]) -> str:
    """Write Markdown of a whole check; result: see runner.run_parts, with the machine's record in it."""
    machine = result["machine"]
    facts = [str(machine["device"]), f"torch {machine['torch']}", f"transformers {machine['transformers']}"]
    facts += [f"{name} {machine[name]}" for name in ("cuda", "commit") if machine.get(name)]
    lines = [", ".join(facts), ""]
    rows = [
        [part["name"], word(part), f"{part['seconds']:.1f}", part["summary"], part["shows"]]
        for part in result["parts"]
    ]
    lines.append(markdown_table(["part", "verdict", "seconds", "what was found", "what it does"], rows))
    if result["left_out"]:
        lines += ["", "Left out:"]
        lines += [f"- {one['part']}: {one['reason']}" for one in result["left_out"]]
    for part in result["parts"]:
        if "table" in part["findings"]:
            shown = part["findings"]["table"]
            lines += ["", f"{part['name']}:", "", markdown_table(shown["titles"], shown["rows"])]
            lines += ["", part["findings"]["label"]] if "label" in part["findings"] else []
    return "\n".join(lines)
