"""Log-probabilities of tokens that are no whole characters, or whose space a decoder leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

WITHOUT = 'the server and its test need extras: pip install "eagle-fsd[dev]"'
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason=WITHOUT)

from support.tiny_tokenizer import decoding_tokenizer
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from eagle_fsd.decoding.request import TokenLogprob
from eagle_fsd.serving.answers.completions import Completion
from eagle_fsd.serving.answers.logprobs import LogprobTables
from eagle_fsd.serving.work.jobs import Job, News
from eagle_fsd.text.streamed import StreamedText

EURO = ["\u00e2", "\u0124", "\u00ac"]  # its three bytes, as a byte-level vocabulary writes them
BYTES = decoding_tokenizer(["a", *EURO, "\u00e2\u0124"], decoders.ByteLevel())
WORDS = decoding_tokenizer(["\u2581Hello", "\u2581world", "!"], decoders.Metaspace())


def tables(
    tokenizer: PreTrainedTokenizerFast,
    tokens: Sequence[str],
    top: Sequence[tuple[str, float]] = (),
    chat: bool = False,
    prompt: Sequence[str] = (),
    chunks: int = 1,
    own: float = -1.0,
) -> list[dict[str, Any]]:
    """Return the log-probabilities of an answer of these tokens, by chunks. top, own: at every place."""
    ids = tokenizer.convert_tokens_to_ids
    written = StreamedText(tokenizer, (), ids(list(prompt)))
    job = Job(ids(list(prompt)), 99, None, (0, 0), written, lambda news: None)
    write = LogprobTables(lambda token: tokenizer.decode([token]), chat)
    choice = SimpleNamespace(tools=None, described={}, seed=0)
    answer = Completion("tiny", [job], choice, len(prompt), write, chat)
    likeliest = [(ids(token), value) for token, value in top]
    made = [TokenLogprob(token, own, likeliest) for token in ids(list(tokens))]
    size = -(-len(made) // chunks)
    parts = [made[start : start + size] for start in range(0, len(made), size)]
    return [answer._choice(0, {}, News((), part))["logprobs"] for part in parts]


def test_parts_of_a_character_have_their_own_bytes() -> None:
    (found,) = tables(BYTES, ["a", *EURO], [("\u00e2\u0124", -2.0), ("<end>", -3.0)], chat=True)
    assert b"".join(bytes(one["bytes"]) for one in found["content"]).decode() == "a€"
    assert [one["bytes"] for one in found["content"][1:]] == [[0xE2], [0x82], [0xAC]]
    top = [(one["token"], bytes(one["bytes"])) for one in found["content"][0]["top_logprobs"]]
    assert top == [("\ufffd", b"\xe2\x82"), ("<end>", b"<end>")]


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_they_are_where_their_character_is(chunks: int) -> None:
    found = tables(BYTES, [*EURO, "a"], chunks=chunks)
    assert [place for part in found for place in part["text_offset"]] == [0, 0, 0, 1]
    assert [token for part in found for token in part["tokens"]] == ["\ufffd"] * 3 + ["a"]


def test_of_likely_tokens_that_look_the_same_the_likeliest_is_told() -> None:
    (found,) = tables(BYTES, ["a"], [("a", -0.5), (EURO[0], -1.0), (EURO[1], -2.0), (EURO[2], -float("inf"))])
    assert found["top_logprobs"] == [{"a": -0.5, "\ufffd": -1.0}]
    (found,) = tables(BYTES, ["a"], [(EURO[2], -float("inf"))])
    assert found["top_logprobs"] == [{"\ufffd": -9999.0, "a": -1.0}]
    for chat in (True, False):  # JSON has no infinity
        (found,) = tables(BYTES, ["a"], chat=chat, own=-float("inf"))
        assert (found["content"][0]["logprob"] if chat else found["token_logprobs"][0]) == -9999.0


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_word_has_its_space_but_at_the_beginning_of_a_text(chunks: int) -> None:
    text = ["\u2581Hello", "\u2581world", "!"]
    found = tables(WORDS, text, chunks=chunks)
    assert [token for part in found for token in part["tokens"]] == ["Hello", " world", "!"]
    assert [place for part in found for place in part["text_offset"]] == [0, 5, 11]
    (found,) = tables(WORDS, text, [("\u2581world", -1.0)], prompt=["!"])
    assert found["tokens"] == [" Hello", " world", "!"] and found["text_offset"] == [0, 6, 12]
    assert found["top_logprobs"] == [{" world": -1.0, **own} for own in ({" Hello": -1.0}, {}, {"!": -1.0})]
    (found,) = tables(WORDS, text, chat=True)
    assert b"".join(bytes(one["bytes"]) for one in found["content"]) == b"Hello world!"
