"""Answers as chats and plain completions have them: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from uuid import uuid4

from eagle_fsd.serving.answers.answer import Answer, new_id
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.work.jobs import News
from eagle_fsd.text.tool_calls import Call, text_and_calls
from eagle_fsd.version import __version__

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"eagle_fsd-{__version__}"


@dataclass
class Completion(Answer):
    """An answer as a chat has it, or a plain completion.

    with_origins: see Generation.return_token_origins. with_usage: a stream ends with a chunk of the usage.
    with_timings: all chunks have the timings.
    """

    levels: ClassVar[int] = 5

    chat: bool = True
    with_origins: bool = False
    with_usage: bool = False
    with_timings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid4().hex}"

    def whole(self) -> dict[str, Any]:
        choices = []
        for place in range(len(self.jobs)):
            told = self.all_news(place)
            text, calls = text_and_calls(self.read(place, told))
            said: dict[str, Any] = {"text": text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": text}}
            if calls:
                said["message"] |= {"content": text or None, "tool_calls": list(map(tool_call, calls))}
            choices.append(self._choice(place, said, told))
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage, "timings": self.timings}

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def begin(self) -> bytes:
        """Return the chunks that name the role of every text of a chat."""
        if not self.chat:
            return b""
        role = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk([self._choice(place, {"delta": role}, News())]) for place in range(len(self.jobs))
        )

    def tell(self, place: int, news: News) -> bytes:
        """Return the chunks for a text's news. The last one of the answer always has the timings.

        The reason of the end comes behind calls in a chunk of its own, as OpenAI sends it: its client takes
        the calls of one chunk for unfinished.
        """
        text, calls = text_and_calls(self.read(place, news))
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"delta": {"content": text} if text else {}}
        if calls:
            first = len(self.readers[place].calls) - len(calls)
            said["delta"]["tool_calls"] = [
                {"index": index, **tool_call(call)} for index, call in enumerate(calls, first)
            ]
        before, timed = b"", self.with_timings
        if calls and news.finish_reason is not None:
            before = self._timed(self._choice(place, said, replace(news, finish_reason=None)), timed)
            said, news = {"delta": {}}, News(finish_reason=news.finish_reason)
        return before + self._timed(self._choice(place, said, news), timed or self.done)

    def end(self, error: ApiError | None = None) -> bytes:
        if error is not None:
            return event(error.body) + DONE
        usage = self._chunk([], usage=self.usage, timings=self.timings) if self.with_usage else b""
        return usage + DONE

    def _choice(self, place: int, said: dict[str, Any], news: News) -> dict[str, Any]:
        logprobs = None
        if self.tables is not None and news.logprobs:
            logprobs = self.tables(news.logprobs, self.spellings[place])
        reason = news.finish_reason
        if reason == "stop" and self.readers and self.readers[place].calls:
            reason = "tool_calls"
        choice = {"index": place, **said, "logprobs": logprobs, "finish_reason": reason}
        if self.with_origins:
            choice["origins"] = [{"text": piece.text, "origin": piece.origin} for piece in news.pieces]
        return choice

    def _timed(self, choice: dict[str, Any], timed: bool) -> bytes:
        return self._chunk([choice], **({"timings": self.timings} if timed else {}))

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage = {"usage": None} if self.with_usage else {}  # as OpenAI's chunks have it before the last
        return event({**self._head(kind), "choices": choices, **usage, **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def tool_call(call: Call) -> dict[str, Any]:
    """Return a function call as messages of chats have it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call_"), "type": "function", "function": function}


def event(data: object) -> bytes:
    """Return one server-sent event, in ASCII: a model may write half a character."""
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"
