"""From the prompts of requests to token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eagle_fsd.core.checks import find_half_character, format_value, one_line
from eagle_fsd.serving.choices import Chooser
from eagle_fsd.serving.errors import ApiError, wrong_value
from eagle_fsd.serving.requests.completions import CompletionRequest
from eagle_fsd.serving.requests.generation import Chat, Templated
from eagle_fsd.serving.tools.plan import ToolPlan, turns_of
from eagle_fsd.text.chat import ChatRefused, encode, encode_chat, require_tokenizer

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD

COMPLETIONS = "/v1/completions"
# What a request gives to the chat template beside messages and tools, and the values that give nothing.
TEMPLATE_FIELDS: dict[str, Any] = {
    "documents": [],
    "chat_template_kwargs": {},
    "continue_final_message": False,
}


class PromptReader:
    """Encodes the prompts of requests for one engine. choose: knows which ones it may take."""

    def __init__(self, model: EagleFSD, choose: Chooser) -> None:
        self.tokenizer, self.choose = require_tokenizer(model.tokenizer), choose

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
            prompts = [self.chat_ids(body, tools)]
        else:
            prompts = [self.text_ids(one) for one in body.prompts]
            if not prompts:
                raise wrong_value("prompt is empty: write something to continue", "prompt")
        for prompt in prompts:
            self.choose.require_prompt(prompt, body.source)
        return prompts

    def chat_ids(self, body: Templated, tools: ToolPlan | None = None) -> list[int]:
        turns, arguments = turns_of(body.turns, tools, self.choose.calls)
        parts: dict[str, Any] = {
            "instructions": getattr(body, "instructions", None),
            "tools": None if tools is None else list(tools.functions),
            body.source: turns,  # last: they may have what the others say
        }
        for name, part in parts.items():
            for text in texts_in(part):
                require_unicode(text, name)

        def written(asked: Templated) -> list[int]:
            with self.choose.encoding:
                said = {**asked.template, **arguments}
                return encode_chat(self.tokenizer, turns, said, asked.end)[0].tolist()

        try:
            ids = written(body)
        except ChatRefused as error:
            name, remedy = body.source, f"if no other chat will do, continue a text with {COMPLETIONS}"
            if (guilty := field_at_fault(body, written)) is not None:
                name, remedy = guilty, "change it, or leave it out"
            raise wrong_value(f"{name}: {one_line(error.reason)}; {remedy}", name) from error
        if getattr(body, "documents", None):
            with contextlib.suppress(ChatRefused):  # a template that cannot do without them reads them
                if written(body.model_copy(update={"documents": []})) == ids:
                    message = "documents: the model's chat template reads none; write them into a message"
                    raise ApiError(400, message, "unsupported_field", "documents")
        return ids

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
