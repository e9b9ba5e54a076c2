"""Decodes token ids as they arrive, whole characters only."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not a whole character
NEAR = 16  # tokens of a context after which the next one is decoded


class Detokenizer:
    """Turns token ids into text as they arrive. The text so far is always a prefix of the whole decoding.

    A token may hold half a character, and in some vocabularies its space depends on the token before it. So a
    new token is decoded together with those just before it, and held back while the text ends in half a
    character. `context` are ids that the text continues; they are not returned.
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
    def begins(self) -> bool:
        """Whether no text comes before the next token, so that its first space may be left out."""
        return not self._decode(self.ids[self.start :])

    def _add(self, token: int) -> str:
        if token in self._without_text:  # a long run of them would be decoded again at each
            return ""
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
