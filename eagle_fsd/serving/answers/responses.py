"""Answers as responses, the newer form of OpenAI's chats: items of output, and the events of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from eagle_fsd.serving.answers.answer import Answer, json_in_parts, new_id
from eagle_fsd.serving.errors import SERVER, ApiError
from eagle_fsd.serving.requests.responses import ResponsesRequest
from eagle_fsd.serving.work.jobs import News
from eagle_fsd.text.tool_calls import Call

RUNNING, DONE, CUT, FAILED = "in_progress", "completed", "incomplete", "failed"


@dataclass
class ResponseAnswer(Answer):
    """The one text of an answer as a response: messages and function calls, in the order of the text."""

    levels: ClassVar[int] = 6

    request: ResponsesRequest
    output: list[dict[str, Any]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = new_id("resp_")
        self._events = 0
        self._part: dict[str, Any] | None = None  # of the message that is being written
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is yet to come

    def whole(self) -> dict[str, Any]:
        self.tell(0, self.all_news(0))
        return self.response(self._status)

    def begin(self) -> bytes:
        events = [self._event(f"response.{kind}", response=self.response()) for kind in ("created", RUNNING)]
        return b"".join(events)

    def tell(self, place: int, news: News) -> bytes:
        if self.tables is not None and news.logprobs:
            self._logprobs += self.tables(news.logprobs, self.spellings[place])["content"]
        events = []
        for part in self.read(place, news):
            events += self._write(part) if isinstance(part, str) else [*self._close(DONE), *self._call(part)]
        if news.finish_reason is not None:
            if not self.output:
                events += self._write("")
            events += self._close(CUT if news.finish_reason == "length" else DONE)
        return b"".join(events)

    def end(self, error: ApiError | None = None) -> bytes:
        status = self._status if error is None else FAILED
        if error is not None:
            self.output = [one for one in self.output if one["status"] == DONE]
        return self._event(f"response.{status}", response=self.response(status, error))

    def response(self, status: str = RUNNING, error: ApiError | None = None) -> dict[str, Any]:
        """Return the response as it is now."""
        asked, sampling = self.request, self.choice.terms.sampling
        said = asked.model_dump(by_alias=True, exclude_none=True, include={"text", "tools", "tool_choice"})
        made: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": code_of(error), "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if status == CUT else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self.model,
            "output": self.output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **said["text"]},
            "tool_choice": said.get("tool_choice", "auto"),
            "tools": said["tools"],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if status != RUNNING:
            made |= {"usage": self.usage, "timings": self.timings}
        return made

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }

    @property
    def _status(self) -> str:
        return CUT if self.reasons[0] == "length" else DONE

    def _write(self, text: str) -> list[bytes]:
        """Write more text into the message that is open, or into a new one."""
        events = []
        if self._part is None:
            self._part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
            events = self._add({**item, "status": RUNNING, "content": []})
            events.append(self._of_part("content_part.added", part=self._part))
            self.output[-1]["content"].append(self._part)
        logprobs, self._logprobs = self._logprobs, []
        self._part["text"] += text
        self._part["logprobs"] += logprobs
        if text:
            events.append(self._of_part("output_text.delta", delta=text, logprobs=logprobs))
        return events

    def _close(self, status: str) -> list[bytes]:
        """End the message that is open, if there is one."""
        part, self._part = self._part, None
        if part is None:
            return []
        part["logprobs"] += self._logprobs  # of tokens without text, such as the end token
        self.output[-1]["status"] = status
        return [
            self._of_part("output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._of_part("content_part.done", part=part),
            self._item("output_item.done"),
        ]

    def _call(self, call: Call) -> list[bytes]:
        """Add a function call, which comes whole."""
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": new_id("call_"), "name": call.name}
        events = self._add({**item, "status": RUNNING, "arguments": ""})
        self.output[-1] |= {"status": DONE, "arguments": call.arguments}
        place = {"item_id": item["id"], "output_index": len(self.output) - 1}
        kind = "response.function_call_arguments"
        return [
            *events,
            self._event(f"{kind}.delta", **place, delta=call.arguments),
            self._event(f"{kind}.done", **place, name=call.name, arguments=call.arguments),
            self._item("output_item.done"),
        ]

    def _add(self, item: dict[str, Any]) -> list[bytes]:
        self.output.append(item)
        return [self._item("output_item.added")]

    def _item(self, kind: str) -> bytes:
        """Return an event of the last item as a whole."""
        return self._event(f"response.{kind}", output_index=len(self.output) - 1, item=self.output[-1])

    def _of_part(self, kind: str, **said: Any) -> bytes:
        """Return an event of the last message's text."""
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "content_index": 0}
        return self._event(f"response.{kind}", **place, **said)

    def _event(self, kind: str, **said: Any) -> bytes:
        """Return one server-sent event, in ASCII: a model may write half a character.

        An answer that is not streamed has none, which saves writing its log-probabilities four times more.
        """
        if not self.request.stream:
            return b""
        data = {"type": kind, "sequence_number": self._events, **said}
        self._events += 1
        written = json_in_parts(data, self.levels + 1 if self.tables else 0)
        return f"event: {kind}\ndata: {written}\n\n".encode()


def code_of(error: ApiError) -> str:
    """Return the code of a response that failed, which is one of OpenAI's few for that."""
    return "server_error" if error.kind == SERVER else "invalid_prompt"
