"""GSM8K: grade-school word problems, answered with a chain of thought (arXiv 2110.14168, 2201.11903)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from eagle_fsd.evaluation.tasks.base import Asked, Task, few_shot, strict_and_flexible, text_of

ASK = 'Solve the problem step by step, and end with "The answer is" and the number.\n\nProblem: {}'

# A sign belongs to a number only where nothing that it could be subtracted from stands right before it.
DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
NUMBER = rf"(?:(?<![\w)\].])[-\u2212])?\$?{DIGITS}"
MARK = r"(?:\banswer[*_]*(?:\s+is\b|\s*:)|####)"
DRESS = r"[\s*_$(\[{=:\\]*(?:boxed\{|text\{)?[\s*_$(\\]*"  # what Markdown and LaTeX put before the number
STRICT = re.compile(f"{MARK}{DRESS}({NUMBER})", re.IGNORECASE)
FLEXIBLE = re.compile(NUMBER)


def strict_answer(text: str) -> Decimal | None:
    """Find the number after the first "The answer is" or "####": what comes later is another problem."""
    found = STRICT.search(text)
    return found and value_of(found[1])


def flexible_answer(text: str) -> Decimal | None:
    """Find the last number of the text."""
    found = FLEXIBLE.findall(text)
    return value_of(found[-1]) if found else None


def value_of(number: str) -> Decimal:
    """Read a number: 1,234.50 and 1234.5 are one, and a currency sign is no part of it."""
    return Decimal(re.sub(r"[\s,$]", "", number).replace("\u2212", "-"))


def ask(row: Mapping[str, Any], place: int) -> Asked:
    _, mark, answer = text_of(row, "answer").rpartition("####")
    if not mark or not re.fullmatch(NUMBER, answer.strip()):
        raise ValueError("answer does not end in `#### N`")
    messages = few_shot("gsm8k", ASK.format, text_of(row, "question").strip())
    return str(row.get("id", place)), messages, {"answer": str(value_of(answer.strip()))}


def judge(reference: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score an answer. strict: the number that it calls the answer is right; flexible: its last number is."""
    return strict_and_flexible(Decimal(reference["answer"]), strict_answer(text), flexible_answer(text))


GSM8K = Task(
    name="gsm8k",
    version=1,
    files=("gsm8k_test.jsonl", "gsm8k.jsonl"),
    fields="`question`, and an `answer` that ends in `#### N`",
    hub=("openai/gsm8k", "main", "test"),
    ask=ask,
    judge=judge,
    max_new_tokens=256,
    stops=("\nProblem:", "\nQuestion:"),
)
