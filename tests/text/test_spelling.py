"""How tokens are spelled: their bytes are those of the text, and their places are the text's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain

import pytest
import transformers
from support.tiny_tokenizer import END, decoding_tokenizer, tiny_tokenizer
from tokenizers import decoders

from eagle_fsd.text.spelling import ALPHABET, Spelling
from eagle_fsd.text.streamed import StreamedText

WORDS = ["\u2581", "\u2581Hello", "Hello", "\u2581world", "!", "\u2581\u2581", "é", "\u2581€"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


KINDS: dict[str, Callable[[], transformers.PreTrainedTokenizerFast]] = {
    "bytes": lambda: decoding_tokenizer(
        [*ALPHABET, "\u0120world", "\u00e2\u0124\u00ac"], decoders.ByteLevel()
    ),
    "metaspace": lambda: decoding_tokenizer(WORDS, decoders.Metaspace()),
    "no space at first": lambda: decoding_tokenizer(WORDS, decoders.Metaspace(prepend_scheme="never")),
    "llama": lambda: decoding_tokenizer([*WORDS, *BYTES], decoders.Sequence(LLAMA)),
    "gemma": lambda: decoding_tokenizer([*WORDS, *BYTES], decoders.Sequence(LLAMA[:3])),
    "characters": tiny_tokenizer,
}


def spell(
    tokenizer: transformers.PreTrainedTokenizerFast, ids: Sequence[int], context: Sequence[int]
) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each token and the place where it begins."""
    spelling, found, places = Spelling(tokenizer, context), [], []
    for token in ids:
        raw = spelling.raw(token)
        found.append(tokenizer.decode([token]).encode() if raw is None else raw)
        places.append(spelling.characters)
        spelling.add(token)
    return found, places


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_tokens_are_those_of_their_text(name: str) -> None:
    tokenizer = KINDS[name]()
    draw, special = random.Random(name), set(tokenizer.all_special_ids)
    pool = [[token] for token in range(len(tokenizer)) if token not in special]
    if BYTES[0] in tokenizer.get_vocab():  # a half of a character makes its decoder drop the neighbours too
        pool = [[token] for token in tokenizer.convert_tokens_to_ids([*WORDS, *BYTES[:128]])]
        pool += [tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])] * 20
    for length in range(1, 60):
        ids, context = (list(chain(*draw.choices(pool, k=count))) for count in (length, length % 3))
        if name in ("metaspace", "llama"):  # one that is a space and nothing else has no text at first
            ids.insert(0, tokenizer.convert_tokens_to_ids("\u2581Hello"))
        if context:
            context = [tokenizer.convert_tokens_to_ids("!"), *context, tokenizer.convert_tokens_to_ids("!")]
        found, places = spell(tokenizer, ids, context)
        before, whole = (tokenizer.decode(one) for one in (context, [*context, *ids]))
        text = whole[len(before) :]
        assert b"".join(found).decode(errors="replace") == text
        assert places == sorted(places) and 0 <= places[-1] < len(text)


@pytest.mark.parametrize("name", KINDS)
def test_a_token_begins_where_the_text_before_it_ends(name: str) -> None:
    """Each part of a character is where the character is."""
    tokenizer = KINDS[name]()
    if name == "bytes":
        parts = ["\u00e2", "\u0124", "\u00ac", "\u0120world", "\u00e2\u0124\u00ac", "x"]
        expected = ("€ world€x", [0, 0, 0, 1, 7, 8])
    elif name in ("llama", "gemma"):
        parts = ["\u2581Hello", "<0xE2>", "<0x82>", "<0xAC>", "\u2581world", "!"]
        space = name == "gemma"
        places = [0, 5 + space, 5 + space, 5 + space, 6 + space, 12 + space]
        expected = (" " * space + "Hello€ world!", places)
    elif name == "characters":
        parts, expected = list("a bc"), ("a bc", [0, 1, 2, 3])
    else:
        parts, space = ["\u2581Hello", "\u2581world", "!"], name != "metaspace"
        expected = (" " * space + "Hello world!", [0, 5 + space, 11 + space])
    ids = tokenizer.convert_tokens_to_ids(parts)
    written = StreamedText(tokenizer)
    text = "".join(piece.text for piece in [*written.add(ids), *written.finish()])
    assert (text, spell(tokenizer, ids, ())[1]) == expected


def test_a_special_token_is_spelled_and_takes_no_place() -> None:
    tokenizer = KINDS["bytes"]()
    end, a = tokenizer.convert_tokens_to_ids([END, "a"])
    assert spell(tokenizer, [a, end, a], ()) == ([b"a", END.encode(), b"a"], [0, 1, 1])
    tokenizer.add_tokens(["two words"])
    added = tokenizer.convert_tokens_to_ids("two words")
    assert spell(tokenizer, [added, a], ()) == ([b"two words", b"a"], [0, 9])
    tokenizer = KINDS["metaspace"]()
    end, hello = tokenizer.convert_tokens_to_ids([END, "\u2581Hello"])
    assert spell(tokenizer, [hello], [end]) == ([b"Hello"], [0]), "no text comes before it"


def test_a_token_that_the_tokenizer_lacks_is_left_to_its_decoding() -> None:
    assert Spelling(KINDS["bytes"]()).raw(9999) is None
