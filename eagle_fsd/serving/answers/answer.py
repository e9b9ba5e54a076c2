"""An answer while it is made: what all forms of it share."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from eagle_fsd.decoding.request import TokenLogprob
from eagle_fsd.serving.answers.logprobs import LogprobTables
from eagle_fsd.serving.choices import Choice
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.work.jobs import Job, News
from eagle_fsd.text.spelling import Spelling
from eagle_fsd.text.streamed import Piece, merged
from eagle_fsd.text.tool_calls import Call


@dataclass
class Answer(ABC):
    """The answer to one request while it is made: its texts' pieces and ends, by their place.

    tables: write the log-probabilities if they are wanted. A subclass says in what form a client gets it:
    whole, or as the events of a stream.
    """

    levels: ClassVar[int]  # of a body above what is said of one token

    model: str
    jobs: Sequence[Job]
    choice: Choice
    prompt_tokens: int
    tables: LogprobTables | None
    logprobs: list[list[TokenLogprob]] = field(init=False)
    pieces: list[list[Piece]] = field(init=False)
    reasons: list[str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.pieces = [[] for _ in self.jobs]
        self.logprobs = [[] for _ in self.jobs]
        self.reasons = [None for _ in self.jobs]
        self.spellings = (
            [Spelling(job.written.tokenizer, job.written.context) for job in self.jobs] if self.tables else []
        )
        plan = self.choice.tools
        self.readers = [] if plan is None else [plan.reader() for _ in self.jobs]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return what the body of an answer says that is not streamed."""

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events at the beginning of a stream, before any text."""

    @abstractmethod
    def tell(self, place: int, news: News) -> bytes:
        """Return the events for a text's news, which `take` has noted."""

    @abstractmethod
    def end(self, error: ApiError | None = None) -> bytes:
        """Return the events at the end of a stream, or where an error ends it."""

    def body(self) -> bytes:
        """Return the body of an answer that is not streamed."""
        return json_in_parts(self.whole(), self.levels).encode()

    def take(self, place: int, news: News) -> None:
        """Note what has happened to a text."""
        self.pieces[place] += news.pieces
        self.logprobs[place] += news.logprobs
        self.reasons[place] = news.finish_reason

    def all_news(self, place: int) -> News:
        """Return all that has happened to a text."""
        return News(merged(self.pieces[place]), self.logprobs[place], self.reasons[place])

    def read(self, place: int, news: News) -> list[str | Call]:
        """Return what a text's news say: text, and the function calls that are complete, in their order."""
        text = "".join(piece.text for piece in news.pieces)
        if not self.readers:
            return [text] if text else []
        reason = news.finish_reason
        cut = reason == "length" or self.jobs[place].written.stopped
        return self.readers[place].add(text, last=reason is not None, cut=cut)

    @property
    def done(self) -> bool:
        return all(reason is not None for reason in self.reasons)

    @property
    def new_tokens(self) -> int:
        return sum(job.written.tokens for job in self.jobs)

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
    def timings(self) -> dict[str, Any]:
        """How fast it was, in llama.cpp's names, and how the draft did. Its texts were made side by side."""
        clocks = [job.clock for job in self.jobs]
        submitted = min(clock.submitted for clock in clocks)
        started = min((clock.started for clock in clocks if clock.started is not None), default=submitted)
        last = max((clock.last for clock in clocks if clock.last is not None), default=started)
        reading = max(0.0, *(clock.prompt for clock in clocks if clock.first is not None), 0.0)
        decoding = max(0.0, last - started - reading)
        read = self.prompt_tokens - self.cached_tokens
        new, stats = self.new_tokens, [job.stats for job in self.jobs]
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


def new_id(kind: str) -> str:
    return f"{kind}{uuid4().hex[:24]}"


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


def per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
