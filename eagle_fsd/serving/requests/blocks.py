"""The messages of Anthropic's requests: blocks of text, images, calls and results, as turns of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.requests.messages import (
    CalledFunction,
    Message,
    Part,
    TextPart,
    ToolCall,
    refuse_images,
    require_parts,
)
from eagle_fsd.serving.tools.fields import Cacheable, OrText, Strict

JOINED = ("user", "assistant")  # the roles whose neighbours are one turn
KINDS = {  # the classes of blocks, by their types
    "text": "TextBlock",
    "image": "ImageBlock",
    "tool_use": "ToolUseBlock",
    "tool_result": "ToolResultBlock",
    "thinking": "ThinkingBlock",
    "redacted_thinking": "ThinkingBlock",
}


class TextBlock(Strict):
    """A block that is text. What answers carry beside it has no effect."""

    without_effect: ClassVar[Sequence[str]] = (*Cacheable.without_effect, "citations", "parsed_output")

    type: Literal["text"]
    text: str

    @property
    def part(self) -> dict[str, Any]:
        """The block as chats have it."""
        return {"type": "text", "text": self.text}


def require_base64(source: Any) -> Any:
    if isinstance(source, Mapping) and source.get("type") != "base64":
        raise ValueError(
            f"source is of type {format_json(source.get('type'))}: this server fetches nothing, so an image "
            "must be in the request; send its base64, with the type base64"
        )
    return source


class ImageSource(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(Cacheable):
    """A block that is an image in base64."""

    type: Literal["image"]
    source: Annotated[ImageSource, BeforeValidator(require_base64)]

    @property
    def part(self) -> dict[str, Any]:
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ToolUseBlock(Strict):
    """A call that the model made."""

    without_effect: ClassVar[Sequence[str]] = (*Cacheable.without_effect, "caller", "toolset_name")

    type: Literal["tool_use"]
    id: str = Field(max_length=200)
    name: str
    input: dict[str, Any]

    @property
    def call(self) -> ToolCall:
        function = CalledFunction(name=self.name, arguments=json.dumps(self.input))
        return ToolCall(id=self.id, function=function)


class ThinkingBlock(Strict):
    """What a model thought in an earlier turn. It is left out, as most chat templates do with it."""

    without_effect: ClassVar[Sequence[str]] = (
        *Cacheable.without_effect,
        *("thinking", "signature", "data"),
    )

    type: Literal["thinking", "redacted_thinking"]


def as_blocks(value: Any, info: ValidationInfo) -> Any:
    """Return a message's content as blocks: a text is one. Raises ValueError for what is not read there."""
    require_parts(info.field_name, value, tuple(KINDS))
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def as_texts(value: Any, info: ValidationInfo) -> Any:
    """Return a field's texts as blocks. Raises ValueError for what is no text."""
    require_parts(info.field_name, value, ("text",))
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(as_texts), OrText()]


class ToolResultBlock(Strict):
    """The result of a call. Its text says whether it is an error: chat templates have no place for that."""

    without_effect: ClassVar[Sequence[str]] = (*Cacheable.without_effect, "is_error", "toolset_name")

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=200)
    content: Texts = []

    @property
    def turn(self) -> Message:
        return Message(role="tool", content=text_of(self.content), tool_call_id=self.tool_use_id)


def kind_of_block(block: Any) -> str:
    """Return the class of a block, as pydantic's error has it; see is_type_name."""
    return KINDS[str(block["type"] if isinstance(block, Mapping) else block.type)]


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ImageBlock, Tag("ImageBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")],
    Discriminator(kind_of_block),
]
Blocks = Annotated[list[Block], Field(fail_fast=True), BeforeValidator(as_blocks), OrText()]


class BlockMessage(Strict):
    """A message: results of calls and what the user says, or what the assistant said and called."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def require_what_the_role_has(self) -> BlockMessage:
        if self.has_images:
            refuse_images(self.role)
        for kind, role in (("tool_use", "assistant"), ("tool_result", "user")):
            if self.role != role and any(block.type == kind for block in self.content):
                raise ValueError(
                    f"content has a block of type {kind} in a message of the role {self.role}: only the "
                    f"{role}'s may; leave it out"
                )
        return self

    @property
    def has_images(self) -> bool:
        return any(isinstance(block, ImageBlock) for block in self.content)

    @property
    def calls(self) -> list[ToolCall]:
        return [block.call for block in self.content if isinstance(block, ToolUseBlock)]

    @property
    def turns(self) -> list[Message]:
        """The message as chats have it, where every result is a turn of its own."""
        turns: list[Message] = []
        said: list[TextBlock | ImageBlock] = []

        def speak() -> None:
            if any(isinstance(block, ImageBlock) for block in said):
                parts = [block.part for block in said]
                turns.append(Message.model_validate({"role": self.role, "content": parts}))
            else:
                turns.append(Message(role=self.role, content=text_of(said), tool_calls=self.calls))
            said.clear()

        for block in self.content:
            if isinstance(block, TextBlock | ImageBlock):
                said.append(block)
            elif isinstance(block, ToolResultBlock):
                if said:
                    speak()
                turns.append(block.turn)
        if said or not turns:
            speak()
        return turns


def text_of(blocks: Sequence[TextBlock | ImageBlock]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def turns_of_blocks(messages: Sequence[BlockMessage]) -> list[Message]:
    """Return the turns of a chat. Results have the names of the functions that were called."""
    turns = joined([turn for message in messages for turn in message.turns])
    names: dict[str | None, str] = {}
    for turn in turns:
        names |= {call.id: call.function.name for call in turn.tool_calls}
        if turn.role == "tool":
            turn.name = names.get(turn.tool_call_id)
    return turns


def joined(turns: Sequence[Message]) -> list[Message]:
    """Return turns in which neighbours of the user, or of the assistant, are one, with an empty line between.

    Many templates refuse two turns of one role. What the assistant says behind its calls stays behind them.
    """
    made: list[Message] = []
    for turn in turns:
        before = made[-1] if made else None
        if before is None or before.role != turn.role or turn.role not in JOINED or before.tool_calls:
            made.append(turn)
        elif before.images or turn.images:
            before.content = [*parts_of(before), *parts_of(turn)]
        else:
            before.content = "\n\n".join(filter(None, (before.text, turn.text)))
            before.tool_calls = turn.tool_calls
    return made


def parts_of(turn: Message) -> list[Part]:
    return [TextPart(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content


BlockMessages = Annotated[list[BlockMessage], Field(fail_fast=True, min_length=1)]
