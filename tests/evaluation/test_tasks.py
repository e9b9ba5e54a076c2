"""The benchmarks: files in, chats out, and scores of texts that try to mislead."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_fsd.evaluation.tasks import TASKS, cut, task_named
from eagle_fsd.evaluation.tasks.base import EXAMPLES
from eagle_fsd.evaluation.tasks.choice import (
    flexible_letter,
    strict_letter,
)
from eagle_fsd.evaluation.tasks.gsm8k import flexible_answer, strict_answer
from eagle_fsd.evaluation.tasks.humaneval import program
from eagle_fsd.evaluation.tasks.ifeval import library
from eagle_fsd.files.jsonl import read_jsonl

SUM = {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}
HOOK = {
    "id": "a1",
    "question": "Where does a coat hang?",
    "choices": {"label": ["A", "B", "C"], "text": ["oven", "hook", "sea"]},
    "answerKey": "B",
}
PLANET = {
    "question": "Which is a planet?",
    "subject": "high_school_physics",
    "choices": list("abcd"),
    "answer": 3,
}
ADD = {
    "task_id": "T/0",
    "prompt": "import math\n\n\ndef twice(x):\n    return 2 * x\n\n\ndef add(a, b):\n"
    '    """ Add two numbers, twice.\n    >>> add(1, 2)\n    6\n    """\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 6\n    assert candidate(-1, 1) == 0\n",
}
SAY = {"key": 7, "prompt": "Say hi.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
TURNS = {"question_id": 81, "category": "writing", "turns": ["Write.", "Write more."]}
ROWS = {
    "gsm8k": SUM,
    "commonsense_qa": HOOK,
    "mmlu": PLANET,
    "humaneval": ADD,
    "ifeval": SAY,
    "mt_bench": TURNS,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A JSONL file of rows, or of lines as they are."""

    def make(*rows: Any) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return make


@pytest.fixture(scope="session")
def ifeval_library() -> None:
    """if-verifiable with its data; nothing is downloaded."""
    if importlib.util.find_spec("if_verifiable") is None:
        pytest.skip("if-verifiable is not installed: pip install 'eagle-fsd[eval]'")
    try:
        library()
    except ValueError as error:
        pytest.skip(str(error))


# --- every task ---


@pytest.mark.parametrize("name", TASKS)
def test_a_row_becomes_a_sample_that_json_keeps(name: str, write: Callable[..., Path]) -> None:
    task = task_named(name)
    (sample,) = task.load(write(ROWS[name]))
    assert sample.id and task.max_new_tokens > 0
    assert json.loads(json.dumps(sample.reference)) == sample.reference
    roles = [message["role"] for message in sample.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert all(message["content"] == message["content"].strip() != "" for message in sample.messages)


IFEVAL = ("strict", "loose", "instruction_strict", "instruction_loose")
METRICS = {
    **dict.fromkeys(("gsm8k", "commonsense_qa", "mmlu"), ("strict", "flexible")),
    **{"humaneval": ("pass_at_1",), "ifeval": IFEVAL, "mt_bench": ()},
}


@pytest.mark.parametrize("name", TASKS)
def test_metrics_are_named_and_within_0_and_1(
    name: str, write: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    if name == "ifeval":
        request.getfixturevalue("ifeval_library")
    task = task_named(name)
    (sample,) = task.load(write(ROWS[name]))
    for text in ("", "The answer is", "x" * 1000, "\n\n```", "\0\udcff"):
        scores = task.score(sample.reference, text)
        assert [*scores] == [*METRICS[name], *dict.fromkeys(task.weights.values())]
        assert all(0 <= scores[metric] <= 1 for metric in METRICS[name])


def test_no_task_of_that_name() -> None:
    with pytest.raises(ValueError, match=r"task is 'gsm9k': it must be one of gsm8k, commonsense_qa, mmlu, "):
        task_named("gsm9k")
    with pytest.raises(ValueError, match=r"task is \[\]"):
        task_named([])


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((), "abc\nQ: d\nP: e"),
        (("\nP:",), "abc\nQ: d"),
        (("\nP:", "\nQ:"), "abc"),
        (("abc",), ""),
        (("z",), None),
    ],
)
def test_cut_ends_at_the_first_stop(stops: tuple[str, ...], expected: str | None) -> None:
    text = "abc\nQ: d\nP: e"
    found = cut(text, stops)
    assert found == (text if expected is None else expected)
    assert cut(found, stops) == found


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        cut("a", ("b", ""))


# --- files ---


def test_limit_and_skip_take_a_stretch(write: Callable[..., Path]) -> None:
    path = write(*[{**SUM, "question": f"{n}?"} for n in range(10)])
    task = task_named("gsm8k")
    every = task.load(path)
    assert [sample.id for sample in every] == [str(n) for n in range(10)]
    assert task.load(path, limit=3, skip=4) == every[4:7]
    assert task.load(path, skip=8) == task.load(path, limit=100, skip=8) == every[8:]
    with pytest.raises(ValueError, match=r"skip is 10: .* has 10 samples; lower it"):
        task.load(path, skip=10)
    for wrong in ({"limit": 0}, {"skip": -1}, {"limit": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
            task.load(path, **wrong)


def test_a_folder_gives_the_file_of_the_tasks_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps(SUM))
    assert len(task_named("gsm8k").load(tmp_path)) == 1
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path))
    assert len(task_named("gsm8k").load()) == 1
    with pytest.raises(ValueError, match=r": has no mmlu.jsonl, the file of mmlu; put it there, "):
        task_named("mmlu").load()


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("gsm8k", "{", "rows.jsonl:2: is not JSON"),
        ("gsm8k", "[1]", "not an object; repair or delete it"),
        ("gsm8k", {"question": "1?"}, "rows.jsonl:2: has no 'answer'; a row of gsm8k needs `question`, and"),
        ("gsm8k", {**SUM, "answer": "two"}, "rows.jsonl:2: answer does not end in `#### N`"),
        ("gsm8k", {**SUM, "answer": "#### two"}, "rows.jsonl:2: answer does not end in `#### N`"),
        ("gsm8k", {**SUM, "question": 3}, "rows.jsonl:2: question is 3: it must be text"),
        ("gsm8k", {**SUM, "id": "0"}, "rows.jsonl:2: sample '0' is there twice"),
        ("commonsense_qa", {**HOOK, "answerKey": ""}, "jsonl:2: answer is '': it must be one of A, B, C"),
        ("commonsense_qa", {**HOOK, "choices": ["a"]}, "rows.jsonl:2: "),
        ("commonsense_qa", {**HOOK, "choices": {"label": ["A"], "text": ["a", "b"]}}, "jsonl:2: 2 options"),
        ("commonsense_qa", {**HOOK, "choices": {"label": ["A", "A"], "text": ["a", "b"]}}, "jsonl:2: 2 op"),
        ("mmlu", {**PLANET, "answer": 4}, "rows.jsonl:2: answer is 4: it must be an option's number"),
        ("mmlu", {**PLANET, "answer": "D"}, "rows.jsonl:2: answer is 'D'"),
        ("mmlu", {**PLANET, "choices": ["a", 2, "c", "d"]}, "rows.jsonl:2: an option is not text"),
        ("humaneval", {**ADD, "entry_point": "sub"}, "rows.jsonl:2: prompt does not define sub"),
        ("humaneval", {**ADD, "test": ""}, "rows.jsonl:2: test is ''"),
        ("ifeval", {**SAY, "kwargs": []}, "rows.jsonl:2: instruction_id_list and kwargs"),
        ("ifeval", {**SAY, "kwargs": [None]}, "rows.jsonl:2: "),
        ("mt_bench", {**TURNS, "turns": []}, "rows.jsonl:2: turns is []"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_on_one_line(name: str, row: Any, said: str, write: Callable[..., Path]) -> None:
    path = write({**ROWS[name], "id": "0", "key": 0, "task_id": "0", "question_id": 0}, row)
    with pytest.raises(ValueError) as caught:
        task_named(name).load(path)
    assert said in str(caught.value) and str(path.parent) in str(caught.value)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none.jsonl: cannot be read \(No such file or directory\); name a JSONL"
    ):
        task_named("gsm8k").load(tmp_path / "none.jsonl")


def test_half_a_last_line_may_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": 2}\n{"a": "\xc3')
    assert list(read_jsonl(path, torn=True)) == [(1, {"a": 1}), (3, {"a": 2})]
    with pytest.raises(ValueError, match=r"rows.jsonl:4: is not JSON"):
        list(read_jsonl(path))


def test_rows_of_another_version_are_refused() -> None:
    task = replace(task_named("gsm8k"), version=2)
    task.require_version(2)
    for other in (1, None, "2"):
        with pytest.raises(ValueError, match=rf"version is {other!r}: gsm8k is version 2 here, .*; generate"):
            task.require_version(other)


def test_the_hubs_rows_pass_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its IFEval has every argument in every row, as null where an instruction has none."""
    monkeypatch.delenv("EAGLE_FSD_DATA", raising=False)
    asked = []

    def load_dataset(*args: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((*args, options))
        return [{**SAY, "kwargs": [{"num_words": None, "relation": None}]}, {**SAY, "key": 8, "kwargs": []}]

    library = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(
        ValueError, match=r"google/IFEval:2: instruction_id_list and kwargs .*; a row of ifeval"
    ):
        task_named("ifeval").load()
    assert asked == [("google/IFEval", None, {"split": "train"})]
    library.load_dataset = lambda *_, **__: [{**SAY, "kwargs": [{"num_words": None}]}]
    assert task_named("ifeval").load()[0].reference["kwargs"] == [{}]

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    library.load_dataset = offline
    with pytest.raises(
        ValueError, match=r"gsm8k cannot be loaded from the Hub \(no route to host\): give a JSONL"
    ):
        task_named("gsm8k").load()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"gsm8k comes from the Hub through datasets: pip install 'eagle-fsd\[eval"
    ):
        task_named("gsm8k").load()


# --- gsm8k ---


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("2 + 3 = 5. The answer is 5.", "5", "5"),
        ("the answer is: $1,234.50!", "1234.5", "1234.5"),
        ("#### -7", "-7", "-7"),
        ("#### \N{MINUS SIGN}7", "-7", "-7"),
        ("#### 1,000,000", "1000000", "1000000"),
        ("**Answer:** 18", "18", "18"),
        ("**Answer**: **18** eggs", "18", "18"),
        (r"The answer is $\boxed{18}$.", "18", "18"),
        (r"The final answer is \$18.00", "18", "18"),
        ("The answer is 18 dollars for 3 days", "18", "3"),
        ("The answer is 5. The answer is 6.", "5", "6"),
        ("The answer is five. The answer is 6.", "6", "6"),
        ("So 72 - 47 = 25 rolls", None, "25"),
        ("That is 72-47", None, "47"),
        ("It was (3)-4", None, "4"),
        ("It fell to -4", None, "-4"),
        ("- 12 apples", None, "12"),
        ("half is .5", None, "0.5"),
        ("12,34", None, "34"),
        ("nothing", None, None),
        ("The answer is unknown", None, None),
        ("", None, None),
    ],
)
def test_numbers_are_found(text: str, strict: str | None, flexible: str | None) -> None:
    assert strict_answer(text) == (strict and Decimal(strict))
    assert flexible_answer(text) == (flexible and Decimal(flexible))


def test_a_number_is_right_however_it_is_written(write: Callable[..., Path]) -> None:
    task = task_named("gsm8k")
    (sample,) = task.load(write({**SUM, "answer": "#### 1,200"}))
    assert task.score(sample.reference, "The answer is $1200.00.") == {"strict": 1.0, "flexible": 1.0}
    assert task.score(sample.reference, "1,200") == {"strict": 0.0, "flexible": 1.0}
    assert task.score(sample.reference, "The answer is 1201.") == {"strict": 0.0, "flexible": 0.0}
    run_on = "It is 1,200.\n\nProblem: What is 7?"
    assert task.score(sample.reference, run_on)["flexible"] == 1.0


def test_the_examples_are_eight_with_right_sums_and_in_no_split(data_folder: Path) -> None:
    assert len(EXAMPLES["gsm8k"]) == 8
    for _, said in EXAMPLES["gsm8k"]:
        assert strict_answer(said) == flexible_answer(said) is not None
        sums = re.findall(r"([\d.]+(?: [-+*/] [\d.]+)+) = (\d+(?:\.\d+)?)", said)
        assert sums and all(eval(left) == float(right) for left, right in sums)
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        questions = {row["question"] for _, row in read_jsonl(data_folder / name)}
        assert not questions & {question for question, _ in EXAMPLES["gsm8k"]}


# --- multiple choice ---


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("A hook holds it. The answer is (B).", "B", "B"),
        ("the answer is B", "B", "B"),
        ("Answer: b) hook", None, None),
        ("Answer: (b)", "B", "B"),
        ("**Answer:** **C**", "C", "C"),
        (r"The answer is $\boxed{D}$.", "D", "D"),
        ("The correct answer is option D: sea", "D", "D"),
        ("The answer is (A). The answer is (B).", "A", "A"),
        ("The answer is not (A) but (B).", None, "B"),
        ("The answer is a hook, which is (B).", None, "B"),
        ("The answer is Bob.", None, None),
        ("The answer is (E).", None, None),
        ("The answer is I'd say D", None, None),
        ("B", None, "B"),
        ("**B**\nbecause", None, "B"),
        ("B. hook", None, "B"),
        ("(C) sea", None, "C"),
        ("A coat hangs on it", None, None),
        ("Dogs bark", None, None),
        ("(A) is wrong and (C) is right", None, "A"),
        ("Not (A), so (C)", None, "C"),
        ("", None, None),
    ],
)
def test_letters_are_found(text: str, strict: str | None, flexible: str | None) -> None:
    assert strict_letter(text, "ABCD") == strict
    assert flexible_letter(text, "ABCD") == flexible


@pytest.mark.parametrize(("name", "right"), [("commonsense_qa", "B"), ("mmlu", "D")])
def test_choices_are_shown_and_judged(name: str, right: str, write: Callable[..., Path]) -> None:
    task = task_named(name)
    (sample,) = task.load(write(ROWS[name]))
    asked = sample.messages[-1]["content"]
    assert all(f"\n({letter}) " in asked for letter in sample.reference["letters"])
    assert ("high school physics" in asked) == (name == "mmlu")
    for letter in sample.reference["letters"]:
        assert task.score(sample.reference, f"So. The answer is ({letter}).")["strict"] == (letter == right)
    run_on = "It is ({}).\nQuestion: Next? The answer is (A)."
    assert task.score(sample.reference, run_on.format(right)) == {"strict": 0.0, "flexible": 1.0}


def test_the_examples_answer_in_the_form_asked_for() -> None:
    for examples, letters in ((EXAMPLES["commonsense_qa"], "ABCDE"), (EXAMPLES["mmlu"], "ABCD")):
        assert all(len(options) == len(letters) for _, options, _ in examples)
        answers = [strict_letter(said, letters) for _, _, said in examples]
        assert None not in answers and len(set(answers)) == len(answers), (
            "a habit of one letter is no example"
        )


# --- humaneval ---

BODY = "    return twice(a) + twice(b)\n"
WHOLE = f"def add(a, b):\n{BODY}"


@pytest.mark.parametrize(
    "text",
    [
        BODY,
        BODY + "\nThis adds the numbers.",
        "return twice(a) + twice(b)",
        WHOLE,
        f"Here is the function:\n\n{WHOLE}\nIt works like this.",
        f"Sure!\nimport os\nfrom math import pi\n\n{WHOLE}\n\nprint(add(1, 'x'))",
        f"```python\n{WHOLE}```\nDone.",
        f"```\n{WHOLE}```",
        f"Sure:\n```python\n{WHOLE}",
        f"Use it:\n```bash\npython x.py\n```\n```python\n{WHOLE}```",
        f"```python\ndef other():\n    pass\n```\nor\n```py\n{WHOLE}```",
        "1. Like this:\n   ```python\n   def add(a, b):\n       return twice(a) + twice(b)\n   ```",
        f"```python\n{ADD['prompt']}{BODY}```",
        f"```python\n{BODY}```",
        "```python\ndef add(a: int,\n        b: int) -> int:\n    # math is imported by the prompt\n"
        "    return math.floor(twice(a + b))\n```",
        f"def helper(x):\n    return x\n\n\nLIMIT = 3\n\n\n{WHOLE}",
    ],
)  # fmt: skip
def test_code_is_found_in_every_dress(text: str, write: Callable[..., Path]) -> None:
    task = task_named("humaneval")
    (sample,) = task.load(write(ADD))
    assert task.score(sample.reference, text) == {"pass_at_1": 1.0}, program(sample.reference, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "    pass\n",
        "I cannot.",
        "```python\n```",
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```python\ndef add(a, b):\n    raise SystemExit\n```",
        "def add(a, b):\n    import os\n    os._exit(0)\n",
        f"```python\n{WHOLE}",
    ],
)
def test_wrong_programs_fail(text: str, write: Callable[..., Path]) -> None:
    """The last one is right but for a cut inside its last line."""
    task = task_named("humaneval")
    (sample,) = task.load(write(ADD))
    text = text[:-4] if text.endswith(WHOLE) else text
    assert task.score(sample.reference, text) == {"pass_at_1": 0.0}


def solutions(folder: Path) -> list[tuple[Any, str]]:
    rows = [row for _, row in read_jsonl(folder / "humaneval.jsonl")]
    return list(
        zip(task_named("humaneval").load(folder), [row["canonical_solution"] for row in rows], strict=True)
    )


def check_solutions(found: list[tuple[Any, str]]) -> None:
    task = task_named("humaneval")
    for sample, solution in found:
        whole = f"```python\n{sample.reference['prompt']}{solution}```"
        assert task.score(sample.reference, solution)["pass_at_1"] == 1.0, sample.id
        assert task.score(sample.reference, whole)["pass_at_1"] == 1.0, sample.id
        assert task.score(sample.reference, "")["pass_at_1"] == 0.0, sample.id


def test_the_authors_solutions_pass_and_no_body_fails(data_folder: Path) -> None:
    """Those whose prompt defines a helper, and one more."""
    found = solutions(data_folder)
    assert len(found) == 100
    check_solutions([found[number] for number in (0, 10, 38)])


@pytest.mark.slow
def test_all_of_the_authors_solutions_pass_and_no_body_fails(data_folder: Path) -> None:
    check_solutions(solutions(data_folder))


# --- ifeval ---

LONG = "This is a plain English sentence about the weather in the north of the country."
FOLLOWED: dict[str, tuple[dict[str, Any], str, str]] = {  # arguments, a text that follows, one that does not
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, "It is VERY, VERY cold", "It is VERY cold"),
    "change_case:english_capital": ({}, LONG.upper(), LONG),
    "change_case:english_lowercase": ({}, LONG.lower(), LONG),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Name a river."}, "name a river. The Rhine.", "The Rhine. Name a river."),
    "combination:two_responses": ({}, "One.\n******\nTwo.", "One.\n******\nOne."),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] in [city]", "[name] in city"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\nP.S. Write!", "Bye. PS: Write!"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes"),
    "detectable_format:json_format": ({}, '```json\n{"a": [1, 2]}\n```', '{"a": [1, 2}'),
    "detectable_format:multiple_sections": (
        {"num_sections": 2, "section_spliter": "SECTION"}, "SECTION 1\nSECTION 2", "SECTION 1\nSection 2"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a"),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and *b*", "*a* and b"),
    "detectable_format:title": ({}, "<<A day>>\nText.", "< <A day> >\nText."),
    "keywords:existence": ({"keywords": ["sun", "moon"]}, "Sun and MOON.", "The sun."),
    "keywords:forbidden_words": ({"forbidden_words": ["sun"]}, "Sunny days.", "The Sun."),
    "keywords:frequency": ({"keyword": "sun", "frequency": 2, "relation": "less than"}, "Sun.", "Sun, sun."),
    "keywords:letter_frequency": (
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Quiet Qatar.", "Quiet."),
    "language:response_language": (
        {"language": "de"}, "Das Wetter im Norden des Landes ist heute sehr schlecht.", LONG),
    "length_constraints:nth_paragraph_first_word": (
        {"first_word": "then", "nth_paragraph": 2, "num_paragraphs": 2}, "A.\n\n'Then, b.", "Then.\n\nB."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "One.\n***\nTwo.", "One.\n\nTwo."),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"}, "Mr. Smith came. He sat.", "He came. He sat. He ate."),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"}, "It's so.", "So what?"),
    "punctuation:no_comma": ({}, "One; two.", "One, two."),
    "startend:end_checker": ({"end_phrase": "Is that all?"}, 'So. "Is that ALL?"', "Is that all? Yes."),
    "startend:quotation": ({}, ' "All of it." ', '"All" of it.'),
}  # fmt: skip


def ifeval_reference(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "Name a river.", "instruction_id_list": [name], "kwargs": [arguments]}


@pytest.mark.usefixtures("ifeval_library")
def test_every_instruction_has_its_pair_of_texts() -> None:
    _, checkers = library()
    assert len(FOLLOWED) == 25 and FOLLOWED.keys() == checkers.keys()
    with pytest.raises(ValueError, match="no_comma is no instruction with n; fix the row"):
        task_named("ifeval").score(ifeval_reference("punctuation:no_comma", {"n": 1}), "x")


@pytest.mark.usefixtures("ifeval_library")
@pytest.mark.parametrize("name", FOLLOWED)
def test_an_instruction_is_followed_or_not(name: str) -> None:
    task = task_named("ifeval")
    arguments, follows, breaks = FOLLOWED[name]
    reference = ifeval_reference(name, arguments)
    yes, no = (task.score(reference, text) for text in (follows, breaks))
    assert yes == dict.fromkeys(IFEVAL, 1.0) | {"instructions": 1.0}
    assert no == dict.fromkeys(IFEVAL, 0.0) | {"instructions": 1.0}
    assert task.score(reference, " \n")["loose"] == 0.0


@pytest.mark.usefixtures("ifeval_library")
def test_loose_forgives_the_first_line_the_last_and_asterisks() -> None:
    task = task_named("ifeval")
    reference = ifeval_reference("punctuation:no_comma", {})
    for text in ("Sure, here it is:\nText.", "Text.\nBye, then."):
        assert {k: task.score(reference, text)[k] for k in ("strict", "loose")} == {
            "strict": 0.0,
            "loose": 1.0,
        }
    quoted = ifeval_reference("startend:quotation", {})
    assert task.score(quoted, '*"All."*')["strict"] == 0.0 and task.score(quoted, '*"All."*')["loose"] == 1.0


@pytest.mark.usefixtures("ifeval_library")
def test_a_prompt_is_followed_only_as_a_whole() -> None:
    task = task_named("ifeval")
    both = {
        "prompt": "p",
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation", "detectable_format:title"],
        "kwargs": [{}, {}, {}],
    }
    assert task.score(both, "Plain") == {
        "strict": 0.0,
        "loose": 0.0,
        "instruction_strict": 1 / 3,
        "instruction_loose": 1 / 3,
        "instructions": 3.0,
    }


@pytest.mark.usefixtures("ifeval_library")
def test_a_symbol_is_counted_where_one_is_asked_for() -> None:
    """The library would count a letter drawn at random."""
    task = task_named("ifeval")
    reference = ifeval_reference(
        "keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}
    )
    for seed in range(20):
        random.seed(seed)
        assert task.score(reference, "##")["strict"] == 1.0
        assert task.score(reference, "# " + "abcdefghijklmnopqrstuvwxyz" * 3)["strict"] == 0.0


@pytest.mark.usefixtures("ifeval_library")
def test_all_prompts_can_be_scored_and_the_score_repeats(data_folder: Path) -> None:
    task = task_named("ifeval")
    samples = task.load(data_folder)
    assert len(samples) == 400
    assert {name for sample in samples for name in sample.reference["instruction_id_list"]} == FOLLOWED.keys()
    text = "Guten Tag. This is a test, and ein Test. BYE"
    scores = [task.score(sample.reference, text) for sample in samples]
    random.seed(1)
    assert scores[::10] == [task.score(sample.reference, text) for sample in samples[::10]]
    assert 0 < sum(score["strict"] for score in scores) < 400


def test_without_the_library_or_its_data_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    task = task_named("ifeval")
    (sample,) = task.load(write(SAY))
    library.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "if_verifiable.common", None)
            patch.setitem(sys.modules, "if_verifiable", None)
            with pytest.raises(ValueError, match=r"ifeval is scored by if-verifiable.*eagle-fsd\[eval\]"):
                task.score(sample.reference, "hi")
        if importlib.util.find_spec("if_verifiable") is None:
            return
        import nltk

        def nothing(_: str) -> None:
            raise LookupError

        with monkeypatch.context() as patch:
            patch.setattr(nltk.data, "find", nothing)
            patch.setattr(nltk.data, "path", [])
            with pytest.raises(
                ValueError, match=r"needs NLTK's punkt_tab .*: python -m nltk.downloader punkt_tab"
            ):
                task.score(sample.reference, "hi")
    finally:
        library.cache_clear()


# --- the shared files ---


@pytest.mark.parametrize(
    ("name", "count"), [("gsm8k", 1000), ("humaneval", 100), ("ifeval", 400), ("mt_bench", 40)]
)
def test_the_shared_files_load_as_a_whole(name: str, count: int, data_folder: Path) -> None:
    samples = task_named(name).load(data_folder)
    assert len({sample.id for sample in samples}) == len(samples) == count


def test_gsm8ks_own_solutions_are_right(data_folder: Path) -> None:
    task = task_named("gsm8k")
    rows = [row for _, row in read_jsonl(data_folder / "gsm8k_test.jsonl")]
    scores = [
        task.score(sample.reference, row["answer"])
        for sample, row in zip(task.load(data_folder), rows, strict=True)
    ]
    assert all(score == {"strict": 1.0, "flexible": 1.0} for score in scores)


def test_mt_bench_asks_the_first_turn_and_keeps_the_others(write: Callable[..., Path]) -> None:
    task = task_named("mt_bench")
    (sample,) = task.load(write(TURNS))
    assert sample.id == "81" and [m["content"] for m in sample.messages] == ["Write."]
    assert sample.reference["turns"] == TURNS["turns"]
    assert task.score(sample.reference, "text") == {}
    (hub,) = task.load(write({"prompt_id": 5, "prompt": ["Write."], "category": "writing"}))
    assert hub.id == "5"
