"""Prompts whose answers repeat most of the prompt, for measuring looked-up drafts: JSONL of `prompt`.

    python eval/repeating_prompts.py --data data --output runs/prompts_repeating.jsonl

A third of them ask to rename a function in a program (humaneval.jsonl: openai/human-eval, MIT), a third to
correct planted errors in a text (gsm8k_train.jsonl: openai/grade-school-math, MIT), a third to answer from a
passage in the passage's words (p3_text.jsonl: the P3 sample of self-instruct, Apache-2.0, whose source sets
keep their own terms). The same files give the same prompts. They are for use here, not for publishing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import require_integer
from eagle_fsd.evaluation.cli import parsed, plain_parser, say
from eagle_fsd.files.jsonl import read_jsonl, write_rows

LONGEST = 1500  # characters of a text that a prompt quotes
SHORTEST = 300
EVERY = 6  # of the longer words of a text, one has a planted error
PASSAGES = ("answer_the_following_q", "based_on", "question_context_answer")  # ends of P3's task names


def main(argv: Sequence[str] | None = None) -> None:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    folder = "folder of humaneval.jsonl, gsm8k_train.jsonl, p3_text.jsonl"
    add("--data", type=Path, required=True, help=folder)
    add("--output", type=Path, required=True, help="the JSONL file to write")
    add("--count", type=int, default=30, help="prompts in all; default: %(default)s")
    with parsed(parser, argv) as arguments:
        require_integer("count", arguments.count, 1, "30 is usual")
        made = repeating_prompts(arguments.data, arguments.count)
        write_rows(arguments.output, made)
    say(f"{len(made)} prompts in {arguments.output}")


def repeating_prompts(folder: Path, count: int) -> list[dict[str, str]]:
    """Return `count` prompts, of the kinds in turn. Raises ValueError if the files have too few texts."""
    kinds = []
    for kind, (file, make) in KINDS.items():
        prompts = filter(None, (make(row) for _, row in read_jsonl(folder / file)))
        try:
            kinds.append([{"kind": kind, "prompt": prompt} for prompt in islice(prompts, count)])
        except KeyError as name:
            said = f"{folder / file}: a row has no {name}, which a prompt needs; give the whole data set"
            raise ValueError(said) from name
    mixed = [row for turn in zip_longest(*kinds) for row in turn if row is not None][:count]
    if len(mixed) < count:
        raise ValueError(f"count is {count}: {folder} has texts for {len(mixed)} prompts; lower --count")
    return mixed


def rename(row: dict[str, Any]) -> str | None:
    """Return a prompt that asks for a program with another function name."""
    code, name = row["prompt"] + row["canonical_solution"], row["entry_point"]
    if not SHORTEST <= len(code) <= LONGEST:
        return None
    return f"Rename the function `{name}` to `solve` and write out the whole code.\n\n```python\n{code}```"


def correct(row: dict[str, Any]) -> str | None:
    """Return a prompt that asks for a text without its planted errors."""
    text = f"{row['question']} {row['answer'].partition('####')[0].strip()}"
    if not SHORTEST <= len(text) <= LONGEST or "<<" in text:
        return None
    return f"Correct the spelling of this text and change nothing else.\n\n{with_errors(text)}"


def with_errors(text: str) -> str:
    """Swap two letters in every EVERY-th word of at least five letters."""
    words, longer = text.split(" "), 0
    for place, word in enumerate(words):
        if len(word) >= 5 and word.isalpha():
            longer += 1
            if longer % EVERY == 0:
                words[place] = word[:2] + word[3] + word[2] + word[4:]
    return " ".join(words)


def quote(row: dict[str, Any]) -> str | None:
    """Return a prompt that asks a question on a passage and wants the passage's own words."""
    if not row["task"].endswith(PASSAGES) or not SHORTEST <= len(row["prompt"]) <= LONGEST:
        return None
    return f"{row['prompt']}\n\nQuote the whole sentences of the passage that say so, then answer."


KINDS: dict[str, tuple[str, Callable[[dict[str, Any]], str | None]]] = {
    "rename": ("humaneval.jsonl", rename),
    "correct": ("gsm8k_train.jsonl", correct),
    "quote": ("p3_text.jsonl", quote),
}
