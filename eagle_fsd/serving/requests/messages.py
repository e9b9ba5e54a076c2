"""The messages of a chat, with calls of functions and their results, as OpenAI has them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.tools.fields import Cacheable, OrText, Strict, excess_of
from eagle_fsd.text.tool_calls import refuse_constant


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
            read = "text and images are" if any("image" in one for one in types if one) else "text is"
            raise ValueError(
                f"{name} has a part of type {format_json(kind)}: only {read} read here; leave it out"
            )


class TextPart(Cacheable):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """An image in a data: URL. detail, which is for OpenAI's own towers, has no effect."""

    without_effect: ClassVar[Sequence[str]] = ("detail",)

    url: str


def as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class ImagePart(Cacheable):
    """A part of a message that is an image."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(as_image_url), OrText()]


def kind_of_part(part: Any) -> str:
    """Return the class of a part, as pydantic's error has it; see is_type_name."""
    kind = part.get("type") if isinstance(part, dict) else part.type
    return "ImagePart" if kind == "image_url" else "TextPart"


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[ImagePart, Tag("ImagePart")], Discriminator(kind_of_part)
]


def refuse_images(role: str) -> None:
    """Raise ValueError unless messages of this role may have images."""
    if role != "user":
        raise ValueError(
            f"content has an image in a message of the role {role}: only the user's may; leave it out"
        )


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
    content: str | Annotated[list[Part], Field(fail_fast=True)] = ""
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
        require_parts("content", value, ("text", "image_url", None))
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
        if self.images:
            refuse_images(self.role)
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> Sequence[ImagePart]:
        return [part for part in self.content if isinstance(part, ImagePart)]


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


def with_instructions(said: str | None, turns: Sequence[Message]) -> Sequence[Message]:
    """Return turns with these instructions as a system message before them."""
    if not said:
        return turns
    if turns[0].role in ("system", "developer"):  # many templates have one such message, at the beginning
        said, turns = f"{said}\n\n{turns[0].text}", turns[1:]
    return [Message(role="system", content=said), *turns]
