"""Decodes token ids as they arrive, whole characters only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not a whole character
NEAR = 16  # tokens of a context after which the next one is decoded, and of a long run that is held back
HALF = 3  # bytes that may lack a fourth to be a character


class Detokenizer:
    """Turns token ids into text as they arrive. The text so far is always a prefix of the whole decoding.

    A token may hold half a character, and in some vocabularies its space depends on the token before it. So a
    new token is decoded together with those just before it, and held back while the text ends in half a
    character. Where a vocabulary is of bytes, a long run of those that are no characters is shown as it
    grows. `context` are ids that the text continues; they are not returned.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.ids = list(context[-NEAR:])
        self.start = 0  # ids[start:shown] are shown already and are the context of the next token
        self.shown = len(self.ids)
        added = tokenizer.added_tokens_decoder if getattr(tokenizer, "is_fast", False) else {}
        self._without_text = frozenset(place for place, token in added.items() if token.special)

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; "" if they complete none."""
        return "".join(self._add(token) for token in ids)

    def finish(self) -> str:
        """Return the text that was held back; an unfinished character becomes U+FFFD."""
        return self._show(self._pending())

    def whole_characters(self) -> str:
        """Return the text that is held back, without the half of a character that it ends in."""
        return self._pending().rstrip(UNFINISHED)

    @property
    def waits(self) -> bool:
        """Whether tokens are held back."""
        return len(self.ids) > self.shown

    @property
    def begins(self) -> bool:
        """Whether no text comes before the next token, so that its first space may be left out."""
        return not self._decode(self.ids[self.start :])

    def _add(self, token: int) -> str:
        if token in self._without_text:  # a long run of them would be decoded again at each
            return ""
        self.ids.append(token)
        text = self._pending()
        if text and not text.endswith(UNFINISHED):
            return self._show(text)
        return self._begin_to_show(text) if len(self.ids) - self.shown >= NEAR else ""

    def _begin_to_show(self, text: str) -> str:
        """Return the first half of what is held back if no byte can complete a character there, else ""."""
        middle = (self.shown + len(self.ids)) // 2
        first = self._pending(middle)
        # Each U+FFFD stands for a byte at least, so that bytes enough are known on both sides.
        enough = len(first) >= HALF and len(text) - len(first) >= HALF
        return self._show(first, middle) if enough and text.startswith(first) and self._of_bytes else ""

    @cached_property
    def _of_bytes(self) -> bool:
        """Whether the tokens' bytes are put together and read as UTF-8, so that far ones do not matter."""
        return [step["type"] for step in decoder_steps(self.tokenizer)] == ["ByteLevel"]

    def _show(self, text: str, end: int | None = None) -> str:
        self.start, self.shown = self.shown, len(self.ids) if end is None else end
        return text

    def _pending(self, end: int | None = None) -> str:
        before = self._decode(self.ids[self.start : self.shown])
        return self._decode(self.ids[self.start : end])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return what a fast tokenizer's decoder does, step by step; nothing of other tokenizers."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    found: dict[str, Any] = json.loads(decoder.__getstate__())
    return found["decoders"] if found["type"] == "Sequence" else [found]
