"""A Processing checks its own values, whoever makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from eagle_fsd.core.processing import Processing, as_biases, as_sequences, as_tokens


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
    for wrong in (b"ab", {5: 1}):
        with pytest.raises(ValueError, match=r"^suppress_tokens has .*: a token id is an integer"):
            as_tokens("suppress_tokens", wrong)


@pytest.mark.parametrize("kind", [torch.tensor, numpy.array])
def test_tokens_come_as_tensors_and_arrays_too(kind: Callable[[object], Any]) -> None:
    assert as_tokens("suppress_tokens", kind(5)) == as_tokens("suppress_tokens", kind([5])) == (5,)
    assert as_tokens("suppress_tokens", [kind(5), kind(6)]) == (5, 6)
    assert as_sequences("bad_words_ids", kind([[5, 6], [7, 8]])) == ((5, 6), (7, 8))
    assert as_biases([(kind([5, 6]), -1.0)]) == as_biases({(5, 6): kind(-1.0)}) == (((5, 6), -1.0),)
    with pytest.raises(ValueError, match=r"^logit_bias is \[-1.0, 2.0\]: it must be a number"):
        as_biases({5: kind([-1.0, 2.0])})
    with pytest.raises(ValueError, match=r"^bad_words_ids is .*: it must be a list of lists"):
        as_sequences("bad_words_ids", kind(5))
    with pytest.raises(ValueError, match=r"^bad_words_ids has 5: it must be a list of .*; write \[5\]$"):
        as_sequences("bad_words_ids", kind([5]))
    with pytest.raises(ValueError, match=r"^suppress_tokens has 5\.0: a token id is an integer"):
        as_tokens("suppress_tokens", kind([5.0]))
