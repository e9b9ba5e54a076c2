"""Streamed text: never a part of a stop string, and the same text however its tokens come."""

from __future__ import annotations

import random

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd.text.streamed import Piece, StreamedText, merged

TOKENIZER = tiny_tokenizer()


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


def test_what_may_become_a_stop_string_waits_and_nothing_else_does() -> None:
    written = StreamedText(TOKENIZER, ["END"])
    assert written.add(ids_of("abE")) == [Piece("ab")]
    assert written.add(ids_of("x")) == [Piece("Ex")]
    assert written.add(ids_of("EN")) == []
    assert written.finish() == [Piece("EN")]
    assert StreamedText(TOKENIZER).add(ids_of("abE")) == [Piece("abE")]


def test_origins_stay_with_their_characters() -> None:
    written = StreamedText(TOKENIZER, ["cde"])
    assert written.add(ids_of("abc"), ["fuzzy", "fuzzy", "drafted"]) == [Piece("ab", "fuzzy")]
    assert written.add(ids_of("d"), ["target"]) == []
    shown = written.add(ids_of("xcdez"), ["fuzzy", "fuzzy", "target", "target", "target"])
    assert shown == [Piece("c", "drafted"), Piece("d", "target"), Piece("x", "fuzzy")]
    assert written.stopped and written.tokens == 8 and written.finish() == []
    assert merged([Piece("a", "x"), Piece("b", "x"), Piece("c", "y")]) == [Piece("ab", "x"), Piece("c", "y")]
