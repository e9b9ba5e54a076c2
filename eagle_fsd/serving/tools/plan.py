"""What a chat's tools come to: the turns that the model reads, the form of its answer, and its reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.core.checks import format_value
from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import ApiError, wrong_value
from eagle_fsd.serving.requests.generation import Chat
from eagle_fsd.serving.requests.messages import ImagePart, Message
from eagle_fsd.text.tool_calls import (
    OWN_FORMAT,
    CallFormat,
    CallReader,
    call_grammar,
    call_text,
    describe_functions,
)


@dataclass(frozen=True)
class ToolPlan:
    """How the functions of one chat are offered and called.

    functions: as templates show them. format: how the answer calls them. form: forces that, or a text of the
    request's own form; None: the model may call or not, in its own words. several: whether there may be more
    than one call. free: whether it may answer with text.
    """

    functions: Sequence[dict[str, Any]]
    format: CallFormat
    form: Form | None
    several: bool
    free: bool

    def reader(self) -> CallReader:
        names = [one["name"] for one in self.functions]
        return CallReader(names, self.format.tagged, self.several, self.free)


def plan_tools(request: Chat, known: CallFormat) -> ToolPlan | None:
    """Return what a request's tools come to; None without any, or if none may be called.

    known: what the model's chat template has. Raises ApiError for what cannot be done with it.
    """
    offered, choice = request.functions, request.call_choice or "auto"
    named = request.allowed if request.called is None else [request.called]
    if not offered and (choice == "required" or named is not None):
        raise wrong_value("tool_choice without tools: send tools, or leave it out", "tool_choice")
    if choice == "none" or not offered:
        return None
    if named is not None:
        known_names = [one.name for one in offered]
        if (missing := next((one for one in named if one not in known_names), None)) is not None:
            said = format_value(missing)
            raise wrong_value(f"tool_choice names {said}, which is not in tools: add it", "tool_choice")
        offered = [one for one in offered if one.name in named]
    if request.form is not None and request.form.kind != "json_schema":
        name = request.form_name
        message = (
            f"{name} beside tools: an answer is calls or JSON; send a schema, leave one of them out, or set "
            "tool_choice to none"
        )
        raise wrong_value(message, name)
    # A template that knows functions says how to call them in its own words, tagged or not.
    functions = [one.shown for one in offered]
    several = request.several_calls and request.called is None
    if choice != "auto":
        grammar = call_grammar(functions, known, several)
        return ToolPlan(functions, known, Form("grammar", grammar), several, free=False)
    if not known.tagged:
        message = (
            "tools: the model's chat template writes calls in a way that is not read here; force a call with "
            "tool_choice, or leave tools out"
        )
        raise ApiError(400, message, "unsupported_field", "tools")
    form, answer = None, None if request.form is None else request.form.source
    # What is promised of arguments, or of text, can only be kept by force.
    if answer is not None or any(one.strict for one in offered):
        form = Form("grammar", call_grammar(functions, known, several, free=answer is None, answer=answer))
    return ToolPlan(functions, known, form, several, free=True)


def turns_of(
    messages: Sequence[Message], plan: ToolPlan | None, known: CallFormat
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the turns of a chat, and the arguments of the chat template, with functions, calls and results.

    Where the template knows none, they are written into the messages; see OWN_FORMAT.
    """
    if known.known:
        tools = [{"type": "function", "function": one} for one in plan.functions] if plan else []
        return [as_known_turn(message) for message in messages], {"tools": tools} if tools else {}
    turns = [as_plain_turn(message) for message in messages]
    if plan is not None:
        described = describe_functions(plan.functions)
        if turns[0]["role"] == "system":
            turns[0] = {"role": "system", "content": f"{turns[0]['content']}\n\n{described}"}
        else:
            turns.insert(0, {"role": "system", "content": described})
    return merged_results(turns), {}


def role_of(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def content_of(message: Message) -> str | list[dict[str, Any]]:
    """Return what a message says: a text, or parts where it has images, which are yet to be read."""
    if isinstance(message.content, str) or not message.images:
        return message.text
    return [
        {"type": "image", "image": part} if isinstance(part, ImagePart) else part.model_dump()
        for part in message.content
    ]


def as_known_turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": role_of(message), "content": content_of(message)}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "function": {"name": call.function.name, "arguments": call.function.read}}
            | ({"id": call.id} if call.id else {})
            for call in message.tool_calls
        ]
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            turn["name"] = message.name
    return turn


def as_plain_turn(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    if message.images:
        return {"role": role_of(message), "content": content_of(message)}
    calls = [call_text(call.function.name, call.function.read, OWN_FORMAT) for call in message.tool_calls]
    return {"role": role_of(message), "content": "\n".join(filter(None, [message.text, *calls]))}


def merged_results(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with results as the user's; several in a row are one, since roles must alternate."""
    found: list[dict[str, Any]] = []
    results = False  # whether the last turn is of results
    for turn in turns:
        if turn["role"] == "tool" and results:
            found[-1]["content"] += f"\n{turn['content']}"
            continue
        results = turn["role"] == "tool"
        found.append({**turn, "role": "user" if results else turn["role"]})
    return found
