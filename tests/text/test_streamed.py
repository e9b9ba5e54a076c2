"""Streamed text: never a part of a stop string, and the same text however its tokens come."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.tiny_tokenizer import decoding_tokenizer, tiny_tokenizer
from tokenizers import decoders

from eagle_fsd.text.spelling import ALPHABET
from eagle_fsd.text.streamed import Piece, StreamedText, merged, special_tokens

TOKENIZER = tiny_tokenizer()
WRITTEN = {byte: letter for letter, byte in ALPHABET.items()}  # as a vocabulary of bytes has them


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def cut(text: str, stops: list[str]) -> str:
    """The plain twin: the text before the stop string that is complete first, the longest on a tie."""
    for end in range(len(text) + 1):
        if ended := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ended))]
    return text


@pytest.mark.parametrize("seed", range(40))
def test_it_ends_where_the_plain_twin_does(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab", k=30))
    stops = ["".join(draw.choices("ab", k=draw.randint(2, 6))) for _ in range(draw.randint(0, 3))]
    written, shown, rest = StreamedText(TOKENIZER, stops), "", ids_of(text)
    while rest:
        count = draw.randint(1, 4)
        shown += "".join(piece.text for piece in written.add(rest[:count]))
        rest = rest[count:]
        # What is shown stays: it is a beginning of the result, and no stop string begins in it.
        assert cut(text, stops).startswith(shown) and written.text == shown
    shown += "".join(piece.text for piece in written.finish())
    assert shown == written.text == cut(text, stops)
    assert written.stopped == (shown != text)
    ended = next((end for end in range(len(text)) if cut(text[:end], stops) != text[:end]), len(text))
    assert written.tokens == ended
    longest = max((stop for stop in stops if text[:ended].endswith(stop)), key=len, default=None)
    assert written.stop == longest


def test_what_may_become_a_stop_string_waits_and_nothing_else_does() -> None:
    written = StreamedText(TOKENIZER, ["END"])
    assert written.add(ids_of("abE")) == [Piece("ab")]
    assert written.add(ids_of("x")) == [Piece("Ex")]
    assert written.add(ids_of("EN")) == []
    assert written.finish() == [Piece("EN")]
    for none in ((), ("",)):
        assert StreamedText(TOKENIZER, none).add(ids_of("abE")) == [Piece("abE")]


def test_a_stop_string_may_be_a_special_token() -> None:
    """It has no text. What was held back is shown; the token is taken, and nothing after it."""
    tokenizer = tiny_tokenizer(special=40)
    written = StreamedText(tokenizer, ["<stop>", "END"])
    assert written.add([*ids_of("abEN"), 40, *ids_of("c")]) == [Piece("abEN")]
    assert written.stop == "<stop>" and written.tokens == 5 and written.finish() == []
    assert not StreamedText(tokenizer, ["END"]).add([40]), "without that stop string it is nothing"
    assert special_tokens(tokenizer, ["END"]) == special_tokens(tokenizer, []) == {}


def test_special_tokens_are_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that may not end writes nothing else, and one thread writes the texts of a server."""
    tokenizer, decoded = tiny_tokenizer(special=40), 0
    decode = tokenizer.decode

    def counted(ids: list[int], **options: Any) -> Any:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    written = StreamedText(tokenizer, ["END"])
    assert written.add([*ids_of("ab"), *[40] * 300, *ids_of("c")]) == [Piece("abc")]
    assert written.tokens == 303 and decoded < 3 * 303


class Bytes:
    """A tokenizer whose tokens are these pieces of bytes."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: Any) -> str:
        return b"".join(self.pieces[one] for one in ids).decode(errors="replace")


def test_a_token_that_ends_in_half_a_character_may_complete_a_stop_string() -> None:
    smile = "\U0001f600".encode()
    tokenizer = Bytes(b"a", b": " + smile[:2], smile[2:], b"x")
    written = StreamedText(tokenizer, [": "])
    assert written.add([0, 1, 2]) == [Piece("a")] and written.tokens == 2 and written.stopped
    assert written.finish() == [] and written.text == "a"
    for stops in (["\U0001f600x"], [" x"], []):
        written = StreamedText(tokenizer, stops)
        shown = [*written.add([0, 1]), *written.add([2, 3]), *written.finish()]
        text = "a: " if stops == ["\U0001f600x"] else "a: \U0001f600x"
        assert merged(shown) == [Piece(text)], stops


def test_a_stop_string_may_stand_among_bytes_that_are_no_characters() -> None:
    """It ends the text at its own token, also where some of what was held back is shown at that one."""
    tokenizer = decoding_tokenizer([WRITTEN[0xFF], f"END{WRITTEN[0xFF]}"], decoders.ByteLevel())
    wrong, end = tokenizer.convert_tokens_to_ids([WRITTEN[0xFF], f"END{WRITTEN[0xFF]}"])
    for count in range(40):
        written = StreamedText(tokenizer, ["END"])
        written.add([*[wrong] * count, end, wrong])
        assert written.stopped and (written.text, written.tokens) == ("\ufffd" * count, count + 1)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_characters_do_not_wait_for_the_last_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown is a beginning of the whole text, and few tokens are decoded again."""
    draw, smile = random.Random(seed), "\U0001f600".encode()
    pieces = [bytes([byte]) for byte in (0x80, 0x91, 0xC3, 0xE2, 0xF0, 0xFF)]
    pieces += [smile[:2], smile[2:], smile[:3], smile[3:], smile[3:] + smile[:1], "é".encode()]
    words = ["".join(WRITTEN[byte] for byte in piece) for piece in pieces]
    tokenizer = decoding_tokenizer(words, decoders.ByteLevel())
    some = draw.sample(words, draw.choice([1, 2, 3, len(words)]))
    ids = [*draw.choices(tokenizer.convert_tokens_to_ids(some), k=300)]
    whole, decode, decoded = tokenizer.decode(ids), tokenizer.decode, 0

    def counted(ids: list[int], **options: Any) -> Any:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    written = StreamedText(tokenizer)
    for count, token in enumerate(ids, 1):
        written.add([token])
        assert whole.startswith(written.text)
        assert len(decode(ids[:count])) - len(written.text) < 40
    written.finish()
    assert written.text == whole and decoded < 100 * len(ids)


def test_origins_stay_with_their_characters() -> None:
    written = StreamedText(TOKENIZER, ["cde"])
    assert written.add(ids_of("abc"), ["fuzzy", "fuzzy", "drafted"]) == [Piece("ab", "fuzzy")]
    assert written.add(ids_of("d"), ["target"]) == []
    shown = written.add(ids_of("xcdez"), ["fuzzy", "fuzzy", "target", "target", "target"])
    assert shown == [Piece("c", "drafted"), Piece("d", "target"), Piece("x", "fuzzy")]
    assert written.stopped and written.tokens == 8 and written.finish() == []
    cut_off = StreamedText(Bytes(b"a", b"\xf0\x9f"))
    assert cut_off.add([0, 1], ["fuzzy", "target"]) == [Piece("a", "fuzzy")]
    assert cut_off.finish() == [Piece("\ufffd", "target")], "half a character at the end has one too"
    assert merged([Piece("a", "x"), Piece("b", "x"), Piece("c", "y")]) == [Piece("ab", "x"), Piece("c", "y")]
