"""IFEval: instructions that a program can check (arXiv 2311.07911); the library if-verifiable checks them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.tasks.base import EXTRA, Asked, Task, text_of, user

PUNKT = "tokenizers/punkt_tab/english/"
BUNDLED = "core/_static/nltk_cache"  # llama-index-core brings the data along, for machines without a network


def ask(row: Mapping[str, Any], place: int) -> Asked:
    names, given = row["instruction_id_list"], row["kwargs"]
    if not isinstance(names, list) or not isinstance(given, list) or not names or len(names) != len(given):
        raise ValueError("instruction_id_list and kwargs must be lists of one length")
    # The Hub's table has every argument in every row, as null where it is none.
    told = [{key: value for key, value in one.items() if value is not None} for one in given]
    prompt = text_of(row, "prompt")
    reference = {"prompt": prompt, "instruction_id_list": names, "kwargs": told}
    return str(row["key"]), [user(prompt)], reference


def judge(reference: Mapping[str, Any], text: str) -> dict[str, float]:
    """Score an answer, also leniently: without its first or last line, and without asterisks.

    strict, loose: all instructions are followed; instruction_strict, instruction_loose: the share that is;
    instructions: how many there are.
    """
    evaluate, checkers = library()
    names = reference["instruction_id_list"]
    for name, given in zip(names, reference["kwargs"], strict=True):
        # The library draws what it is not told at random, and the score with it.
        if name not in checkers or set(checkers[name](name).get_instruction_args_keys()) != given.keys():
            raise ValueError(
                f"{name} is no instruction with {', '.join(given) or 'no arguments'}; fix the row"
            )
    _, scores = evaluate(text, names, reference["kwargs"], reference["prompt"], checkers)
    return {
        "strict": scores.binary_strict,
        "loose": scores.binary_loose,
        "instruction_strict": scores.partial_strict,
        "instruction_loose": scores.partial_loose,
        "instructions": float(len(names)),
    }


@cache
def library() -> tuple[Callable[..., Any], dict[str, type]]:
    """Return if-verifiable's judge and its checkers, made repeatable. Raises ValueError without it."""
    try:
        import langdetect
        import nltk
        from if_verifiable.common import evaluate_instructions
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise ValueError(
            f"ifeval is scored by if-verifiable, which needs Python 3.11 ({error}): {EXTRA}"
        ) from error
    require_punkt(nltk)
    langdetect.DetectorFactory.seed = 0  # else a text of two languages is now the one, now the other
    name = "keywords:letter_frequency"
    base = INSTRUCTION_DICT[name]

    class LetterFrequency(base):
        """The library counts a letter drawn at random where the prompt asks for # or !; this counts these."""

        def build_description(self, *, letter: str, **others: Any) -> str:
            text = super().build_description(letter=letter, **others)
            self._letter = letter.lower()
            return text

    return evaluate_instructions, {**INSTRUCTION_DICT, name: LetterFrequency}


def require_punkt(nltk: Any) -> None:
    """Find NLTK's data for sentences, downloaded before or bundled in llama-index-core; fetch nothing."""
    bundles = importlib.util.find_spec("llama_index")
    for folder in [None, *(bundles.submodule_search_locations or () if bundles else ())]:
        if folder is not None:
            nltk.data.path.append(str(Path(folder) / BUNDLED))
        try:
            nltk.data.find(PUNKT)
        except LookupError:
            continue
        return
    raise ValueError(
        "ifeval needs NLTK's punkt_tab to count sentences: python -m nltk.downloader punkt_tab; or, without "
        "a network, pip install --no-deps llama-index-core, which bundles it"
    )


IFEVAL = Task(
    name="ifeval",
    version=1,
    files=("ifeval.jsonl",),
    fields="`key`, `prompt`, `instruction_id_list` and `kwargs`",
    hub=("google/IFEval", None, "train"),
    ask=ask,
    judge=judge,
    weights={"instruction_strict": "instructions", "instruction_loose": "instructions"},
    max_new_tokens=1280,
)
