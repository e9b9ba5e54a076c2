"""A model's own processor, which makes what its towers read of the images and sounds of a chat."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import transformers

from eagle_fsd.core.checks import one_line
from eagle_fsd.text.chat import ChatRefused

TEXT = "text"  # the type of a part of a message that is no image and no sound
PARTS = ("image_processor", "video_processor", "feature_extractor")  # of a processor
GIVEN = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}


@dataclass(frozen=True)
class ProcessorSource:
    """Where a target's processor is. Few need it, so it is loaded when it is first asked for."""

    name: str
    folder: Path
    trust_remote_code: bool = False

    @functools.cached_property
    def processor(self) -> Any:
        """The processor. Raises ValueError if the target has none, or what it needs is not installed."""
        try:
            found = transformers.AutoProcessor.from_pretrained(
                self.folder, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:  # readers' errors have no common base
            raise ValueError(
                f"target {self.name!r} has no processor of images that can be loaded "
                f"({one_line(error, 200)}): its folder must hold one, and what that needs must be installed, "
                "such as pillow and torchvision; leave images out, or install it"
            ) from error
        if not isinstance(found, transformers.ProcessorMixin):
            raise ValueError(
                f"target {self.name!r} reads text alone: its processor is a {type(found).__name__}; leave "
                "images and sound out, or use another target"
            )
        return found


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any message of a chat has a part that is no text."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") != TEXT for part in parts)


def require_processor(processor: Any) -> Any:
    """Return transformers' processor. Raises ValueError for None, and for a source of none."""
    if processor is None:
        raise ValueError(
            "the target reads text alone, for it has no processor: leave images and sound out, or use a "
            "target that reads them"
        )
    return processor.processor if isinstance(processor, ProcessorSource) else processor


class Generation(jinja2.ext.Extension):
    """Takes the tag that marks an assistant's words in some templates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def own_template(processor: Any) -> str:
    """Return a processor's chat template; "" if it has none."""
    template = getattr(processor, "chat_template", None) or ""
    return template.get("default", "") if isinstance(template, Mapping) else template


@functools.lru_cache
def variables_of(template: str) -> frozenset[str]:
    """Return the names that a chat template reads.

    A processor takes all other arguments as its own, such as images by their paths.
    """
    environment = jinja2.Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


def settings_of(processor: Any) -> frozenset[str]:
    """Return the names of what can be said of how a processor makes arrays of images and sound."""
    parts = (getattr(processor, name, None) for name in PARTS)
    known = (getattr(getattr(part, "valid_kwargs", None), "__annotations__", {}) for part in parts)
    return frozenset().union(*known) - GIVEN.keys()


def split_arguments(processor: Any, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return which arguments are the chat template's, and which are the processor's own.

    Raises ValueError for one that neither knows.
    """
    template, settings = variables_of(own_template(processor)), settings_of(processor)
    for name in arguments:
        if name not in template | settings:
            near = get_close_matches(name, sorted(template | settings), 1)
            known = f"{near[0]!r} may be meant" if near else "max_pixels is one of some processors"
            raise ValueError(
                f"{name} is no argument of the target's chat template or of its processor: it must be one "
                f"that they read; {known}, or leave it out"
            )
    ours = {name: value for name, value in arguments.items() if name in template}
    return ours, {name: value for name, value in arguments.items() if name not in template}


def process_chat(
    processor: Any,
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Return what a processor makes of a chat that waits for its answer: input_ids, pixel_values and such.

    processor: transformers', or a ProcessorSource. messages: see EagleFSD.read_chat. template: arguments of
    the chat template; it need not read them. settings: see `settings_of`. Raises ValueError without a
    processor, and ChatRefused for what it does not take.
    """
    processor = require_processor(processor)
    try:
        turns = [
            {**message, "content": [{"type": TEXT, "text": content}]}
            if isinstance(content := message.get("content"), str)
            else message
            for message in messages
        ]
        known = variables_of(own_template(processor))
        read = {name: value for name, value in (template or {}).items() if name in known}
        own = dict(settings or {})
        if "processor_kwargs" in inspect.signature(processor.apply_chat_template).parameters:
            own = {"processor_kwargs": own}  # of later releases of transformers
        made: Mapping[str, Any] = processor.apply_chat_template(turns, **{**own, **read, **GIVEN})
    except Exception as error:  # what reads images, from files or by the net, has errors with no common base
        raise ChatRefused(
            f"the target's processor does not take this chat ({one_line(error, 200)})",
            "its parts must be text, or what the model reads; change it",
        ) from error
    return made


def prepare_chat(
    processor: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return what `process_chat` does, for arguments of template and processor alike.

    Raises ValueError for one that neither knows.
    """
    processor = require_processor(processor)
    return process_chat(processor, messages, *split_arguments(processor, arguments))
