"""A Processing checks its own values, whoever makes it."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_fsd.core.processing import Processing, as_tokens


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0.0},
        {"presence_penalty": -1e11},
        {"frequency_penalty": 1e11},
        {"no_repeat_ngram_size": -1},
        {"min_new_tokens": -1},
        {"min_new_tokens": 1.5},
    ],
    ids=str,
)
def test_a_number_out_of_range_is_refused(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=f"^{name} is {value}"):
        Processing(**values)


def test_a_text_is_no_sequence_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"^suppress_tokens has 'ab': a token id is an integer"):
        as_tokens("suppress_tokens", "ab")
    assert as_tokens("suppress_tokens", 0) == as_tokens("suppress_tokens", [0]) == (0,)
