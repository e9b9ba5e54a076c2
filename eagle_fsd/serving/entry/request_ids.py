"""Every request has an id: its answer says it in headers, and the log names the request by it."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING
from urllib.parse import quote
from uuid import uuid4

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)
HEADER = "x-request-id"  # OpenAI's clients read it
HEADERS = (HEADER, "request-id")  # Anthropic's read the other one
CLIENTS_OWN = re.compile(rb"[!-~]{1,128}")  # a line of the log has no room for others


def new_id() -> str:
    return f"req_{uuid4().hex}"


class RequestIds:
    """ASGI middleware that gives a request its id, as `state.request_id`, and logs its answer.

    The id is the client's own where it sends one, so that both sides' logs have the same.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER.encode(), b"")
        name = given.decode() if CLIENTS_OWN.fullmatch(given) else new_id()
        scope.setdefault("state", {})["request_id"] = name
        asked = scope["method"], quote(scope["path"]), (scope.get("client") or ("nobody",))[0]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                logger.info("%s: %s %s from %s: %d", name, *asked, message["status"])
                ids = [(header.encode(), name.encode()) for header in HEADERS]
                headers = [*message.get("headers", ()), *ids]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, named)
