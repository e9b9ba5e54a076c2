"""GSM8K: grade-school word problems, answered with a chain of thought (arXiv 2110.14168, 2201.11903)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from eagle_fsd.evaluation.tasks.base import Asked, Task, assistant, text_of, user

# Written for this project: none is in either split.
EXAMPLES = (
    (
        "A bakery fills 6 trays with 12 rolls each. By noon 47 rolls are sold. How many rolls are left?",
        "The bakery makes 6 * 12 = 72 rolls. After the sales 72 - 47 = 25 rolls are left. The answer is 25.",
    ),
    (
        "Ines reads 18 pages on Monday and twice as many on Tuesday. Her book has 120 pages. How many pages "
        "does she still have to read?",
        "On Tuesday Ines reads 2 * 18 = 36 pages. In two days she reads 18 + 36 = 54 pages. She still has "
        "120 - 54 = 66 pages to read. The answer is 66.",
    ),
    (
        "A taxi costs $4 to start and $3 for every mile. Tom pays with a $50 note for a ride of 9 miles. How "
        "many dollars does he get back?",
        "The miles cost 9 * 3 = 27 dollars. The ride costs 4 + 27 = 31 dollars. Tom gets back 50 - 31 = 19 "
        "dollars. The answer is 19.",
    ),
    (
        "Three classes share 2 boxes of 75 pencils equally. How many pencils does each class get?",
        "There are 2 * 75 = 150 pencils. Each class gets 150 / 3 = 50 pencils. The answer is 50.",
    ),
    (
        "A farmer has 80 hens. A quarter of them lay no eggs, the others lay one egg a day each. How many "
        "eggs does he collect in a week?",
        "There are 80 / 4 = 20 hens without eggs, so 80 - 20 = 60 hens lay. They lay 60 eggs a day. In a "
        "week they lay 60 * 7 = 420 eggs. The answer is 420.",
    ),
    (
        "Mira saves $15 a week. A bicycle costs $240, and her aunt pays a third of it. How many weeks must "
        "Mira save?",
        "Her aunt pays 240 / 3 = 80 dollars. Mira pays 240 - 80 = 160 dollars, but 160 / 15 is 10 weeks and "
        "10 dollars more, so she needs one more week: 10 + 1 = 11 weeks. The answer is 11.",
    ),
    (
        "A train has 8 coaches with 60 seats. 15% of the seats are free. How many passengers sit in the "
        "train?",
        "The train has 8 * 60 = 480 seats. Of these 480 * 0.15 = 72 are free. So 480 - 72 = 408 passengers "
        "sit in it. The answer is 408.",
    ),
    (
        "Paul is 4 years older than Lena. Together they are 30 years old. How old is Paul?",
        "Without the 4 years both would be as old as Lena: 30 - 4 = 26, and 26 / 2 = 13. So Lena is 13, and "
        "Paul is 13 + 4 = 17. The answer is 17.",
    ),
)
ASK = 'Solve the problem step by step, and end with "The answer is" and the number.\n\nProblem: {question}'

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
    question = text_of(row, "question").strip()
    messages = [
        turn for asked, said in EXAMPLES for turn in (user(ASK.format(question=asked)), assistant(said))
    ]
    reference = {"answer": str(value_of(answer.strip()))}
    return str(row.get("id", place)), [*messages, user(ASK.format(question=question))], reference


def judge(reference: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score an answer. strict: the number that it calls the answer is right; flexible: its last number is."""
    expected = Decimal(reference["answer"])
    return {
        "strict": float(strict_answer(text) == expected),
        "flexible": float(flexible_answer(text) == expected),
    }


GSM8K = Task(
    name="gsm8k",
    version=1,
    files=("gsm8k_test.jsonl", "gsm8k.jsonl"),
    fields="`question`, and an `answer` that ends in `#### N`",
    hub=("openai/gsm8k", "main", "test"),
    ask=ask,
    judge=judge,
    metrics=("strict", "flexible"),
    max_new_tokens=256,
    stops=("\nProblem:", "\nQuestion:"),
)
