"""The target's own answers: equal to `generate` whatever the pool; files that go on; sources of prompts."""

from __future__ import annotations

import functools
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from support.tiny_models import VOCAB, greedy_alone, prompts_of, tiny_model
from support.training_world import ends_in_one_line, run_command
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel

from eagle_fsd import SamplingConfig, hub
from eagle_fsd.core.sampling import warp
from eagle_fsd.files.atomic import sole
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from eagle_fsd.text.prompt_files import find_prompt
from eagle_fsd.training.commands.synthesize import beside
from eagle_fsd.training.data import conversations
from eagle_fsd.training.data.conversations import (
    Plan,
    RowFile,
    answer_prompts,
    self_prompts,
    user_opening,
)
from eagle_fsd.training.data.prompts import gather_prompts, usable_prompts, without_overlap
from eagle_fsd.training.data.synthesis import Answer, Question, write_answers

ENDS = [5, 17, 30, 31]
NEW_TOKENS = 15
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(1.0, top_k=20, top_p=0.9)


def model_of(family: str) -> PreTrainedModel:
    model = tiny_model(family)
    model.generation_config.eos_token_id = ENDS
    return model


@functools.cache
def target_of(family: str) -> TargetModel:
    return TargetModel(model_of(family))


@functools.cache
def questions_of(mixed: bool = False, count: int = 23) -> tuple[Question, ...]:
    draw = random.Random(0)
    prompts = prompts_of([1, 1, *(draw.randint(1, 20) for _ in range(count - 2))])
    return tuple(
        Question(i, prompt, SAMPLED if mixed and i % 2 else GREEDY, seed=i)
        for i, prompt in enumerate(prompts)
    )


@functools.cache
def greedy_texts(family: str) -> list[list[int]]:
    """The greedy text of each of the questions."""
    return greedy_alone(target_of(family).model, [question.tokens for question in questions_of()], NEW_TOKENS)


def by_number(answers: Iterator[Answer]) -> dict[int, Answer]:
    found = {answer.number: answer for answer in answers}
    return dict(sorted(found.items()))


# --- the pool ---


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_answers_are_the_targets_own_greedy_texts_whatever_the_pool(family: str, rows: int) -> None:
    """Rows that take the place of finished ones, in groups, beside rows in the middle of their answers."""
    count = 8 if rows == 1 else 23  # one after the other they take longest
    target, questions = target_of(family), questions_of()[:count]
    made = by_number(write_answers(target, questions, NEW_TOKENS, rows))
    assert list(made) == list(range(len(questions)))
    for answer, text in zip(made.values(), greedy_texts(family)[:count], strict=True):
        ended = text[-1] in ENDS
        assert (answer.tokens, answer.complete) == (text[:-1] if ended else text, ended)


def test_some_of_these_answers_end_and_some_are_cut() -> None:
    made = by_number(write_answers(target_of("llama"), questions_of(), NEW_TOKENS))
    assert 3 < sum(answer.complete for answer in made.values()) < 20
    assert 1 < sum(answer.complete for answer in list(made.values())[:8]) < 8


def test_a_sampled_answer_depends_on_its_seed_alone() -> None:
    target, questions = target_of("llama"), questions_of(mixed=True)
    pools = [by_number(write_answers(target, questions, NEW_TOKENS, rows)) for rows in (3, 8)]
    assert pools[0] == pools[1]
    backwards = by_number(write_answers(target, questions[::-1][:9], NEW_TOKENS, 4))
    assert backwards == {number: pools[0][number] for number in backwards}
    greedy = by_number(write_answers(target, questions_of(), NEW_TOKENS, 8))
    assert all((pools[0][i] == greedy[i]) == (i % 2 == 0) for i in (4, 5, 6, 7, 8, 9))


def test_equal_prompts_are_read_once_and_answered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    target, (one, two, *_) = target_of("llama"), questions_of()[4:]
    texts = [one.tokens, two.tokens, one.tokens, one.tokens, two.tokens]
    questions = [Question(i, text, SAMPLED, seed=i) for i, text in enumerate(texts)]
    alone = {q.number: next(write_answers(target, [q], NEW_TOKENS)) for q in questions}
    read: list[int] = []
    prefill = TargetSession.prefill

    def counted(session: TargetSession, tokens: Tensor, lengths: list[int]) -> Tensor:
        read.append(len(tokens))
        return prefill(session, tokens, lengths)

    monkeypatch.setattr(TargetSession, "prefill", counted)
    assert by_number(write_answers(target, questions, NEW_TOKENS)) == alone
    assert read == [2]
    assert len({tuple(alone[i].tokens) for i in (0, 2, 3)}) == 3  # by their seeds


def test_sampled_tokens_follow_the_warped_law() -> None:
    """The first token of many seeds' answers, and the second behind its likeliest."""
    target, prompt, count = target_of("llama"), prompts_of((6,))[0], 3000
    questions = [Question(i, prompt, SAMPLED, seed=i) for i in range(count)]
    made = [answer.tokens for answer in write_answers(target, questions, 2, rows=1000)]
    likeliest = Counter(tokens[0] for tokens in made if tokens).most_common(1)[0][0]
    for context, drawn in (
        ([], [tokens[0] for tokens in made if tokens]),
        ([likeliest], [tokens[1] for tokens in made if tokens[:1] == [likeliest] and len(tokens) == 2]),
    ):
        with torch.inference_mode():
            logits = target.model(torch.tensor([prompt + context])).logits[:, -1]
        law = warp(logits, SAMPLED)[0]
        law[ENDS] = 0.0
        law /= law.sum()
        found = torch.tensor(drawn).bincount(minlength=VOCAB) / len(drawn)
        assert len(drawn) > 300 and (found[law == 0] == 0).all()
        assert ((found - law).abs() <= 4.5 * (law * (1 - law) / len(drawn)).sqrt()).all()


def test_an_answer_ends_where_the_positions_do() -> None:
    model = tiny_model("gpt2", n_positions=24)
    prompt = prompts_of((20,))[0]
    (answer,) = write_answers(TargetModel(model), [Question(0, prompt, GREEDY, 0)], 100)
    assert (answer.tokens, answer.complete) == (greedy_alone(model, [prompt], 4)[0], False)


@pytest.mark.parametrize("length", [0, 256])
def test_prompts_that_cannot_be_answered(length: int) -> None:
    with pytest.raises(ValueError, match=f"prompt 3 has {length} tokens: .*256 positions; leave it out"):
        next(write_answers(target_of("llama"), [Question(3, [1] * length, GREEDY, 0)], 4))


# --- files of conversations ---


class LetterTokenizer:
    """One id a character, and a chat template of one line a turn."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) % VOCAB for letter in text])

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> Any:
        text = "".join(f"<{turn['role'][0]}>{turn['content']}#\n" for turn in messages)
        text += "<a>" if add_generation_prompt else ""
        return {"input_ids": torch.tensor([self(text).input_ids])} if tokenize else text

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


class BaseTokenizer(LetterTokenizer):
    """Without a chat template, as a base model's."""

    chat_template = ""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> BatchEncoding:  # type: ignore[override]
        return BatchEncoding({"input_ids": torch.tensor([super().__call__(text).input_ids])})


PROMPTS = ["Why?", "Name three rivers.", "Sum 1 and 2.", "Sing!", "Go on."]
PLAN = Plan("tiny", samplings=(GREEDY, SAMPLED), max_new_tokens=6, rows=2, seed=3)


def answers(path: Path, plan: Plan = PLAN, prompts: list[str] = PROMPTS) -> list[dict[str, Any]]:
    return answer_prompts(target_of("llama"), LetterTokenizer(), prompts, plan, path)


def test_rows_are_conversations_in_the_prompts_order(tmp_path: Path) -> None:
    rows = answers(tmp_path / "new" / "a.jsonl")
    assert rows == [json.loads(line) for line in (tmp_path / "new" / "a.jsonl").read_text().splitlines()]
    assert [row["conversations"][0] for row in rows] == [
        {"role": "user", "content": text} for text in PROMPTS
    ]
    assert [row["temperature"] for row in rows] == [0.0, 1.0, 0.0, 1.0, 0.0]
    tokens = LetterTokenizer().apply_chat_template(rows[0]["conversations"][:1], add_generation_prompt=True)
    wanted = greedy_alone(target_of("llama").model, tokens["input_ids"].tolist(), 6)[0]
    made = [int(word) for word in rows[0]["conversations"][1]["content"].split()]
    assert made == wanted[: len(made)] and len(made) >= 5


def test_a_base_model_continues_its_prompts(tmp_path: Path) -> None:
    """Rows without a chat template are pairs, which training reads as one text."""
    tokenizer: Any = BaseTokenizer()
    target, path = target_of("llama"), tmp_path / "a.jsonl"
    rows = answer_prompts(target, tokenizer, PROMPTS, replace(PLAN, system="Go."), path)
    assert [row["prompt"] for row in rows] == [f"Go.\n\n{prompt}" for prompt in PROMPTS]
    made = [int(word) for word in rows[0]["completion"].split()]
    wanted = greedy_alone(target.model, tokenizer(rows[0]["prompt"]).input_ids.tolist(), 6)[0]
    assert made == wanted[: len(made)] and len(made) >= 5
    with pytest.raises(ValueError, match="no chat template, so that the target cannot write prompts"):
        self_prompts(target, tokenizer, 2, PLAN, tmp_path / "own.jsonl")


def test_a_system_message_is_part_of_every_conversation(tmp_path: Path) -> None:
    rows = answers(tmp_path / "a.jsonl", Plan("tiny", max_new_tokens=2, system="Be brief."))
    assert all(row["conversations"][0] == {"role": "system", "content": "Be brief."} for row in rows)


@pytest.mark.parametrize("torn", [b"", b'{"number": 4, "comp', b'{"content": "\xe2\x82'])
def test_a_stopped_run_goes_on_and_leaves_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    answers(whole)
    real = conversations.write_answers

    def killed(*arguments: Any) -> Iterator[Answer]:
        for count, answer in enumerate(real(*arguments)):
            if count == 2:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(conversations, "write_answers", killed)
    with pytest.raises(KeyboardInterrupt):
        answers(stopped)
    with stopped.open("ab") as file:
        file.write(torn)
    asked: list[int] = []
    monkeypatch.setattr(
        conversations, "write_answers", lambda t, q, *rest: asked.append(len(q)) or real(t, q, *rest)
    )
    answers(stopped)
    assert asked == [3], "finished rows are not made again"
    assert stopped.read_bytes() == whole.read_bytes()


def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before = answers(path)
    for changed, plan, prompts in (
        ("seed was 3, now 4", replace(PLAN, seed=4), PROMPTS),
        (r"prompts was \w+, now \w+", PLAN, PROMPTS[:4]),
        (r"target\.name was tiny, now other", replace(PLAN, base_model="other"), PROMPTS),
    ):
        with pytest.raises(ValueError, match=rf"a\.jsonl was made .* \({changed}\): name another --output"):
            answers(path, plan, prompts)
    assert [json.loads(line) for line in path.read_text().splitlines()] == before
    assert answers(path, replace(PLAN, rows=5)) == before


def test_a_file_of_another_chat_template_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a release that did not note the template goes on."""
    path = tmp_path / "a.jsonl"
    before = answers(path)
    monkeypatch.setattr(LetterTokenizer, "chat_template", "another")
    with pytest.raises(ValueError, match=r"a\.jsonl was made .* \(chat_template was \w+, now \w+\): name"):
        answers(path)
    settings = path.with_name("a.jsonl.settings.json")
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({name: known[name] for name in known if name != "chat_template"}))
    assert answers(path) == before


def test_answers_go_on_however_the_targets_folder_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.jsonl"
    before = answers(path, replace(PLAN, base_model="mine"))
    for name in ("mine/", str(tmp_path / "mine")):
        assert answers(path, replace(PLAN, base_model=name)) == before


def test_files_of_another_target_are_refused(tmp_path: Path) -> None:
    """Answers and prompts of its own alike, by weights and by dtype; both keep their name."""
    tokenizer, (answered, own) = LetterTokenizer(), (tmp_path / name for name in ("a.jsonl", "own.jsonl"))
    answers(answered)
    self_prompts(target_of("llama"), tokenizer, 3, PLAN, own)
    for field, model in {
        "weights": tiny_model("llama", seed=3),
        "dtype": tiny_model("llama").bfloat16(),
    }.items():
        other = TargetModel(model)
        with pytest.raises(ValueError, match=rf"a\.jsonl was made by another target.*target\.{field} was"):
            answer_prompts(other, tokenizer, PROMPTS, PLAN, answered)
        with pytest.raises(ValueError, match=rf"own\.jsonl was made by another target.*target\.{field} was"):
            self_prompts(other, tokenizer, 3, PLAN, own)


def test_empty_answers_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that ends at once, and one of blanks; a later run finds the same."""

    class Blank(LetterTokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return {2: " ", 4: ""}.get(blank.index(ids) if ids in blank else -1, "text")

    path = tmp_path / "a.jsonl"
    blank = [[int(word) for word in row["conversations"][-1]["content"].split()] for row in answers(path)]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            rows = answer_prompts(target_of("llama"), Blank(), PROMPTS, PLAN, tmp_path / "b.jsonl")
            assert [row["number"] for row in rows] == [0, 1, 3]
            assert rows == [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert caplog.text.count("2 conversations left out: the target's answer is empty") == 2


def test_a_finished_run_makes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor the answers that were empty, and without a bar; a file that was removed is made anew, whole."""

    class Blank(LetterTokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return ""

    asked: list[list[int]] = []
    real = conversations.write_answers

    def counted(target: TargetModel, questions: list[Question], *rest: Any) -> Iterator[Answer]:
        asked.append([question.number for question in questions])
        return real(target, questions, *rest)

    monkeypatch.setattr(conversations, "write_answers", counted)
    path = tmp_path / "a.jsonl"
    for bar in ("5/5 [", ""):
        assert answer_prompts(target_of("llama"), Blank(), PROMPTS, PLAN, path) == []
        said = capsys.readouterr().err
        assert bar in said and bool(said) == bool(bar)
    assert asked == [[0, 1, 2, 3, 4], []]
    path.unlink()
    assert len(answers(path)) == 5
    with pytest.raises(ValueError, match=r"seed was 3, now 4\): name another --output"):
        answers(path, replace(PLAN, seed=4))


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    plan = Plan("tiny", max_new_tokens=2, max_prompt_tokens=20)
    rows = answers(tmp_path / "a.jsonl", plan, [*PROMPTS, "long " * 30, "longer " * 200])
    assert [row["number"] for row in rows] == [0, 2, 3, 4]
    with pytest.raises(
        ValueError, match=r"max_prompt_tokens is 3: all 5 prompts are longer, .*; raise --max-p"
    ):
        answers(tmp_path / "b.jsonl", replace(plan, max_prompt_tokens=3))
    assert not (tmp_path / "b.jsonl").exists()


def test_the_file_of_rows_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"number": 0}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl was made .* \(a\.jsonl\.settings\.json is missing\)"):
        RowFile(path, {"seed": 1}).read()
    settings = path.with_name("a.jsonl.settings.json")
    settings.write_text('{"seed": ')
    with pytest.raises(
        ValueError, match=r"a\.jsonl was made .* \(a\.jsonl\.settings\.json holds nothing\): name"
    ):
        RowFile(path, {"seed": 1}).read()
    settings.write_text('{"seed": 1}')
    for row in ('{"complete": true}', '{"number": 3}'):
        path.write_text('{"number": 0, "complete": true}\n' + row + "\n")
        with pytest.raises(
            ValueError, match=r"a\.jsonl:2 has no number, or does not say .*; delete the line"
        ):
            RowFile(path, {"seed": 1}).read()


@pytest.mark.parametrize("field", ["max_new_tokens", "max_prompt_tokens", "rows"])
def test_plans_that_cannot_be(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0: .*--{field.replace('_', '-')}"):
        Plan("tiny", **{field: 0})


# --- prompts ---


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a"}, "a"),
        ({"question": "a", "answer": "b"}, "a"),
        ({"turns": ["a", "b"]}, "a"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, "a"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "a"),
        ({"conversations": [{"role": "user", "content": "a"}]}, "a"),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, "a"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant"}]}, "a"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, None),
        ({"instruction": "a", "output": "b"}, "a"),
        ({"instruction": "a", "input": "", "output": "b"}, "a"),
        ({"instruction": "a", "input": "of b", "output": "c"}, "a\n\nof b"),
        ({"prompt": None, "instruction": "a"}, "a"),
        ({"instruction": 7}, None),
        ({"conversations": [{"from": "gpt", "value": "b"}]}, None),
        ({"turns": []}, None),
        ({"turns": "a"}, None),
        ({"messages": ["a"]}, None),
        ({"prompt": 7}, None),
        ({"text": "a"}, None),
    ],
)
def test_what_a_row_asks(row: dict[str, Any], prompt: str | None) -> None:
    assert find_prompt(row) == prompt


def test_prompts_come_from_files_once_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "x"}\n{"prompt": " "}\n{"prompt": "\\ud83d"}\n{"question": "y"}\n{"prompt": "z"}\n'
    )
    (tmp_path / "b.txt").write_text("x\n")
    (tmp_path / "c.jsonl").write_text('{"turns": ["y"]}\n{"prompt": "v"}\n')
    files = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl")]
    assert usable_prompts(gather_prompts(files)) == ["x", "y", "z", "v"]
    assert caplog.messages == [
        "1 prompts left out: they hold half a character",
        "1 prompts left out: they are blank",
        "2 prompts left out: repeated",
    ]
    assert usable_prompts(gather_prompts(files, limit=4)) == ["x", "y", "v"]
    with pytest.raises(ValueError, match=r"gone\.jsonl: cannot be read"):
        gather_prompts([tmp_path / "gone.jsonl"])


@pytest.mark.parametrize("ending", ["json", "ndjson"])
@pytest.mark.parametrize(
    "text",
    ['{"prompt": "x"}\n{"prompt": "y"}', '{\n "prompt": "x"\n}', '[{"prompt": "x"}]', '["x", "y"]', "[1] ?"],
)
def test_json_of_another_ending_is_not_taken_for_one_prompt(tmp_path: Path, ending: str, text: str) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_text(text + "\n")
    with pytest.raises(
        ValueError, match=rf"rows\.{ending} is .*\.jsonl file, .* \.txt file; rename it, or .*jq"
    ):
        gather_prompts([path])
    renamed = path.rename(tmp_path / "asked.txt")
    assert gather_prompts([renamed]) == [text]


def test_a_file_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub, which may take long to say no, is not asked; a folder of files is one."""
    module = ModuleType("datasets")
    module.load_dataset = lambda name, *_, **__: iter([{"prompt": Path(name).name}])
    monkeypatch.setitem(sys.modules, "datasets", module)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(
        ValueError, match=r"rows.jsonl' is a file: .*; name its folder, or give --prompts for"
    ):
        gather_prompts([], str(tmp_path / "rows.jsonl"))
    assert gather_prompts([], str(tmp_path)) == [tmp_path.name]


def test_prompts_come_from_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    """Its splits have any names, and none is a part of another: train is not train_sft too."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    one, several = str(tmp_path / "one"), str(tmp_path / "several")
    rows = datasets.Dataset.from_list([{"prompt": "x"}, {"text": "none"}, {"prompt": "y"}])
    rows.save_to_disk(one)
    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "train_sft", "rest")}
    datasets.DatasetDict(splits).save_to_disk(several)
    assert gather_prompts([], one) == ["x", "y"] and gather_prompts([], one, "train", limit=1) == ["x"]
    assert gather_prompts([], several) == ["train"] and gather_prompts([], several, "rest") == ["rest"]
    with pytest.raises(ValueError, match=r"split 'test' cannot .*splits rest, train, train_sft and no conf"):
        gather_prompts([], several, "test")
    with pytest.raises(ValueError, match=r"'main', split 'train' cannot be read \(.*the splits train and no"):
        gather_prompts([], one, config="main")


def test_prompts_come_from_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "none"}, *({"question": f"q{n}"} for n in range(5))]
    asked: list[Any] = []
    module = ModuleType("datasets")
    module.load_dataset = lambda *names, **options: asked.append((names, options)) or iter(rows)
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert gather_prompts([], "owner/set", "test", limit=3) == ["q0", "q1", "q2"]
    assert gather_prompts([], "owner/set", "test", 1, "main") == ["q0"]
    assert asked == [(("owner/set", name), {"split": "test", "streaming": True}) for name in (None, "main")]
    with pytest.raises(ValueError, match=r"dataset_config is 'main': .*; name one with --dataset$"):
        gather_prompts([], config="main")
    with pytest.raises(ValueError, match=r"split is 'test': .*; name one with --dataset$"):
        gather_prompts([], split="test")
    assert gather_prompts([], "owner/set", limit=1) == ["q0"] and asked.pop()[1]["split"] == "train"
    with pytest.raises(ValueError, match=r"limit is 0: .* at least 1; change --limit"):
        gather_prompts([], "owner/set", limit=0)
    several = ValueError("Config name is missing.\nPick one among: ['main', 'socratic']")
    module.load_dataset = lambda *_, **__: (_ for _ in ()).throw(several)
    with pytest.raises(ValueError, match=r"'owner/set', configuration None, .*missing. Pick .* --dataset"):
        gather_prompts([], "owner/set")
    module.load_dataset = lambda *_, **__: iter(rows)

    def torn() -> Iterator[dict[str, str]]:
        yield from rows[:3]
        raise ConnectionError("the line was cut")

    module.load_dataset = lambda *_, **__: torn()
    assert gather_prompts([], "owner/set", limit=2) == ["q0", "q1"]  # what was asked for came before
    with pytest.raises(ValueError, match=r"broke off after 2 prompts \(.*cut\): .* lower --limit$"):
        gather_prompts([], "owner/set", limit=3)
    module.load_dataset = lambda *_, **__: iter(rows)
    rows[:] = [{"text": "none"}]
    with pytest.raises(ValueError, match=r"'owner/set', split 'train': no row has a prompt"):
        gather_prompts([], "owner/set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets: pip install eagle-fsd\[train\]"):
        gather_prompts([], "owner/set")


def test_prompts_that_overlap_with_an_evaluation_set_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    held = tmp_path / "held.jsonl"
    held.write_text(
        '{"turns": ["Please say: one two three four five six seven eight!"]}\n{"prompt": "Why?"}\n'
    )
    prompts = ["One two, three four five six SEVEN eight nine", "one two three four", "why", "Why not?"]
    assert without_overlap(prompts, [held]) == ["one two three four", "Why not?"]
    assert caplog.messages[-1].endswith(f" prompts left out: they overlap with {held}")
    assert without_overlap(prompts, []) == prompts
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "why not"}]
    later = {"messages": [*turns, {"role": "user", "content": "One two three four"}]}
    shared = {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": prompts[0]}]}
    held.write_text("".join(json.dumps(row) + "\n" for row in (later, shared, {"prompt": ["Why not"]})))
    assert without_overlap(prompts, [held]) == prompts[:1]
    asked = {"instruction": "Please repeat:", "input": "one two three four five six seven eight"}
    tuned = {"prompt": [{"role": "user", "content": "why"}], "completion": [{"role": "assistant"}]}
    held.write_text("".join(json.dumps(row) + "\n" for row in (asked, tuned)))
    assert without_overlap(prompts, [held]) == ["one two three four", "Why not?"]
    held.write_text('{"text": "one two three four five six seven eight"}\n')
    with pytest.raises(ValueError, match=r"held.jsonl:1: has no prompt"):
        without_overlap(prompts, [held])


def test_a_template_that_refuses_a_system_message_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = LetterTokenizer()

    def refuse(*_: object, **__: object) -> str:
        raise TemplateError("System role not supported")

    monkeypatch.setattr(tokenizer, "apply_chat_template", refuse)
    with pytest.raises(ValueError, match=r"\(System role not supported\); leave --system out"):
        user_opening(tokenizer, system="S")
    with pytest.raises(ValueError, match=r"\(System role not supported\); give --prompts"):
        user_opening(tokenizer, None)


def test_prompts_of_scripts_without_spaces_are_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["天空为什么是蓝色的", "空はなぜ青いの", "ทำไมฟ้าสีฟ้า", "Why so?", "Hi  you there", "你好", "Hello"]
    rows = [{"number": place, "complete": True, "prompt": text} for place, text in enumerate(texts)]
    monkeypatch.setattr(conversations, "fill", lambda *_: rows)
    found = self_prompts(target_of("llama"), LetterTokenizer(), len(rows), PLAN, tmp_path / "own.jsonl")
    assert found == ["天空为什么是蓝色的", "空はなぜ青いの", "ทำไมฟ้าสีฟ้า", "Hi  you there"]


def test_the_target_writes_prompts_in_the_users_place(tmp_path: Path) -> None:
    tokenizer, path = LetterTokenizer(), tmp_path / "own.jsonl"
    opening = user_opening(tokenizer, system="S")
    assert opening == tokenizer("<s>S#\n<u>").input_ids
    assert user_opening(tokenizer, None) == tokenizer("<u>").input_ids
    prompts = self_prompts(target_of("llama"), tokenizer, 12, PLAN, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(12))
    assert prompts == [row["prompt"] for row in rows if row["complete"] and len(row["prompt"].split()) > 2]
    assert 2 < len(prompts) == len(set(prompts))
    assert self_prompts(target_of("llama"), tokenizer, 12, PLAN, path) == prompts
    assert self_prompts(target_of("llama"), tokenizer, 0, PLAN, tmp_path / "none.jsonl") == []
    few = self_prompts(target_of("llama"), tokenizer, 5, PLAN, path)  # of a file that has twelve
    assert 0 < len(few) < len(prompts) and few == prompts[: len(few)]
    other = tmp_path / "other.jsonl"
    self_prompts(target_of("llama"), tokenizer, 12, replace(PLAN, seed=PLAN.seed + 1), other)
    mine, its = (
        {json.loads(line)["prompt"] for line in one.read_text().splitlines()} for one in (path, other)
    )
    assert len(mine & its) < 3  # neighbouring seeds have prompts of their own

    class Dropping(LetterTokenizer):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "nothing"

    with pytest.raises(ValueError, match=r"drops the user's words: .* give --prompts"):
        user_opening(Dropping(), None)


# --- the command ---


@pytest.mark.parametrize(
    ("name", "flag"), [("synthesize", "prompts"), ("synthesize", "exclude"), ("text", "exclude")]
)
def test_files_may_be_named_in_several_places(name: str, flag: str) -> None:
    """And a parse leaves nothing behind for the next."""
    build_parser = import_module(f"eagle_fsd.training.commands.{name}").build_parser
    paths = [Path(letter) for letter in "abc"]
    line = f"--output o --{flag} a b --{flag} c"
    for argv, wanted in ((line, paths), (line, paths), ("--output o", []), (f"--output o --{flag}", [])):
        assert getattr(build_parser().parse_args(argv.split()), flag) == wanted


def test_the_command_asks_for_a_configuration_of_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*names: Any, **_: Any) -> Iterator[dict[str, str]]:
        raise FileNotFoundError(f"asked for {names}")

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    with ends_in_one_line(r".*\(asked for \('openai/gsm8k', 'main'\)\)"):
        run_command("synthesize", f"--dataset openai/gsm8k --dataset-config main --output {tmp_path}/a")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    with ends_in_one_line(r".*split is 'train': it must be of a data set; name one with --data"):
        run_command("synthesize", f"--prompts {prompts} --split train --output {tmp_path}/a")


def use_tiny_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find a tiny model that is new each time: they pack its weights."""
    monkeypatch.setattr(hub, "resolve_target", lambda name: SimpleNamespace(name=name, gguf_file=None))
    monkeypatch.setattr(hub, "load_target", lambda *_, **__: (model_of("llama"), LetterTokenizer()))


def test_the_command_writes_with_openvino_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino", reason="this needs the extra openvino")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    use_tiny_target(monkeypatch)
    for name, flags in (
        ("torch", ""),
        ("graph", " --weight-format float32"),
        ("int8", " --weight-format int8"),
    ):
        output = tmp_path / f"{name}.jsonl"
        run_command("synthesize", f"--prompts {prompts} --output {output} --max-new-tokens 8{flags}")
    texts = {name: (tmp_path / f"{name}.jsonl").read_text() for name in ("torch", "graph", "int8")}
    assert texts["graph"] == texts["torch"] and len(texts["int8"].splitlines()) == len(PROMPTS)
    # A file is continued in the format that it was begun in.
    with ends_in_one_line(r".*target\.weight_format was float32, now int8"):
        flags = f"--output {tmp_path}/graph.jsonl --max-new-tokens 8 --weight-format int8"
        run_command("synthesize", f"--prompts {prompts} {flags}")
    with ends_in_one_line(r".*weight_format is 'packed': the target must be a \.gguf file"):
        run_command("synthesize", f"--prompts {prompts} --output {tmp_path}/x --weight-format packed")


def test_the_command_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out" / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    use_tiny_target(monkeypatch)
    line = f"--base-model tiny --prompts {prompts} --output {output} --self-prompts 8 --max-new-tokens 4"
    line += " --temperature 0 0.7"
    run_command("synthesize", line)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["conversations"][0]["content"] for row in rows][:5] == PROMPTS
    assert len(rows) > 5 and {row["temperature"] for row in rows} == {0.0, 0.7}
    record = json.loads((tmp_path / "out" / "answers.provenance.json").read_text())
    assert (record["base_model"], record["rows"]) == ("tiny", len(rows))
    with ends_in_one_line(r".*answers\.jsonl was made .*prompts was"):
        run_command("synthesize", f"{line} --exclude {prompts}")
    with ends_in_one_line("no prompts: give --prompts, --dataset or --self-prompts"):
        run_command("synthesize", f"--output {output}")
    (tmp_path / "empty.jsonl").write_text("\n")
    with ends_in_one_line(r"no prompts in .*empty\.jsonl: give --prompts"):
        run_command("synthesize", f"--prompts {tmp_path}/empty.jsonl --output {output}")
    before = output.read_text()
    held = sole(output.with_name(".answers.lock"), output, "write each row twice")
    with (
        held,
        ends_in_one_line(r".*answers\.jsonl is in use: two runs would write each row twice"),
    ):
        run_command("synthesize", line)
    assert output.read_text() == before


def test_the_last_line_accounts_for_every_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, held = tmp_path / "p.jsonl", tmp_path / "held.txt"
    asked = [*PROMPTS, PROMPTS[0], " ", "one two three four five six seven eight", "long " * 99]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    held.write_text(asked[-2])
    use_tiny_target(monkeypatch)
    caplog.set_level("INFO")
    line = f"--base-model tiny --prompts {prompts} --exclude {held} --output {tmp_path}/answers.jsonl"
    run_command("synthesize", f"{line} --max-new-tokens 4 --max-prompt-tokens 99")
    last = caplog.messages[-1]
    assert "answers.jsonl: 5 conversations of 9 prompts, " in last
    assert last.endswith(
        "; 2 left out (blank, broken or repeated); 1 left out (for --exclude); 1 left out (too long or with "
        "an empty answer)"
    )


def test_files_beside_the_rows_have_the_whole_name() -> None:
    names = ("answers-t0.7", "answers-t0.3", "answers.jsonl")
    found = [beside(Path("runs") / name, ".prompts.jsonl").name for name in names]
    assert found == ["answers-t0.7.prompts.jsonl", "answers-t0.3.prompts.jsonl", "answers.prompts.jsonl"]


def test_what_cannot_be_answered_is_found_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    monkeypatch.setattr(hub, "resolve_target", lambda _: pytest.fail("a target was looked for"))
    (tmp_path / "b.prompts.jsonl").write_text('{"number": 0}\n')
    (tmp_path / "b.jsonl").write_text("")
    line = f"--prompts {prompts} --output {output}"
    for message, argv in {
        r"no prompt is left to answer: each shares .* --exclude": f"{line} --exclude {prompts}",
        r".*gone: cannot be read": f"{line} --exclude {tmp_path}/gone --self-prompts 3",
        r"--output names .*, which is a folder": f"{line} --output {tmp_path}",
        r"--output names .*a\.jsonl\.gz: rows are written uncompressed": f"{line}.gz",
        r"--output names .*/x, where nothing can be written": f"{line} --output {prompts}/x",
        r"self_prompts is -1: .*": f"{line} --self-prompts -1",
        r"self_prompts is 2: .*b\.jsonl was begun with 1, ": (
            f"{line} --output {tmp_path}/b.jsonl --self-prompts 2"
        ),
    }.items():
        with ends_in_one_line(message):
            run_command("synthesize", argv)
    assert not output.exists()
