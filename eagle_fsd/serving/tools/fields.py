"""The parts of requests that ask for a form of the answer, or for function calls, as OpenAI has them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)

from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import format_json
from eagle_fsd.text.tool_calls import quoted, refuse_constant

MOST_FUNCTIONS, MOST_CHOICES = 128, 1024
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
ANY_OBJECT = {"type": "object"}
DEEPEST = 100  # levels of JSON: templates and encoders call themselves at each, and schemas have some tens
MOST_PARTS = 8192  # lists and objects in a field: to check so many messages holds up all streams for 0.2 s


def excess_of(value: object) -> str | None:
    """Return what a JSON value has too much of, as an error says it; None: it has neither too much."""
    level = [value] if isinstance(value, dict | list) else []
    parts = 0
    for _ in range(DEEPEST):
        parts += len(level)
        if parts > MOST_PARTS:
            return f"more than {MOST_PARTS} lists and objects"
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    return f"more than {DEEPEST} levels of JSON" if level else None


def at_most(count: int) -> BeforeValidator:
    """Return a validator that refuses an object of more fields; max_length would look at all of them."""

    def require_few(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(
                f"{info.field_name} has {len(value)} items: it may have at most {count} items; leave some out"
            )
        return value

    return BeforeValidator(require_few)


class Strict(BaseModel):
    """A request or a part of one. A field that is null is absent, and so are those without effect."""

    without_effect: ClassVar[Sequence[str]] = ()
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_what_says_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        said = {
            name: value
            for name, value in data.items()
            if value is not None and name not in cls.without_effect
        }
        known = {field.alias or name for name, field in cls.model_fields.items()}
        # To refuse each of very many unknown fields would hold up all streams: the first one is enough.
        for name in [name for name in said if name not in known][1:]:
            del said[name]
        return said


class Cacheable(Strict):
    """A part of a request that a client may mark to be cached, as Anthropic has it: here all is."""

    without_effect: ClassVar[Sequence[str]] = ("cache_control",)


class OrText:
    """Marks a field whose validator takes a text as well, for openapi.json."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


class NamedSchema(Strict):
    """A JSON schema with a name, which changes nothing. strict: the schema holds in any case."""

    name: str = Field("answer", max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(ANY_OBJECT, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """response_format: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def require_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError(
                "response_format has a json_schema if its type is json_schema, and only then: fix it"
            )
        return self

    @property
    def form(self) -> Form | None:
        if self.type == "text":
            return None
        return Form.json_schema(self.json_schema.json_schema if self.json_schema is not None else ANY_OBJECT)


class StructuredOutputs(Strict):
    """structured_outputs, as vLLM has it: one of these. grammar: in Lark's language."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)] | None = None
    grammar: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def require_one(self) -> StructuredOutputs:
        given = [self.json_schema, self.regex, self.choice, self.grammar]
        if sum(one is not None for one in given) != 1:
            raise ValueError("structured_outputs must have one of json, regex, choice and grammar: send one")
        return self

    @property
    def form(self) -> Form:
        if self.json_schema is not None:
            return Form.json_schema(self.json_schema)
        if self.regex is not None:
            return Form("regex", self.regex)
        if self.choice is not None:
            return Form("grammar", "start: " + " | ".join(map(quoted, self.choice)))
        assert self.grammar is not None
        return Form("grammar", self.grammar)


class Function(Strict):
    """A function that the model may call. strict: its arguments have their schema in any case."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The function as a chat template shows it."""
        shown: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        return {**shown, "parameters": self.parameters or {**ANY_OBJECT, "properties": {}}}


class Tool(Cacheable):
    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        return self.function.name


def require_different(tools: Sequence[Any]) -> Sequence[Any]:
    names = [tool.name for tool in tools]
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise ValueError(f"tools has the function {twice} twice: name it once")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MOST_FUNCTIONS), AfterValidator(require_different)]


def require_parts(name: str | None, value: Any, types: Sequence[str | None]) -> None:
    """Raise ValueError unless this is a text, or a list of parts of these types, the usual one first."""
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        example = json.dumps({"type": types[0], "text": "Hello"})
        raise ValueError(
            f"{name} is {format_json(value)}: it must be a text, or a list of parts such as {example}; send "
            "one of these"
        )
    for part in value:
        if (kind := part.get("type")) not in types:
            raise ValueError(
                f"{name} has a part of type {format_json(kind)}: this server reads text only; leave it out"
            )


class TextPart(Cacheable):
    """A part of a message; texts are the only kind."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """name and arguments of a call; arguments: the JSON of an object."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def require_object(cls, value: str) -> str:
        try:
            found = json.loads(value or "{}", parse_constant=refuse_constant, parse_int=require_short)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"arguments must be the JSON of an object ({error}): send it as it came"
            ) from error
        if not isinstance(found, dict):
            raise ValueError("arguments must be the JSON of an object: send it as it came")
        if excess := excess_of(found):
            raise ValueError(f"arguments have {excess}: send fewer")
        return value

    @property
    def read(self) -> dict[str, Any]:
        """The arguments, for the model to read. A half character, which it may have written, is a "?"."""
        found = json.dumps(json.loads(self.arguments or "{}", parse_float=bounded), ensure_ascii=False)
        return json.loads(found.encode(errors="replace"))


def require_short(number: str) -> int:
    """Return an integer. Raises ValueError for one of more digits than Python reads."""
    try:
        return int(number)
    except ValueError as error:
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits()} digits") from error


def bounded(number: str) -> float:
    """Return what JSON's text of a number stands for, at most the largest float: not Infinity for 1e999."""
    largest = sys.float_info.max
    return max(-largest, min(largest, float(number)))


class ToolCall(Strict):
    """A call that an assistant made. index: as a stream has it; it has no effect."""

    id: str = Field("", max_length=200)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


# What OpenAI's own answers carry in a message, null or empty, and clients send back.
ABSENT = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content", "reasoning")


class Message(Cacheable):
    """A turn of a chat. The role developer means system, and tool is the result of a call.

    name: of the function whose result it is, for templates that show it. Of other roles it has no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # To note what is wrong with each of a million parts would hold up all streams: the first one is enough.
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = []
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def drop_empty_parts(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in ABSENT or value != []}

    @field_validator("content", mode="before")
    @classmethod
    def require_text(cls, value: Any) -> Any:
        require_parts("content", value, ("text", None))
        return value

    @model_validator(mode="after")
    def require_what_the_role_has(self) -> Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing: add it")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are an assistant's, not of the role {self.role}: leave them out")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id is for messages of the role tool: leave it out")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is missing: say which call this is the result of")
        return self

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]
