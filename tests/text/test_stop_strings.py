"""Stop strings and words that must not come, as tokens."""

from __future__ import annotations

import pytest
from support.tiny_tokenizer import decoding_tokenizer, tiny_tokenizer
from tokenizers import decoders

from eagle_fsd.text.stop_strings import make_stopper, make_stoppers, words_as_tokens

TOKENIZER = tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_stopper_says_how_many_tokens_of_a_step_are_of_the_text() -> None:
    first, second = make_stoppers(TOKENIZER, ["END"], [[], ids_of("E")])
    assert first(ids_of("aE")) is None and first(ids_of("NDab")) == 2
    assert second(ids_of("ND")) is None, "what a text continues is no part of it"
    assert make_stoppers(TOKENIZER, [], [[]]) == []


def test_a_stop_string_may_begin_with_the_space_behind_what_is_continued() -> None:
    tokenizer = decoding_tokenizer(["\u2581Hello", "!"], decoders.Metaspace())
    hello, mark = tokenizer.convert_tokens_to_ids(["\u2581Hello", "!"])
    for context, found in (([mark], 1), ([], None)):
        assert make_stopper(tokenizer, [" Hello"], context)([hello]) == found


def test_bad_words_come_neither_at_the_beginning_nor_after_a_space() -> None:
    assert words_as_tokens(TOKENIZER, ["ab", "c", "ab"]) == [
        ids_of(word) for word in ("ab", " ab", "c", " c")
    ]


def test_words_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"^stop_strings need a tokenizer"):
        make_stoppers(None, ["END"], [[]])
    with pytest.raises(ValueError, match=r"^bad words need a tokenizer"):
        words_as_tokens(None, ["a"])


@pytest.mark.parametrize(
    ("words", "complaint"), [(["a", ""], "is empty"), (["a", "b\ud800"], "is not UTF-8 at character 1")]
)
def test_bad_words_are_whole_texts(words: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"a bad word {complaint}"):
        words_as_tokens(TOKENIZER, words)
