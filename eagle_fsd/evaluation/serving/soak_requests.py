"""What the clients of a soak send: random requests, whose answers are known, and what must be refused."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.evaluation.serving.client import Reply, delta_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN = "plain"  # greedy and exact, so that the target's own log-probabilities judge every token
KINDS = (PLAIN, "fuzzy", "sampled", "sampled fuzzy", "processed")
WORDS = (
    *("the", "a", "of", "river", "light", "why", "how", "many", "water", "people", "write", "story", "about"),
    *("small", "green", "old", "code", "number", "list", "explain", "sort", "find", "is", "are", "between"),
    *("city", "winter", "music", "answer", "question", "one", "two", "three", "first", "last", "house"),
)
TOO_LARGE = 2**20 + 100  # bytes; beyond the server's own limit, unless it was raised


@dataclass(frozen=True)
class Asked:
    """A request. kind: of KINDS."""

    path: str
    body: Mapping[str, Any]
    kind: str


@dataclass(frozen=True)
class Hostile:
    """A request that must be refused with one of these statuses, and a body of OpenAI's form."""

    name: str
    body: Any
    statuses: Sequence[int] = (400,)
    path: str = CHAT
    method: str = "POST"


def draw_request(draw: random.Random, kinds: Sequence[str], words: int, tokens: int) -> Asked:
    """Draw a request of at most so many words, for at most so many tokens."""
    kind = draw.choice(list(kinds))
    prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, words)))
    body: dict[str, Any] = {"max_tokens": draw.randint(1, tokens), "temperature": 0.0}
    if "fuzzy" in kind:
        body |= {
            "threshold": draw.choice((0.1, 0.3, 0.5)),
            "divergence": draw.choice(("js", "tv")),
        }
    if "sampled" in kind:
        body |= {"temperature": draw.choice((0.6, 1.0)), "top_p": draw.choice((0.9, 1.0))}
        body |= {"seed": draw.randrange(2**31), "n": draw.choice((1, 1, 2))}
    if kind == "processed":
        body |= draw.choice(
            (
                {"repetition_penalty": 1.2},
                {"stop": ["e", " the"]},
                {"frequency_penalty": 0.5, "presence_penalty": 0.2},
                {"stop_token_ids": [draw.randrange(3, 90), draw.randrange(3, 90)]},
                {"min_tokens": 1, "no_repeat_ngram_size": 3},
            )
        )
    if draw.random() < 0.7:
        return Asked(CHAT, {"messages": [{"role": "user", "content": prompt}], **body}, kind)
    return Asked(COMPLETIONS, {"prompt": prompt, **body}, kind)


def draw_requests(seed: int, count: int, kinds: Sequence[str], words: int, tokens: int) -> list[Asked]:
    """Draw requests, of every kind about as many."""
    draw = random.Random(seed)
    return [draw_request(draw, [kinds[place % len(kinds)]], words, tokens) for place in range(count)]


def user(text: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


HOSTILE = (
    Hostile("half a body", b"{"),
    Hostile("no body", b""),
    Hostile("deep lists", b"[" * 50_000),
    Hostile("a list", [1, 2]),
    Hostile("not UTF-8", b'{"messages": "\xff\xfe"}'),
    Hostile("half a character", user("\ud800")),
    Hostile("too large", b"x" * TOO_LARGE, (413,)),
    Hostile("too long", user("a " * 200_000)),
    Hostile("no messages", {"messages": []}),
    Hostile("no content", user(None)),
    Hostile("content is a number", user(5)),
    Hostile("unknown role", {"messages": [{"role": "king", "content": "x"}]}),
    Hostile("unknown field", user("x", no_such_field=1)),
    Hostile("unknown model", user("x", model="no-such-model"), (404,)),
    Hostile("no tokens", user("x", max_tokens=0)),
    Hostile("tokens as text", user("x", max_tokens="5")),
    Hostile("n is negative", user("x", n=-1)),
    Hostile("n is huge", user("x", n=10**6)),
    Hostile("temperature below 0", user("x", temperature=-1)),
    Hostile("temperature is NaN", b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
    Hostile("threshold below 0", user("x", threshold=-0.1)),
    Hostile("unknown divergence", user("x", threshold=0.1, divergence="none")),
    Hostile("unknown rule", user("x", rule="x" * 150)),
    Hostile("bias of no token", user("x", logit_bias={"x": 1})),
    Hostile("bias beyond the vocabulary", user("x", logit_bias={"99999999": 1})),
    Hostile("empty stop", user("x", stop=[""])),
    Hostile("seed is too large", user("x", seed=2**70)),
    Hostile("token beyond the vocabulary", {"prompt": [10**9]}, path=COMPLETIONS),
    Hostile("empty prompt", {"prompt": ""}, path=COMPLETIONS),
    Hostile("unknown route", b"{}", (404,), "/v1/no-such-route"),
    Hostile("a way out of the page", None, (404,), "/page/..%2f..%2fapp.py", "GET"),
    Hostile("wrong method", None, (405,), CHAT, "GET"),
    Hostile("unknown method", None, (405,), CHAT, "BREW"),
)


def head(length: int) -> bytes:
    """Return the lines that come before a body of this length."""
    lines = [f"POST {CHAT} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


# What is no HTTP, and must be answered by OpenAI's error or by nothing at all.
NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    b"GET / HTTP/one\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -5\r\n\r\n",
)


def is_clear(reply: Reply) -> bool:
    """Whether an error's body is OpenAI's: {"error": {"message", "type", "param", "code"}}."""
    try:
        error = reply.data()["error"]
        said = (
            isinstance(error["message"], str) and len(error["message"]) > 0 and isinstance(error["type"], str)
        )
        return said and {"param", "code"} <= set(error)
    except (ValueError, TypeError, KeyError):
        return False


def texts_of(answer: Mapping[str, Any]) -> list[str]:
    """Return the texts of a whole answer, by their place."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def texts_of_chunks(chunks: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """Return the texts of a stream of so many choices."""
    texts = [""] * count
    for chunk in chunks:
        for place, text in delta_text(chunk).items():
            texts[place] += text
    return texts
