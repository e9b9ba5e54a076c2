"""Requests for responses, the newer form of OpenAI's chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, model_validator

from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.requests.generation import MOST_LOGPROBS, Chat
from eagle_fsd.serving.requests.items import Items, MessageItem, turns_of_items
from eagle_fsd.serving.requests.messages import Message, with_instructions
from eagle_fsd.serving.requests.unsupported import (
    UNSUPPORTED_RESPONSES,
    WITHOUT_EFFECT_RESPONSES,
    Table,
)
from eagle_fsd.serving.tools.choice import ByKind, FunctionName, RequireChoice, Word
from eagle_fsd.serving.tools.fields import (
    ANY_OBJECT,
    MOST_FUNCTIONS,
    Function,
    Strict,
    at_most,
    require_different,
)

LONGEST_NAME = 64  # characters of a name in the metadata
LOGPROBS = "message.output_text.logprobs"
# There are no items of reasoning, so that there is nothing to encrypt.
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


def require_functions(tools: Any) -> Any:
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("type") != "function":
            kind = format_json(tool.get("type"))
            raise ValueError(f"tools has one of type {kind}: this server has functions only; leave it out")
    return tools


def require_short_names(metadata: dict[str, str]) -> dict[str, str]:
    if long := next((name for name in metadata if len(name) > LONGEST_NAME), None):
        raise ValueError(
            f"metadata has the name {format_json(long)}: it must have at most {LONGEST_NAME} characters; "
            "shorten it"
        )
    return metadata


class FunctionTool(Function):
    """A function, with its fields beside its type."""

    type: Literal["function"]


class TextFormat(Strict):
    """text.format: any text, any JSON object, or JSON of a schema, whose fields stand beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def require_schema(self) -> TextFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("format has a schema if its type is json_schema, and only then: fix it")
        return self

    @property
    def form(self) -> Form | None:
        if self.type == "text":
            return None
        return Form.json_schema(ANY_OBJECT if self.json_schema is None else self.json_schema)


class TextOptions(Strict):
    format: TextFormat | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] = False


Metadata = Annotated[  # OpenAI's limits
    dict[str, Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    at_most(16),
    AfterValidator(require_short_names),
]
FunctionTools = Annotated[
    list[FunctionTool],
    Field(fail_fast=True, max_length=MOST_FUNCTIONS),
    BeforeValidator(require_functions),
    AfterValidator(require_different),
]


class CalledTool(FunctionName):
    """tool_choice: this function is called."""

    type: Literal["function"]


class AllowedTools(Strict):
    """tool_choice: only these functions are offered. mode, tools: see Allowance."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[FunctionTools, Field(min_length=1)]


ToolChoice = Annotated[
    Annotated[
        Annotated[Word, Tag("str")]
        | Annotated[CalledTool, Tag("NamedTool")]
        | Annotated[AllowedTools, Tag("AllowedTools")],
        ByKind,
    ],
    RequireChoice,
]


class ResponsesRequest(Chat):
    """POST /v1/responses. No answer is stored, so the input has all turns.

    instructions: a system message before them. tools, tool_choice: see Chat. metadata: comes back.
    """

    source: ClassVar[str] = "input"
    form_field: ClassVar[str] = "text.format"
    unsupported: ClassVar[Table] = UNSUPPORTED_RESPONSES
    without_effect: ClassVar[Sequence[str]] = WITHOUT_EFFECT_RESPONSES

    input: Items
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions = TextOptions()
    tools: FunctionTools = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] = []
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    metadata: Metadata = {}
    stream_options: ResponseStreamOptions | None = None

    @model_validator(mode="after")
    def require_what_fits(self) -> ResponsesRequest:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise ValueError(f"top_logprobs is for logprobs: add {LOGPROBS} to include, or leave it out")
        if LOGPROBS in self.include and self.tools and self.call_choice != "none":
            raise ValueError(
                f"include has {LOGPROBS} beside tools: tokens of calls have none; leave one out, or set "
                "tool_choice to none"
            )
        return self

    @property
    def preamble(self) -> Mapping[str, str | None]:
        return {"instructions": self.instructions}

    @cached_property
    def turns(self) -> Sequence[Message]:
        return with_instructions(self.instructions, turns_of_items(self.input))

    @property
    def has_images(self) -> bool:
        return any(isinstance(item, MessageItem) and item.has_images for item in self.input)

    @property
    def functions(self) -> Sequence[Function]:
        return self.tools

    @property
    def called(self) -> str | None:
        return self.tool_choice.name if isinstance(self.tool_choice, CalledTool) else None

    @property
    def allowed(self) -> Sequence[str] | None:
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.name for tool in self.tool_choice.tools]
        return None

    @property
    def call_choice(self) -> Word | None:
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.mode
        return "required" if isinstance(self.tool_choice, CalledTool) else self.tool_choice

    @property
    def several_calls(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def own_form(self) -> Form | None:
        return None if self.text.format is None else self.text.format.form

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in self.include else None
