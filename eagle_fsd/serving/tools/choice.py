"""tool_choice: whether functions are called, and which ones. Requests for responses write it otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.tools.fields import Strict, Tools

Word = Literal["none", "auto", "required"]
KINDS = {"function": "NamedTool", "allowed_tools": "AllowedTools"}  # the classes, by their types


def kind_of_choice(choice: Any) -> str:
    """Return the class of a tool_choice, as pydantic's error has it; see is_type_name."""
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    return KINDS.get(kind, "str") if isinstance(kind, str) else "str"


def require_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and kind_of_choice(choice) not in KINDS.values():
        raise ValueError(
            f"tool_choice is of type {format_json(choice.get('type'))}: it must name a function, be "
            "allowed_tools, or be none, auto or required; send one of these"
        )
    return choice


ByKind = Discriminator(kind_of_choice)
RequireChoice = BeforeValidator(require_choice)


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """This function is called."""

    type: Literal["function"]
    function: FunctionName


class Allowance(Strict):
    """mode: whether one is called. tools: those that may be, of which only the names count."""

    mode: Literal["auto", "required"]
    tools: Annotated[Tools, Field(min_length=1)]


class AllowedTools(Strict):
    """Only these functions are offered."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowance


ToolChoice = Annotated[
    Annotated[
        Annotated[Word, Tag("str")]
        | Annotated[NamedTool, Tag("NamedTool")]
        | Annotated[AllowedTools, Tag("AllowedTools")],
        ByKind,
    ],
    RequireChoice,
]
