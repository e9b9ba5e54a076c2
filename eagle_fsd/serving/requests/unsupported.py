"""Fields of requests that this server does not support, and those that have no effect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Table = Mapping[str, tuple[Any, ...]]

# Unsupported fields of OpenAI's and vLLM's requests, and the values that ask for nothing, which clients send
# of their own accord. To switch a field on: take it out of this table, add it to the class of a request, and
# use it in choices.py.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # how tokens are chosen
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "priority": (0,),
    # what is reported
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "include_reasoning": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    # older names of tools and forms
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "chat_template": (),
    # media and services
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# These name a client or its own business, and change no text.
OF_CLIENTS = (
    *("user", "safety_identifier", "cache_prompt"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
WITHOUT_EFFECT = (*OF_CLIENTS, "metadata")

# These go on with an answer that is stored, which none is; and the field that has all turns.
OF_OTHER_ANSWERS = {"previous_response_id": "input", "conversation": "input", "thread": "messages"}

# The same for /v1/responses, whose answers repeat the metadata.
UNSUPPORTED_RESPONSES: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "context_management": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
WITHOUT_EFFECT_RESPONSES = OF_CLIENTS

# The same for /v1/messages. Claude Code sends thinking with every request.
UNSUPPORTED_MESSAGES: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}
WITHOUT_EFFECT_MESSAGES = ("metadata", "thinking", "cache_control", "betas", "diagnostics")

# The fields that do here what unsupported ones ask for.
IN_PLACE = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
    "functions": "tools",
    "function_call": "tool_choice",
    "reasoning_effort": "chat_template_kwargs",
}


def drop_what_asks_for_nothing(data: Any, unsupported: Table) -> Any:
    """Take out unsupported fields; raise Unsupported for one that asks for something."""
    if not isinstance(data, Mapping):
        return data
    for name, value in data.items():
        if name in unsupported and not is_neutral(value, unsupported[name]):
            raise Unsupported(name, unsupported[name])
    return {name: value for name, value in data.items() if name not in unsupported}


def is_neutral(value: object, neutral: Sequence[object]) -> bool:
    """Whether a field's value asks for nothing. An object whose fields are all null is empty."""
    if isinstance(value, Mapping):
        value = {name: inner for name, inner in value.items() if inner is not None}
    return value is None or any(type_and_value(value) == type_and_value(one) for one in neutral)


def type_and_value(value: object) -> tuple[bool, object]:
    """Return what tells values apart: False is not 0 here."""
    return isinstance(value, bool), value


class Unsupported(Exception):
    """A field that asks for something unsupported."""

    def __init__(self, name: str, neutral: Sequence[object]) -> None:
        neutral = [one for one in neutral if one not in ({}, [], "")]
        remedy = f"leave it out, or send {json.dumps(neutral[0])}" if neutral else "leave it out"
        if name in IN_PLACE:
            remedy += f", or send {IN_PLACE[name]} in its place"
        if name in OF_OTHER_ANSWERS:
            remedy = f"no answer is stored; send the earlier turns in {OF_OTHER_ANSWERS[name]}"
        super().__init__(f"{name} is not supported by this server: {remedy}")
        self.name = name
