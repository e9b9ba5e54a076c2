"""Text to examples, and examples to batches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from support.training_world import (
    VOCAB,
    WIDTH,
    LetterTokenizer,
    conversation,
    noise,
    sequences,
)

from eagle_fsd.files.jsonl import read_jsonl
from eagle_fsd.training.batching import (
    add_noise,
    batch_plan,
    collate,
    features_std,
    input_sizes,
    softmax_tokens,
    split_held_out,
    tokens_of_batch,
    without_copies,
)
from eagle_fsd.training.data.examples import Example, batches_by_length, encode_turns, load_examples, turns_of
from eagle_fsd.training.data.shards import FeatureSequence


def marked(example: Example) -> str:
    return "".join(
        chr(token) if flag else "." for token, flag in zip(example.tokens, example.learn, strict=True)
    )


def test_answers_are_marked_and_end_tokens_never() -> None:
    example = encode_turns(conversation("hi", "yes", "why", "so")["conversations"], LetterTokenizer())
    assert "".join(map(chr, example.tokens)) == "S\n<u>hi#\n<a>yes#\n<u>why#\n<a>so"
    assert marked(example) == "...........>yes............>so"


def test_an_empty_answer_marks_nothing() -> None:
    example = encode_turns(conversation("hi", "", "why", "so")["conversations"], LetterTokenizer())
    assert marked(example) == "........................>so"


def test_learning_everywhere_starts_at_the_first_turn() -> None:
    example = encode_turns(conversation("hi", "yes")["conversations"], LetterTokenizer(), learn_all=True)
    assert marked(example) == ".....hi#\n<a>yes"


@pytest.mark.parametrize("first", ["u", "S", "\n", "<u>", "", " u "])
def test_words_that_stand_in_the_template_itself_hide_no_opening(first: str) -> None:
    """The template's own text is the same piece, and nothing of it is learned."""
    example = encode_turns(conversation(first, "yes")["conversations"], LetterTokenizer(), learn_all=True)
    assert "".join(map(chr, example.tokens)) == f"S\n<u>{first}#\n<a>yes"
    assert marked(example) == f".....{first}#\n<a>yes"


class BaseTokenizer(LetterTokenizer):
    """A base model's: no chat template, and a first token of its own."""

    chat_template = ""

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return super().__call__("^" * add_special_tokens + text)


def test_without_a_chat_template_an_answer_continues_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "One, two,", "completion": " three"}
    chat = conversation("hi", "yes", "why", "so")
    path.write_text(json.dumps(row) + "\n" + json.dumps(chat) + "\n")
    (example,), skipped = load_examples(path, BaseTokenizer(), 50)
    assert "".join(map(chr, example.tokens)) == "^One, two, three"
    assert marked(example) == "........., three"
    assert skipped == {"not one answer at the end, and the tokenizer has no chat template": 1}
    (example,), _ = load_examples(path, BaseTokenizer(), 50, learn_all=True)
    assert marked(example) == ".One, two, three"


@pytest.mark.parametrize("row", [{"conversations": None}, {"messages": None, "conversations": []}])
def test_a_row_whose_conversation_is_null_is_skipped_as_an_empty_one(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(conversation("a", "b")) + "\n")
    examples, skipped = load_examples(path, LetterTokenizer(), 50)
    assert len(examples) == 1 and skipped == {"empty answer": 1}


def test_files_with_mistakes_name_file_line_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="cannot be read"):
        load_examples(path, LetterTokenizer(), 50)
    path.write_text(json.dumps(conversation("a", "b")) + "\n\n{broken\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: is not JSON"):
        list(read_jsonl(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r":1: is .*, not an object"):
        list(read_jsonl(path))
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=":1: no 'conversations'"):
        load_examples(path, LetterTokenizer(), 50)
    path.write_text('{"conversations": [{"role": "user"}]}\n')
    with pytest.raises(ValueError, match=":1: turns must be"):
        load_examples(path, LetterTokenizer(), 50)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_file_that_is_one_list_says_how_it_becomes_rows(
    tmp_path: Path, name: str, indent: int | None, encoding: str
) -> None:
    path, rows = tmp_path / name, [conversation("a", "b"), conversation("c", "d")]
    path.write_text(json.dumps(rows, indent=indent), encoding=encoding)
    with pytest.raises(ValueError, match=r":1: is .* one list, `jq -c '\.\[\]'` writes its objects"):
        load_examples(path, LetterTokenizer(), 50)


def test_chats_of_every_spelling_are_the_same_turns(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, *conversation("hi", "yes")["conversations"]]
    share = [
        {"from": name, "value": turn["content"]}
        for name, turn in zip(("system", "human", "gpt"), turns, strict=True)
    ]
    plain = [{"from": turn["role"], "value": turn["content"]} for turn in turns]
    parts = [
        {**turn, "content": [{"type": "text", "text": one} for one in turn["content"]]} for turn in turns
    ]
    rows = [{key: chat} for key in ("conversations", "messages") for chat in (turns, share, plain, parts)]
    rows += [{"messages": turns, "conversations": None, "prompt": "hi"}]
    assert [turns_of(row, "here") for row in rows] == [turns] * 9
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, {"messages": share[2:]})))
    examples, skipped = load_examples(path, LetterTokenizer(), 50)
    assert examples == [encode_turns(turns, LetterTokenizer())] * 9
    assert skipped == {"answer before any question": 1}


QUESTION, ANSWER = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"})


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "hi", "completion": "yes"}, [QUESTION, ANSWER]),
        ({"prompt": [{"type": "text", "text": "hi"}], "completion": "yes"}, [QUESTION, ANSWER]),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, [QUESTION, ANSWER]),
        ({"prompt": [QUESTION, ANSWER, QUESTION], "completion": "yes"}, [QUESTION, ANSWER] * 2),
        ({"prompt": [{"from": "human", "value": "hi"}], "completion": [ANSWER]}, [QUESTION, ANSWER]),
        ({"instruction": "hi", "output": "yes"}, [QUESTION, ANSWER]),
        ({"instruction": "hi", "input": "", "output": "yes", "text": "Below is"}, [QUESTION, ANSWER]),
        ({"instruction": "hi", "input": None, "output": "yes"}, [QUESTION, ANSWER]),
        ({"instruction": "", "input": "hi", "output": "yes"}, [QUESTION, ANSWER]),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "yes"},
            [{"role": "user", "content": "Add.\n\n1, 2"}, ANSWER],
        ),
        ({"messages": None, "prompt": None, "completion": None, "instruction": "hi", "output": "yes"}, None),
        ({"messages": [], "prompt": "hi", "completion": "yes"}, None),
        ({"conversations": [], "messages": [QUESTION, ANSWER]}, None),
    ],
)
def test_pairs_of_every_kind_are_turns(row: dict[str, Any], turns: list[dict[str, str]] | None) -> None:
    """None stands for the question and the answer: a merged table's other fields are null."""
    assert turns_of(row, "here") == (turns or [QUESTION, ANSWER])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": 7, "completion": "yes"},
        {"instruction": "hi", "output": ["yes"]},
        {"prompt": [QUESTION, {"role": "user"}], "completion": [ANSWER]},
    ],
)
def test_a_malformed_pair_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"here: turns must be a list .*, and both sides of a pair must be .*; "
    ):
        turns_of(row, "here")


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"text": "x"}, r"\(keys: \['text'\]\); see eagle-fsd train head --help"),
        ({"prompt": "x"}, r"\(keys: \['prompt'\]\); let the target answer the file .* train synthesize"),
        ({"instruction": "x"}, "; let the target answer the file first"),
        ({"turns": ["x"]}, "; let the target answer the file first"),
    ],
)
def test_a_row_of_no_known_kind_is_told_the_kinds(row: dict[str, Any], remedy: str) -> None:
    kinds = (
        "no 'conversations', no 'messages', no 'prompt' with 'completion' and no 'instruction' with 'output'"
    )
    with pytest.raises(ValueError, match=f"^here: {kinds} .*{remedy}"):
        turns_of(row, "here")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "hi", "completion": None}, "empty answer"),
        ({"instruction": "hi", "output": None}, "empty answer"),
        ({"prompt": None, "completion": "yes"}, "empty answer"),
        ({"prompt": [QUESTION], "completion": []}, "empty answer"),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [{}]}, ANSWER]},
            "an answer without text, such as a call of a tool",
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": None}]},
            "an answer without text, such as a call of a tool",
        ),
    ],
)
def test_rows_whose_answer_is_null_are_skipped_and_counted(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(conversation("a", "b")) + "\n")
    examples, skipped = load_examples(path, LetterTokenizer(), 50)
    assert len(examples) == 1 and skipped == {reason: 1}


def test_a_chat_teaches_its_answers_before_a_call_of_a_tool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    result = {"role": "tool", "content": {"of": "another kind"}}
    called, early, path = tmp_path / "called.jsonl", [QUESTION, call, ANSWER], tmp_path / "plain.jsonl"
    chats = ([QUESTION, ANSWER, QUESTION, call, result], early)
    called.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    path.write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n")
    examples, skipped = load_examples(called, LetterTokenizer(), 50)
    assert examples == load_examples(path, LetterTokenizer(), 50)[0]
    assert skipped == {"an answer without text, such as a call of a tool": 1}
    line = "chats used up to an answer without text, such as a call of a tool: 1"
    assert caplog.messages[-1] == f"{called}: {line}"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"from": "human"}], "here: turns must be .* 'role' and 'content', or 'from' and 'value', and"),
        ([{"value": "hi"}], "here: turns must be"),
        ([{"from": "human", "content": "hi"}], "here: turns must be"),
        (["hi"], "here: turns must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "here: turns must be"),
        ([{"role": "user", "content": []}], "here: turns must be"),
        ({"role": "user", "content": "hi"}, "here: turns must be"),
        (
            [{"from": "bing", "value": "hi"}],
            "here: from is 'bing': it must be human, .*; rename it",
        ),
    ],
)
@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_turns_that_cannot_be_read_are_named(key: str, chat: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turns_of({key: chat}, "here")


@pytest.mark.parametrize("limit", [0, -1])
def test_no_rows_are_refused_by_name(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(conversation("a", "b")) + "\n")
    with pytest.raises(ValueError, match=f"^rows is {limit}: it must be .* at least 1; change --rows$"):
        load_examples(path, LetterTokenizer(), 50, limit=limit)
    assert len(load_examples(path, LetterTokenizer(), 50, limit=1)[0]) == 1


def test_empty_answers_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        conversation("a", "b"),
        conversation("a", " "),
        conversation("x" * 60, "late"),
        {"prompt": "p", "completion": "c"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples, skipped = load_examples(path, LetterTokenizer(), 40)
    assert len(examples) == 2
    assert skipped == {"empty answer": 1, "nothing to learn within max_length": 1}
    assert len(load_examples(path, LetterTokenizer(), 40, limit=2)[0]) == 2  # skipped rows do not count
    path.write_text(json.dumps(conversation("a", "")) + "\n")
    with pytest.raises(ValueError, match="no usable row"):
        load_examples(path, LetterTokenizer(), 40)


@pytest.mark.parametrize("refusal", [jinja2.TemplateError("not supported"), TypeError("not supported")])
def test_rows_that_a_template_refuses_are_skipped_and_counted(tmp_path: Path, refusal: Exception) -> None:
    """As Gemma's does for a system turn, and by mistake others for calls whose arguments are a text."""

    class Strict(LetterTokenizer):
        def apply_chat_template(self, turns: list[dict[str, str]], *args: Any, **kwargs: Any) -> str:
            if turns[0]["role"] == "system":
                raise refusal
            return super().apply_chat_template(turns, *args, **kwargs)

    refused = {
        "conversations": [{"role": "system", "content": "s"}, *conversation("a", "b")["conversations"]]
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(refused) + "\n" + json.dumps(conversation("a", "b")) + "\n")
    examples, skipped = load_examples(path, Strict(), 90)
    assert len(examples) == 1
    assert skipped == {"the chat template refuses it (not supported)": 1}


def test_rows_whose_history_a_template_changes_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen3's template does, which drops the thinking of earlier answers."""

    class Forgetful(LetterTokenizer):
        def apply_chat_template(
            self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
        ) -> str:
            kept = [
                turn | {"content": turn["content"].rpartition("</think>")[2]}
                if turn["role"] == "assistant"
                else turn
                for turn in turns
            ]
            return super().apply_chat_template(kept, tokenize, add_generation_prompt)

    path = tmp_path / "rows.jsonl"
    thoughts = conversation("hi", "<think>hm</think>yes", "why", "so")
    rows = [conversation("a", "b"), thoughts, conversation("hi", "yes", "why", "so"), thoughts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples, skipped = load_examples(path, Forgetful(), 90)
    assert len(examples) == 2
    assert skipped == {"the chat template renders earlier turns differently": 2}
    assert f"skipped rows: {skipped}" in caplog.text
    path.write_text(json.dumps(thoughts) + "\n")
    with pytest.raises(ValueError, match=r"no usable row \(.*renders earlier turns differently"):
        load_examples(path, Forgetful(), 90)


@pytest.mark.parametrize("template", ["{{ turns }}", None])
def test_rows_with_half_a_character_are_skipped(tmp_path: Path, template: str | None) -> None:
    """They are common in text that was scraped, and no tokenizer takes them."""

    class Plain(LetterTokenizer):
        chat_template = template

    path = tmp_path / "rows.jsonl"
    rows = [conversation("a", "b"), conversation("a", "so \ud83d"), conversation("\udc4d", "b")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples, skipped = load_examples(path, Plain(), 90)
    assert len(examples) == 1 and skipped == {"it holds half a character, which is no text": 2}


def test_the_corpus_is_read_whole(data_folder: Path) -> None:
    path = data_folder / "smollm2_corpus.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path.name} in the data folder")
    rows = list(read_jsonl(path))
    examples = [encode_turns(row["conversations"], LetterTokenizer()) for _, row in rows]
    assert len(examples) == 2252 and all(any(example.learn) for example in examples)


def test_batches_by_length_hold_every_row_once_within_the_budget() -> None:
    lengths = [5, 30, 7, 7, 12, 3, 50]
    groups = list(batches_by_length(lengths, 24))
    assert sorted(index for group in groups for index in group) == list(range(7))
    assert all(
        len(group) == 1 or len(group) * max(lengths[index] for index in group) <= 24 for group in groups
    )


def test_noise_is_uniform_seeded_and_on_the_inputs_alone() -> None:
    batch = collate(sequences())
    noisy = add_noise(batch, 0.2, 3.0, seed=1)
    added = noisy.features - batch.features
    assert 0.29 < added.max() <= 0.3 + 1e-5 and -0.3 - 1e-5 <= added.min() < -0.29
    assert abs(added.mean()) < 0.02 and added.std().item() == pytest.approx(0.6 / 12**0.5, rel=0.05)
    assert all(
        torch.equal(getattr(noisy, part), getattr(batch, part)) for part in ("goals", "next_tokens", "learn")
    )
    assert torch.equal(noisy.features, add_noise(batch, 0.2, 3.0, seed=1).features)
    assert not torch.equal(noisy.features, add_noise(batch, 0.2, 3.0, seed=2).features)
    assert add_noise(batch, 0.0, 3.0, seed=1) is batch


def test_the_features_std_is_of_what_is_learned() -> None:
    data = sequences(3)
    learned = torch.cat([one.features[one.learn] for one in data[:2]])
    assert features_std(data[:2]) == pytest.approx(learned.std().item())


def test_input_sizes_are_of_embeddings_and_features_by_dimension() -> None:
    data, table = sequences(3), noise(VOCAB, WIDTH, seed=5)
    table[:, 1] = 0.0
    features = torch.cat([one.features for one in data[:2]])
    embeddings = table[torch.cat([one.tokens for one in data[:2]])]
    want = torch.cat((embeddings, features), dim=1).square().mean(0).sqrt()
    want[1] = 0.01 * want[:WIDTH].square().mean().sqrt()  # unused: no rate without bounds
    assert torch.allclose(input_sizes(data[:2], table), want)


def test_every_epoch_visits_every_sequence_once_in_another_order() -> None:
    lengths = [5, 9, 6, 30, 4, 8, 7]
    plans = [batch_plan(lengths, 20, seed=1, epoch=epoch) for epoch in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert all(sorted(index for group in plan for index in group) == list(range(7)) for plan in plans)


def test_held_out_sequences_are_of_the_first_source_and_not_trained_on() -> None:
    drawn = set()
    for seed in range(20):
        train, held = split_held_out(20, 2, seed, 8)
        assert len(held) == 2 and sorted(train + held) == list(range(20)) and train == sorted(train)
        drawn |= set(held)
    assert drawn == set(range(8))
    for count, first, most in ((9, 8, 8), (20, 20, 19), (0, 8, 8)):
        with pytest.raises(
            ValueError, match=rf"held_out is {count}: it must be in 1\.\.{most}, .*--held-out"
        ):
            split_held_out(20, count, 3, first)
    for total, first in ((1, 1), (0, 0), (5, 0)):  # no number of them would do
        with pytest.raises(
            ValueError, match=rf"the data has {total} sequences, {first} of .*; give more data"
        ):
            split_held_out(total, 1, 3, first)


def test_copies_of_held_out_texts_are_not_trained_on() -> None:
    texts = [torch.tensor(one) for one in ([1, 2], [3], [1, 2], [1, 2, 3], [3], [2, 1])]
    assert without_copies([1, 2, 3, 4, 5], [0], texts) == [1, 3, 4, 5]
    assert without_copies([2, 3, 4, 5], [0, 1], texts) == [3, 5]
    with pytest.raises(ValueError, match=r"same 2 sequences again and again, .*give more data"):
        without_copies([2, 4], [0, 1], texts)


def test_the_softmax_runs_over_frequent_tokens_and_the_end_tokens() -> None:
    tokens = torch.tensor([1, 1, 1, 5, 5, 7])
    one = FeatureSequence(tokens, torch.ones(6, dtype=torch.bool), torch.zeros(6, WIDTH))
    data = [tokens[:2], tokens[2:]]
    assert softmax_tokens(data, VOCAB, 3, always=[20]).tolist() == [1, 5, 20]
    assert softmax_tokens(data, VOCAB, 100).tolist() == [1, 5, 7]
    assert tokens_of_batch(torch.tensor([1, 20]), collate([one])).tolist() == [1, 5, 7, 20]
