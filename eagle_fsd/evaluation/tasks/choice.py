"""Multiple choice, generated: CommonsenseQA (arXiv 1811.00937) and MMLU (arXiv 2009.03300).

The model reasons in a sentence and names a letter: comparing the options' likelihoods would generate nothing,
and so measure nothing of a rule of acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from eagle_fsd.evaluation.tasks.base import Asked, Message, Task, few_shot, strict_and_flexible, text_of

ASK = 'Reason in a sentence, and end with "The answer is" and the letter in brackets.\n\nQuestion: {}\n{}'


def strict_letter(text: str, letters: Sequence[str]) -> str | None:
    """Find the letter after the first "answer is" or "answer:"."""
    only = "".join(letters)
    found = re.search(
        # A bare letter is a capital: the article in "the answer is a hook" is none.
        rf"(?i:\banswer[*_]*(?:\s+is\b|\s*:))[\s:*_\"'$]*(?i:(?:option|choice|\\?boxed\{{|\\text\{{)[\s*]*)?"
        rf"(?:[(\[]\s*(?P<inside>[{only}{only.lower()}])\s*[)\]]|(?P<bare>[{only}])(?![\w']))",
        text,
    )
    return found and (found["inside"] or found["bare"]).upper()


def flexible_letter(text: str, letters: Sequence[str]) -> str | None:
    """Find strict_letter, else the letter that the text is or begins with, else its last one in brackets."""
    only = "".join(letters)
    if strict := strict_letter(text, letters):
        return strict
    if begins := re.match(rf"[\s*_(\[]*([{only}])(?:[ *_)\]]*(?:\n|$)|[*_]*[).:\]])", text):
        return begins[1]
    inside = re.findall(rf"\(([{only}])\)", text)
    return inside[-1] if inside else None


def judge(reference: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score an answer. strict: the letter that it names is right; flexible: one that it may mean is."""
    right, letters = reference["answer"], reference["letters"]
    return strict_and_flexible(right, strict_letter(text, letters), flexible_letter(text, letters))


def written(question: str, options: Sequence[str], letters: Sequence[str] = ascii_uppercase) -> str:
    """Write a question out. letters: of the options, in their order."""
    listed = [f"({letter}) {option}" for letter, option in zip(letters, options, strict=False)]
    return ASK.format(question, "\n".join(listed))


def asked(
    task: str, question: str, options: Sequence[Any], answer: str, letters: Sequence[str]
) -> tuple[list[Message], dict[str, Any]]:
    """Return the chat of a question behind the task's examples, and its reference.

    Raises ValueError where they do not fit.
    """
    if not all(isinstance(option, str) for option in options):
        raise ValueError("an option is not text")
    if len(set(letters)) != len(options) or len(options) < 2 or not set(letters) <= set(ascii_uppercase):
        raise ValueError(f"{len(options)} options have the letters {', '.join(map(str, letters))}")
    if answer not in letters:
        raise ValueError(f"answer is {answer!r}: it must be one of {', '.join(letters)}")
    messages = few_shot(task, written, question.strip(), options, letters)
    return messages, {"answer": answer, "letters": list(letters)}


def ask_commonsense(row: Mapping[str, Any], place: int) -> Asked:
    choices, question = row["choices"], text_of(row, "question")
    found = asked("commonsense_qa", question, choices["text"], row["answerKey"], choices["label"])
    return str(row.get("id", place)), *found


def ask_mmlu(row: Mapping[str, Any], place: int) -> Asked:
    options, answer = row["choices"], row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(options):
        raise ValueError(f"answer is {answer!r}: it must be an option's number from 0")
    letters = ascii_uppercase[: len(options)]
    about = f"({str(row.get('subject', '')).replace('_', ' ')}) " if row.get("subject") else ""
    found = asked("mmlu", about + text_of(row, "question"), options, letters[answer], letters)
    return str(row.get("id", place)), *found


SHARED: dict[str, Any] = {"version": 1, "judge": judge, "max_new_tokens": 128, "stops": ("\nQuestion:",)}
COMMONSENSE_QA = Task(
    name="commonsense_qa",
    files=("commonsense_qa.jsonl",),
    fields="`question`, `choices` {label, text} and `answerKey`",
    hub=("tau/commonsense_qa", None, "validation"),  # the test split has no answers
    ask=ask_commonsense,
    **SHARED,
)
MMLU = Task(
    name="mmlu",
    files=("mmlu.jsonl",),
    fields="`question`, `choices` and `answer`, an option's number",
    hub=("cais/mmlu", "all", "test"),
    ask=ask_mmlu,
    **SHARED,
)
