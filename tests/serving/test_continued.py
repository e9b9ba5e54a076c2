"""Answers that go on with the last message: the engine's own text behind it, whatever else is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='the server needs the extra: pip install "eagle-fsd[serve]"')

from starlette.testclient import TestClient
from support.serving import settings
from support.tiny_engine import CHAT, text_alone, tiny_engine
from support.tiny_tokenizer import TOOL_TEMPLATE, byte_tokenizer, tiny_tokenizer
from tokenizers import decoders

from eagle_fsd import EagleFSD, Fuzzy
from eagle_fsd.serving.app import create_app
from eagle_fsd.text.chat import ChatRefused, encode_chat

URL = "/v1/chat/completions"
BEGUN = [*CHAT, {"role": "assistant", "content": "The sky is "}]
FIELD = "continue_final_message"
OPEN: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
TRIMMING = "{% for one in messages %}<{{ one.role }}>\n{{ one.content | trim }}</>\n{% endfor %}"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(tiny_engine(), settings())) as made:
        yield made


def open_ids() -> list[int]:
    """Return the prompt's token ids, written by hand."""
    tokenizer = tiny_engine().tokenizer
    return tokenizer("<s>user: Hi\nassistant: The sky is ", add_special_tokens=False)["input_ids"]


def answer(client: TestClient, **asked: Any) -> Any:
    found = client.post(URL, json={"messages": BEGUN, "max_tokens": 20, **OPEN, **asked})
    assert found.status_code == 200, found.text
    return found.json()


def streamed(client: TestClient, **asked: Any) -> str:
    body = {"messages": BEGUN, "max_tokens": 20, **OPEN, **asked, "stream": True}
    lines = client.post(URL, json=body).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {}),
        (
            {"seed": 4, "temperature": 1.0, "threshold": 0.2},
            {"seed": 4, "temperature": 1.0, "rule": Fuzzy(0.2)},
        ),
    ],
    ids=["greedy", "fuzzy"],
)
def test_the_answer_is_the_engines_text_behind_the_message(
    client: TestClient, asked: Any, options: Any
) -> None:
    expected = text_alone(open_ids(), max_new_tokens=20, **options)
    whole = answer(client, **asked)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert whole["usage"]["prompt_tokens"] == len(open_ids())
    assert streamed(client, **asked) == expected


def test_a_prompt_that_ends_with_the_message_is_shown_and_continued_alike(client: TestClient) -> None:
    shown = client.post("/tokenize", json={"messages": BEGUN, **OPEN}).json()["tokens"]
    assert shown == open_ids()
    body = {"prompt": shown, "max_tokens": 20, "temperature": 1, "seed": 3, "n": 2, "logprobs": 2}
    twin = client.post("/v1/completions", json=body).json()["choices"]
    texts = answer(client, temperature=1, seed=3, n=2, logprobs=True, top_logprobs=2)["choices"]
    assert [one["message"]["content"] for one in texts] == [one["text"] for one in twin]
    for mine, other in zip(texts, twin, strict=True):
        assert [one["logprob"] for one in mine["logprobs"]["content"]] == other["logprobs"]["token_logprobs"]


def test_a_stop_string_ends_it(client: TestClient) -> None:
    text = text_alone(open_ids(), max_new_tokens=20)
    stop = text[6:9]
    (choice,) = answer(client, stop=stop)["choices"]
    assert choice["message"]["content"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


def test_what_is_kept_of_a_chat_is_not_read_again() -> None:
    with TestClient(create_app(tiny_engine(), settings())) as client:
        first = answer(client)["choices"][0]["message"]["content"]
        again = answer(client, messages=[*CHAT, {**BEGUN[-1], "content": BEGUN[-1]["content"] + first}])
    prompt = [*open_ids(), *tiny_engine().tokenizer(first, add_special_tokens=False)["input_ids"]]
    assert again["choices"][0]["message"]["content"] == text_alone(prompt, max_new_tokens=20)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(open_ids())


def test_without_the_field_nothing_is_continued(client: TestClient) -> None:
    """And add_generation_prompt: false alone takes the beginning of the answer away."""
    read = {}
    for name, asked in (
        ("turn", {}),
        ("true", {"add_generation_prompt": True}),
        ("false", OPEN | {FIELD: False}),
    ):
        read[name] = client.post("/tokenize", json={"messages": BEGUN, **asked}).json()["tokens"]
    closed = [*open_ids(), *tiny_engine().tokenizer("\n", add_special_tokens=False)["input_ids"]]
    assert read["false"] == closed
    assert read["turn"] == read["true"] == closed + tiny_engine().tokenizer("assistant:")["input_ids"][1:]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"messages": CHAT},
            "continue_final_message with a last message of the role user: it goes on with one",
        ),
        (
            {"add_generation_prompt": True},
            "continue_final_message beside add_generation_prompt: an answer is",
        ),
        (
            {
                "messages": [
                    *CHAT,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                    },
                ]
            },
            "continue_final_message with a last message that has tool_calls: a call is its end; send",
        ),
    ],
)
@pytest.mark.parametrize("url", [URL, "/tokenize"])
def test_what_makes_no_sense_beside_it_is_refused(
    client: TestClient, asked: Any, message: str, url: str
) -> None:
    found = client.post(url, json={"messages": BEGUN, **OPEN, **asked})
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (400, FIELD, "invalid_value")
    assert error["message"].startswith(message)


def test_a_text_to_tokenize_has_no_last_message(client: TestClient) -> None:
    error = client.post("/tokenize", json={"prompt": "x", **OPEN}).json()["error"]
    assert error["message"].startswith("continue_final_message with no messages: it goes on with one")


def test_its_first_space_is_shown() -> None:
    """Llama's tokenizers leave a space out where a text begins, which is not here."""
    tokenizer, whole = tiny_tokenizer(), tiny_engine()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    model = EagleFSD(whole.target, whole.drafter, tokenizer, base_model="tiny")
    spaces = {"max_tokens": 3, "logit_bias": {str(tokenizer.convert_tokens_to_ids(" ")): 100}}
    with TestClient(create_app(model, settings())) as client:
        assert (
            answer(client, **spaces)["choices"][0]["message"]["content"]
            == streamed(client, **spaces)
            == "   "
        )
        begun = answer(client, **spaces, continue_final_message=False, add_generation_prompt=True)
    assert begun["choices"][0]["message"]["content"] == "  "


# -- what a template makes of the last message ----------------------------------------


@pytest.mark.parametrize("content", ["The sky is", " no space at its end", "", "a\nb", "</think> x"])
def test_the_prompt_is_that_of_hugging_face(content: str) -> None:
    tokenizer, turns = tiny_tokenizer(), [*CHAT, {"role": "assistant", "content": content}]
    expected = tokenizer.apply_chat_template(turns, continue_final_message=True, return_dict=True)[
        "input_ids"
    ]
    assert encode_chat(tokenizer, turns, end="open")[0].tolist() == expected


@pytest.mark.parametrize("content", ["The sky is ", "", "x\n\n", "  y"])
def test_white_space_at_the_end_stays_where_a_template_trims_messages(content: str) -> None:
    tokenizer, turns = tiny_tokenizer(), [*CHAT, {"role": "assistant", "content": content}]
    tokenizer.chat_template = TRIMMING
    found = tokenizer.decode(encode_chat(tokenizer, turns, end="open")[0])
    assert found == f"<user>\nHi</>\n<assistant>\n{content.lstrip()}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for one in messages %}{{ one.content | upper }}{% endfor %}",
        "{% for one in messages[:-1] %}{{ one.content }}{% endfor %}",
        "{% for one in messages %}{{ one.content.split(' ')[-1] }}{% endfor %}",
        "{% for one in messages %}{{ one.content[:5] }}{% endfor %}",
    ],
    ids=["changed", "left out", "its beginning", "its end"],
)
def test_a_message_that_a_template_changes_is_refused_in_one_line(template: str) -> None:
    tokenizer, whole = tiny_tokenizer(), tiny_engine()
    tokenizer.chat_template = template
    model = EagleFSD(whole.target, whole.drafter, tokenizer, base_model="tiny")
    with TestClient(create_app(model, settings())) as client:
        found = client.post(URL, json={"messages": BEGUN, **OPEN})
        error = found.json()["error"]
        assert client.post(URL, json={"messages": BEGUN, "max_tokens": 1}).status_code == 200
    assert (found.status_code, error["param"]) == (400, FIELD)
    assert error["message"] == (
        "continue_final_message: the target's chat template leaves out, or changes, what the last message "
        "ends with, so that it cannot be continued; change it, or leave it out"
    )
    with pytest.raises(ChatRefused, match=r"cannot be continued: let the answer be a new turn$"):
        encode_chat(tokenizer, BEGUN, end="open")


# -- forms and tools ----------------------------------------


ENDS = {"stop_token_ids": [2]}  # the tiny target has no end token of its own


@pytest.fixture(scope="module")
def on_bytes() -> Iterator[TestClient]:
    whole = tiny_engine()
    model = EagleFSD(whole.target, whole.drafter, byte_tokenizer(TOOL_TEMPLATE), base_model="tiny")
    with TestClient(create_app(model, settings())) as made:
        yield made


def test_a_form_holds_for_the_new_text_alone(on_bytes: TestClient) -> None:
    pytest.importorskip("llguidance", reason='a form needs the extra: pip install "eagle-fsd[schema]"')
    turns = [*CHAT, {"role": "assistant", "content": "It is"}]
    (choice,) = answer(on_bytes, messages=turns, structured_outputs={"regex": " [0-9]{2}"}, **ENDS)["choices"]
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop" and len(text) == 3 and text[1:].isdigit()


def test_a_call_is_forced_behind_the_message(on_bytes: TestClient) -> None:
    pytest.importorskip("llguidance", reason='a form needs the extra: pip install "eagle-fsd[schema]"')
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]},
    }
    asked = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", **ENDS}
    turns = [*CHAT, {"role": "assistant", "content": "I look.\n"}]
    (choice,) = answer(on_bytes, messages=turns, max_tokens=200, parallel_tool_calls=False, **asked)[
        "choices"
    ]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {"x": 1}
