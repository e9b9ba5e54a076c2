"""The service behind the routes: how a server is set up, and how one engine answers its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from eagle_fsd.core.checks import format_value
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.hub.resolve import shown_name
from eagle_fsd.serving.answers.answer import Answer
from eagle_fsd.serving.answers.anthropic import MessageAnswer
from eagle_fsd.serving.answers.completions import Completion
from eagle_fsd.serving.answers.logprobs import LogprobTables
from eagle_fsd.serving.answers.responses import ResponseAnswer
from eagle_fsd.serving.choices import Choice, Chooser, Defaults, Limits
from eagle_fsd.serving.delivery import Deadline, EventStream, Feed, collect, events, unless_gone
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.metrics import Metrics
from eagle_fsd.serving.prompts import PromptReader
from eagle_fsd.serving.requests.anthropic import MessagesRequest
from eagle_fsd.serving.requests.completions import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from eagle_fsd.serving.requests.generation import Chat
from eagle_fsd.serving.requests.responses import ResponsesRequest
from eagle_fsd.serving.work.jobs import Job
from eagle_fsd.serving.work.learning import Learner
from eagle_fsd.serving.work.tree import Measure, ServedTree
from eagle_fsd.serving.work.worker import Worker
from eagle_fsd.text.chat import require_tokenizer
from eagle_fsd.text.streamed import StreamedText

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD

AnyRequest = ChatRequest | CompletionRequest | ResponsesRequest | MessagesRequest


@dataclass(frozen=True)
class Settings:
    """How a server is set up. name: of the model, to clients. tree: of every text's steps. measure_tree:
    chooses its size while nobody asks; None if it stays.

    key: clients must send it; None lets everybody in. hosts: see Gate. cors_origins: web pages from there may
    call. learner: adapts the head to the texts, which voids its calibrations. at_end: is called once the last
    text has ended.
    """

    name: str
    tree: TreeConfig = TreeConfig()  # noqa: RUF009  # it is frozen
    measure_tree: Measure | None = None
    limits: Limits = Limits()  # noqa: RUF009
    defaults: Defaults = field(default_factory=Defaults)
    key: str | None = None
    hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    learner: Learner | None = None
    at_end: Callable[[], None] | None = None


class Service:
    """Answers requests with one engine."""

    def __init__(self, model: EagleFSD, settings: Settings) -> None:
        self.model, self.settings, self.tokenizer = model, settings, require_tokenizer(model.tokenizer)
        self.limits = settings.limits
        self.metrics = Metrics()
        self.tree, learner = ServedTree(settings.tree, settings.measure_tree), settings.learner
        self.worker = Worker(model, self.tree, self.limits, self.metrics, learner)
        self.metrics.watch(self.worker)
        self.choose = Chooser(model, self.limits, settings.defaults, self.tree, adapts=learner is not None)
        self.created = int(time.time())
        self.reader = PromptReader(model, self.choose)

    async def answer(self, body: AnyRequest, request: Request) -> Response:
        """Answer a request for texts, whole or as a stream."""
        deadline = Deadline(self.limits.request_timeout)
        self.require_model(body.model)
        self.reader.require_few(body)
        feed = Feed()
        with self.tree.stays():
            choice = await asyncio.to_thread(self.choose, body)
            prompts = await self.reader.aside(body, self.reader.encode, choice.tools)
            stops = body.stop if "stop" in body.model_fields_set else self.settings.defaults.stops
            texts = [prompt for prompt in prompts for _ in range(body.count)]
            jobs = [
                Job(
                    prompt=prompt,
                    limit=choice.limit,
                    terms=choice.terms,
                    stream=(choice.stream, place),
                    written=StreamedText(self.tokenizer, stops, prompt if body.goes_on else ()),
                    tell=feed.teller(place),
                    wants_origins=body.wants_origins,
                    top_logprobs=body.top_tokens,
                    request_id=request.state.request_id,
                )
                for place, prompt in enumerate(texts)
            ]
            answer = self.answer_of(body, jobs, choice, sum(map(len, prompts)))
            self.worker.submit(jobs)
        streamed = False
        try:
            if not body.stream:
                await unless_gone(request, collect(answer, feed, deadline))
                # Log-probabilities make it megabytes, whose tables and JSON would hold up all streams.
                return Response(await asyncio.to_thread(answer.body), media_type="application/json")
            first = await unless_gone(request, feed.next(deadline))
            streamed = True
        finally:
            if not streamed:
                self.worker.cancel(jobs)
        stream = events(answer, first, feed, deadline)
        return EventStream(stream, deadline, lambda: self.worker.cancel(jobs))

    def answer_of(self, body: AnyRequest, jobs: Sequence[Job], choice: Choice, read: int) -> Answer:
        """Return the answer to a request, in its form. read: the tokens of its prompts."""
        chat = isinstance(body, Chat)
        tables = LogprobTables(self.decode, chat) if body.top_tokens is not None else None
        made = (self.settings.name, jobs, choice, read, tables)
        if isinstance(body, ResponsesRequest):
            return ResponseAnswer(*made, body)
        if isinstance(body, MessagesRequest):
            return MessageAnswer(*made)
        flags = (body.wants_origins, body.stream_options.include_usage, body.timings_per_token)
        return Completion(*made, chat, *flags)

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            message = f"model is {format_value(name)}: this server has {self.settings.name!r}"
            message += "; name that, or leave it out"
            raise ApiError(404, message, "model_not_found", "model")

    def decode(self, token: int) -> str:
        """Return one token's text. It takes no lock, since encoding a long prompt may hold that for long."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self.require_model(body.model)
        ids = await self.reader.aside(body, self.reader.shown)
        return {"count": len(ids), "max_model_len": self.model.target.max_positions, "tokens": ids}

    async def count(self, body: MessagesRequest) -> dict[str, Any]:
        """Return how many tokens the prompt of a request for a message has."""
        self.require_model(body.model)
        tools = await asyncio.to_thread(self.choose.plan, body)
        return {"input_tokens": len(await self.reader.aside(body, self.reader.shown, tools))}

    def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        self.require_model(body.model)
        self.choose.require_tokens(body.tokens, "tokens")
        with self.choose.encoding:
            return {"prompt": self.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)}

    @property
    def card(self) -> dict[str, Any]:
        """The model as /v1/models shows it, to clients of OpenAI's API and of Anthropic's."""
        model, name = self.model, self.settings.name
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.created, timezone.utc).isoformat(),
            "owned_by": "eagle_fsd",
            "max_model_len": model.target.max_positions,
            "draft": shown_name(model.ea_model),
            "tree": str(self.tree.size),
            "dtype": str(model.dtype).removeprefix("torch."),
            "runtime": model.runtime,
            "weight_format": model.weight_format,
        }
