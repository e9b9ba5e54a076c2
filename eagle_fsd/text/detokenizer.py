"""Text of token ids as they come: whole characters only."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no whole character


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
