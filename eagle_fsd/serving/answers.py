"""Answers in OpenAI's forms: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from eagle_fsd.decoding.request import TokenLogprob
from eagle_fsd.serving.choices import Choice
from eagle_fsd.serving.work.jobs import Job, News
from eagle_fsd.text.spelling import Spelling
from eagle_fsd.text.streamed import Piece, merged
from eagle_fsd.version import __version__

LEVELS = 5  # of an answer's body above what is said of one token
LEAST = -9999.0  # a log-probability: JSON has no -inf
DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"eagle_fsd-{__version__}"


class LogprobTables:
    """Writes the log-probabilities of tokens in OpenAI's forms: as chats have them, or plain completions.

    decode: returns a token's text on its own.
    """

    def __init__(self, decode: Callable[[int], str], chat: bool) -> None:
        self.decode, self.chat = decode, chat

    def __call__(self, logprobs: Sequence[TokenLogprob], spelling: Spelling) -> dict[str, Any]:
        """Return a choice's `logprobs`. spelling: of the text before these tokens; it takes them in."""
        if self.chat:
            content = []
            for one in logprobs:
                top = [self._entry(token, value, spelling) for token, value in one.top]
                content.append({**self._entry(one.token, one.logprob, spelling), "top_logprobs": top})
                spelling.add(one.token)
            return {"content": content, "refusal": None}
        tokens, tops, starts = [], [], []
        for one in logprobs:
            likeliest: dict[str, float] = {}
            for token, value in one.top:  # parts of characters may look the same
                text, _ = self._spell(token, spelling)
                likeliest[text] = max(value, likeliest.get(text, LEAST))
            tokens.append(self._spell(one.token, spelling)[0])
            tops.append(likeliest)
            starts.append(spelling.characters)
            spelling.add(one.token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(one.logprob, LEAST) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": starts,
        }

    def _entry(self, token: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
        text, raw = self._spell(token, spelling)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def _spell(self, token: int, spelling: Spelling) -> tuple[str, bytes]:
        """Return the text and the bytes of a token that may come next."""
        raw = spelling.raw(token)
        if raw is not None:
            return raw.decode(errors="replace"), raw
        text = self.decode(token)
        return text, text.encode(errors="replace")


@dataclass
class Answer:
    """The answer to one request while it is made: its texts' pieces and ends, by their place.

    chat: whether it is a chat's, or a plain completion's. with_origins: see Generation.return_token_origins.
    tables: write the log-probabilities if they are wanted.
    """

    chat: bool
    model: str
    jobs: Sequence[Job]
    choice: Choice
    prompt_tokens: int
    with_origins: bool = False
    tables: LogprobTables | None = None
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid4().hex}"
        self.created = int(time.time())
        self.pieces = [[] for _ in self.jobs]
        self.logprobs = [[] for _ in self.jobs]
        self._spellings = (
            [Spelling(job.written.tokenizer, job.written.context) for job in self.jobs] if self.tables else []
        )
        self.reasons = [None for _ in self.jobs]
        plan = self.choice.tools
        self._readers = [] if plan is None else [plan.reader() for _ in self.jobs]

    def take(self, place: int, news: News) -> None:
        """Note what has happened to a text."""
        self.pieces[place] += news.pieces
        self.logprobs[place] += news.logprobs
        self.reasons[place] = news.finish_reason

    @property
    def done(self) -> bool:
        return all(reason is not None for reason in self.reasons)

    @property
    def cached_tokens(self) -> int:
        """How many of the prompts' tokens were not read, since kept texts began with them.

        The texts of one prompt count once, as in prompt_tokens.
        """
        found: dict[int, int] = {}
        for job in self.jobs:
            reused = job.stats.reused_tokens
            found[id(job.prompt)] = min(reused, found.get(id(job.prompt), reused))
        return sum(found.values())

    @property
    def usage(self) -> dict[str, Any]:
        new = sum(job.written.tokens for job in self.jobs)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def timings(self) -> dict[str, Any]:
        """How fast it was, in llama.cpp's names, and how the draft did. Its texts were made side by side."""
        clocks = [job.clock for job in self.jobs]
        submitted = min(clock.submitted for clock in clocks)
        started = min((clock.started for clock in clocks if clock.started is not None), default=submitted)
        last = max((clock.last for clock in clocks if clock.last is not None), default=started)
        reading = max(0.0, *(clock.prompt for clock in clocks if clock.first is not None), 0.0)
        decoding = max(0.0, last - started - reading)
        read = self.prompt_tokens - self.cached_tokens
        new, stats = sum(job.written.tokens for job in self.jobs), [job.stats for job in self.jobs]
        steps = sum(one.steps for one in stats)
        timings = {
            "queue_ms": 1000 * (started - submitted),
            "cache_n": self.cached_tokens,
            "prompt_n": read,
            "prompt_ms": 1000 * reading,
            "prompt_per_second": per_second(read, reading),
            "predicted_n": new,
            "predicted_ms": 1000 * decoding,
            "predicted_per_second": per_second(new, decoding),
            "steps": steps,
            "tau": sum(one.new_tokens for one in stats) / steps if steps else 0.0,
            "exact_accepts": sum(one.exact_accepts for one in stats),
            "fuzzy_accepts": sum(one.fuzzy_accepts for one in stats),
        }
        rounded = {key: round(value, 3) for key, value in timings.items()}
        return {**rounded, **self.choice.described, "seed": self.choice.seed}

    def body(self) -> bytes:
        """Return the body of an answer that is not streamed."""
        return json_in_parts(self.whole(), LEVELS).encode()

    def whole(self) -> dict[str, Any]:
        """Return what the body of an answer says that is not streamed."""
        choices = []
        for place, pieces in enumerate(self.pieces):
            told = News(merged(pieces), self.logprobs[place], self.reasons[place])
            text, calls = self._read(place, told)
            said: dict[str, Any] = {"text": text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": text}}
            if calls:
                said["message"] |= {"content": text or None, "tool_calls": calls}
            choices.append(self._choice(place, said, told))
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage, "timings": self.timings}

    def first_chunks(self) -> bytes:
        """Return the chunks that name the role of every text of a chat."""
        if not self.chat:
            return b""
        role = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk([self._choice(place, {"delta": role}, News())]) for place in range(len(self.jobs))
        )

    def chunk(self, place: int, news: News, with_timings: bool) -> bytes:
        """Return the chunk for a text's news. The last one of the answer always has the timings."""
        text, calls = self._read(place, news)
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"delta": {"content": text} if text else {}}
        if calls:
            first = len(self._readers[place].calls) - len(calls)
            said["delta"]["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls, first)]
        choice = self._choice(place, said, news)
        return self._chunk([choice], **({"timings": self.timings} if with_timings or self.done else {}))

    def usage_chunk(self) -> bytes:
        return self._chunk([], usage=self.usage, timings=self.timings)

    def _read(self, place: int, news: News) -> tuple[str, list[dict[str, Any]]]:
        """Return what a text's news say: text, and the function calls that are complete with them."""
        text = "".join(piece.text for piece in news.pieces)
        if not self._readers:
            return text, []
        reason = news.finish_reason
        cut = reason == "length" or self.jobs[place].written.stopped
        text, calls = self._readers[place].add(text, last=reason is not None, cut=cut)
        return text, [
            {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _choice(self, place: int, said: dict[str, Any], news: News) -> dict[str, Any]:
        logprobs = None
        if self.tables is not None and news.logprobs:
            logprobs = self.tables(news.logprobs, self._spellings[place])
        reason = news.finish_reason
        if reason == "stop" and self._readers and self._readers[place].calls:
            reason = "tool_calls"
        choice = {"index": place, **said, "logprobs": logprobs, "finish_reason": reason}
        if self.with_origins:
            choice["origins"] = [{"text": piece.text, "origin": piece.origin} for piece in news.pieces]
        return choice

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event({**self._head(kind), "choices": choices, **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def json_in_parts(data: object, levels: int) -> str:
    """Return the JSON of this data. levels: of it that are taken apart, so that json.dumps gets small parts.

    No other thread runs while json.dumps encodes, which may take seconds where it gets all at once.
    """
    if levels and isinstance(data, dict):
        items = (f"{json.dumps(key)}: {json_in_parts(value, levels - 1)}" for key, value in data.items())
        return "{" + ", ".join(items) + "}"
    if levels and isinstance(data, list):
        return "[" + ", ".join(json_in_parts(one, levels - 1) for one in data) + "]"
    return json.dumps(data, allow_nan=False)


def event(data: object) -> bytes:
    """Return one server-sent event, in ASCII: a model may write half a character."""
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


def per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
