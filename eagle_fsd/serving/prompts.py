"""From the prompts of requests to token ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from eagle_fsd.core.checks import find_half_character, format_value, one_line
from eagle_fsd.hub.media.processor import ProcessorSource, process_chat, require_processor
from eagle_fsd.hub.resolve import shown_name
from eagle_fsd.serving.choices import Chooser, naming
from eagle_fsd.serving.errors import ApiError, queue_full, wrong_value
from eagle_fsd.serving.requests.completions import CompletionRequest, TokenizeRequest
from eagle_fsd.serving.requests.generation import Chat, Templated
from eagle_fsd.serving.requests.images import read_images
from eagle_fsd.serving.tools.plan import ToolPlan, turns_of
from eagle_fsd.target.media.reading import read_media, require_towers
from eagle_fsd.text.chat import ChatEnd, ChatRefused, encode, encode_chat, require_tokenizer

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD

COMPLETIONS = "/v1/completions"
# What a request gives to the chat template beside messages and tools, and the values that give nothing.
TEMPLATE_FIELDS: dict[str, Any] = {
    "documents": [],
    "chat_template_kwargs": {},
    "continue_final_message": False,
}
# The fields that say what stands behind the turns, if that is not the beginning of an answer.
OTHER_ENDS: dict[str, ChatEnd] = {"continue_final_message": "open", "add_generation_prompt": "closed"}
LONGEST_WAIT = 60  # seconds
# Claude Code knows this error by its first words, Anthropic's own, and says the same as the user then.
LATE_SYSTEM = (
    "role 'system' is not supported on this model behind the first turn; say it at the beginning, or as the "
    "user"
)
AnyPrompt = Templated | CompletionRequest
Made = TypeVar("Made")


class PromptReader:
    """Encodes the prompts of requests for one engine. choose: knows which ones it may take."""

    def __init__(self, model: EagleFSD, choose: Chooser) -> None:
        self.model, self.choose = model, choose
        self.tokenizer = require_tokenizer(model.tokenizer)
        self._seeing, self._line = asyncio.Lock(), 0  # how many chats with images are read, or wait for it
        self._blind: str | None = None  # why no image is read

    async def aside(self, body: AnyPrompt, work: Callable[..., Made], *args: Any) -> Made:
        """Let a thread read a request's prompts with this function of the reader.

        Those with images are read one at a time: they take much memory, and would hold up the threads. Raises
        ApiError if as many wait for that as texts may wait.
        """
        if not has_images(body):
            return await asyncio.to_thread(work, body, *args)
        if self._line >= self.choose.limits.most_texts:
            raise queue_full(self._line, min(self._line, LONGEST_WAIT))
        self._line += 1
        try:
            async with self._seeing:
                return await asyncio.to_thread(work, body, *args)
        finally:
            self._line -= 1

    def require_few(self, body: Chat | CompletionRequest) -> None:
        """Raise ApiError for more texts than ever find room. It makes no list of them and encodes none."""
        prompts = 1 if isinstance(body, Chat) else len(body.prompts)
        most = self.choose.limits.most_texts
        if prompts > most:
            raise wrong_value(f"prompt has {prompts} texts: at most {most} are taken; send fewer", "prompt")
        if prompts * body.count > most:
            said = f"n is {format_value(body.count)}" + (f" for {prompts} prompts" if prompts > 1 else "")
            raise wrong_value(f"{said}: at most {most} texts are taken; lower it", "n")

    def encode(self, body: Chat | CompletionRequest, tools: ToolPlan | None) -> list[list[int]]:
        """Return the prompts' token ids. Raises ApiError for one that is none, or too long."""
        if isinstance(body, Chat):
            inputs = self.chat_inputs(body, tools)
            prompts = [ids_of(inputs)]
        else:
            prompts = [self.text_ids(one) for one in body.prompts]
            if not prompts:
                raise wrong_value("prompt is empty: write something to continue", "prompt")
        for prompt in prompts:
            self.choose.require_prompt(prompt, body.source)
        if not has_images(body):
            return prompts
        with naming(body.source):
            return [read_media(self.model.target, inputs)]

    def shown(self, body: Templated, tools: ToolPlan | None = None) -> list[int]:
        """Return the token ids of a text or a chat; in the places of images they are placeholders."""
        if isinstance(body, TokenizeRequest) and body.prompt is not None:
            return self.text_ids(body.prompt, body.add_special_tokens)
        return ids_of(self.chat_inputs(body, tools))

    def chat_inputs(self, body: Templated, tools: ToolPlan | None = None) -> Mapping[str, Any]:
        """Return the input_ids [1, L] of a chat, and what the target's towers read if it has images."""
        turns, arguments = turns_of(body.turns, tools, self.choose.calls)
        parts: dict[str, Any] = {
            **body.preamble,
            "tools": None if tools is None else list(tools.functions),
            body.source: turns,  # last: they may have what the others say
        }
        for name, part in parts.items():
            for text in texts_in(part):
                require_unicode(text, name)

        seen = has_images(body)
        if seen:
            turns = self.with_images(body, turns)

        def written(asked: Templated, turns: Sequence[dict[str, Any]] = turns) -> Mapping[str, Any]:
            said = {**asked.template, **arguments}
            if seen:
                return self.processed(turns, said)
            with self.choose.encoding:
                return {"input_ids": encode_chat(self.tokenizer, turns, said, asked.end)}

        try:
            inputs = written(body)
        except ChatRefused as error:
            early = [turn for place, turn in enumerate(turns) if place == 0 or turn["role"] != "system"]
            if len(early) < len(turns):
                with contextlib.suppress(ChatRefused):
                    written(body, early)
                    raise wrong_value(f"{body.source}: {LATE_SYSTEM}", body.source) from error
            name, remedy = body.source, f"if no other chat will do, continue a text with {COMPLETIONS}"
            remedy = "change it, or leave images out" if seen else remedy
            if (guilty := field_at_fault(body, written)) is not None:
                name, remedy = guilty, "change it, or leave it out"
            raise wrong_value(f"{name}: {one_line(error.reason)}; {remedy}", name) from error
        if getattr(body, "documents", None):
            with contextlib.suppress(ChatRefused):  # a template that cannot do without them reads them
                if ids_of(written(body.model_copy(update={"documents": []}))) == ids_of(inputs):
                    message = "documents: the model's chat template reads none; write them into a message"
                    raise ApiError(400, message, "unsupported_field", "documents")
        return inputs

    def with_images(self, body: Templated, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return turns with their images in place of the parts that hold them.

        A processor must get no text of a client's there, which it would take for a path or a URL.
        """
        for name, end in OTHER_ENDS.items():
            if body.end == end:
                raise wrong_value(f"{name} beside images: an answer is a new turn there; leave it out", name)
        with naming(body.source):
            self.require_sight()
            images = iter(read_images([part.image_url.url for one in body.turns for part in one.images]))
        return [
            {**turn, "content": [replaced(part, images) for part in turn["content"]]}
            if isinstance(turn["content"], list)
            else turn
            for turn in turns
        ]

    def processed(self, turns: Sequence[Mapping[str, Any]], said: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the processor makes of a chat. Nobody else uses it; its tokenizer mostly is its own."""
        processor = require_processor(self.model.processor)
        shared = getattr(processor, "tokenizer", None) is self.tokenizer
        with self.choose.encoding if shared else contextlib.nullcontext():
            return process_chat(processor, turns, said)

    def require_sight(self) -> None:
        """Raise ValueError if the model reads text alone. What is loaded for that is tried once."""
        require_towers(self.model.target)
        if self._blind is None:
            try:
                require_processor(self.model.processor)
            except ValueError as error:
                self._blind = str(error)
                if isinstance(source := self.model.processor, ProcessorSource):
                    for place in (str(source.folder), source.name):  # a client need not know where it lies
                        self._blind = self._blind.replace(place, shown_name(place))
        if self._blind is not None:
            raise ValueError(self._blind)

    def text_ids(self, prompt: str | list[int], special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        require_unicode(prompt, "prompt")
        with self.choose.encoding:
            if special:
                return encode(self.tokenizer, prompt, raw=True)[0].tolist() if prompt else []
            return self.tokenizer.encode(prompt, add_special_tokens=False)


def field_at_fault(body: Templated, written: Callable[[Templated], object]) -> str | None:
    """Return the field without which a chat that was refused can be written; None if there is no such one."""
    for name, nothing in TEMPLATE_FIELDS.items():
        if getattr(body, name, nothing) != nothing:
            with contextlib.suppress(ChatRefused):
                written(body.model_copy(update={name: nothing}))
                return name
    return None


def has_images(body: AnyPrompt) -> bool:
    return isinstance(body, Templated) and body.has_images


def replaced(part: dict[str, Any], images: Iterator[Any]) -> dict[str, Any]:
    return {**part, "image": next(images)} if part["type"] == "image" else part


def ids_of(inputs: Mapping[str, Any]) -> list[int]:
    ids: list[int] = inputs["input_ids"][0].tolist()
    return ids


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names of fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from texts_in(one)


def require_unicode(text: str, name: str) -> None:
    if (place := find_half_character(text)) is not None:
        raise wrong_value(f"{name} is not Unicode text at character {place}: send whole characters", name)
