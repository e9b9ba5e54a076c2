"""Between text and token ids: prompts to ids, and ids back to text as they come. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

PLAIN = "or continue the prompt as it stands (--raw)"
WATCHED = (  # what a head is watched on while a tree is chosen for it
    "Why is the sky blue?",
    "Write a Python function that reverses the words of a sentence.",
    "Tom has 3 boxes with 12 pencils each. He gives 7 pencils away. How many are left?",
    "Write a short story about a lighthouse keeper and a storm.",
)
UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no whole character


def encode(
    tokenizer: PreTrainedTokenizerBase | None, prompt: str, system: str | None = None, raw: bool = False
) -> Tensor:
    """Token ids [1, n] of a prompt, as a chat that waits for its answer, or raw."""
    require_tokenizer(tokenizer)
    try:
        (prompt + (system or "")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt or its system message is not UTF-8 at character {error.start}: retype it, or give a "
            "file of UTF-8 text"
        ) from error
    if raw:
        return tokenizer(prompt, return_tensors="pt")["input_ids"]
    messages = [{"role": "system", "content": system}] if system is not None else []
    return encode_chat(tokenizer, [*messages, {"role": "user", "content": prompt}])


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """ValueError where there is none."""
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: name a folder or Hub id that holds one")


def encode_chat(tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Mapping[str, str]]) -> Tensor:
    """Token ids [1, n] of a chat of {"role", "content"} that waits for its answer."""
    require_tokenizer(tokenizer)
    if not tokenizer.chat_template:
        raise ValueError(f"the target's tokenizer has no chat template: choose one that has, {PLAIN}")
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the target's chat template is broken ({error}): mend it, {PLAIN}") from error
    # Templates raise on purpose, e.g. for a system role that they lack, and by mistake.
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"the target's chat template refuses this chat ({error}): leave the system message out, {PLAIN}"
        ) from error


def watched_prompts(tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Our own texts as prompts for a target; none where it has no way to read them."""
    if tokenizer is None:
        return []
    raw = not getattr(tokenizer, "chat_template", None)
    try:
        return [encode(tokenizer, prompt, raw=raw)[0].tolist() for prompt in WATCHED]
    except ValueError:
        return []


class Detokenizer:
    """Token ids to text as they come: what it has returned is always a prefix of the whole text's decoding.

    A token may hold half a character, and in some vocabularies its space depends on the token before it; so a
    new token is decoded behind those just before it, and held back while the text ends in half a character.
    `context` are ids that the text continues; they are not returned.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.ids = list(context)
        self.start = 0  # ids[start:shown] are shown already, and give the next token its surroundings
        self.shown = len(self.ids)

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; "" while there is none."""
        return "".join(self._add(token) for token in ids)

    def finish(self) -> str:
        """What was held back: a character that stays unfinished is shown as U+FFFD."""
        return self._show(self._pending())

    def _add(self, token: int) -> str:
        self.ids.append(token)
        text = self._pending()
        return "" if not text or text.endswith(UNFINISHED) else self._show(text)

    def _show(self, text: str) -> str:
        self.start, self.shown = self.shown, len(self.ids)
        return text

    def _pending(self) -> str:
        before, after = self._decode(self.ids[self.start : self.shown]), self._decode(self.ids[self.start :])
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
