"""Responses, the newer form of chats: the same texts as chats, whole or as events that add up to them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

WITHOUT = 'the server and its test need extras: pip install "eagle-fsd[dev]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "openai", "llguidance"):
    pytest.importorskip(needed, reason=WITHOUT)

import openai
from openai.types.responses import EasyInputMessage, FunctionToolParam, Response, ResponseError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from support.schema_engine import as_call, schema_engine
from support.serving import running, settings, writing
from support.tiny_engine import CHAT, NAME, chat_ids, text_alone
from support.tiny_tokenizer import TEMPLATE

from eagle_fsd import Fuzzy
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.decoding.steps.failures import NonFiniteLogits
from eagle_fsd.serving.requests.completions import ChatRequest
from eagle_fsd.serving.requests.responses import ResponsesRequest
from eagle_fsd.serving.requests.unsupported import (
    UNSUPPORTED_RESPONSES,
    WITHOUT_EFFECT_RESPONSES,
    Unsupported,
)

LOGPROBS = "message.output_text.logprobs"
SAID = "Wait."
SCRIPTS = {
    "text": "Just text.",
    "a call": as_call("pick", {"n": 1}),
    "text and calls": f"{SAID}\n{as_call('pick', {'n': 1})}\n{as_call('now', {})}",
    "text after a call": f"{SAID}\n{as_call('pick', {'n': 1})}\nSo.\n{as_call('now', {})}\nDone.",
    "half a call": f'{SAID}\n<tool_call>\n{{"name": "now"',
}
LONG = "text and calls"  # what it has, the text after a call has too
QUICK_SCRIPTS = [pytest.param(name, marks=[pytest.mark.slow] * (name == LONG)) for name in SCRIPTS]


class Person(BaseModel):
    """What answers must be."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["ann", "bob"]
    age: int = Field(ge=0, le=150)


def function(name: str, parameters: dict[str, Any] | None = None) -> FunctionToolParam:
    return FunctionToolParam(type="function", name=name, parameters=parameters, strict=None)


TOOLS = [function("pick", {"type": "object", "properties": {"n": {"type": "integer"}}}), function("now")]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running(settings()) as (url, _):
        yield client_of(url)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def respond(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(**{"model": NAME, "input": CHAT, "max_output_tokens": 20, **fields})


def without_ids(output: Any) -> list[dict[str, Any]]:
    """Return the items of a response as JSON, without what is drawn for each anew.

    Of log-probabilities the tokens stay, for a prompt that is kept rounds them.
    """
    items = copy.deepcopy(
        [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in output]
    )
    for part in (part for item in items for part in item.get("content", ())):
        part["logprobs"] = [one["token"] for one in part["logprobs"]]
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


class Replay:
    """Puts the items of a response together from the events of a stream, and checks each one's place."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.kinds: list[str] = []
        self.final: Response | None = None

    def take(self, event: Any) -> None:
        assert event.sequence_number == len(self.kinds) and self.final is None
        kind = event.type.removeprefix("response.")
        self.kinds.append(kind)
        if hasattr(event, "output_index"):
            assert event.output_index == len(self.items) - (kind != "output_item.added")
        if hasattr(event, "item_id"):
            assert event.item_id == self.items[-1]["id"]
        match kind:
            case "created" | "in_progress":
                assert event.response.status == "in_progress" and not event.response.output
            case "output_item.added":
                self.items.append(event.item.model_dump(exclude_none=True))
                assert self.items[-1]["status"] == "in_progress"
            case "content_part.added":
                assert self.items[-1]["content"] == []
                self.items[-1]["content"].append(event.part.model_dump(exclude_none=True))
            case "output_text.delta":
                part = self.items[-1]["content"][event.content_index]
                part["text"] += event.delta
                part["logprobs"] += [one.model_dump() for one in event.logprobs]
                assert event.delta
            case "output_text.done":
                part = self.items[-1]["content"][event.content_index]
                assert event.text == part["text"]
                told = [one.model_dump() for one in event.logprobs]
                assert told[: len(part["logprobs"])] == part["logprobs"]
                part["logprobs"] = told
            case "content_part.done":
                assert event.part.model_dump(exclude_none=True) == self.items[-1]["content"][-1]
            case "function_call_arguments.delta":
                self.items[-1]["arguments"] += event.delta
            case "function_call_arguments.done":
                assert event.arguments == self.items[-1]["arguments"]
            case "output_item.done":
                done = event.item.model_dump(exclude_none=True)
                assert done["status"] != "in_progress"
                assert {**done, "status": "in_progress"} == self.items[-1]
                self.items[-1] = done
            case _:
                assert kind == event.response.status and kind in ("completed", "incomplete")
                self.final = event.response


def streamed(client: openai.OpenAI, **fields: Any) -> Replay:
    """Return a stream's replay, whose last event has the items that the others add up to."""
    replay = Replay()
    for event in respond(client, stream=True, **fields):  # type: ignore[attr-defined]
        replay.take(event)
    assert replay.final is not None
    assert [item.model_dump(exclude_none=True) for item in replay.final.output] == replay.items
    return replay


# -- texts ----------------------------------------


def test_a_response_has_the_text_of_a_chat(client: openai.OpenAI) -> None:
    found = respond(client, metadata={"who": "me"})
    assert found.output_text == text_alone(chat_ids(), max_new_tokens=20)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].status == "incomplete" and found.metadata == {"who": "me"}
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(chat_ids()), 20)
    assert found.model_extra["timings"]["tau"] > 1 and found.error is None
    assert (found.temperature, found.text.format.type, found.tool_choice, found.tools) == (
        0,
        "text",
        "auto",
        [],
    )
    text = found.output_text
    stop = respond(client, extra_body={"stop": text[9:11]})
    assert stop.output_text == text[: text.index(text[9:11])] and stop.status == "completed"
    assert stop.incomplete_details is None and stop.output[0].status == "completed"
    fuzzy = respond(client, extra_body={"threshold": 0.3, "divergence": "js"})
    assert fuzzy.output_text == text_alone(chat_ids(), max_new_tokens=20, rule=Fuzzy(0.3))
    drawn = {"temperature": 0.8, "top_p": 0.9, "extra_body": {"seed": 5}}
    chat = {**drawn, "model": NAME, "messages": CHAT, "max_tokens": 20}
    assert respond(client, **drawn).output_text == (
        client.chat.completions.create(**chat).choices[0].message.content
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("fields", [{}, {"include": [LOGPROBS]}, {"include": [LOGPROBS], "top_logprobs": 2}])
@pytest.mark.parametrize("stops", [False, True])
def test_the_events_of_a_stream_add_up_to_the_whole_response(
    client: openai.OpenAI, fields: dict[str, Any], stops: bool
) -> None:
    text = text_alone(chat_ids(), max_new_tokens=20)
    asked = {**fields, "extra_body": {"stop": text[9:11]} if stops else {}}
    whole, replay = respond(client, **asked), streamed(client, **asked)
    assert replay.final.output_text == whole.output_text and replay.final.status == whole.status
    assert without_ids(replay.items) == without_ids(whole.output)
    assert replay.kinds[-1] == ("completed" if stops else "incomplete")
    (part,) = whole.output[0].content
    chat = client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        max_tokens=20,
        logprobs=bool(fields),
        top_logprobs=fields.get("top_logprobs"),
        stop=text[9:11] if stops else None,
    )
    told = chat.choices[0].logprobs.content if fields else []
    for mine, its in zip(part.logprobs, told, strict=True):
        assert (mine.token, mine.bytes) == (its.token, its.bytes)
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-3)
        assert [one.token for one in mine.top_logprobs] == [one.token for one in its.top_logprobs]


def test_a_text_of_no_characters_is_a_message(client: openai.OpenAI) -> None:
    text = text_alone(chat_ids(), max_new_tokens=20)
    asked = {"extra_body": {"stop": text[:1]}}
    whole, replay = respond(client, **asked), streamed(client, **asked)
    assert whole.output_text == "" and whole.status == "completed"
    assert without_ids(replay.items) == without_ids(whole.output) and len(whole.output) == 1
    assert "output_text.delta" not in replay.kinds


def test_the_openai_client_reads_streams_and_forms() -> None:
    with running(settings(), schema_engine()) as (url, _):
        client = client_of(url)
        asked = {"model": NAME, "input": "Who?", "max_output_tokens": 300}
        found = client.responses.parse(**asked, text_format=Person)
        assert isinstance(found.output_parsed, Person) and found.text.format.name == "Person"
        with client.responses.stream(**asked, text_format=Person) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_parsed == found.output_parsed
        turns = [*request(input="Who?").input, *found.output]
        for bare in (False, True):
            back = [one.model_dump(exclude_none=bare) for one in turns]
            told = client.responses.create(**{**asked, "input": back, "max_output_tokens": 2})
            assert told.usage.input_tokens > found.usage.input_tokens + len(found.output_text)
        loose = client.responses.create(**asked, text={"format": {"type": "json_object"}}, temperature=0)
        assert json.loads(loose.output_text) is not None or loose.status == "incomplete"


@pytest.mark.parametrize("schema", [{}, {"type": "array"}])
def test_a_schema_is_that_of_a_chats_form(schema: dict[str, Any]) -> None:
    """Also one that says nothing, which any JSON has."""
    found = request(text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat = ChatRequest.model_validate({"messages": CHAT, "response_format": wanted})
    assert found.form == chat.form and found.form_name == "text.format"


def test_the_schema_of_requests_has_texts_where_lists_may_be_texts(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("/v1/")
    parts = client.get(f"{root}/openapi.json", cast_to=object)["components"]["schemas"]
    fields = [("ResponsesRequest", "input"), ("MessageItem", "content"), ("ResultItem", "output")]
    for part, name in (*fields, ("ChatRequest", "stop"), ("ResponsesRequest", "stop")):
        kinds = [one["type"] for one in parts[part]["properties"][name]["anyOf"]]
        assert kinds == ["string", "array"], name


# -- turns ----------------------------------------


def test_input_is_a_text_or_the_turns_of_a_chat(client: openai.OpenAI) -> None:
    """What a chat says in messages, with instructions as its system message."""
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": one} for one in "Hi"]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Ho", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "Hi"), ("assistant", "Ho"), ("user", "And?"))
    ]
    for instructions, system in ((None, []), ("Be short.", [{"role": "system", "content": "Be short."}])):
        found = respond(client, input=turns, instructions=instructions)
        chat = client.chat.completions.create(model=NAME, messages=[*system, *messages], max_tokens=20)
        assert found.output_text == chat.choices[0].message.content
        assert found.usage.input_tokens == chat.usage.prompt_tokens and found.instructions == instructions
    assert respond(client, input="Hi").usage == respond(client, input=messages[:1]).usage
    dumped = EasyInputMessage(role="user", content="Hi").model_dump()
    assert dumped["type"] is None and request(input=[dumped]) == request(input=messages[:1])
    merged = ResponsesRequest(input=[{"role": "developer", "content": "b"}, *messages], instructions="a")
    assert [turn.text for turn in merged.turns] == ["a\n\nb", "Hi", "Ho", "And?"]


@pytest.mark.parametrize("template", ["known", "unknown"])
def test_calls_and_results_go_back_as_they_came(template: str) -> None:
    """The next turn's prompt is that of a chat with the same calls and results."""
    engine = schema_engine() if template == "known" else schema_engine(template=TEMPLATE)
    with running(settings(), engine) as (url, _):
        client = client_of(url)
        asked = {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "name": "pick"},
            "max_output_tokens": 300,
        }
        first = respond(client, **asked, input="Pick.")
        (called,) = first.output
        assert called.type == "function_call" and called.status == "completed" and called.name == "pick"
        n = json.loads(called.arguments)
        told = {"type": "function_call_output", "call_id": called.call_id, "output": "done"}
        turns = [{"role": "user", "content": "Pick."}, called.model_dump(exclude_none=True), told]
        listed = [{"type": "function", "name": "pick"}]
        allowed = {"type": "allowed_tools", "mode": "required", "tools": listed}
        asked |= {"tool_choice": allowed, "parallel_tool_calls": False}
        again = respond(client, **asked, input="Pick.")
        assert again.tool_choice.model_dump() == allowed
        assert again.usage.input_tokens == first.usage.input_tokens
        assert (again.output[0].name, again.output[0].arguments) == (called.name, called.arguments)
        found = respond(client, input=turns, tools=TOOLS, tool_choice="none")
        made = {"name": "pick", "arguments": json.dumps(n)}
        messages = [
            {"role": "user", "content": "Pick."},
            {
                "role": "assistant",
                "tool_calls": [{"id": called.call_id, "type": "function", "function": made}],
            },
            {"role": "tool", "tool_call_id": called.call_id, "name": "pick", "content": "done"},
        ]
        chat = client.chat.completions.create(model=NAME, messages=messages, max_tokens=20)
        assert found.usage.input_tokens == chat.usage.prompt_tokens
        assert found.output_text == chat.choices[0].message.content


def test_messages_around_calls_are_of_one_turn() -> None:
    """As an answer of a chat has them: its whole text beside all of its calls."""
    said = [{"role": "assistant", "content": text} for text in "abc"]
    call = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "d"}
    asked = request(input=[said[0], call, said[1], call, result, said[2], said[0]])
    turns = [(turn.role, turn.content, len(turn.tool_calls)) for turn in asked.turns]
    assert turns == [("assistant", "ab", 2), ("tool", "d", 0), ("assistant", "c", 0), ("assistant", "a", 0)]


def test_calls_in_a_row_are_of_the_message_before_them() -> None:
    calls = [
        {"type": "function_call", "call_id": name, "name": name, "arguments": "{}", "status": "completed"}
        for name in ("pick", "now")
    ]
    results = [
        {"type": "function_call_output", "call_id": name, "output": [{"type": "input_text", "text": name}]}
        for name in ("now", "pick")
    ]
    results[1]["name"] = "pick"
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "Wait."}]}
    asked = ResponsesRequest(input=[{"role": "user", "content": "Hi"}, said, *calls, *results, calls[0]])
    turns = [
        (turn.role, turn.text, [one.function.name for one in turn.tool_calls], turn.name)
        for turn in asked.turns
    ]
    assert turns == [
        ("user", "Hi", [], None),
        ("assistant", "Wait.", ["pick", "now"], None),
        ("tool", "now", [], "now"),
        ("tool", "pick", [], "pick"),
        ("assistant", "", ["pick"], None),
    ]


# -- calls ----------------------------------------


@pytest.mark.parametrize("name", QUICK_SCRIPTS)
def test_text_and_calls_are_items_in_their_order(name: str) -> None:
    """Wherever the limit cuts them, they are what a chat's answer has."""
    written = SCRIPTS[name]
    kinds = {
        "text": ["message"],
        "a call": ["function_call"],
        "text and calls": ["message", "function_call", "function_call"],
        "text after a call": ["message", "function_call", "message", "function_call", "message"],
        "half a call": ["message"],
    }
    limits = [300, 3, 30, 100] if name == "text and calls" else [300]
    functions = [{key: value for key, value in one.items() if key != "type"} for one in TOOLS]
    with running(writing(written), schema_engine()) as (url, _):
        client = client_of(url)
        for limit in limits:
            asked = {"tools": TOOLS, "max_output_tokens": limit}
            whole, replay = respond(client, **asked), streamed(client, **asked)
            assert without_ids(replay.items) == without_ids(whole.output)
            assert len({item["id"] for item in replay.items}) == len(replay.items)
            (choice,) = client.chat.completions.create(
                model=NAME,
                messages=CHAT,
                max_tokens=limit,
                tools=[{"type": "function", "function": one} for one in functions],
            ).choices
            texts = [item.content[0].text for item in whole.output if item.type == "message"]
            assert "".join(texts) == (choice.message.content or "")
            calls = [(one.name, one.arguments) for one in whole.output if one.type == "function_call"]
            wanted = choice.message.tool_calls or []
            assert calls == [(one.function.name, one.function.arguments) for one in wanted]
            assert whole.status == ("incomplete" if choice.finish_reason == "length" else "completed")
            if limit == limits[0]:
                assert [item.type for item in whole.output] == kinds[name]


def test_a_response_that_calls_nothing_has_its_form_beside_tools() -> None:
    ann = '{"name": "ann", "age": 3}'
    for written, kind in ((ann, "message"), (as_call("now", {}), "function_call")):
        with running(writing(written), schema_engine()) as (url, _):
            asked = {"tools": TOOLS, "max_output_tokens": 300, "parallel_tool_calls": False}
            found = client_of(url).responses.parse(
                model=NAME,
                input="Hi",
                text_format=Person,
                **asked,  # type: ignore[arg-type]
            )
        assert [item.type for item in found.output] == [kind]
        assert found.output_parsed == (Person(name="ann", age=3) if kind == "message" else None)


# -- what is refused ----------------------------------------


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "Hi", **fields})


@pytest.mark.parametrize("name", UNSUPPORTED_RESPONSES)
def test_what_is_not_done_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    assert name not in ResponsesRequest.model_fields
    for value in (None, *UNSUPPORTED_RESPONSES[name]):
        assert request(**{name: value}) == request()
    with pytest.raises(Unsupported, match=f"^{name} is not supported by this server: "):
        request(**{name: "something else"})
    assert request(reasoning={"effort": None, "summary": None}) == request()


@pytest.mark.parametrize("name", WITHOUT_EFFECT_RESPONSES)
def test_what_names_a_client_changes_nothing(name: str) -> None:
    assert request(**{name: "me"}) == request()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "it must be a text, or a list of items"),
        ({"input": 5}, "input", "it must be a text, or a list of items"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "has an item 'reasoning': it must"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "send the item itself"),
        ({"input": ["Hi"]}, "input", "has an item 'Hi'"),
        ({"input": [{"type": [], "role": "user", "content": "x"}]}, "input", "has an item []"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content",
         "only text and images are read"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "content is 5"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "is 'tool'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "is missing"),
        ({"input": [{"role": "user", "content": "x", "more": 1}]}, "input.0.more", "is not a field"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "x", "arguments": "["}]},
         "input.0.arguments", "must be the JSON of an object"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input.0.output", "is missing"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 1}]}, "input.0.output",
         "output is 1"),
        ({"max_tokens": 5}, "max_tokens", "is not a field"),
        ({"n": 2}, "n", "is not a field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"previous_response_id": "x"}, "previous_response_id", "send the earlier turns in input"),
        ({"tools": [{"type": "web_search"}]}, "tools", "has one of type 'web_search'"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "is of type 'web_search'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools",
         "at least 1 item"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "x"}]}}, "tool_choice", "not in tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.name", "is missing"),
        ({"metadata": {"anItem": 5}}, "metadata.anItem", "should be a valid string"),
        ({"metadata": {"anItem": "x" * 513}}, "metadata.anItem", "at most 512 characters"),
        ({"metadata": {"x" * 65: "y"}}, "metadata", "at most 64 characters"),
        ({"metadata": dict.fromkeys("abcdefghijklmnopq", "x")}, "metadata", "at most 16 items"),
        ({"stream_options": {}}, "stream_options", "is for streams"),
        ({"tool_choice": "any"}, "tool_choice", "Input should be"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "has the function pick twice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "without tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not in tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "has a schema if"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "is not a field"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "structured_outputs", "beside text.format"),
        ({"include": ["file_search_call.results"]}, "include.0", "Input should be"),
        ({"include": [LOGPROBS], "tools": TOOLS}, "include", "beside tools"),
        ({"top_logprobs": 3}, "top_logprobs", f"add {LOGPROBS}"),
        ({"input": "x" * 9000}, "input", "tokens: at most"),
        ({"stop": 5}, "stop", "must be a string"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_remedy(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.post("/responses", body={"input": "Hi", **fields}, cast_to=object)
    error = found.value
    assert error.param == param and message in error.body["message"]
    assert error.body["message"].startswith(param.split(".")[-1]) or error.body["message"].startswith(param)


def test_a_text_that_fails_ends_its_stream_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Scheduler.step

    def broken(scheduler: Scheduler) -> Any:
        bad = next((text for text in scheduler.decoding if text.stats.steps >= 2), None)
        if bad is not None:
            raise NonFiniteLogits(bad.stats.steps + 1, bad.number)
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", broken)
    with running(settings()) as (url, _):
        client = client_of(url)
        events = list(respond(client, stream=True, max_output_tokens=60))  # type: ignore[call-overload]
        assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
        assert events[-1].response.error.code == "server_error" and events[-1].response.output == []
        ResponseError.model_validate(events[-1].response.error.model_dump())
        assert "not finite" in events[-1].response.error.message
        with pytest.raises(openai.InternalServerError, match="not finite"):
            respond(client, max_output_tokens=60)


def test_a_text_that_no_token_may_follow_fails_by_its_request() -> None:
    """The codes of a response that failed are a closed list."""
    with running(settings(), schema_engine()) as (url, _):
        b = schema_engine().tokenizer.convert_tokens_to_ids("b")
        asked = {"suppress_tokens": [b], "structured_outputs": {"regex": "a{30}b"}}
        *_, last = respond(client_of(url), stream=True, max_output_tokens=60, extra_body=asked)  # type: ignore[call-overload]
    assert last.type == "response.failed" and last.response.error.code == "invalid_prompt"
    assert "the other options allow no token" in last.response.error.message


def test_items_are_what_the_clients_types_allow(client: openai.OpenAI) -> None:
    """The openai client reads answers without checks; other clients may not."""
    adapter = TypeAdapter(Response)
    answer = client.post("/responses", body={"input": "Hi", "include": [LOGPROBS]}, cast_to=object)
    adapter.validate_python(answer)
    with pytest.raises(ValidationError):
        adapter.validate_python({**answer, "output": [{"type": "message"}]})
