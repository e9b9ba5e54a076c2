"""Turns prompts and conversations into token ids with the tokenizer's chat template. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from eagle_fsd.core.checks import require_utf8

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# What apply_chat_template takes or gives to the template beside the arguments that a user may choose.
OWN_ARGUMENTS = {
    *("self", "conversation", "conversations", "messages", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
# What a chat template may end with where its arguments are not what it expects.
REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
ASKED = "the prompt or its system message"
# Stands before a template that takes a message as a list of parts alone: it makes one of a message of text.
AS_PARTS = (
    "{%- set listed = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- if message.content is string -%}"
    "{%- set message = dict(message, content=[{'type': 'text', 'text': message.content}]) -%}{%- endif -%}"
    "{%- set listed.messages = listed.messages + [message] -%}{%- endfor -%}"
    "{%- set messages = listed.messages %}"
)
PROBE = "a message of text"
# What stands behind the messages: the beginning of an answer; nothing; or the last one is open, to go on.
ChatEnd = Literal["waiting", "closed", "open"]
END = "THE_LAST_MESSAGE_IS_OPEN_HERE"  # where an open message ends; a template takes it for a word of it


class ChatRefused(ValueError):
    """A chat that cannot be written. reason: why; the message says what to do, too."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason = reason


def encode(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: str,
    system: str | None = None,
    raw: bool = False,
    template: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the token ids [1, n] of a prompt, as a chat that waits for its answer, or raw.

    template: arguments of the chat template; see `require_template`.
    """
    tokenizer = require_tokenizer(tokenizer)
    require_utf8(ASKED, prompt + (system or ""))
    if raw:
        return tokenizer(prompt, return_tensors="pt")["input_ids"]
    return encode_chat(tokenizer, [*system_turns(system), {"role": "user", "content": prompt}], template)


def system_turns(system: str | None) -> list[dict[str, str]]:
    """Return the turns that a chat begins with before the user's first one."""
    return [] if system is None else [{"role": "system", "content": system}]


def encode_as_trained(
    tokenizer: PreTrainedTokenizerBase | None, asked: str | Sequence[Mapping[str, str]]
) -> list[int]:
    """Return the token ids of a prompt or a chat that waits for its answer.

    A base model continues text: where its tokenizer has no chat template, these are the ids of plain text.
    """
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    text = plain_text(turns)
    if not getattr(require_tokenizer(tokenizer), "chat_template", None):
        return encode(tokenizer, text, raw=True)[0].tolist()
    require_utf8(ASKED, text)
    return encode_chat(tokenizer, turns)[0].tolist()


def plain_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return what a model without a chat template reads of a chat: its contents, a blank line between two."""
    return "\n\n".join(message["content"] for message in messages)


def take_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a chat template that takes messages as lists of parts alone take them as text as well.

    Templates of models that read images too are often such. Others leave out a message of text or fail.
    """
    if not isinstance(template := tokenizer.chat_template, str) or writes_text(tokenizer):
        return
    tokenizer.chat_template = AS_PARTS + template
    if not writes_text(tokenizer):
        tokenizer.chat_template = template


def writes_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes a user's message of text."""
    try:
        return PROBE in tokenizer.apply_chat_template([{"role": "user", "content": PROBE}], tokenize=False)
    except REFUSALS:
        return False


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer. Raises ValueError if there is none."""
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: name a folder or Hub id that holds one")
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return a tokenizer. Raises ValueError if there is none, and ChatRefused if it has no chat template."""
    tokenizer = require_tokenizer(tokenizer)
    if not tokenizer.chat_template:
        raise ChatRefused("the target's tokenizer has no chat template", "choose a target that has one")
    return tokenizer


def require_template(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a chat template, such as enable_thinking, tools or documents.

    Raises ValueError for one that is not the user's to choose.
    """
    if own := OWN_ARGUMENTS.intersection(arguments):
        raise ValueError(
            f"{min(own)} is no argument of a chat template that can be chosen: the answer's form depends on "
            "it; leave it out"
        )
    return arguments


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, str]],
    template: Mapping[str, Any] | None = None,
    end: ChatEnd = "waiting",
) -> Tensor:
    """Return the token ids [1, n] of a chat of {"role", "content"}.

    template: arguments of the chat template; see `require_template`. end: what stands behind the messages;
    see ChatEnd. Raises ValueError without a tokenizer, and ChatRefused for what the template does not take.
    """
    tokenizer = require_chat_template(tokenizer)
    turns, given = list(messages), {**(template or {}), "add_generation_prompt": end == "waiting"}
    if end == "open":
        turns[-1] = {**turns[-1], "content": turns[-1]["content"] + END}
        given["tokenize"] = False
    else:
        given |= {"return_tensors": "pt", "return_dict": True}
    try:
        written: Any = tokenizer.apply_chat_template(turns, **given)
    except jinja2.TemplateSyntaxError as error:
        raise ChatRefused(f"the target's chat template is broken ({error})", "fix it") from error
    # Templates raise on purpose, e.g. for a system role that they do not support, and by mistake.
    except REFUSALS as error:
        said = any(turn.get("role") == "system" for turn in messages)
        remedy = "leave the system message out" if said else "change it"
        raise ChatRefused(f"the target's chat template refuses this chat ({error})", remedy) from error
    if end == "open":
        text = cut_open(written, messages[-1]["content"])
        written = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    return written["input_ids"]


def cut_open(text: str, said: str) -> str:
    """Return what a template wrote up to the end of the last message. said: the message, which END follows.

    So white space at its end stays, also with a template that trims messages. Raises ChatRefused if something
    else was made of the message.
    """
    found, mark, _ = text.rpartition(END)
    if not mark or not found.endswith(said.lstrip()):
        raise ChatRefused(
            "the target's chat template leaves out, or changes, what the last message ends with, so that it "
            "cannot be continued",
            "let the answer be a new turn",
        )
    return found
