"""Forms of answers and calls of functions through the openai client, against a real server."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest

WITHOUT = 'the server and its test need extras: pip install "eagle-fsd[dev]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "openai", "llguidance"):
    pytest.importorskip(needed, reason=WITHOUT)

import httpx
import openai
from pydantic import BaseModel, ConfigDict, Field
from support.schema_engine import as_call, schema_engine
from support.serving import running, settings, writing
from support.tiny_engine import CHAT, NAME
from support.tiny_tokenizer import TEMPLATE, TOOL_TEMPLATE

ASK: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": 300}
ANY_TOKEN = {"threshold": 1000.0}


class Person(BaseModel):
    """What answers must be."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["ann", "bob"]
    age: int = Field(ge=0, le=150)
    tags: list[bool] = Field(max_length=2)


PERSON = Person.model_json_schema()
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """Return the tool_choice that offers these functions alone."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(function, names))}}


TOOLS = [
    function("greet", description="Greet somebody.", parameters=PERSON),
    function("now"),
    function("pick", parameters={"$ref": "#/$defs/one", "$defs": {"one": {"type": "object", "properties": {
        "n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running(settings(), schema_engine()) as (url, _):
        yield client_of(url)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{**ASK, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, dict[int, dict[str, str]], str]:
    """Return the text, the calls by index and the reason of a stream, put together as clients do."""
    text, calls, reason = "", {}, ""
    for chunk in ask(client, stream=True, **fields):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            mine = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            mine["id"] += call.id or ""
            mine["name"] += call.function.name or ""
            mine["arguments"] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return text, calls, reason


# -- forms ----------------------------------------


@pytest.mark.parametrize(
    ("temperature", "more"),
    [(0, {}), (0, ANY_TOKEN), pytest.param(1, ANY_TOKEN, marks=pytest.mark.slow)],
    ids=str,
)
def test_answers_have_their_schema_whole_and_streamed(
    client: openai.OpenAI, more: dict[str, Any], temperature: float
) -> None:
    asked = {"temperature": temperature, "seed": 4, "extra_body": more}
    found = client.chat.completions.parse(**ASK, **asked, response_format=Person).choices[0]
    assert isinstance(found.message.parsed, Person) and found.finish_reason == "stop"
    loose = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}
    text, calls, reason = streamed(client, **asked, response_format=loose)
    Person.model_validate_json(text)
    assert reason == "stop" and not calls
    if temperature == 0 and not more:  # kept prompts round
        assert text == found.message.content
    assert ask(client, **asked, response_format={"type": "text"}).choices[0].message.content != text


def test_an_object_is_any_object(client: openai.OpenAI) -> None:
    wanted = {"response_format": {"type": "json_object"}, "temperature": 1.2, "n": 4, "seed": 3}
    likely = schema_engine().tokenizer.convert_tokens_to_ids(['"', "}", "]", "1"])
    bias = dict.fromkeys(likely, 5.0)  # a random model would go on for long
    texts = [one.message.content for one in ask(client, **wanted, logit_bias=bias).choices]
    assert all(isinstance(json.loads(text), dict) for text in texts) and len(set(texts)) > 1


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"(yes|no)-\d{2}"}, r"(yes|no)-\d{2}"),
        ({"choice": ["red", 'a "b"', "c\\d", "\x7f"]}, r'red|a "b"|c\\d|\x7f'),
        ({"json": {"enum": [1, "x"]}}, '1|"x"'),
        ({"json": '{"enum": [1, "x"]}'}, '1|"x"'),
        ({"grammar": 'start: "a" B\nB: /[0-4]{3}/'}, "a[0-4]{3}"),
    ],
)
def test_structured_outputs_as_vllm_has_them(
    client: openai.OpenAI, wanted: dict[str, Any], pattern: str
) -> None:
    for temperature in (0, 1.5):
        body = {"structured_outputs": wanted, **ANY_TOKEN}
        chat = ask(client, temperature=temperature, n=1 + 2 * (temperature > 0), extra_body=body)
        plain = client.completions.create(
            model=NAME, prompt="Hi", max_tokens=60, temperature=temperature, extra_body=body
        )
        texts = [choice.message.content for choice in chat.choices] + [plain.choices[0].text]
        assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_a_completion_has_a_response_format_too(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model=NAME, prompt=["Hi", "Ho"], max_tokens=300, extra_body={"response_format": FORMAT}
    )
    assert [Person.model_validate_json(choice.text) for choice in made.choices]


# -- calls that are forced ----------------------------------------


def require_call(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    match name:
        case "greet":
            Person.model_validate(found)
        case "pick":
            assert found in ({"n": 1}, {"n": 2})
        case _:
            assert name == "now" and found == {}


@pytest.mark.parametrize(
    ("template", "more"), [("known", {}), pytest.param("unknown", ANY_TOKEN, marks=pytest.mark.slow)]
)
def test_a_required_call_fits_its_schema(template: str, more: dict[str, Any]) -> None:
    """Also where the chat template knows no tools: these are then described in the system message."""
    engine = schema_engine() if template == "known" else schema_engine(template=TEMPLATE)
    with running(settings(), engine) as (url, _):
        client = client_of(url)
        names = set()
        for seed in range(3):
            asked = {"temperature": 1.3, "seed": seed, "extra_body": more, "tools": TOOLS}
            (choice,) = ask(client, **asked, tool_choice="required", parallel_tool_calls=False).choices
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert call.type == "function" and call.id
            require_call(call.function.name, call.function.arguments)
            names.add(call.function.name)
            named = {"type": "function", "function": {"name": "pick"}}
            text, calls, reason = streamed(client, **asked, tool_choice=named)
            assert (text, reason, list(calls)) == ("", "tool_calls", [0])
            assert calls[0]["name"] == "pick" and calls[0]["id"].startswith("call_")
            require_call("pick", calls[0]["arguments"])
        assert len(names) > 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("template", [TOOL_TEMPLATE, TEMPLATE], ids=["known", "unknown"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_functions_those_that_are_allowed_are_offered(mode: str, template: str) -> None:
    """The answer is the one that a request with these functions alone gets."""
    written = as_call("pick", {"n": 1})
    with running(writing(written), schema_engine(template=template)) as (url, _):
        client = client_of(url)
        for names in (("now",), ("now", "pick")):
            own = [tool for tool in TOOLS if tool["function"]["name"] in names]
            alone = ask(client, tools=own, tool_choice=mode)
            found = ask(client, tools=TOOLS, tool_choice=allowed(mode, *names))
            assert found.usage.prompt_tokens == alone.usage.prompt_tokens
            (answer,), (expected,) = found.choices, alone.choices
            calls, wanted = ((one.message.tool_calls or ()) for one in (answer, expected))
            assert [one.function for one in calls] == [one.function for one in wanted]
            assert answer.message.content == expected.message.content
            if mode == "auto":
                assert [one.function.name for one in calls] == (["pick"] if "pick" in names else [])
            else:
                assert {one.function.name for one in calls} <= set(names) and calls


def test_arguments_are_an_object_whatever_their_schema_leaves_open(client: openai.OpenAI) -> None:
    """Without a type it says what an object has, and allows all else; numbers are made likely here."""
    only = {"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    likely = dict.fromkeys(schema_engine().tokenizer.convert_tokens_to_ids(["1", "n"]), 30.0)
    for schema in (only, {**only, "type": ["object", "null"]}, {"anyOf": [only, {"type": "null"}]}):
        asked = {"tools": [function("f", parameters=schema)], "tool_choice": "required", "max_tokens": 100}
        (choice,) = ask(client, **asked, parallel_tool_calls=False, logit_bias=likely).choices
        assert choice.finish_reason == "tool_calls", choice.message.content
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1}


def test_several_calls_are_told_apart(client: openai.OpenAI) -> None:
    asked = {"tools": TOOLS[1:], "tool_choice": "required", "temperature": 1, "logit_bias": {"2": -6}}
    asked["max_tokens"] = 170
    counts = set()
    for seed in range(2):
        choice = ask(client, **asked, seed=seed).choices[0]
        text, calls, reason = streamed(client, **asked, seed=seed)
        assert reason == choice.finish_reason
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
            (calls[place]["name"], calls[place]["arguments"]) for place in range(len(calls))
        ]
        assert len({call["id"] for call in calls.values()}) == len(calls)
        for call in calls.values():
            require_call(call["name"], call["arguments"])
        counts.add(len(calls))
        assert not text and not choice.message.content, "half of a call must not show"
    assert max(counts) > 1


# -- calls of the model's own ----------------------------------------


SCRIPTS: dict[str, tuple[str, str | None, list[tuple[str, Any]]]] = {
    "text": ("Just text, 1 < 2.", "Just text, 1 < 2.", []),
    "a call": (as_call("pick", {"n": 1}), None, [("pick", {"n": 1})]),
    "text and calls": (
        f"Wait.\n{as_call('pick', {'n': 1})}\n{as_call('now', {})}",
        "Wait.\n",
        [("pick", {"n": 1}), ("now", {})],
    ),
    "an unknown function": (as_call("fly", {}), as_call("fly", {}), []),
    "no JSON": ("<tool_call>\nnow()\n</tool_call>", "<tool_call>\nnow()\n</tool_call>", []),
    "no end": ('<tool_call>\n{"name": "now"', '<tool_call>\n{"name": "now"', []),
    "a tag's beginning": ("a <tool_cal", "a <tool_cal", []),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("template", [TOOL_TEMPLATE, TEMPLATE], ids=["known", "unknown"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_models_own_calls_are_read(name: str, template: str) -> None:
    """Also where the chat template knows no tools."""
    written, content, calls = SCRIPTS[name]
    with running(writing(written), schema_engine(template=template)) as (url, _):
        client = client_of(url)
        (answer,) = ask(client, tools=TOOLS).choices
        assert answer.message.content == content
        found = [
            (one.function.name, json.loads(one.function.arguments)) for one in answer.message.tool_calls or ()
        ]
        assert found == calls and answer.finish_reason == ("tool_calls" if calls else "stop")
        text, parts, reason = streamed(client, tools=TOOLS)
        assert (text or None, reason) == (content, answer.finish_reason)
        assert [(one["name"], json.loads(one["arguments"])) for one in parts.values()] == calls
        if name != "text and calls":
            return
        (answer,) = ask(client, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False).choices
        assert len(answer.message.tool_calls or ()) == min(1, len(calls))
        (answer,) = ask(client, tools=TOOLS, tool_choice="none").choices
        assert answer.message.content == written and not answer.message.tool_calls


def test_a_call_that_is_cut_off_is_left_out_of_an_answer() -> None:
    """Whole or streamed, wherever the limit cuts it; what is complete before it is told."""
    written = f"Wait.\n{as_call('pick', {'n': 1})}\n{as_call('now', {})}"
    first, second = (written.index(name) for name in ("pick", "now"))
    cuts = [first - 8, first, first + 6, written.index("</tool_call>") + 4, second, len(written) - 12]
    with running(writing(written), schema_engine()) as (url, _):
        client = client_of(url)
        for limit in cuts:
            (answer,) = ask(client, tools=TOOLS, max_tokens=limit).choices
            text, calls, reason = streamed(client, tools=TOOLS, max_tokens=limit)
            assert text == answer.message.content or not answer.message.content
            assert text.strip() == "Wait." and reason == answer.finish_reason == "length"
            names = [one.function.name for one in answer.message.tool_calls or ()]
            assert names == [one["name"] for one in calls.values()]
            ends = [written.index(end) + len(end) for end in ("1}}", "{}}")]
            assert names == ["pick", "now"][: sum(limit >= end for end in ends)]


def test_a_call_that_a_stop_string_cuts_is_left_out_as_well(client: openai.OpenAI) -> None:
    """The closing tag may be missing, and half a call is no text."""
    whole = f"Wait.\n{as_call('pick', {'n': 1})}\n"
    cases: dict[str, list[str]] = {"}": [], '"arg': [], "</tool_call>": ["pick"], " two": ["pick"]}
    with running(writing(f"{whole}one two"), schema_engine()) as found:
        own = client_of(found[0])
        for stop, names in cases.items():
            (answer,) = ask(own, tools=TOOLS, stop=stop).choices
            text, calls, reason = streamed(own, tools=TOOLS, stop=stop)
            assert text.split() == answer.message.content.split() == ["Wait.", "one"][: 1 + (stop == " two")]
            assert [one["name"] for one in calls.values()] == names
            assert [one.function.name for one in answer.message.tool_calls or ()] == names
            assert reason == answer.finish_reason == ("tool_calls" if names else "stop")
    asked = {"tools": TOOLS[2:], "tool_choice": "required", "parallel_tool_calls": False}
    for stop, names in (("}", []), ("</tool_call>", ["pick"])):
        (answer,) = ask(client, **asked, stop=stop).choices
        assert not answer.message.content
        assert [one.function.name for one in answer.message.tool_calls or ()] == names
        assert streamed(client, **asked, stop=stop)[0] == ""


def test_the_openai_clients_events_say_that_a_call_is_done(client: openai.OpenAI) -> None:
    """It looks for the end before it takes in the calls of a chunk."""
    asked = {"tools": TOOLS[2:], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**ASK, **asked) as events:
        kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    *_, last = ask(client, **asked, stream=True)
    assert last.choices[0].finish_reason == "tool_calls" and not last.choices[0].delta.tool_calls


def test_a_forced_call_that_is_cut_off_shows_nothing(client: openai.OpenAI) -> None:
    asked = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    for limit in (1, 5, 14, 30):
        (answer,) = ask(client, **asked, max_tokens=limit).choices
        assert not answer.message.content and not answer.message.tool_calls
        assert answer.finish_reason == "length" and answer.message.role == "assistant"
        assert streamed(client, **asked, max_tokens=limit) == ("", {}, "length")


def test_a_strict_function_is_called_with_what_its_schema_allows_or_not_at_all() -> None:
    strict = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
    wrong = f"Hm. {as_call('pick', {'n': 7})}"
    for written, said, called in ((wrong, "Hm. ", ["pick"]), ("Only <b> text.", "Only <b> text.", [])):
        with running(writing(written), schema_engine()) as (url, _):
            (answer,) = ask(client_of(url), tools=strict, parallel_tool_calls=False).choices
        assert answer.message.content == said
        assert [one.function.name for one in answer.message.tool_calls or ()] == called
        for one in answer.message.tool_calls or ():
            require_call(one.function.name, one.function.arguments)


@pytest.mark.parametrize(
    "template", [TOOL_TEMPLATE, pytest.param(TEMPLATE, marks=pytest.mark.slow)], ids=["known", "unknown"]
)
def test_an_answer_that_calls_nothing_has_its_form_beside_tools(template: str) -> None:
    """A model that would write neither is held to one of them, and a call that is forced stays one."""
    ann = '{"name": "ann", "age": 3, "tags": []}'
    for written in (ann, as_call("pick", {"n": 2}), "Just text."):
        with running(writing(written), schema_engine(template=template)) as (url, _):
            client = client_of(url)
            asked = {"tools": TOOLS, "parallel_tool_calls": False, "response_format": FORMAT}
            (answer,) = ask(client, **asked).choices
            text, calls, reason = streamed(client, **asked)
            (forced,) = ask(client, **asked, tool_choice=PICK).choices
        found = [one.function for one in answer.message.tool_calls or ()]
        assert [one["arguments"] for one in calls.values()] == [one.arguments for one in found]
        assert (text or None, reason) == (answer.message.content, answer.finish_reason)
        assert bool(found) != bool(text) and reason == ("tool_calls" if found else "stop")
        assert written != ann or text == ann
        assert written in (ann, "Just text.") or [one.name for one in found] == ["pick"]
        if text:
            Person.model_validate_json(text)
        for one in (*found, forced.message.tool_calls[0].function):
            require_call(one.name, one.arguments)


# -- calls and results in messages ----------------------------------------

HISTORY: Sequence[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "pick", "arguments": '{"n": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}},
    ]},
    {"role": "tool", "tool_call_id": "a", "content": "one"},
    {"role": "tool", "tool_call_id": "b", "name": "now", "content": [{"type": "text", "text": "noon"}]},
]  # fmt: skip


@pytest.mark.parametrize("template", ["known", "unknown"])
def test_calls_and_results_go_into_the_prompt(template: str) -> None:
    engine = schema_engine() if template == "known" else schema_engine(template=TEMPLATE)
    with running(settings(), engine) as (url, _):
        client = client_of(url)
        answer = ask(client, messages=HISTORY, tools=TOOLS, tool_choice="required")
        plain = client.post("/../tokenize", body={"messages": HISTORY}, cast_to=object)
        again = ask(client, messages=HISTORY, max_tokens=3)
    text = engine.tokenizer.decode(plain["tokens"])
    assert again.usage.prompt_tokens == plain["count"]
    assert answer.usage.prompt_tokens > plain["count"] + len(json.dumps(PERSON)) // 2
    calls = [re.sub(r"\s", "", one) for one in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    assert [json.loads(one) for one in calls] == [
        {"name": "pick", "arguments": {"n": 1}},
        {"name": "now", "arguments": {}},
    ]
    results = "tool: one\ntool: noon\n"
    if template == "unknown":
        results = "user: <tool_response>\none\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
    assert text.endswith(f"{results}assistant:")


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, TEMPLATE], ids=["known", "unknown"])
def test_a_call_with_half_a_character_and_a_huge_number_can_be_sent_back(template: str) -> None:
    """A model may write such JSON, and its call is a part of the chat from then on."""
    function = {"name": "pick", "arguments": '{"n": "hi \\ud83d", "e": "\\ud83d\\ude00", "m": -1e999}'}
    messages = [
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
    ]
    engine = schema_engine(template=template)
    with running(settings(), engine) as (url, _):
        client = client_of(url)
        assert ask(client, messages=messages, max_tokens=3).choices
        found = client.post("/../tokenize", body={"messages": messages}, cast_to=object)
    text = engine.tokenizer.decode(found["tokens"])
    assert '"n": "hi ?"' in text and f'"m": {-sys.float_info.max}' in text


# -- what is refused ----------------------------------------

PICK = {"type": "function", "function": {"name": "pick"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has a json_schema if"),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
            "response_format",
            "Invalid type: foo",
        ),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs", "is calls or JSON"),
        (
            {"tools": TOOLS,
             "response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "one form"),
        ({"response_format": FORMAT, "ignore_eos": True}, "response_format", "leave ignore_eos out, or"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, regex, choice and grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "JSON object"),
        ({"structured_outputs": {"structural": 1}}, "structured_outputs.structural", "not a field"),
        ({"guided_json": PERSON}, "guided_json", "not supported"),
        ({"functions": [{"name": "x"}]}, "functions", "not supported"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "custom"),
        ({"tools": [function("a b")]}, "tools.0.function.name", "a b"),
        ({"tools": [function("x"), function("x")]}, "tools", "x twice"),
        ({"tools": [function("x", parameters={"type": 5})], "tool_choice": "required"}, "tools", "type"),
        ({"tools": [function("x", parameters={"enum": [1]})], "tool_choice": "required"}, "tools", "types"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", "sometimes"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "tool_choice", "is of type 'custom'"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice.allowed_tools",
         "is missing"),
        ({"tool_choice": allowed("sometimes", "now"), "tools": TOOLS}, "tool_choice.allowed_tools.mode",
         "'auto' or 'required'"),
        ({"tool_choice": allowed("auto"), "tools": TOOLS}, "tool_choice.allowed_tools.tools",
         "at least 1 item"),
        ({"tool_choice": allowed("auto", "now", "fly"), "tools": TOOLS}, "tool_choice",
         "'fly', which is not in tools"),
        ({"tool_choice": allowed("auto", "now")}, "tool_choice", "without tools"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function", "is missing"),
        ({"tool_choice": PICK, "tools": TOOLS[:1]}, "tool_choice", "'pick', which is not in tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "is missing"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content", "is missing"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": HISTORY[1]["tool_calls"]}]},
            "messages.0.tool_calls",
            "assistant's",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "JSON of an object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '[-Infinity]'}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "JSON of an object (-Infinity is no JSON): send it as it came",
        ),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as found:
        client.post("/chat/completions", body={**ASK, **fields}, cast_to=object)
    assert found.value.param == param


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [function("x", description=HALF)]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": HALF, "arguments": "{}"}}]}]}, "messages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [TOOL_TEMPLATE, TEMPLATE], ids=["known", "unknown"])
def test_half_a_character_is_refused_where_it_stands(
    template: str, fields: dict[str, Any], param: str
) -> None:
    with running(settings(), schema_engine(template=template)) as (url, _):
        body = json.dumps({**ASK, "tools": TOOLS, "tool_choice": "required", **fields}).encode()
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert error["message"].startswith(f"{param} is not Unicode text")


def test_a_template_whose_calls_are_not_read_is_named() -> None:
    """Forcing a call works all the same, and so does a chat whose tools are not to be called."""
    template = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson if tools }}")
    words = "the model's chat template writes calls in a way that is not read here"
    with running(settings(), schema_engine(template=template)) as (url, _):
        client = client_of(url)
        for more in ({}, {"tool_choice": "auto"}):
            with pytest.raises(openai.BadRequestError, match=words) as found:
                ask(client, tools=TOOLS, **more)
            assert (found.value.param, found.value.code) == ("tools", "unsupported_field")
        (choice,) = ask(client, tools=TOOLS, tool_choice=PICK).choices
        require_call("pick", choice.message.tool_calls[0].function.arguments)
        assert ask(client, tools=TOOLS, tool_choice="none", max_tokens=3).choices[0].message.content


def test_without_the_library_forms_are_refused_and_free_calls_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(settings(), schema_engine()) as (url, _):
        client = client_of(url)
        monkeypatch.setitem(sys.modules, "llguidance", None)
        for fields, param in (
            ({"response_format": FORMAT}, "response_format"),
            ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
            ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ):
            with pytest.raises(openai.BadRequestError, match=r'pip install "eagle-fsd\[schema\]"') as found:
                ask(client, **fields)
            assert found.value.param == param
        assert ask(client, tools=TOOLS, max_tokens=3).choices


def test_a_text_that_cannot_go_on_ends_alone(client: openai.OpenAI) -> None:
    """The bias rules out what the form needs; a neighbour's text is not touched."""
    alone = ask(client, max_tokens=40).choices[0].message.content
    stream = ask(client, max_tokens=40, stream=True)
    b = schema_engine().tokenizer.convert_tokens_to_ids("b")
    asked = {"suppress_tokens": [b], "structured_outputs": {"regex": "ab"}}
    with pytest.raises(openai.BadRequestError, match="regex and the other options allow no token") as found:
        ask(client, extra_body=asked)
    assert found.value.code == "nothing_allowed"
    shown = []
    with pytest.raises(openai.APIError, match="regex and the other options allow no token"):
        for chunk in ask(client, extra_body=asked, stream=True):
            shown += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    assert shown == ["a"], "what could be made is shown before the error"
    ended = ask(client, extra_body=asked, stop="a").choices[0]
    assert (ended.message.content, ended.finish_reason) == ("", "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == alone


def test_rows_with_and_without_a_form_are_decoded_together(client: openai.OpenAI) -> None:
    text = ask(client, max_tokens=60).choices[0].message.content
    stream = ask(client, max_tokens=60, stream=True)
    forms = [ask(client, response_format=FORMAT, seed=seed, temperature=1) for seed in range(3)]
    for form in forms:
        Person.model_validate_json(form.choices[0].message.content)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
