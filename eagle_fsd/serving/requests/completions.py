"""Requests for chats, plain completions and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.requests.generation import MOST_LOGPROBS, Body, Chat, Decoding, Endable
from eagle_fsd.serving.requests.messages import Message, Messages
from eagle_fsd.serving.tools.choice import AllowedTools, NamedTool, ToolChoice, Word
from eagle_fsd.serving.tools.fields import Function, ResponseFormat, Strict, Tools

Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]


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


class StreamOptions(Strict):
    """include_usage: end the stream with a chunk that has the usage and no choices."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class Generation(Decoding):
    """The fields that chats and plain completions share.

    timings_per_token: every chunk of a stream says how fast it was so far. return_token_origins: see
    Decoding.wants_origins.
    """

    form_field: ClassVar[str] = "response_format"

    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    timings_per_token: bool = False
    return_token_origins: bool = False

    @property
    def own_form(self) -> Form | None:
        return None if self.response_format is None else self.response_format.form

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def count(self) -> int:
        return self.n

    @property
    def wants_origins(self) -> bool:
        return self.return_token_origins


class ChatRequest(Endable, Chat, Generation):
    """POST /v1/chat/completions. documents: for the model's chat template. tools, tool_choice: see Chat."""

    source: ClassVar[str] = "messages"
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
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
    def turns(self) -> Sequence[Message]:
        return self.messages

    @property
    def goes_on(self) -> bool:
        return self.continue_final_message

    @property
    def functions(self) -> Sequence[Function]:
        return [tool.function for tool in self.tools]

    @property
    def called(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def allowed(self) -> Sequence[str] | None:
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.name for tool in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def call_choice(self) -> Word | None:
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode
        return "required" if isinstance(self.tool_choice, NamedTool) else self.tool_choice

    @property
    def several_calls(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def template(self) -> dict[str, Any]:
        return {**super().template, **({"documents": self.documents} if self.documents else {})}

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Generation):
    """POST /v1/completions. prompt: a text, several, token ids, or several lists of them."""

    source: ClassVar[str] = "prompt"
    prompt: Annotated[str | Texts | Ids | list[Ids], BeforeValidator(require_prompt)]
    logprobs: Annotated[int | None, BeforeValidator(none_if_false)] = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs

    @property
    def goes_on(self) -> bool:
        return True

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if alone else list(prompt)


class TokenizeRequest(Endable):
    """POST /tokenize: the token ids of a text, or of a chat as it is answered."""

    source: ClassVar[str] = "messages"
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @property
    def turns(self) -> Sequence[Message]:
        return self.messages or ()

    @model_validator(mode="after")
    def require_one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be there, and not both: send one of them")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize: the text of token ids."""

    model: str | None = None
    tokens: Ids
