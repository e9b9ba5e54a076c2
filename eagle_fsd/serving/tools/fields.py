"""The parts of requests that ask for a form of the answer, or for function calls, as OpenAI has them."""

from __future__ import annotations

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
    model_validator,
)

from eagle_fsd.core.config import Form
from eagle_fsd.text.tool_calls import quoted

MOST_FUNCTIONS, MOST_CHOICES = 128, 1024
NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # OpenAI has 64 characters at most, and Anthropic 128
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
