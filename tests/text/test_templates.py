"""Which arguments of a chat template are a user's to choose."""

from __future__ import annotations

import inspect

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd.text.chat import OWN_ARGUMENTS, require_template

CHOSEN = {"tools", "documents", "enable_thinking"}


def test_no_argument_of_the_tokenizers_own_is_taken_for_one_of_the_template() -> None:
    taken = set(inspect.signature(tiny_tokenizer().apply_chat_template).parameters)
    assert taken - CHOSEN - {"kwargs"} <= OWN_ARGUMENTS
    assert require_template(dict.fromkeys(CHOSEN)) == dict.fromkeys(CHOSEN)


@pytest.mark.parametrize("name", ["tokenize", "messages", "conversations"])
def test_what_the_tokenizer_gives_to_the_template_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is no argument of a chat template that can be chosen"):
        require_template({"tools": [], name: []})
