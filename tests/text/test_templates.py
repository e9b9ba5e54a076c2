"""Which arguments of a chat template are a user's to choose, and what is said where it refuses a chat."""

from __future__ import annotations

import inspect

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd.text.chat import OWN_ARGUMENTS, ChatRefused, encode_as_trained, require_template

CHOSEN = {"tools", "documents", "enable_thinking"}


def test_no_argument_of_the_tokenizers_own_is_taken_for_one_of_the_template() -> None:
    taken = set(inspect.signature(tiny_tokenizer().apply_chat_template).parameters)
    assert taken - CHOSEN - {"kwargs"} <= OWN_ARGUMENTS
    assert require_template(dict.fromkeys(CHOSEN)) == dict.fromkeys(CHOSEN)


@pytest.mark.parametrize("name", ["tokenize", "messages", "conversations"])
def test_what_the_tokenizer_gives_to_the_template_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is no argument of a chat template that can be chosen"):
        require_template({"tools": [], name: []})


@pytest.mark.parametrize(
    ("roles", "remedy"), [(["system", "user"], "leave the system message out"), (["user"], "change it")]
)
def test_a_refusal_names_no_flag_of_a_single_program(roles: list[str], remedy: str) -> None:
    """A chat, `train` and `eval` have no --raw; `generate` names it itself."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('not this') }}"
    with pytest.raises(ChatRefused, match=rf"refuses this chat \(not this\): {remedy}$"):
        encode_as_trained(tokenizer, [{"role": role, "content": "Go."} for role in roles])
