"""Random chats that are answered side by side: each answer is what its texts are alone, by plain twins.

All is in float64: in float32 the rounding of prompts that are read in slices turns near-ties of long texts.
EAGLE_FSD_CHATS=7 runs seed 7 alone, with -m "slow or not slow".
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx", "llguidance"):
    pytest.importorskip(needed, reason='this needs extras: pip install "eagle-fsd[serve,schema]" httpx')

import httpx
import torch
from support.plain_calls import fits, read_plainly, refuse
from support.random_calls import seeds
from support.random_requests import Told, random_fields, random_limits, send, told_alone
from support.schema_engine import new_schema_engine
from support.serving import running, settings, until
from support.tiny_tokenizer import BEGIN, END, PAD, TEMPLATE, TOOL_TEMPLATE
from torch import Tensor

from eagle_fsd.core.processing import Processing
from eagle_fsd.serving.choices import Defaults
from eagle_fsd.serving.work import scheduling
from eagle_fsd.text.tool_calls import OWN_FORMAT, CallFormat, call_grammar, call_text, describe_functions

CLIENTS, CHATS, TURNS = 6, 4, 3
LONGEST_PROMPT, CACHE_TOKENS = 1400, 1900
SPECIAL = (PAD, BEGIN, END)
ANSWER = "assistant:"  # what a prompt ends with
BARE = TOOL_TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "")
FORMATS = {
    TOOL_TEMPLATE: CallFormat(known=True, tagged=True),
    BARE: CallFormat(known=True, tagged=False),
    TEMPLATE: OWN_FORMAT,
}


# -- what is asked ----------------------------------------


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    fields = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**fields, "required": list(required)}


SHORT = {"type": "string", "maxLength": 5}
SCHEMAS = (
    object_of(),
    object_of("n", n={"enum": [1, 2, "x"]}),
    object_of("a", "b", a=SHORT, b={"type": "array", "items": {"type": "boolean"}, "maxItems": 2}),
    object_of("x", x={"type": "number"}, y={"type": "integer", "minimum": -9, "maximum": 40}),
    object_of("s", s={"anyOf": [SHORT, {"type": "null"}, object_of("t", t=SHORT)]}),
)
FORMS = (
    {"regex": r"(yes|no)-\d{2}"},
    {"regex": r"[a-e ]{0,30}"},
    {"choice": ["red", 'a "b"', "c\\d"]},
    {"grammar": 'start: "a" B\nB: /[0-4]{3}/'},
    {"json": SCHEMAS[2]},
)
ARGUMENTS = (
    "{}",
    '{"n": 1}',
    '{ "n" : [1.0, 1e999, -0] }',
    '{"n": 12345678901234567890.5}',
    '{"s": "</tool_call> <tool_call>{"}',
    '{"s": "\\u00e9 \\n \\"x\\" ]]"}'.replace("]]", "} }"),
    '{"s": {"t": "\\ud83d"}, "s": null}',
    '{"x": NaN}',
    "3",
)


def random_script(draw: random.Random, names: Sequence[str]) -> str:
    """Return what a model may write that calls functions, rightly or not."""
    parts = []
    for _ in range(draw.choice([1, 2, 3, 4])):
        space, arguments = draw.choice(["", "\n", " "]), draw.choice(ARGUMENTS)
        call = f'{{"name": "{draw.choice([*names, *names, "fly"])}", "arguments": {arguments}}}'
        whole = f"<tool_call>{space}{call}{draw.choice(['', chr(10)])}</tool_call>"
        cut = whole[: draw.randrange(len(whole))]
        odd = draw.choice([cut, "<tool_call>", "</tool_call>", "{", "a < b", "so ", "\n", "\n\n ", " "])
        parts.append(draw.choice([whole, whole, whole, odd, odd]))
    return "".join(parts)


def random_tools(draw: random.Random, tagged: bool) -> dict[str, Any]:
    """Return tools and what goes with them. tagged: whether they may be left to the model."""
    functions = []
    for name in draw.sample(["greet", "now", "pick", "a.b-c"], draw.choice([1, 2, 3])):
        function: dict[str, Any] = {"name": name}
        if draw.random() < 0.8:
            function["parameters"] = draw.choice(SCHEMAS)
        if draw.random() < 0.3:
            function["description"] = "Do it."
        if draw.random() < 0.2:
            function["strict"] = True
        functions.append(function)
    named = {"type": "function", "function": {"name": draw.choice(functions)["name"]}}
    choices = ["required", "required", named, "none", *(["auto", None] * 2 if tagged else [])]
    found: dict[str, Any] = {
        "tools": [{"type": "function", "function": one} for one in functions],
        "tool_choice": draw.choice(choices),
    }
    return found | {"parallel_tool_calls": draw.choice([True, False, None])}


def random_form(draw: random.Random, of_json: bool = False) -> dict[str, Any]:
    """Return a form. of_json: one that an answer may have beside tools."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": draw.choice(SCHEMAS)}}
    return draw.choice(
        [
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "text"}},
            {"response_format": schema},
            {"structured_outputs": FORMS[-1] if of_json else draw.choice(FORMS)},
        ]
    )


def random_chat(draw: random.Random, known: CallFormat) -> dict[str, Any]:
    """Return the first turn of any chat."""
    own = {"bad_words": draw.choices(["a", "tr", "xy"], k=2)}
    kind = draw.choice(["plain", "form", "form", "tools", "tools", "tools", "tools"])
    body = random_fields(draw, [3, 60, 250, 250] if kind == "tools" else [1, 5, 40, 120], own)
    if kind == "tools":
        body |= random_tools(draw, known.tagged)
        body |= random_form(draw, of_json=True) if draw.random() < 0.3 else {}
    elif kind == "form":
        body |= random_form(draw)
    if draw.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": draw.choice([0, 2])}
    said = "".join(draw.choices("aeiou rst", k=draw.choice([1, 9, 60])))
    first = [{"role": draw.choice(["system", "developer"]), "content": "Be good."}]
    messages = first if draw.random() < 0.3 else []
    if draw.random() < 0.2:
        messages += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    messages = [*messages, random_question(draw, body, said)]
    if draw.random() < 0.2:
        return go_on(
            body, messages, {"role": "assistant", "content": draw.choice(["", "so", "a \n", "<tool_call>"])}
        )
    return body | {"messages": messages}


def go_on(body: dict[str, Any], messages: Sequence[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    """Return the request whose answer goes on with this message behind others."""
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    return body | asked | {"messages": [*messages, last]}


def random_question(draw: random.Random, body: dict[str, Any], said: str) -> dict[str, Any]:
    names = [tool["function"]["name"] for tool in body.get("tools", ())]
    if names and draw.random() < 0.9:
        said += f"[[{random_script(draw, names)}]]"
    parts = [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:]}]
    return {"role": "user", "content": draw.choice([said, said, parts]), "name": "x"}


def echo(tokenizer: Any, force: float) -> Any:
    """Return what makes a model write what stands between [[ and ]] in the last question of its prompt."""
    mark = tokenizer.encode(ANSWER, add_special_tokens=False)
    scripts: dict[tuple[int, ...], list[int]] = {}

    def script_of(prompt: tuple[int, ...]) -> list[int]:
        found = re.findall(r"\[\[(.*?)\]\]", tokenizer.decode(prompt).split("user:")[-1], re.DOTALL)
        return (
            [*tokenizer.encode(found[-1], add_special_tokens=False), tokenizer.eos_token_id] if found else []
        )

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        for row, tokens in enumerate(ids.tolist()):
            end = next(at for at in range(len(tokens), 0, -1) if tokens[at - len(mark) : at] == mark)
            prompt = tuple(tokens[:end])
            script = scripts[prompt] = scripts.get(prompt) or script_of(prompt)
            if script:
                changed[row, script[min(len(tokens) - end, len(script) - 1)]] += force
        return changed

    return forced


# -- what must be answered ----------------------------------------


def callable_names(body: dict[str, Any]) -> list[str]:
    """Return the names of the functions that may be called."""
    choice = body.get("tool_choice") or "auto"
    names = [tool["function"]["name"] for tool in body.get("tools", ())]
    if choice == "none":
        return []
    return names if isinstance(choice, str) else [choice["function"]["name"]]


def is_free(body: dict[str, Any]) -> bool:
    """Return whether the model may call a function or not."""
    return (body["tool_choice"] or "auto") == "auto"


def several(body: dict[str, Any]) -> bool:
    """Return whether there may be more than one call."""
    return body["parallel_tool_calls"] is not False and not isinstance(body["tool_choice"], dict)


def read_arguments(written: str) -> dict[str, Any]:
    """Return a call's arguments as the model sees them: with "?" for half a character, and no Infinity."""

    def finite(number: str) -> float:
        return math.copysign(min(abs(float(number)), sys.float_info.max), float(number))

    found = json.loads(written, parse_float=finite)
    return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))


@dataclass
class Answered:
    """What one text of a chat must be: what is shown, its calls, and the text that both are in."""

    prompt: list[int]
    content: str
    calls: list[tuple[str, object]]
    reason: str
    told: Told


class Twin:
    """Says what a chat must be answered with. force: see echo; None without."""

    def __init__(self, template: str, force: float | None) -> None:
        self.model, self.format = new_schema_engine(template=template, dtype=torch.float64), FORMATS[template]
        self.processors = [] if force is None else [echo(self.model.tokenizer, force)]

    def answers(self, body: dict[str, Any]) -> list[Answered]:
        prompt = self.prompt(body)
        more: dict[str, Any] = self.form(body)
        if self.processors:
            more["logits_processor"] = self.processors
        if "bad_words" in body:
            forms = [form for word in body["bad_words"] for form in (word, f" {word}")]
            ids = [self.model.tokenizer.encode(form, add_special_tokens=False) for form in forms]
            more["bad_words_ids"] = list(map(list, dict.fromkeys(map(tuple, ids))))
        return [
            self.read(body, prompt, told_alone(self.model, body, prompt, place, **more))
            for place in range(body["n"])
        ]

    def read(self, body: dict[str, Any], prompt: list[int], told: Told) -> Answered:
        names = callable_names(body)
        if not names:
            return Answered(prompt, told.text, [], told.reason, told)
        cut = told.reason == "length" or told.stopped
        content, calls = read_plainly(
            told.text, names, self.format.tagged, not is_free(body), several(body), cut
        )
        reason = "tool_calls" if calls and told.reason == "stop" else told.reason
        return Answered(prompt, content, calls, reason, told)

    def functions(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the functions that may be called, as the model sees them."""
        names = callable_names(body)
        return [
            {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description", ""),
                "parameters": tool["function"].get("parameters", {"type": "object", "properties": {}}),
            }
            for tool in body.get("tools", ())
            if tool["function"]["name"] in names
        ]

    def form(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the form of a chat's answer, as an option of `generate`."""
        if functions := self.functions(body):
            said = self.form({**body, "tools": ()}) if is_free(body) else {}
            strict = any(tool["function"].get("strict") for tool in body["tools"])
            if is_free(body) and not strict and not said:
                return {}
            free, schema = is_free(body) and not said, json.dumps(said["json_schema"]) if said else None
            return {"grammar": call_grammar(functions, self.format, several(body), free, schema)}
        if wanted := body.get("response_format"):
            schemas = {"text": None, "json_object": {"type": "object"}}
            kind = wanted["type"]
            schema = schemas[kind] if kind in schemas else wanted["json_schema"]["schema"]
            return {} if schema is None else {"json_schema": schema}
        found = dict(body.get("structured_outputs", {}))
        if "choice" in found:
            return {"grammar": "start: " + " | ".join(map(json.dumps, found["choice"]))}
        return {"json_schema" if name == "json" else name: value for name, value in found.items()}

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """Return the token ids of a chat that waits for its answer, or goes on with its last message."""
        functions, turns = self.functions(body), [self.turn(message) for message in body["messages"]]
        more = {"tools": [{"type": "function", "function": one} for one in functions]} if functions else {}
        if not self.format.known:
            turns, more = self.plain_turns(turns, functions), {}
        goes_on = bool(body.get("continue_final_message"))
        text = self.model.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on, **more
        )
        return list(self.model.tokenizer.encode(text, add_special_tokens=False))

    def turn(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"] or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        turn = {**message, "content": content, "role": message["role"].replace("developer", "system")}
        if "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            turn["tool_calls"] = [
                {"function": {"name": one["name"], "arguments": read_arguments(one["arguments"])}}
                for one in functions
            ]
        return turn

    def plain_turns(
        self, turns: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return turns for a template that knows no functions."""
        found: list[dict[str, Any]] = []
        results = False
        for turn in turns:
            called = [one["function"] for one in turn.get("tool_calls", ())]
            calls = [call_text(one["name"], one["arguments"]) for one in called]
            content = "\n".join(filter(None, [turn["content"], *calls]))
            if turn["role"] == "tool":
                content = f"<tool_response>\n{content}\n</tool_response>"
                if results:
                    found[-1]["content"] += f"\n{content}"
                    continue
            results = turn["role"] == "tool"
            found.append({"role": "user" if results else turn["role"], "content": content})
        if not functions:
            return found
        said = describe_functions(functions)
        if found[0]["role"] != "system":
            return [{"role": "system", "content": said}, *found]
        return [{"role": "system", "content": f"{found[0]['content']}\n\n{said}"}, *found[1:]]


# -- what is answered ----------------------------------------


def joined(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one choice's message, from one whole one or from all parts of a stream."""
    if "message" in choices[0]:
        return choices[0]["message"]
    found: dict[str, Any] = {"role": None, "content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        found["role"] = delta.get("role", found["role"])
        found["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            assert call["index"] == len(found["tool_calls"])
            found["tool_calls"].append({name: value for name, value in call.items() if name != "index"})
    return found


def require_answer(body: dict[str, Any], wanted: Sequence[Answered], url: str) -> list[dict[str, Any]]:
    """Return the messages of an answer that is as it must be; none of one that is an error."""
    if not callable_names(body):
        fields = ("messages", "continue_final_message", "add_generation_prompt")
        shown = {name: body[name] for name in fields if name in body}
        found = httpx.post(f"{url}/tokenize", json=shown, timeout=300).json()
        assert found["tokens"] == wanted[0].prompt
    choices, usage, error = send(f"{url}/v1/chat/completions", body)
    if not all(one.told.reason for one in wanted):
        assert error == "nothing_allowed", body
        return []
    assert not error, (error, body)
    assert {choice["index"] for choice in choices} == set(range(body["n"]))
    found = []
    for place, one in enumerate(wanted):
        mine = [choice for choice in choices if choice["index"] == place]
        message, told = joined(mine), one.told
        found.append(message)
        assert message["role"] == "assistant"
        assert (message["content"] or "") == one.content, (body, told.text)
        calls = message.get("tool_calls") or []
        functions = [call["function"] for call in calls]
        arguments = [json.loads(function["arguments"], parse_constant=refuse) for function in functions]
        names = [function["name"] for function in functions]
        assert list(zip(names, arguments, strict=True)) == one.calls, (
            body,
            told.text,
        )
        assert len({call["id"] for call in calls}) == len(calls)
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [one.reason], body
        if body.get("return_token_origins"):
            pieces = [piece for part in mine for piece in part.get("origins", ())]
            assert "".join(piece["text"] for piece in pieces) == told.text
        require_form(body, one)
        require_logprobs(body, [part["logprobs"] for part in mine if part["logprobs"]], told)
    assert usage["completion_tokens"] == sum(one.told.tokens for one in wanted)
    assert usage["prompt_tokens"] == len(wanted[0].prompt)
    return found


def require_form(body: dict[str, Any], one: Answered) -> None:
    """Require that a whole text has its form, and that calls have arguments of their schemas."""
    tools = [tool["function"] for tool in body.get("tools", ())]
    asked = body.keys() & {"response_format", "structured_outputs"}
    if tools and (not is_free(body) or any(tool.get("strict") for tool in tools) or asked):
        schemas = {tool["name"]: tool.get("parameters", {"type": "object"}) for tool in tools}
        assert all(fits(schemas[name], arguments) for name, arguments in one.calls), (body, one.told.text)
    if one.told.reason != "stop" or one.told.stopped or "stop_token_ids" in body:  # it may have text
        return
    if one.calls:
        return
    wanted = body.get("structured_outputs", {})
    kind = body.get("response_format", {"type": "text"})["type"]
    if kind != "text":
        schema = body["response_format"].get("json_schema", {"schema": {"type": "object"}})["schema"]
        assert fits(schema, json.loads(one.content)), (body, one.content)
    if "json" in wanted:
        assert fits(wanted["json"], json.loads(one.content)), (body, one.content)
    if "regex" in wanted:
        assert re.fullmatch(wanted["regex"], one.content), (body, one.content)
    assert one.content in wanted.get("choice", [one.content])


def require_logprobs(body: dict[str, Any], tables: Sequence[dict[str, Any]], told: Told) -> None:
    if told.logprobs is None:
        assert not tables
        return
    entries = [entry for table in tables for entry in table["content"]]
    assert [entry["logprob"] for entry in entries] == pytest.approx(told.logprobs, abs=1e-3), body
    assert {len(entry["top_logprobs"]) for entry in entries} <= {body["top_logprobs"]}
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries if entry["token"] not in SPECIAL)
    assert spelled.decode().startswith(told.text), body


def next_turn(draw: random.Random, body: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Return the request that goes on with a chat, as clients do."""
    before = body["messages"]
    if body.get("continue_final_message"):
        body = body | {"continue_final_message": None, "add_generation_prompt": None}
        *before, begun = before
        message = message | {"content": begun["content"] + (message["content"] or "")}
    calls = message.get("tool_calls", ())
    if not calls and draw.random() < 0.3:
        return go_on(body, before, message)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {place}"}
        for place, call in enumerate(calls)
    ]
    question = [] if results and draw.random() < 0.5 else [random_question(draw, body, "And now?")]
    return body | {"messages": [*before, message, *results, *question]}


def ask(seed: float, body: dict[str, Any], wanted: Sequence[Answered], url: str) -> dict[str, Any] | None:
    """Return the next turn's request once this one is answered rightly; None if it is an error."""
    draw = random.Random(seed)
    if draw.random() < 0.3:
        leave(draw, url, body)
    if not (messages := require_answer(body, wanted, url)):
        return None
    message = draw.choice(messages)
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    return next_turn(draw, body, message)


def leave(draw: random.Random, url: str, body: dict[str, Any]) -> None:
    """Send a request, and leave before its answer is whole."""
    address, wait = f"{url}/v1/chat/completions", draw.choice([0.02, 0.1])
    try:
        with httpx.stream("POST", address, json=body, timeout=wait) as answer:
            for _ in zip(range(draw.choice([0, 1, 4])), answer.iter_lines(), strict=False):
                pass
    except httpx.TimeoutException:
        pass


@pytest.mark.parametrize("seed", seeds("EAGLE_FSD_CHATS", 1, 20))
def test_chats_are_answered_with_their_texts_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    template, force = (
        draw.choice([TOOL_TEMPLATE, TOOL_TEMPLATE, BARE, TEMPLATE]),
        draw.choice([12, 60, 60, 60, None]),
    )
    monkeypatch.setattr(scheduling, "SLICE", draw.choice([4, 50, 512]))
    model, twin = new_schema_engine(template=template, dtype=torch.float64), Twin(template, force)
    written = Processing() if force is None else Processing.of(logits_processor=echo(model.tokenizer, force))
    configured = settings(
        limits=random_limits(draw, CACHE_TOKENS), defaults=Defaults(max_new_tokens=40, processing=written)
    )
    bodies = [random_chat(draw, FORMATS[template]) for _ in range(CHATS)]
    with running(configured, model) as (url, service), ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(TURNS):
            bodies = [body for body in bodies if len(twin.prompt(body)) < LONGEST_PROMPT]
            wanted = [twin.answers(body) for body in bodies]
            asked = [
                pool.submit(ask, draw.random(), body, answers, url)
                for body, answers in zip(bodies, wanted, strict=True)
            ]
            bodies = [body for one in asked if (body := one.result()) is not None]
        until(lambda: service.worker.running == service.worker.waiting == 0)
