"""HumanEval: Python functions from their docstrings, run against tests (arXiv 2107.03374)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle_fsd.evaluation.tasks.base import Asked, Task, text_of, user
from eagle_fsd.evaluation.tasks.sandbox import PASSED, run

ASK = (
    "Complete this Python function. Reply with the whole function in one ```python block.\n\n"
    "```python\n{}\n```"
)
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
KEEPS = re.compile(
    r"(?:\s|def\b|async\b|class\b|import\b|from\b|@|#|\)|\]|\}|[A-Za-z_]\w*\s*(?::[^=\n]*)?=[^=])"
)


def definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(name)}\b", re.MULTILINE)


def program(reference: Mapping[str, Any], text: str) -> str:
    """Make a program of an answer: imports and helpers of the prompt, and the function.

    An answer without a `def` of it is taken as what follows the prompt. The code is the first fenced block
    that defines the function, else the first block, else the text itself as far as it looks like code. A
    block that the length cut off ends with the text.
    """
    prompt, defines = reference["prompt"], definition(reference["entry_point"])
    blocks = FENCE.findall(text)
    code = next(filter(defines.search, blocks), blocks[0] if blocks else None)
    if code is None:
        code = text
        if start := defines.search(code):  # words may come before the function, and imports too
            imports = re.search(r"^(?:import|from)\s+\w", code[: start.start()], re.MULTILINE)
            code = code[imports.start() if imports else start.start() :]
        code = unfenced(code)
    if defines.search(code):
        before = prompt[: defines.search(prompt).start()]
        return f"{before}\n{dedented(code)}\n"
    first = next((line for line in code.splitlines() if line.strip()), "")
    if first and not first[0].isspace():
        code = "\n".join(f"    {line}" for line in code.splitlines())
    return f"{prompt.rstrip()}\n{code}\n"


def unfenced(code: str) -> str:
    """Cut the prose that follows code: from the first line neither indented nor of a program's top level.

    A first line that is no code leaves the text as it is.
    """
    kept = []
    for line in code.splitlines():
        if kept and line.strip() and not KEEPS.match(line):
            break
        kept.append(line)
    return "\n".join(kept)


def dedented(code: str) -> str:
    """Move code to the margin where its first line begins: a block in a list is indented as a whole."""
    lines = code.expandtabs(4).splitlines()
    first = next(line for line in lines if line.strip())
    margin = len(first) - len(first.lstrip())
    return "\n".join(line[margin:] if line[:margin].isspace() else line for line in lines)


def judge(reference: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score an answer. pass_at_1: the program passes the problem's tests in the sandbox."""
    tests = f"{reference['test']}\n\ncheck({reference['entry_point']})\n"
    return {"pass_at_1": float(run(f"{program(reference, text)}\n{tests}") == PASSED)}


def ask(row: Mapping[str, Any], place: int) -> Asked:
    reference = {name: text_of(row, name) for name in ("prompt", "entry_point", "test")}
    if not definition(reference["entry_point"]).search(reference["prompt"]):
        raise ValueError(f"prompt does not define {reference['entry_point']}")
    return text_of(row, "task_id"), [user(ASK.format(reference["prompt"].strip()))], reference


HUMANEVAL = Task(
    name="humaneval",
    version=2,
    files=("humaneval.jsonl",),
    fields="`task_id`, `prompt`, `entry_point` and `test`",
    hub=("openai/openai_humaneval", None, "test"),
    ask=ask,
    judge=judge,
    max_new_tokens=512,
)
