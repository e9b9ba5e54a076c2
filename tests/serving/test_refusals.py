"""Requests that would cost much or fail inside: they are refused early, and by the name of the field."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient
from support.serving import settings
from support.tiny_engine import CHAT, tiny_engine
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.entry.json_body import read_json
from eagle_fsd.serving.prompts import PromptReader
from eagle_fsd.serving.requests.anthropic import MessagesRequest
from eagle_fsd.serving.requests.completions import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from eagle_fsd.serving.requests.responses import ResponsesRequest
from eagle_fsd.text.chat import encode_chat

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(tiny_engine(), settings()), raise_server_exceptions=False) as made:
        yield made


LONG = "x" * 50_000
FUNCTION = {"type": "function", "function": {"name": "f"}}


def refusal(client: TestClient, path: str = CHATS, **body: Any) -> dict[str, Any]:
    """Return the error of a request, which must be the client's fault and say so on one line."""
    if path == CHATS:
        body = {"messages": CHAT, **body}
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    return error


# -- more texts than find room ----------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "begins"),
    [
        (CHATS, {"n": 73}, "n", "n is 73: at most 72 texts"),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 37}, "n", "n is 37 for 2 prompts: at most 72 texts"),
        (COMPLETIONS, {"prompt": ["a"] * 73}, "prompt", "prompt has 73 texts: at most 72 are taken"),
        (COMPLETIONS, {"prompt": ["a"] * 73, "n": 2}, "prompt", "prompt has 73 texts: at most 72 are taken"),
    ],
)
def test_too_many_texts_are_refused_before_any_is_encoded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str, begins: str
) -> None:
    encoded: list[Any] = []
    encode = PromptReader.encode
    monkeypatch.setattr(
        PromptReader, "encode", lambda self, *asked: encoded.append(asked) or encode(self, *asked)
    )
    error = refusal(client, path, **body)
    assert error["param"] == param and error["message"].startswith(begins)
    assert not encoded


def test_as_many_texts_as_find_room_are_taken(client: TestClient) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 36, "max_tokens": 1})
    assert len(answer.json()["choices"]) == 72


def test_an_error_names_no_field_that_the_request_has_not(client: TestClient) -> None:
    error = refusal(client, rule="js:0.3:child=none")
    assert error["message"].startswith("child ") and error["param"] is None


def test_a_lossless_rule_with_values_is_answered_and_told(client: TestClient) -> None:
    """It is the only rule whose description leaves out the values that it has by default."""
    asked = {"messages": CHAT, "max_tokens": 3, "rule": "lossless:share_noise=false"}
    timings = client.post(CHATS, json=asked).json()["timings"]
    assert (timings["rule"], timings["threshold"], timings["share_noise"]) == ("lossless", 0, False)


# -- names of other servers ----------------------------------------


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        (CHATS, "treshold", "threshold"),
        (CHATS, "max_new_tokens", "max_completion_tokens"),
        (COMPLETIONS, "n_predict", "max_tokens"),
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (CHATS, "max_output_tokens", "max_completion_tokens"),
        (CHATS, "repeat_penalty", "repetition_penalty"),
        (RESPONSES, "response_format", "text"),
        (CHATS, "grammar", "structured_outputs"),
        (CHATS, "stop_sequences", "stop"),
        (CHATS, "enable_thinking", "chat_template_kwargs"),
        (CHATS, "mirostat", None),
    ],
)
def test_an_unknown_field_is_refused_with_the_one_that_is_meant(
    client: TestClient, path: str, name: str, meant: str | None
) -> None:
    prompt = {COMPLETIONS: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}}.get(path, {})
    error = refusal(client, path, **prompt, **{name: 1})
    assert (error["param"], error["code"]) == (name, "unknown_field")
    remedy = f"write {meant} if that is meant, else leave it out" if meant else "leave it out"
    assert error["message"] == f"{name} is not a field of this request: {remedy}"


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "/v1/chat/completions is one; end the client's base URL with /v1"),
        ("/v1/v1/responses", "/v1/responses is one; "),
        (f"{CHATS}/chat/completions", "/v1/chat/completions is one; "),
        ("/v1/v1/messages", "/v1/messages is one; leave /v1 out"),
        ("/v1/tokenize", "/tokenize is one; leave /v1 out"),
        ("/v1/health", "/health is one; leave /v1 out"),
        ("/v1/embeddings", "it writes texts alone; ask another server"),
        ("/v1/responses/resp_1", "no answer is stored; send all turns"),
        ("/api/generate", "/openapi.json lists them"),
    ],
)
def test_a_path_that_is_no_route_is_refused_with_what_helps(
    client: TestClient, path: str, remedy: str
) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"{path} is no route of this server: {remedy}")


# -- values that cannot be read ----------------------------------------


def test_an_endless_threshold_is_sent_as_it_is_told(client: TestClient) -> None:
    asked = {"messages": CHAT, "max_tokens": 3, "threshold": "inf"}
    assert client.post(CHATS, json=asked).json()["timings"]["threshold"] == "inf"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHATS, {"threshold": "high"}, "threshold is 'high': it must be a number of at least 0, \"inf\" or "),
        (CHATS, {"threshold": [1]}, "threshold is [1]: it must be a number of at least 0, "),
        (CHATS, {"threshold": True}, "threshold is true: it must be a number of at least 0, "),
        (CHATS, {"threshold": 10**400}, "threshold is 1000"),
        (
            CHATS,
            {"stop": 3},
            "stop is 3: it must be a string, or a list of strings; send that, or leave it out",
        ),
        (CHATS, {"stop": ["a", 3]}, 'stop is ["a", 3]: it must be a string, or a list of strings'),
        (CHATS, {"rule": "js:x"}, "rule is 'js:x': threshold is 'x': it must be a number; correct it"),
        (CHATS, {"rule": "foo"}, "rule is 'foo': it must be one of lossless"),
        (
            COMPLETIONS,
            {"prompt": ["a", 1]},
            'prompt is ["a", 1]: it must be a text, several texts, token ids',
        ),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt is [1.5]: it must be a text"),
        (COMPLETIONS, {"prompt": [[1], 2]}, "prompt is [[1], 2]: it must be a text"),
        (COMPLETIONS, {"prompt": 3}, "prompt is 3: it must be a text"),
        (COMPLETIONS, {"prompt": [True]}, "prompt is [true]: it must be a text"),
    ],
)
def test_a_value_of_another_kind_is_told_the_whole_rule(
    client: TestClient, path: str, body: Any, message: str
) -> None:
    error = refusal(client, path, **body)
    assert error["message"].startswith(message) and error["param"] == next(iter(body))
    assert "Input should" not in error["message"] and "; " in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": True}, "temperature is true: Input should be a valid number"),
        ({"bad_words": [None]}, "bad_words.0 is null: Input should be a valid string"),
        ({"top_k": {"a": [False]}}, 'top_k is {"a": [false]}: Input should be a valid integer'),
        ({"stream": True, "stream_options": True}, "stream_options is true: Input should be a JSON object"),
        (
            {"messages": [{"role": "user", "content": [{"type": True, "text": "a"}]}]},
            "content has a part of type true: only text and images are read here; leave it out",
        ),
    ],
)
def test_a_value_is_shown_as_json_writes_it(client: TestClient, body: Any, message: str) -> None:
    assert refusal(client, **body)["message"] == message


@pytest.mark.parametrize("content", [3, {"type": "text", "text": "a"}, ["a"], [3]])
def test_content_of_another_kind_is_told_the_whole_rule(client: TestClient, content: Any) -> None:
    error = refusal(client, messages=[{"role": "user", "content": content}])
    shown = json.dumps(content)
    assert error["message"].startswith(f"content is {shown}: it must be a text, or a list of parts such")
    assert error["param"] == "messages.0.content" and error["message"].endswith("; send one of these")


@pytest.mark.parametrize(
    "body",
    [
        {"model": LONG},
        {"divergence": LONG, "threshold": 0.1},
        {"logit_bias": {LONG: 1}},
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": LONG}}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_long_value_is_cut_in_its_error(client: TestClient, body: Any) -> None:
    answer = client.post(CHATS, json={"messages": CHAT, **body})
    assert answer.status_code in (400, 404) and "xxxx..." in answer.json()["error"]["message"]
    assert len(answer.content) < 500


MANY: Any = [{}] * 1000
UNKNOWN: Any = dict.fromkeys(map(str, range(1000)), "x")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": MANY}]}),
        (TokenizeRequest, {"messages": MANY}),
        (DetokenizeRequest, {"tokens": MANY}),
        (ResponsesRequest, {"input": MANY}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_text"}] * 1000}]}),
        (ResponsesRequest, {"input": "Hi", "tools": [{"type": "function"}] * 1000}),
        (ResponsesRequest, {"input": "Hi", "include": MANY}),
        (MessagesRequest, {"messages": MANY}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * 1000}]}),
        (MessagesRequest, {"messages": CHAT, "system": [{"type": "text"}] * 1000}),
        (MessagesRequest, {"messages": CHAT, "tools": MANY}),
        (MessagesRequest, {"messages": CHAT, "tools": [{"allowed_callers": [""] * 1000}]}),
        (MessagesRequest, {"messages": CHAT, "stop_sequences": [""] * 1000}),
        (MessagesRequest, {"messages": CHAT, "context_management": {"edits": MANY}}),
        (ChatRequest, {"messages": CHAT, **UNKNOWN}),
        (ChatRequest, {"messages": CHAT, "tools": [{"type": "function", "function": UNKNOWN}]}),
        (ChatRequest, {"messages": CHAT, "logit_bias": UNKNOWN | {f"{name}0": "x" for name in UNKNOWN}}),
        (ChatRequest, {"messages": CHAT, "stop": [""] * 1000}),
        (ResponsesRequest, {"input": "Hi", "metadata": dict.fromkeys(UNKNOWN, 1)}),
    ],
)
def test_of_many_parts_that_are_wrong_the_first_is_looked_at(kind: type[BaseModel], body: Any) -> None:
    """A small body may hold a million: to note what is wrong with each held up all streams for seconds."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 4


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatRequest, {"messages": CHAT * 8200}, "messages"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 8200}]}, "messages"),
        (ChatRequest, {"messages": CHAT, "tools": [FUNCTION] * 8200}, "tools"),
        (TokenizeRequest, {"messages": CHAT * 8200}, "messages"),
        (CompletionRequest, {"prompt": [[1]] * 8200}, "prompt"),
        (ResponsesRequest, {"input": CHAT * 8200}, "input"),
        (MessagesRequest, {"messages": CHAT * 8200}, "messages"),
        (MessagesRequest, {"messages": CHAT, "stop_sequences": [[]] * 8200}, "stop_sequences"),
    ],
)  # fmt: skip
def test_a_field_has_a_bounded_number_of_parts(kind: type[BaseModel], body: Any, field: str) -> None:
    """To check a body of very many small messages held up all streams for a second."""
    with pytest.raises(ValidationError, match=f"{field} has more than 8192 lists and objects: send fewer"):
        kind.model_validate(body)


def test_a_chat_of_eight_thousand_messages_is_read() -> None:
    assert len(ChatRequest.model_validate({"messages": CHAT[:1] * 8000}).messages) == 8000


def test_a_body_is_read_without_a_look_for_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of thousands of lists it held up all streams for two seconds."""
    seen, loads = [], json.loads
    monkeypatch.setattr(
        json, "loads", lambda *text, **how: seen.append(gc.isenabled()) or loads(*text, **how)
    )
    assert read_json(b'{"a": [[]]}') == {"a": [[]]}
    assert seen == [False] and gc.isenabled()


def test_a_long_path_is_cut_in_its_error(client: TestClient) -> None:
    answer = client.get(f"/{LONG}")
    assert answer.status_code == 404 and len(answer.content) < 500


@pytest.mark.parametrize("schema", ["[1]", "{bad", "", '{"const": NaN}', '{"a":' * 100_000])
def test_a_schema_that_is_none_is_refused(client: TestClient, schema: str) -> None:
    error = refusal(client, structured_outputs={"json": schema})
    assert error["param"] == "structured_outputs" and "must be a JSON object" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("field", "param"),
    [
        ('"temperature": %s', "temperature"),
        ('"threshold": %s', "threshold"),
        ('"metadata": {"a": [0, 1e2, %s, Infinity]}', "metadata.a.2"),
        ('"tools": [{"function": {"parameters": {"const": %s}}}]', "tools.0.function.parameters.const"),
        ('"structured_outputs": {"json": {"const": %s}}', "structured_outputs.json.const"),
    ],
)
def test_a_number_that_json_lacks_is_refused_by_its_place(
    client: TestClient, field: str, param: str, number: str
) -> None:
    """Also where the field would have no effect, or would only be shown to the model."""
    error = refusal_of(client, '{"messages": [], %s}' % (field % number))
    assert (error["param"], error["code"]) == (param, "invalid_value")
    remedy = 'send another, "inf" or "auto"' if param == "threshold" else "send another"
    assert error["message"] == f"{param} is {number}: a number must be finite; {remedy}"


@pytest.mark.parametrize("body", ["NaN", '{"seed": NaN, "seed": 3}'])
def test_a_number_that_json_lacks_is_refused_without_a_place(client: TestClient, body: str) -> None:
    error = refusal_of(client, body)
    assert error["param"] is None and error["message"].startswith("the body has NaN: a number must be")


def test_the_place_of_a_number_is_cut_in_its_error(client: TestClient) -> None:
    error = refusal_of(client, f'{{"{LONG}": [0, 1{"0" * 1000}.0e9]}}')
    assert error["message"].startswith("xxxx") and len(error["message"]) < 400


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    ("field", "param"),
    [('"seed": %s', "seed"), ('"logit_bias": {"1": %s}', "logit_bias.1"), ('"user": [1, %s, NaN]', "user.1")],
)
def test_an_integer_of_thousands_of_digits_is_refused_by_its_place(
    client: TestClient, field: str, param: str, sign: str
) -> None:
    """Python does not read it; one that it reads is refused as any other value is."""
    most = sys.get_int_max_str_digits()
    error = refusal_of(client, '{"messages": [], "top_p": 1.5, %s}' % (field % (sign + "7" * (most + 1))))
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert re.fullmatch(
        rf"{param} is {sign}7+\W+: an integer may have at most {most} digits; send another", error["message"]
    )
    assert len(error["message"]) < 200
    error = refusal_of(client, '{"messages": [], "seed": %s}' % (sign + "7" * most))
    assert error["param"] == "seed" and "digits" not in error["message"]


def test_so_is_one_in_the_arguments_of_a_call(client: TestClient) -> None:
    most = sys.get_int_max_str_digits()
    error = refusal(client, messages=call_with('{"x": %s}' % ("7" * (most + 1))))
    assert error["param"] == ARGUMENTS and f"(an integer has more than {most} digits)" in error["message"]


@pytest.mark.parametrize("part", ["[", '{"a":'])
@pytest.mark.parametrize("begin", ["", '{"messages": '])
def test_a_body_that_is_nested_too_deeply_is_told_so(client: TestClient, begin: str, part: str) -> None:
    error = refusal_of(client, begin + part * 100_000)
    assert error["code"] == "invalid_json"
    assert error["message"] == (
        "the body is nested too deeply: a field may have 100 levels of JSON; send fewer"
    )


def refusal_of(client: TestClient, body: str) -> Any:
    """Return the error of a body that is sent as it is."""
    answer = client.post(CHATS, content=body.encode(), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def call_with(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]


ARGUMENTS = "messages.1.tool_calls.0.function.arguments"
TOOL = {"type": "function", "function": {"name": "f", "parameters": nested(600)}}
DEEP_SCHEMA = '{"properties": {"a": ' * 600 + "{}" + "}}" * 600


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, {"messages": call_with("[" * 100_000)}, ARGUMENTS),
        (CHATS, {"messages": call_with(json.dumps(nested(600)))}, ARGUMENTS),
        (CHATS, {"messages": nested(600)}, "messages"),
        (CHATS, {"chat_template_kwargs": nested(600)}, "chat_template_kwargs"),
        (CHATS, {"documents": [nested(600)]}, "documents"),
        (CHATS, {"tools": [TOOL], "tool_choice": "required"}, "tools"),
        (CHATS, {"structured_outputs": {"json": nested(600)}}, "structured_outputs"),
        (CHATS, {"structured_outputs": {"json": json.dumps(nested(600))}}, "structured_outputs"),
        (CHATS, {"structured_outputs": {"json": DEEP_SCHEMA}}, "structured_outputs"),
        (CHATS, {"structured_outputs": {"json": DEEP_SCHEMA}, "tools": [FUNCTION]}, "structured_outputs"),
        (CHATS, {"structured_outputs": {"json": "{"}, "tools": [FUNCTION]}, "structured_outputs"),
        (CHATS, {"temperature": nested(600)}, "temperature"),
        (COMPLETIONS, {"prompt": nested(600)}, "prompt"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": nested(600)}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": nested(600)}, "tokens"),
    ],
)  # fmt: skip
def test_json_of_many_levels_is_refused(client: TestClient, path: str, body: Any, param: str) -> None:
    """What reads it calls itself at each level, and Python ends that somewhere."""
    assert refusal(client, path, **body)["param"] == param


def test_json_of_some_levels_is_read(client: TestClient) -> None:
    assert "more than 100 levels" in refusal(client, chat_template_kwargs=nested(101))["message"]
    after_reading = ("context_length_exceeded", "unsupported_field")  # the template reads no documents
    for body in (
        {"messages": call_with(json.dumps(nested(100)))},
        {"messages": CHAT, "chat_template_kwargs": nested(100)},
        {"messages": CHAT, "documents": [nested(98)]},
    ):
        answer = client.post(CHATS, json={**body, "max_tokens": 1})
        assert answer.status_code == 200 or answer.json()["error"]["code"] in after_reading


def test_a_template_that_calls_itself_too_often_refuses_its_chat() -> None:
    template = "{% macro at(one) %}{{ at(one) }}{% endmacro %}{{ at(messages) }}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"refuses this chat [(]maximum recursion depth"):
        encode_chat(tokenizer, CHAT)


# -- what the chat template does not take ----------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, {"documents": [1]}, "documents"),
        (CHATS, {"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs"),
        (CHATS, {"chat_template_kwargs": {"tools": 5}, "documents": [{"text": "x"}]}, "chat_template_kwargs"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"documents": [1]}}, "chat_template_kwargs"),
    ],
)
def test_arguments_that_the_template_refuses_are_named(
    client: TestClient, path: str, body: Any, param: str
) -> None:
    error = refusal(client, path, **body)
    assert error["param"] == param and error["message"].startswith(f"{param}: the target's chat template")
    assert error["message"].endswith("; change it, or leave it out") and "--raw" not in error["message"]


@pytest.mark.parametrize("field", ["continue_final_message", "add_generation_prompt"])
@pytest.mark.parametrize("path", [CHATS, "/tokenize"])
def test_what_stands_behind_the_messages_is_a_field_of_the_request(
    client: TestClient, path: str, field: str
) -> None:
    """Some clients send it among the arguments of the template, which is where transformers has it."""
    error = refusal(client, path, messages=CHAT, chat_template_kwargs={field: False})
    assert error["param"] == "chat_template_kwargs" and error["message"].endswith(
        f": {field} is a field of the request: send it beside chat_template_kwargs"
    )


def test_documents_are_refused_unless_the_template_reads_them() -> None:
    whole, asked = tiny_engine(), {"messages": CHAT, "documents": [{"text": "b"}], "max_tokens": 1}
    plain = "{% for one in messages %}{{ one.content }}{% endfor %}"
    for template, reads in (
        (plain, False),
        (plain + "{% for one in documents or [] %}{{ one.text }}{% endfor %}", True),
        (plain + "{{ documents[0].text }}{% if not documents %}{{ raise_exception('no') }}{% endif %}", True),
    ):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        model = EagleFSD(whole.target, whole.drafter, tokenizer, base_model="tiny")
        with TestClient(create_app(model, settings())) as client:
            if reads:
                assert client.post(CHATS, json=asked).status_code == 200
            else:
                error = refusal(client, **asked)
                assert (error["code"], error["param"]) == ("unsupported_field", "documents")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this chat (roles must alternate)"),
        ("{% if %}", "is broken"),
        (None, "the target's tokenizer has no chat template"),
    ],
)
def test_messages_that_the_template_refuses_are_told_in_a_servers_words(
    template: str | None, words: str
) -> None:
    tokenizer, whole = tiny_tokenizer(), tiny_engine()
    tokenizer.chat_template = template
    model = EagleFSD(whole.target, whole.drafter, tokenizer, base_model="tiny")
    with TestClient(create_app(model, settings())) as client:
        error = refusal(client, chat_template_kwargs={"enable_thinking": False})
    assert error["param"] == "messages" and words in error["message"]
    assert error["message"].endswith("; if no other chat will do, continue a text with /v1/completions")
