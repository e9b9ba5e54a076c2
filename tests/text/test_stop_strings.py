"""Stop strings and words that must not come, as tokens."""

from __future__ import annotations

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd.text.stop_strings import words_as_tokens


@pytest.mark.parametrize(
    ("words", "complaint"), [(["a", ""], "is empty"), (["a", "b\ud800"], "is not UTF-8 at character 1")]
)
def test_bad_words_are_whole_texts(words: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"a bad word {complaint}"):
        words_as_tokens(tiny_tokenizer(), words)
