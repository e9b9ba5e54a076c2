"""IFEval: instructions that a program can check (arXiv 2311.07911); the library if-verifiable checks them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.tasks.base import Message, Task, text_of, user
from eagle_fsd.evaluation.tasks.source import EXTRA, Source

# What every instruction must be told. The library draws what is missing at random, and the score with it.
INSTRUCTIONS: dict[str, frozenset[str]] = {
    name: frozenset(needs)
    for name, needs in {
        "change_case:capital_word_frequency": ("capital_frequency", "capital_relation"),
        "change_case:english_capital": (),
        "change_case:english_lowercase": (),
        "combination:repeat_prompt": ("prompt_to_repeat",),
        "combination:two_responses": (),
        "detectable_content:number_placeholders": ("num_placeholders",),
        "detectable_content:postscript": ("postscript_marker",),
        "detectable_format:constrained_response": (),
        "detectable_format:json_format": (),
        "detectable_format:multiple_sections": ("num_sections", "section_spliter"),
        "detectable_format:number_bullet_lists": ("num_bullets",),
        "detectable_format:number_highlighted_sections": ("num_highlights",),
        "detectable_format:title": (),
        "keywords:existence": ("keywords",),
        "keywords:forbidden_words": ("forbidden_words",),
        "keywords:frequency": ("keyword", "frequency", "relation"),
        "keywords:letter_frequency": ("letter", "let_frequency", "let_relation"),
        "language:response_language": ("language",),
        "length_constraints:nth_paragraph_first_word": ("first_word", "nth_paragraph", "num_paragraphs"),
        "length_constraints:number_paragraphs": ("num_paragraphs",),
        "length_constraints:number_sentences": ("num_sentences", "relation"),
        "length_constraints:number_words": ("num_words", "relation"),
        "punctuation:no_comma": (),
        "startend:end_checker": ("end_phrase",),
        "startend:quotation": (),
    }.items()
}
PUNKT = "tokenizers/punkt_tab/english/"
BUNDLED = "core/_static/nltk_cache"  # llama-index-core brings the data along, for machines without a network


def ask(row: Mapping[str, Any], place: int) -> tuple[str, list[Message], dict[str, Any]]:
    names, given = row["instruction_id_list"], row["kwargs"]
    if not isinstance(names, list) or not isinstance(given, list) or not names or len(names) != len(given):
        raise ValueError("instruction_id_list and kwargs must be lists of one length")
    # The Hub's table has every argument in every row, as null where it is none.
    told = [{key: value for key, value in one.items() if value is not None} for one in given]
    for name, arguments in zip(names, told, strict=True):
        if name not in INSTRUCTIONS:
            raise ValueError(f"instruction {name!r} is none of IFEval's {len(INSTRUCTIONS)}")
        if arguments.keys() != INSTRUCTIONS[name]:
            needs = ", ".join(sorted(INSTRUCTIONS[name])) or "none"
            raise ValueError(
                f"{name} has the arguments {', '.join(sorted(arguments)) or 'none'} and not {needs}"
            )
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
    source=Source(
        ("ifeval.jsonl",),
        "`key`, `prompt`, `instruction_id_list` and `kwargs`",
        ("google/IFEval", None, "train"),
    ),
    ask=ask,
    judge=judge,
    metrics=("strict", "loose", "instruction_strict", "instruction_loose"),
    weights={"instruction_strict": "instructions", "instruction_loose": "instructions"},
    max_new_tokens=1280,
)
