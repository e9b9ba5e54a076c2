"""Answers as messages, Anthropic's form of chats: blocks of content, and the events of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from eagle_fsd.serving.answers.answer import Answer, new_id
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.requests.messages import bounded
from eagle_fsd.serving.work.jobs import News
from eagle_fsd.text.tool_calls import Call

NOT_YET: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}


@dataclass
class MessageAnswer(Answer):
    """The one text of an answer as a message: blocks of text and calls, in the order of the text."""

    levels: ClassVar[int] = 0

    content: list[dict[str, Any]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = new_id("msg_")
        self._writing = False  # whether the last block is open

    def whole(self) -> dict[str, Any]:
        self.tell(0, self.all_news(0))
        return {**self._message(self.content, self._end), "timings": self.timings}

    def begin(self) -> bytes:
        message = self._message([], NOT_YET)
        return event("message_start", message=message) + event("ping")

    def tell(self, place: int, news: News) -> bytes:
        events = []
        for part in self.read(place, news):
            events += self._write(part) if isinstance(part, str) else self._call(part)
        if news.finish_reason is not None:
            if not self.content:
                events += self._write("")
            events += self._close()
        return b"".join(events)

    def end(self, error: ApiError | None = None) -> bytes:
        if error is not None:
            return event("error", **error.anthropic_body(self.jobs[0].request_id))
        end = event("message_delta", delta=self._end, usage=self.usage, timings=self.timings)
        return end + event("message_stop")

    @property
    def usage(self) -> dict[str, int]:
        """Anthropic's counts: of the prompt's tokens each is in one of three."""
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.new_tokens,
        }

    @property
    def _end(self) -> dict[str, str | None]:
        """Why the text ended."""
        stop = self.jobs[0].written.stop
        if self.reasons[0] == "length":
            return {**NOT_YET, "stop_reason": "max_tokens"}
        if self.readers and self.readers[0].calls:
            return {**NOT_YET, "stop_reason": "tool_use"}
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _message(self, content: list[dict[str, Any]], end: dict[str, str | None]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **end, "usage": self.usage}

    def _write(self, text: str) -> list[bytes]:
        """Write more text into the block that is open, or into a new one."""
        events = []
        if not self._writing:
            self._writing = True
            events = self._start({"type": "text", "text": ""})
        self.content[-1]["text"] += text
        return [*events, self._delta({"type": "text_delta", "text": text})] if text else events

    def _close(self) -> list[bytes]:
        """End the block that is open, if there is one."""
        writing, self._writing = self._writing, False
        return [self._of_block("content_block_stop")] if writing else []

    def _call(self, call: Call) -> list[bytes]:
        """Add a call, which comes whole."""
        events = self._close()
        events += self._start({"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": {}})
        self.content[-1]["input"] = json.loads(call.arguments, parse_float=bounded)
        written = self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return [*events, written, self._of_block("content_block_stop")]

    def _start(self, block: dict[str, Any]) -> list[bytes]:
        self.content.append(block)
        return [self._of_block("content_block_start", content_block=block)]

    def _delta(self, delta: dict[str, str]) -> bytes:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **said: Any) -> bytes:
        """Return an event of the last block."""
        return event(kind, index=len(self.content) - 1, **said)


def event(kind: str, **said: Any) -> bytes:
    """Return one server-sent event, in ASCII: a model may write half a character."""
    data = json.dumps({"type": kind, **said}, allow_nan=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()
