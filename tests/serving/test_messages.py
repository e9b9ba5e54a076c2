"""Messages, Anthropic's form of chats: the same texts as chats, whole or as events that add up to them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx", "llguidance"):
    pytest.importorskip(needed, reason='this needs extras: pip install "eagle-fsd[serve,schema]" httpx')

from starlette.testclient import TestClient
from support.schema_engine import as_call, schema_engine
from support.serving import settings, writing
from support.tiny_engine import CHAT, NAME, chat_ids, text_alone, tiny_engine
from support.tiny_tokenizer import TEMPLATE, TOOL_TEMPLATE, tiny_tokenizer

from eagle_fsd import EagleFSD, Fuzzy
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.decoding.steps.failures import NonFiniteLogits
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.choices import Defaults, Limits
from eagle_fsd.serving.requests.anthropic import MessagesRequest
from eagle_fsd.serving.requests.completions import ChatRequest
from eagle_fsd.serving.requests.messages import bounded
from eagle_fsd.serving.requests.unsupported import (
    UNSUPPORTED_MESSAGES,
    WITHOUT_EFFECT_MESSAGES,
    Unsupported,
)
from eagle_fsd.serving.tools.plan import turns_of
from eagle_fsd.text.tool_calls import OWN_FORMAT, CallFormat

URL, CHATS = "/v1/messages", "/v1/chat/completions"
COUNT = f"{URL}/count_tokens"
SAID = "Wait."
SCRIPTS = {
    "text": "Just text.",
    "a call": as_call("pick", {"n": 1}),
    "text and calls": f"{SAID}\n{as_call('pick', {'n': 1})}\n{as_call('now', {})}",
    "text after a call": f"{SAID}\n{as_call('pick', {'n': 1})}\nSo.\n{as_call('now', {})}\nDone.",
    "half a call": f'{SAID}\n<tool_call>\n{{"name": "now"',
    "a number that no float is": '<tool_call>\n{"name": "pick", "arguments": {"n": 1e999}}\n</tool_call>',
}
LONG = "text and calls"  # what it has, the text after a call has too
QUICK_SCRIPTS = [pytest.param(name, marks=[pytest.mark.slow] * (name == LONG)) for name in SCRIPTS]
PICK = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [
    {"name": "pick", "description": "Pick.", "input_schema": PICK, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "now", "input_schema": {"type": "object", "properties": {}}},
]
FUNCTIONS = [
    {"type": "function", "function": {"name": "pick", "description": "Pick.", "parameters": PICK}},
    {"type": "function", "function": {"name": "now", "parameters": TOOLS[1]["input_schema"]}},
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(tiny_engine(), settings()), raise_server_exceptions=False) as made:
        yield made


def ask(client: TestClient, path: str = URL, **fields: Any) -> dict[str, Any]:
    found = client.post(path, json={"messages": CHAT, "max_tokens": 20, **fields})
    assert found.status_code == 200, found.text
    return found.json()


def chat_text(client: TestClient, **fields: Any) -> str:
    return ask(client, CHATS, **fields)["choices"][0]["message"]["content"]


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def events_of(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which has the name of its type."""
    found = client.post(URL, json={"messages": CHAT, "max_tokens": 20, **fields, "stream": True})
    assert found.status_code == 200, found.text
    *written, rest = found.text.split("\n\n")
    events = []
    for one in written:
        name, data = one.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert rest == ""
    return events


def streamed(client: TestClient, **fields: Any) -> dict[str, Any]:
    """Put a message together from the events of a stream, and check each one's place."""
    first, ping, *events = events_of(client, **fields)
    message = first["message"]
    assert (first["type"], ping) == ("message_start", {"type": "ping"})
    assert message["content"] == [] and message["stop_reason"] is message["stop_sequence"] is None
    written: str | None = None  # of the block that is open
    for event in events[:-2]:
        opens = event["type"] == "content_block_start"
        assert (written is None) == opens and event["index"] == len(message["content"]) - (not opens)
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"])
                written = ""
            case "content_block_delta":
                kind = {"text": "text", "tool_use": "partial_json"}[message["content"][-1]["type"]]
                assert event["delta"][kind]
                written += event["delta"][kind]
            case "content_block_stop":
                block = message["content"][-1]
                if block["type"] == "text":
                    block["text"] += written
                else:
                    block["input"] |= json.loads(written, parse_float=bounded)
                written = None
            case kind:
                pytest.fail(f"{kind} comes between blocks")
    last, end = events[-2:]
    assert written is None and (last["type"], end) == ("message_delta", {"type": "message_stop"})
    return {**message, **last["delta"], "usage": last["usage"], "timings": last["timings"]}


def told(message: dict[str, Any]) -> dict[str, Any]:
    """Return what a message says, without what is drawn for it anew or measured."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    usage = message["usage"]
    read = sum(usage[name] for name in usage if name.endswith("input_tokens"))
    dropped = {"id": None, "timings": None, "usage": (read, usage["output_tokens"])}
    return {**message, **dropped, "content": content}


# -- texts ----------------------------------------


def test_a_message_has_the_text_of_a_chat(client: TestClient) -> None:
    found = ask(client)
    text = text_alone(chat_ids(), max_new_tokens=20)
    assert found.pop("timings")["tau"] > 1 and found.pop("id").startswith("msg_")
    usage = found.pop("usage")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": NAME,
        "content": [{"type": "text", "text": text}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    again = ask(client)["usage"]  # the prompt is kept now, but for the token that is read in any case
    assert again["cache_read_input_tokens"] == len(chat_ids()) - 1 and again["input_tokens"] == 1
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(chat_ids())
    assert (again["output_tokens"], again["cache_creation_input_tokens"]) == (20, 0)
    fuzzy = ask(client, threshold=0.3, divergence="js")
    assert text_of(fuzzy) == text_alone(chat_ids(), max_new_tokens=20, rule=Fuzzy(0.3))
    assert fuzzy["timings"]["threshold"] == 0.3
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5}
    assert text_of(ask(client, **drawn)) == chat_text(client, **drawn) != text


@pytest.mark.covering(1)
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3, "threshold": 0.2}])
@pytest.mark.parametrize("stops", [False, True])
def test_the_events_of_a_stream_add_up_to_the_whole_message(
    client: TestClient, fields: dict[str, Any], stops: bool
) -> None:
    text = text_of(ask(client, **fields))
    asked = {**fields, "stop_sequences": ["never", text[9:11]] if stops else []}
    whole = ask(client, **asked)
    assert told(streamed(client, **asked)) == told(whole)
    ends = [whole["stop_reason"], whole["stop_sequence"]]
    assert ends == (["stop_sequence", text[9:11]] if stops else ["max_tokens", None])
    assert text_of(whole) == (text[: text.index(text[9:11])] if stops else text)


def test_a_text_of_no_characters_is_a_block(client: TestClient) -> None:
    asked = {"stop_sequences": [text_alone(chat_ids(), max_new_tokens=20)[:1]]}
    whole = ask(client, **asked)
    assert whole["content"] == [{"type": "text", "text": ""}] and told(streamed(client, **asked)) == told(
        whole
    )


def test_an_end_token_ends_a_turn_and_a_servers_own_stop_string_counts() -> None:
    with TestClient(create_app(schema_engine(), writing(SCRIPTS["text"]))) as client:
        found = ask(client)
        assert (text_of(found), found["stop_reason"], found["stop_sequence"]) == (
            "Just text.",
            "end_turn",
            None,
        )
    with TestClient(create_app(schema_engine(), settings(defaults=Defaults(stops=("t",))))) as client:
        likely = {"logit_bias": {str(schema_engine().tokenizer.convert_tokens_to_ids("t")): 100.0}}
        assert ask(client, **likely)["stop_sequence"] == "t"
        assert ask(client, **likely, stop_sequences=[])["stop_reason"] == "max_tokens"


# -- turns ----------------------------------------


@pytest.mark.parametrize(
    "system", ["Be short.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]]
)
def test_system_and_blocks_are_the_turns_of_a_chat(client: TestClient, system: Any) -> None:
    marked = {"cache_control": {"type": "ephemeral"}, "citations": None}
    blocks = [{"type": "text", "text": "H", **marked}, {"type": "text", "text": "i"}]
    thought = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
    ]
    turns = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [*thought, {"type": "text", "text": "Ho"}]},
        {"role": "system", "content": "Now be long."},
        {"role": "user", "content": "And?"},
    ]
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "system", "content": "Now be long."},
        {"role": "user", "content": "And?"},
    ]
    found = ask(client, messages=turns, system=system)
    assert text_of(found) == chat_text(client, messages=chat)
    tokens = client.post("/tokenize", json={"messages": chat}).json()["count"]
    assert ask(client, COUNT, messages=turns, system=system) == {"input_tokens": tokens}
    both = request(messages=[{"role": "system", "content": "b"}, *turns[:1]], system="a")
    assert [turn.text for turn in both.turns] == ["a\n\nb", "Hi"]


def test_neighbours_of_one_role_are_one_turn() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": "you"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]},
        {"role": "assistant", "content": "Ho"},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}, call]},
        {"role": "assistant", "content": "then"},  # behind the call
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]},
        {"role": "user", "content": "Look"},
        {"role": "user", "content": [image]},
        {"role": "system", "content": "x"},
        {"role": "system", "content": "y"},
    ]
    found = request(messages=turns).turns
    assert [(turn.role, turn.text) for turn in found] == [
        ("user", "Hi\n\nyou"),
        ("assistant", "Ho\n\nso"),
        ("assistant", "then"),
        ("tool", "1"),
        ("user", "Look"),
        ("system", "x"),
        ("system", "y"),
    ]
    assert [len(turn.tool_calls) for turn in found] == [0, 1, 0, 0, 0, 0, 0]
    assert [len(turn.images) for turn in found] == [0, 0, 0, 0, 1, 0, 0]


def test_an_answer_goes_on_with_the_last_of_joined_messages(client: TestClient) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "Well."}, {"role": "assistant", "content": "The sky "}]
    chat = [*CHAT, {"role": "assistant", "content": "Well.\n\nThe sky "}]
    assert text_of(ask(client, messages=begun)) == text_of(ask(client, messages=chat))


def test_a_late_system_message_is_refused_in_words_that_claude_code_knows(client: TestClient) -> None:
    """Where the chat template refuses it, and no other chat that it refuses."""
    strict = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    whole, tokenizer = tiny_engine(), tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ message['role'] }}", f"{strict}{{{{ message['role'] }}}}")
    model = EagleFSD(whole.target, whole.drafter, tokenizer, base_model=NAME)
    late = {"messages": [*CHAT, {"role": "system", "content": "Be short."}], "system": "Be kind."}
    assert ask(client, **late)["stop_reason"] == "max_tokens"
    with TestClient(create_app(model, settings())) as client:
        for path in (URL, COUNT):
            error = client.post(path, json=late).json()["error"]
            assert error["message"].startswith("messages: role 'system' is not supported on this model ")
        assert ask(client, messages=CHAT, system="Be kind.")["stop_reason"] == "max_tokens"
        tokenizer.chat_template = "{{ raise_exception('never') }}"
        assert "refuses this chat (never)" in client.post(URL, json=late).json()["error"]["message"]


@pytest.mark.parametrize("form", [CallFormat(known=True, tagged=True), OWN_FORMAT], ids=["known", "unknown"])
def test_calls_and_results_are_those_of_a_chat(form: CallFormat) -> None:
    """Also where text stands between results, which keep the names of their functions."""
    called = [
        {"type": "tool_use", "id": one, "name": "pick", "input": {"n": 1}, "caller": {"type": "direct"}}
        for one in "ab"
    ]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": parts, "is_error": True},
        {"type": "text", "text": "So."},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "text", "text": "Well?"},
    ]
    turns = [
        *CHAT,
        {"role": "assistant", "content": [{"type": "text", "text": "Wait."}, *called]},
        {"role": "user", "content": results},
    ]
    function = {"name": "pick", "arguments": '{"n": 1}'}
    chat = [
        *CHAT,
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [{"id": one, "function": function} for one in "ab"],
        },
        {"role": "tool", "tool_call_id": "a", "content": "onetwo", "name": "pick"},
        {"role": "user", "content": "So."},
        {"role": "tool", "tool_call_id": "b", "content": "", "name": "pick"},
        {"role": "user", "content": "Well?"},
    ]
    wanted = ChatRequest.model_validate({"messages": chat}).turns
    assert turns_of(request(messages=turns).turns, None, form) == turns_of(wanted, None, form)


@pytest.mark.parametrize(
    "last", ["The sky is ", [{"type": "text", "text": "The sky "}, {"type": "text", "text": "is "}]]
)
def test_an_answer_goes_on_with_a_last_message_of_the_assistant(client: TestClient, last: Any) -> None:
    begun = [*CHAT, {"role": "assistant", "content": last}]
    chat = [*CHAT, {"role": "assistant", "content": "The sky is "}]
    expected = chat_text(client, messages=chat, continue_final_message=True)
    found = ask(client, messages=begun)
    assert text_of(found) == expected and told(streamed(client, messages=begun)) == told(found)
    shown = client.post("/tokenize", json={"messages": chat, "continue_final_message": True}).json()["count"]
    assert ask(client, COUNT, messages=begun)["input_tokens"] == shown == sum(told(found)["usage"]) - 20
    stop = f"is {expected[:2]}"  # it begins in what was there
    assert ask(client, messages=begun, stop_sequences=[stop])["stop_reason"] == "max_tokens"


# -- calls and forms ----------------------------------------


@pytest.mark.parametrize("name", QUICK_SCRIPTS)
def test_calls_are_blocks_in_the_order_of_the_text(name: str) -> None:
    """Wherever the limit cuts them, they are what a chat's answer has."""
    kinds = {
        "text": ["text"],
        "a call": ["tool_use"],
        "text and calls": ["text", "tool_use", "tool_use"],
        "text after a call": ["text", "tool_use", "text", "tool_use", "text"],
        "half a call": ["text"],
        "a number that no float is": ["tool_use"],
    }
    limits = [300, 3, 30, 100] if name == "text and calls" else [300]
    configured = writing(SCRIPTS[name])
    with TestClient(create_app(schema_engine(), configured)) as client:
        for limit in limits:
            whole = ask(client, tools=TOOLS, max_tokens=limit)
            assert told(streamed(client, tools=TOOLS, max_tokens=limit)) == told(whole)
            (choice,) = ask(client, CHATS, tools=FUNCTIONS, max_tokens=limit)["choices"]
            assert text_of(whole) == (choice["message"]["content"] or "")
            used = [block for block in whole["content"] if block["type"] == "tool_use"]
            wanted = [one["function"] for one in choice["message"].get("tool_calls", ())]
            assert [one["name"] for one in used] == [one["name"] for one in wanted]
            arguments = [json.loads(one["arguments"], parse_float=bounded) for one in wanted]
            assert [one["input"] for one in used] == arguments
            reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
            assert whole["stop_reason"] == reasons[choice["finish_reason"]]
            assert len({one["id"] for one in used}) == len(used)
            if limit == limits[0]:
                assert [block["type"] for block in whole["content"]] == kinds[name]


@pytest.mark.parametrize(
    "template", [TOOL_TEMPLATE, pytest.param(TEMPLATE, marks=pytest.mark.slow)], ids=["known", "unknown"]
)
def test_tool_choice_is_that_of_a_chat(template: str) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    choices = [
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "now"}, named, True),
        ({"type": "none"}, "none", True),
    ]
    with TestClient(create_app(schema_engine(template=template), settings())) as client:
        for mine, its, several in choices:
            asked = {"max_tokens": 100, "temperature": 1.3, "seed": 1}
            chat = ask(client, CHATS, **asked, tools=FUNCTIONS, tool_choice=its, parallel_tool_calls=several)
            found = ask(client, **asked, tools=TOOLS, tool_choice=mine)
            assert text_of(found) == (chat["choices"][0]["message"]["content"] or "")
            wanted = [one["function"] for one in chat["choices"][0]["message"].get("tool_calls", ())]
            used = [block for block in found["content"] if block["type"] == "tool_use"]
            assert [(one["name"], one["input"]) for one in used] == [
                (one["name"], json.loads(one["arguments"])) for one in wanted
            ]
            assert bool(used) == (found["stop_reason"] == "tool_use") == (its != "none")
            counted = ask(client, COUNT, tools=TOOLS, tool_choice=mine)["input_tokens"]
            assert counted == chat["usage"]["prompt_tokens"] == told(found)["usage"][0]


def test_a_message_has_the_form_that_output_config_says() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    asked = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert request(output_config=asked).form == ChatRequest(messages=CHAT, response_format=chat).form
    with TestClient(create_app(schema_engine(), settings())) as client:
        found = ask(client, output_config=asked, max_tokens=200)
        assert json.loads(text_of(found)) in ({"n": 1}, {"n": 2}) and found["stop_reason"] == "end_turn"
        assert told(streamed(client, output_config=asked, max_tokens=200)) == told(found)


# -- what is refused ----------------------------------------


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"messages": CHAT, **fields})


@pytest.mark.parametrize("name", UNSUPPORTED_MESSAGES)
def test_what_is_not_done_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    assert name not in MessagesRequest.model_fields
    for value in (None, *UNSUPPORTED_MESSAGES[name]):
        assert request(**{name: value}) == request()
    with pytest.raises(Unsupported, match=f"^{name} is not supported by this server: "):
        request(**{name: "something else"})


@pytest.mark.parametrize("name", WITHOUT_EFFECT_MESSAGES)
def test_what_clients_send_with_every_request_changes_nothing(name: str) -> None:
    assert request(**{name: {"type": "adaptive"}}) == request()


def test_what_claude_code_sends_with_every_request_is_taken() -> None:
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    found = request(
        context_management={"edits": [edit]},
        output_config={"effort": "high"},
        thinking={"type": "adaptive"},
        metadata={"user_id": "me"},
    )
    assert found.form is None and found.turns == request().turns


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.example/cat.png"}}
USE = {"type": "tool_use", "id": "a", "name": "pick", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, *CHAT]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": 5}, "messages", "valid list"),
        ({"messages": None}, "messages", "is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "is 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "content is 5"),
        (said("Hi"), "messages.0.content", "it must be a text, or a list of parts"),
        (said({"type": "document"}), "messages.0.content", "only text and images are read here"),
        (said({"type": []}), "messages.0.content", "has a part of type []"),
        (said(IMAGE), "messages.0.content.0.source", "this server fetches nothing"),
        (said({"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": ""}}),
         "messages.0.content.0.source.media_type", "is 'image/bmp'"),
        (said(USE), "messages.0.content", "only the assistant's may"),
        (said(RESULT, role="assistant"), "messages.0.content", "only the user's may"),
        (said({**RESULT, "content": [IMAGE]}), "messages.0.content.0.content", "only text is read here"),
        (said({**USE, "input": 5}, role="assistant"), "messages.0.content.0.input", "a JSON object"),
        (said({"type": "text", "text": "x", "more": 1}), "messages.0.content.0.more", "is not a field"),
        ({"messages": [*CHAT, {"role": "assistant", "content": [USE]}]}, "messages", "send its result"),
        ({"system": [IMAGE]}, "system", "only text is read here"),
        ({"system": 5}, "system", "system is 5"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stop_sequences": "x"}, "stop_sequences", "valid list"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16 items"),
        ({"stop": ["x"]}, "stop", "write stop_sequences"),
        ({"n": 2}, "n", "is not a field"),
        ({"response_format": {}}, "response_format", "write output_config"),
        ({"max_completion_tokens": 2}, "max_completion_tokens", "write max_tokens"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "write tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools",
         "has one of type 'web_search_20250305'"),
        ({"tools": [{"name": "x y", "input_schema": {}}]}, "tools.0.name", "match pattern"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema", "is missing"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "has the function pick twice"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools.0.defer_loading", "should be False"),
        ({"tool_choice": "any"}, "tool_choice", "a JSON object"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "is 'required'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "has a name if"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "without tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "not in tools"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "is 'text'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}},
          "structured_outputs": {"regex": "a"}}, "structured_outputs", "beside output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits.0.type", "is 'clear_tool_uses_20250919'"),
        ({"system": "\ud800"}, "system", "is not Unicode text"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "the prompt is too long"),
        ({"mcp_servers": [{}]}, "mcp_servers", "is not supported"),
        ({"stop_sequences": [[[]]] * 9000}, "stop_sequences", "send fewer"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [URL, COUNT])
def test_refusals_name_the_field_and_the_remedy(
    client: TestClient, fields: dict[str, Any], param: str, message: str, path: str
) -> None:
    if path == COUNT and "too long" in message:
        return  # there is nothing wrong with counting
    written = json.dumps({"messages": CHAT, **fields})
    found = client.post(path, content=written, headers={"content-type": "application/json"})
    body = found.json()
    assert found.status_code == 400, body
    error = body["error"]
    assert (body["type"], error["type"]) == ("error", "invalid_request_error")
    assert error["details"]["param"] == param and message in error["message"] and "\n" not in error["message"]
    assert error["message"].startswith((param.split(".")[0], param.split(".")[-1]))


def test_errors_have_anthropics_form_and_types(client: TestClient) -> None:
    def error_of(found: Any, status: int) -> tuple[str, str]:
        body = found.json()
        assert found.status_code == status and set(body) == {"type", "error", "request_id"}, body
        assert body["request_id"] == found.headers["request-id"] == found.headers["x-request-id"]
        return body["error"]["type"], body["error"]["details"]["error_code"]

    found = client.post(URL, json={"messages": CHAT, "model": "other"})
    assert error_of(found, 404) == ("not_found_error", "model_not_found")
    # Anthropic's client goes on without a thread where it reads this code.
    unthreaded = client.post(URL, json={"messages": CHAT, "thread": {"type": "create"}})
    assert error_of(unthreaded, 400) == ("invalid_request_error", "thread_unsupported_request")
    assert "send the earlier turns in messages" in unthreaded.json()["error"]["message"]
    assert error_of(client.post(f"{URL}/batches", json={}), 404) == ("not_found_error", "not_found")
    assert error_of(client.get(URL), 405) == ("invalid_request_error", "method_not_allowed")
    assert error_of(client.post(URL, content=b"{}"), 400) == ("invalid_request_error", "invalid_json")
    long = b'{"system": "' + b"x" * 2**20 + b'"}'
    headers = {"content-type": "application/json"}
    assert error_of(client.post(URL, content=long, headers=headers), 413) == (
        "request_too_large",
        "body_too_large",
    )
    assert set(client.post(f"{URL}x", json={}).json()) == {"error"}  # OpenAI's form
    with TestClient(create_app(tiny_engine(), settings(key="secret"))) as locked:
        body = {"messages": CHAT, "max_tokens": 1}
        for wrong in ({}, {"x-api-key": "other"}, {"x-api-key": ""}, {"authorization": "secret"}):
            found = locked.post(URL, json=body, headers=wrong)
            assert error_of(found, 401) == ("authentication_error", "invalid_api_key")
        both = {"x-api-key": "other", "authorization": "Bearer secret"}
        for right in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}, both):
            assert locked.post(URL, json=body, headers=right).status_code == 200
            assert locked.get("/v1/models", headers=right).status_code == 200


def test_a_full_queue_and_a_late_answer_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    step, going = Scheduler.step, threading.Event()

    def held(scheduler: Scheduler) -> Any:
        going.wait(30)
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", held)
    limits = Limits(max_rows=1, max_queue=0, request_timeout=0.3)
    with TestClient(create_app(tiny_engine(), settings(limits=limits))) as client:
        first: list[Any] = []
        asking = threading.Thread(target=lambda: first.append(client.post(URL, json={"messages": CHAT})))
        asking.start()
        asking.join(0.1)
        busy = client.post(URL, json={"messages": CHAT})
        asking.join()
        going.set()
    assert (busy.status_code, busy.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(busy.headers["retry-after"]) >= 1
    assert (first[0].status_code, first[0].json()["error"]["type"]) == (504, "timeout_error")


def test_a_text_that_fails_ends_its_stream_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Scheduler.step

    def broken(scheduler: Scheduler) -> Any:
        bad = next((text for text in scheduler.decoding if text.stats.steps >= 2), None)
        if bad is not None:
            raise NonFiniteLogits(bad.stats.steps + 1, bad.number)
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", broken)
    with TestClient(create_app(tiny_engine(), settings())) as client:
        *before, last = events_of(client)
        assert before[0]["type"] == "message_start" and "message_delta" not in [one["type"] for one in before]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert "not finite" in last["error"]["message"] and last["request_id"].startswith("req_")
        found = client.post(URL, json={"messages": CHAT})
        assert (found.status_code, found.json()["error"]["type"]) == (500, "api_error")


def test_what_nothing_foresaw_has_the_form_too(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.app.state.service, "answer_of", lambda *_: 1 / 0)
    found = client.post(URL, json={"messages": CHAT}, headers={"x-request-id": "mine"})
    assert (found.status_code, found.json()["error"]["type"]) == (500, "api_error")
    assert found.json()["request_id"] == found.headers["request-id"] == "mine"


def test_anthropics_clients_can_read_the_list_of_models(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    (card,) = listed["data"]
    assert (card["type"], card["display_name"], card["id"]) == ("model", NAME, NAME)
    assert card["created_at"].endswith("+00:00") and listed["has_more"] is False
