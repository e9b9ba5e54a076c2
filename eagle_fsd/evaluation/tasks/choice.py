"""Multiple choice, generated: CommonsenseQA (arXiv 1811.00937) and MMLU (arXiv 2009.03300).

The model reasons in a sentence and names a letter: comparing the options' likelihoods would generate nothing,
and so measure nothing of a rule of acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from eagle_fsd.evaluation.tasks.base import Asked, Message, Task, assistant, text_of, user

ASK = 'Reason in a sentence, and end with "The answer is" and the letter in brackets.\n\nQuestion: {}\n{}'

# Written for this project: (question, options, answer).
COMMONSENSE_EXAMPLES = (
    (
        "Where would you hang a wet coat when you come home?",
        ("hook", "oven", "bookshelf", "letter box", "sink"),
        "A wet coat has to hang freely to dry, and a hook by the door lets it. The answer is (A).",
    ),
    (
        "The candle went out when she opened the window. What put it out?",
        ("light", "noise", "smell", "wind", "dust"),
        "An open window lets moving air in, and wind blows a flame out. The answer is (D).",
    ),
    (
        "What do people look for when they turn to the last pages of a textbook?",
        ("pictures", "index", "cover", "price", "author's photo"),
        "The last pages of a textbook list its terms and where they occur, which is an index. The answer is "
        "(B).",
    ),
)
MMLU_EXAMPLES = (
    (
        "A ball is thrown straight up. What is its acceleration at the highest point, without air?",
        ("zero", "9.8 m/s^2 upwards", "9.8 m/s^2 downwards", "it depends on its mass"),
        "Gravity is the only force on the ball all the time, so it accelerates downwards at 9.8 m/s^2. The "
        "answer is (C).",
    ),
    (
        "Which branch of government interprets laws where powers are separated?",
        ("the legislature", "the judiciary", "the executive", "the press"),
        "Parliaments make laws, governments carry them out, and courts, the judiciary, interpret them. The "
        "answer is (B).",
    ),
    (
        "What is the derivative of x^3 + 2x at x = 1?",
        ("5", "3", "2", "6"),
        "The derivative is 3x^2 + 2, which is 3 + 2 = 5 at x = 1. The answer is (A).",
    ),
)


def options_of(letters: Sequence[str], options: Sequence[str]) -> str:
    return "\n".join(f"({letter}) {option}" for letter, option in zip(letters, options, strict=True))


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
    strict = strict_letter(text, letters)
    if strict:
        return strict
    begins = re.match(rf"[\s*_(\[]*([{only}])(?:[ *_)\]]*(?:\n|$)|[*_]*[).:\]])", text)
    if begins:
        return begins[1]
    inside = re.findall(rf"\(([{only}])\)", text)
    return inside[-1] if inside else None


def judge(reference: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score an answer. strict: the letter that it names is right; flexible: one that it may mean is."""
    answer, letters = reference["answer"], reference["letters"]
    return {
        "strict": float(strict_letter(text, letters) == answer),
        "flexible": float(flexible_letter(text, letters) == answer),
    }


def asked(
    examples: Sequence[tuple[str, Sequence[str], str]],
    question: str,
    options: Sequence[Any],
    answer: str,
    letters: Sequence[str],
) -> tuple[list[Message], dict[str, Any]]:
    """Return the chat of a question behind its examples, and its reference.

    Raises ValueError where they do not fit.
    """
    if not all(isinstance(option, str) for option in options):
        raise ValueError("an option is not text")
    if len(set(letters)) != len(options) or len(options) < 2 or not set(letters) <= set(ascii_uppercase):
        raise ValueError(f"{len(options)} options have the letters {', '.join(map(str, letters))}")
    if answer not in letters:
        raise ValueError(f"answer is {answer!r}: it must be one of {', '.join(letters)}")
    messages = []
    for one, choices, said in examples:
        listed = options_of(ascii_uppercase[: len(choices)], choices)
        messages += [user(ASK.format(one, listed)), assistant(said)]
    messages.append(user(ASK.format(question.strip(), options_of(letters, options))))
    return messages, {"answer": answer, "letters": list(letters)}


def ask_commonsense(row: Mapping[str, Any], place: int) -> Asked:
    choices = row["choices"]
    messages, reference = asked(
        COMMONSENSE_EXAMPLES, text_of(row, "question"), choices["text"], row["answerKey"], choices["label"]
    )
    return str(row.get("id", place)), messages, reference


def ask_mmlu(row: Mapping[str, Any], place: int) -> Asked:
    options, answer = row["choices"], row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(options):
        raise ValueError(f"answer is {answer!r}: it must be an option's number from 0")
    letters = ascii_uppercase[: len(options)]
    about = f"({str(row.get('subject', '')).replace('_', ' ')}) " if row.get("subject") else ""
    question = about + text_of(row, "question")
    messages, reference = asked(MMLU_EXAMPLES, question, options, letters[answer], letters)
    return str(row.get("id", place)), messages, reference


SHARED: dict[str, Any] = {"version": 1, "judge": judge, "metrics": ("strict", "flexible")}
SHARED |= {"max_new_tokens": 128, "stops": ("\nQuestion:",)}
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
