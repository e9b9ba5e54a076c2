"""How the tokens of a text are spelled: the bytes of each, and where its characters begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle_fsd.text.detokenizer import Detokenizer, decoder_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary, as GPT-2 has them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others are written from 256 on
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


ALPHABET = byte_alphabet()


class Spelling:
    """Follows a text token by token.

    A token's decoding on its own is not always its part of a text: it may be some of a character's bytes, and
    some vocabularies write a space at a word's beginning that their decoder leaves out where a text begins.
    context: token ids that the text continues.

    characters: of the text, all that the tokens so far have completed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self.characters = 0
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, context)
        steps = decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_tokens = "ByteFallback" in kinds
        self._space = next(filter(None, map(mark_of_space, steps)), "")

    def add(self, token: int) -> None:
        """Take the text's next token."""
        self.characters += len(self._detokenizer.add([token]))

    def raw(self, token: int) -> bytes | None:
        """Return the bytes of a token that may come next; None: those of its decoding on its own."""
        if not (self._byte_level or self._byte_tokens or self._space):
            return None
        written = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(written, str):  # a model may have more tokens than its tokenizer
            return None
        if self._byte_level:
            plain = any(one not in ALPHABET for one in written)  # of a token that was added
            return written.encode() if plain else bytes(ALPHABET[one] for one in written)
        if self._byte_tokens and (byte := BYTE_TOKEN.fullmatch(written)):
            return bytes.fromhex(byte[1])
        if self._space and not self._begins:
            return written.replace(self._space, " ").encode()
        return None

    @property
    def _begins(self) -> bool:
        return self.characters == 0 and self._detokenizer.begins


def mark_of_space(step: dict[str, Any]) -> str:
    """Return what a decoder's step makes a space of; "" if nothing."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return str(step["pattern"].get("String", "")) if step.get("content") == " " and "pattern" in step else ""
