"""Requests as clients send them. A field that is unknown or asks for what is unsupported is refused by name.

Values must have their JSON type: "5" is no number. null means that a field is absent.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WrapValidator,
    model_validator,
)

from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.tools.fields import (
    DEEPEST,
    Messages,
    Strict,
    StructuredOutputs,
    ToolChoice,
    Tools,
    WantedFormat,
    is_too_deep,
)
from eagle_fsd.text.chat import OWN_ARGUMENTS

MOST_STOPS, LONGEST_STOP = 16, 200
MOST_IDS = 1024  # entries of a list of tokens or words: each costs time in every step
MOST_LOGPROBS = 20
SEEDS = 2**63

# Unsupported fields of OpenAI's and vLLM's requests, and the values that ask for nothing, which clients send
# of their own accord. To switch a field on: take it out of this table, add it to a class below, and use
# it in choices.py.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # how tokens are chosen
    "best_of": (1,),
    "use_beam_search": (False,),
    # what is reported
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "include_reasoning": (False,),
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
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# These name a client or its own business, and change no text.
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "cache_prompt")


def drop_what_asks_for_nothing(data: Any) -> Any:
    """Take out fields without effect; raise ValueError for one that asks for what is unsupported."""
    if not isinstance(data, Mapping):
        return data
    kept = {}
    for name, value in data.items():
        if name in UNSUPPORTED:
            refuse_unless_neutral(name, value)
        elif name not in WITHOUT_EFFECT:
            kept[name] = value
    return kept


def refuse_unless_neutral(name: str, value: object) -> None:
    if value is not None and not any(
        type_and_value(value) == type_and_value(one) for one in UNSUPPORTED[name]
    ):
        raise Unsupported(name)


def type_and_value(value: object) -> tuple[bool, object]:
    """Return what tells values apart: False is not 0 here."""
    return isinstance(value, bool), value


class Unsupported(Exception):
    """A field that asks for something unsupported."""

    def __init__(self, name: str) -> None:
        neutral = [one for one in UNSUPPORTED[name] if one not in ({}, [], "")]
        remedy = f"leave it out, or send {json.dumps(neutral[0])}" if neutral else "leave it out"
        super().__init__(f"{name} is not supported by this server: {remedy}")
        self.name = name


def as_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(
            f"stop is {format_json(value)}: it must be a string, or a list of strings; send that, or leave "
            "it out"
        )
    return stops


def require_prompt(value: Any) -> Any:
    rows = value if isinstance(value, list) else [value]
    texts = all(isinstance(row, str) for row in rows)
    if texts or (isinstance(value, list) and (are_ids(rows) or all(map(are_ids, rows)))):
        return value
    raise ValueError(
        f"prompt is {format_json(value)}: it must be a text, several texts, token ids, or several lists of "
        "token ids, and not a mixture; send one of these"
    )


def are_ids(value: Any) -> bool:
    """Whether this is a list of integers, as token ids are."""
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) for one in value
    )


def none_if_false(value: Any) -> Any:
    """Take a chat's way to ask for no log-probabilities as well."""
    return None if value is False else value


def require_threshold(value: Any, _check: Any) -> Any:
    """Take "inf" as well, since JSON has no number for it; timings write it so."""
    if value is None or value == "auto":
        return value
    if value == "inf":
        return math.inf
    with contextlib.suppress(OverflowError):  # an integer may be larger than any float
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise ValueError(
        f'threshold is {format_json(value)}: it must be a number of at least 0, "inf" or "auto"; send one'
    )


def require_template(value: Any) -> Any:
    if own := OWN_ARGUMENTS.intersection(value):
        raise ValueError(
            f"chat_template_kwargs has {min(own)}, which is no argument of a template: leave it out"
        )
    return value


Template = Annotated[dict[str, Any], AfterValidator(require_template)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(Strict):
    """The body of a request."""

    @model_validator(mode="before")
    @classmethod
    def require_few_levels(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if name in cls.model_fields and is_too_deep(value):
                raise ValueError(f"{name} has more than {DEEPEST} levels of JSON: send fewer")
        return data


class StreamOptions(Strict):
    """include_usage: end the stream with a chunk that has the usage and no choices."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Generation(Body):
    """The fields that chats and plain completions share.

    repetition_penalty to min_tokens: see choices.py. stop_token_ids: tokens that end a text as well.
    threshold, divergence, rule, quality_budget: how far a text may be from the target's, see choices.py.
    response_format, structured_outputs: what form the text has, one of them at most.
    ignore_eos: end tokens do not end a text. timings_per_token: every chunk of a stream says how fast it was
    so far. return_token_origins: texts also come in pieces that say how their tokens came.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_IDS)] = {}
    bad_words: Annotated[list[Stop], Field(max_length=MOST_IDS)] = []
    suppress_tokens: Annotated[list[int], Field(max_length=MOST_IDS)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_IDS)] = []
    min_tokens: int | None = None
    seed: int | None = Field(None, ge=0, lt=SEEDS)
    stop: Annotated[list[Stop], BeforeValidator(as_stops), Field(max_length=MOST_STOPS)] = []
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    threshold: Annotated[float | str | None, WrapValidator(require_threshold)] = None
    divergence: str | None = Field(None, max_length=200)
    rule: str | None = Field(None, max_length=200)
    quality_budget: float | None = None
    response_format: WantedFormat = None
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool = False
    timings_per_token: bool = False
    return_token_origins: bool = False

    @model_validator(mode="before")
    @classmethod
    def take_what_is_done(cls, data: Any, info: ValidationInfo) -> Any:
        return drop_what_asks_for_nothing(data)

    @model_validator(mode="after")
    def require_stream(self) -> Generation:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options is for streams: leave it out, or set stream to true")
        return self

    @model_validator(mode="after")
    def require_one_form(self) -> Generation:
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs beside response_format: a text has one form; leave one out")
        return self

    @property
    def form(self) -> Form | None:
        """What form the text has."""
        wanted = self.response_format or self.structured_outputs
        return None if wanted is None else wanted.form

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        """How many likeliest tokens are reported beside each token; None: no log-probabilities at all."""
        return None


class ChatRequest(Generation):
    """POST /v1/chat/completions. chat_template_kwargs, documents: for the model's chat template.

    tools, tool_choice, parallel_tool_calls: see tools/plan.py.
    """

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: Template = {}
    documents: list[Any] = []
    tools: Tools = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def require_one_limit(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is the old name of max_completion_tokens: send one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: set that to true, or leave top_logprobs out")
        return self

    @property
    def top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        return {**self.chat_template_kwargs, **({"documents": self.documents} if self.documents else {})}

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Generation):
    """POST /v1/completions. prompt: a text, several, token ids, or several lists of them."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(require_prompt)]
    logprobs: Annotated[int | None, BeforeValidator(none_if_false)] = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if alone else list(prompt)


class TokenizeRequest(Body):
    """POST /tokenize: the token ids of a text, or of a chat that waits for its answer."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: Template = {}

    @property
    def template(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        return self.chat_template_kwargs

    @model_validator(mode="after")
    def require_one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be there, and not both: send one of them")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize: the text of token ids."""

    model: str | None = None
    tokens: list[int]
