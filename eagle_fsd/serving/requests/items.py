"""The items of a request for a response: messages, calls and their results, as turns of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.requests.messages import (
    CalledFunction,
    Message,
    ToolCall,
    refuse_images,
    require_parts,
)
from eagle_fsd.serving.tools.fields import OrText, Strict

# What answers carry in an item or a part of one, or OpenAI's client adds to it, and clients send back.
WITHOUT_EFFECT = (
    *("id", "status", "phase", "annotations", "logprobs", "namespace", "caller", "async", "created_by"),
    *("parsed", "parsed_arguments", "cache_control"),
)
TEXTS = ("input_text", "output_text", "text", "refusal")


class Kept(Strict):
    """An item, or a part of one."""

    without_effect: ClassVar[Sequence[str]] = WITHOUT_EFFECT


class ItemPart(Kept):
    """A part of a message or a result that is text."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str

    @property
    def part(self) -> dict[str, Any]:
        """The part as chats have it."""
        return {"type": "text", "text": self.text}


class ImageItemPart(Kept):
    """A part of a message that is an image in a data: URL. detail has no effect, as in chats."""

    without_effect: ClassVar[Sequence[str]] = (*WITHOUT_EFFECT, "detail")

    type: Literal["input_image"]
    image_url: str

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


def as_parts(value: Any, info: ValidationInfo) -> Any:
    """Return a field's texts as parts. Raises ValueError for what is not read there."""
    require_parts(info.field_name, value, (*TEXTS, "input_image") if info.field_name == "content" else TEXTS)
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    refused = {"refusal": "text"}  # where a part of this type has its text
    return [{refused.get(name, name): said for name, said in part.items()} for part in value]


def kind_of_item_part(part: Any) -> str:
    """Return the class of a part, as pydantic's error has it; see is_type_name."""
    kind = part.get("type") if isinstance(part, Mapping) else part.type
    return "ImageItemPart" if kind == "input_image" else "ItemPart"


Texts = Annotated[list[ItemPart], Field(fail_fast=True), BeforeValidator(as_parts), OrText()]
AnyPart = Annotated[
    Annotated[ItemPart, Tag("ItemPart")] | Annotated[ImageItemPart, Tag("ImageItemPart")],
    Discriminator(kind_of_item_part),
]
Parts = Annotated[list[AnyPart], Field(fail_fast=True), BeforeValidator(as_parts), OrText()]


class MessageItem(Kept):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts

    @model_validator(mode="after")
    def require_users_images(self) -> MessageItem:
        if self.has_images:
            refuse_images(self.role)
        return self

    @property
    def has_images(self) -> bool:
        return any(isinstance(part, ImageItemPart) for part in self.content)

    @property
    def turn(self) -> Message:
        if self.has_images:
            return Message.model_validate(
                {"role": self.role, "content": [part.part for part in self.content]}
            )
        return Message(role=self.role, content=text_of(self.content))


class CallItem(Kept, CalledFunction):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=200)

    @property
    def turn(self) -> Message:
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return Message(role="assistant", tool_calls=[ToolCall(id=self.call_id, function=function)])


class ResultItem(Kept):
    """The result of a call. name: of the function, which the call says as well."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=200)
    output: Texts
    name: str | None = None

    @property
    def turn(self) -> Message:
        said = text_of(self.output)
        return Message(role="tool", content=said, tool_call_id=self.call_id, name=self.name)


def text_of(parts: Sequence[ItemPart | ImageItemPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ItemPart))


def kind_of(item: Any) -> str:
    """Return the class of an item. Raises ValueError for a kind that is not read here."""
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    if kind is None and isinstance(item, Mapping):
        kind = "message"
    classes = {"message": "MessageItem", "function_call": "CallItem", "function_call_output": "ResultItem"}
    if not isinstance(kind, str) or kind not in classes:
        said = format_json(item if kind is None else kind)
        remedy = "no answer is stored; send the item itself" if kind == "item_reference" else "leave it out"
        raise ValueError(f"input has an item {said}: it must be of type {', '.join(classes)}; {remedy}")
    return classes[kind]


def as_items(value: Any) -> Any:
    """Return what an input comes to: a text is what the user says."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"input is {format_json(value)}: it must be a text, or a list of items; send one")
    for item in value:
        kind_of(item)
    return value


Item = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[ResultItem, Tag("ResultItem")],
    Discriminator(kind_of),
]
Items = Annotated[list[Item], Field(fail_fast=True), BeforeValidator(as_items), OrText()]


def turns_of_items(items: Sequence[Any]) -> list[Message]:
    """Return the turns of a chat. The assistant's calls and the messages around them are one turn."""
    turns: list[Message] = []
    names: dict[str, str] = {}  # of functions, by the calls' ids
    for item in items:
        turn, before = item.turn, turns[-1] if turns else None
        if isinstance(item, CallItem):
            names[item.call_id] = item.name
        elif isinstance(item, ResultItem):
            turn.name = names.get(item.call_id, item.name)
        if (
            before is not None
            and before.role == turn.role == "assistant"
            and (before.tool_calls or turn.tool_calls)
        ):
            before.content += turn.content
            before.tool_calls += turn.tool_calls
        else:
            turns.append(turn)
    return turns
