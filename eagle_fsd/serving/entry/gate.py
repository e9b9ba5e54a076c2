"""What every request passes before the application: host, key, the body's size and type, a count."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from eagle_fsd.serving.entry.request_ids import HEADERS, new_id
from eagle_fsd.serving.errors import ApiError, no_json, too_large, unknown_host, unknown_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DRAINED = 16  # an oversized body is read up to this many times the limit, so that its sender gets the error
JSON_TYPE = re.compile(r"application/(.+\+)?json")
BODY_SECONDS = 60.0  # a body must be there after this time


class Gate:
    """ASGI middleware that answers for the application where a request may not go on.

    key: None lets everybody in. hosts: the host names that requests may use; empty allows all. This stops DNS
    rebinding, by which a foreign page could call the server and read its answers. is_open: whether a path
    needs no key. answered: is told the scope and the status of all answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        hosts: Sequence[str],
        max_body: int,
        is_open: Callable[[str], bool],
        answered: Callable[[Scope, int], None],
    ) -> None:
        self.app, self.max_body, self.is_open, self.answered = app, max_body, is_open, answered
        self.hosts = frozenset(hosts)
        self.key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        started = False

        async def count_and_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.answered(scope, message["status"])
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._require_host(headers)
            self._require_key(scope["path"], headers)
            body = await asyncio.wait_for(self._read_body(headers, receive), BODY_SECONDS)
            if scope["method"] == "POST" and body:
                require_json(headers)
        except ApiError as error:
            await error.response(scope)(scope, receive, count_and_send)
        except asyncio.TimeoutError:
            late = f"the body did not come within {BODY_SECONDS:g} s: send it faster"
            await ApiError(408, late, "body_timeout").response(scope)(scope, receive, count_and_send)
        except ClientLeft:
            pass
        else:
            try:
                await self.app(scope, replay(body, receive), count_and_send)
            except Exception:
                if not started:  # the answer comes from around this
                    self.answered(scope, HTTPStatus.INTERNAL_SERVER_ERROR.value)
                raise

    def _require_host(self, headers: dict[bytes, bytes]) -> None:
        said = headers.get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", said).lower()
        if self.hosts and name not in self.hosts:
            raise unknown_host(name)

    def _require_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self.key is None or self.is_open(path):
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer] if scheme.lower() == b"bearer" else []  # as OpenAI's clients send it
        if b"x-api-key" in headers:  # as Anthropic's do
            given.append(headers[b"x-api-key"])
        if not any([hmac.compare_digest(one, self.key) for one in given]):
            raise unknown_key()

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Return the whole body. Of one that is too large, the rest is thrown away as it comes."""
        said = headers.get(b"content-length", b"")
        if said.isdigit() and int(said) > DRAINED * self.max_body:
            raise too_large(self.max_body)
        parts: list[bytes] = []
        length, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part, more = message.get("body", b""), message.get("more_body", False)
            length += len(part)
            if length > DRAINED * self.max_body:
                break
            if length <= self.max_body:
                parts.append(part)
            else:
                parts.clear()
        if length > self.max_body:
            raise too_large(self.max_body)
        return b"".join(parts)


def require_json(headers: dict[bytes, bytes]) -> None:
    """Raise ApiError unless the body is sent as JSON, which a foreign page may not do without asking.

    FastAPI looks at this too, but older releases read a body without any type as JSON.
    """
    said = headers.get(b"content-type", b"").decode("latin-1")
    if JSON_TYPE.fullmatch(said.partition(";")[0].strip().lower()) is None:
        raise no_json(said)


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses it by what is installed
    """Speaks HTTP on one connection. What is no HTTP gets an error of the same form as every other one."""

    def send_400_response(self, _msg: str) -> None:
        error = ApiError(400, "this is no HTTP request: send HTTP/1.1 without TLS", code="invalid_http")
        body = json.dumps(error.body).encode()
        lines = ["HTTP/1.1 400 Bad Request", "content-type: application/json", f"content-length: {len(body)}"]
        name = new_id()
        lines += [f"{header}: {name}" for header in HEADERS]
        head = "\r\n".join([*lines, "connection: close", "", ""]).encode()
        self.transport.write(head + body)
        self.transport.close()


class ClientLeft(Exception):
    """The client closed its connection before its request was there."""


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives this body first, and then what comes on the connection."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
