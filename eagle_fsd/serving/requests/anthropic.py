"""Requests for messages, Anthropic's form of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.requests.blocks import BlockMessages, Texts, text_of, turns_of_blocks
from eagle_fsd.serving.requests.generation import MOST_STOPS, Chat, Stop
from eagle_fsd.serving.requests.messages import Message, with_instructions
from eagle_fsd.serving.requests.unsupported import (
    UNSUPPORTED_MESSAGES,
    WITHOUT_EFFECT_MESSAGES,
    Table,
)
from eagle_fsd.serving.tools.choice import Word
from eagle_fsd.serving.tools.fields import (
    MOST_FUNCTIONS,
    NAME,
    Cacheable,
    Function,
    Strict,
    require_different,
)
from eagle_fsd.text.chat import ChatEnd

WORDS: dict[str, Word] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def require_own_tools(tools: Any) -> Any:
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("type") not in (None, "custom"):
            kind = format_json(tool["type"])
            raise ValueError(
                f"tools has one of type {kind}: this server has tools with an input_schema only; leave it out"
            )
    return tools


class InputTool(Strict):
    """A tool that the client runs. How its input is streamed is always the same: at once."""

    without_effect: ClassVar[Sequence[str]] = (*Cacheable.without_effect, "eager_input_streaming")

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: Literal[False] = False
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] = []

    @property
    def function(self) -> Function:
        said = {"name": self.name, "description": self.description, "strict": self.strict}
        return Function.model_validate({**said, "parameters": self.input_schema})


InputTools = Annotated[
    list[InputTool],
    Field(fail_fast=True, max_length=MOST_FUNCTIONS),
    BeforeValidator(require_own_tools),
    AfterValidator(require_different),
]


class InputToolChoice(Strict):
    """tool_choice: whether tools are called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def require_name(self) -> InputToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("tool_choice has a name if its type is tool, and only then: fix it")
        return self


class OutputFormat(Strict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """format: the form of the text. effort, which every request of some clients has, has no effect."""

    without_effect: ClassVar[Sequence[str]] = ("effort",)

    format: OutputFormat | None = None


class ThinkingEdit(Strict):
    """Earlier thinking is taken out of the turns, of which keep is to stay: none of it is read here."""

    without_effect: ClassVar[Sequence[str]] = ("keep",)

    type: Literal["clear_thinking_20251015"]


class ContextManagement(Strict):
    edits: Annotated[list[ThinkingEdit], Field(fail_fast=True)] = []


class MessagesRequest(Chat):
    """POST /v1/messages, and count_tokens below it. system: a system message before the others.

    The answer goes on with a last message of the assistant. tools, tool_choice: see Chat.
    """

    source: ClassVar[str] = "messages"
    form_field: ClassVar[str] = "output_config.format"
    unsupported: ClassVar[Table] = UNSUPPORTED_MESSAGES
    without_effect: ClassVar[Sequence[str]] = WITHOUT_EFFECT_MESSAGES

    messages: BlockMessages
    system: Texts = []
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS, alias="stop_sequences")] = []
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement = ContextManagement()
    tools: InputTools = []
    tool_choice: InputToolChoice | None = None

    @model_validator(mode="after")
    def require_open_end(self) -> MessagesRequest:
        if self.goes_on and self.messages[-1].calls:
            raise ValueError("messages end with a call: an answer cannot go on with it; send its result")
        if self.goes_on and self.has_images:
            raise ValueError(
                "messages end with one of the assistant beside images: an answer is a new turn there; leave "
                "it out"
            )
        return self

    @property
    def preamble(self) -> Mapping[str, str | None]:
        return {"system": text_of(self.system)}

    @cached_property
    def turns(self) -> Sequence[Message]:
        return with_instructions(text_of(self.system), turns_of_blocks(self.messages))

    @property
    def has_images(self) -> bool:
        return any(message.has_images for message in self.messages)

    @property
    def goes_on(self) -> bool:
        return self.messages[-1].role == "assistant"

    @property
    def end(self) -> ChatEnd:
        return "open" if self.goes_on else "waiting"

    @property
    def functions(self) -> Sequence[Function]:
        return [tool.function for tool in self.tools]

    @property
    def called(self) -> str | None:
        return None if self.tool_choice is None else self.tool_choice.name

    @property
    def allowed(self) -> Sequence[str] | None:
        return None

    @property
    def call_choice(self) -> Word | None:
        return None if self.tool_choice is None else WORDS[self.tool_choice.type]

    @property
    def several_calls(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def own_form(self) -> Form | None:
        asked = self.output_config.format
        return None if asked is None else Form.json_schema(asked.json_schema)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        return None
