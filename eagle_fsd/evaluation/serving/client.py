"""A client of OpenAI's API on the standard library alone: whole answers, and streams with their times.

Every request has a connection of its own, so that no fault of one can reach the next.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DONE = "[DONE]"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """A whole answer. headers: with names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def data(self) -> Any:
        """Return the body's JSON. Raises ValueError if it is none."""
        return json.loads(self.body)


@dataclass
class Streamed:
    """A stream of events.

    chunks: (seconds since the request was sent, the event's data). whole: whether it ended with [DONE].
    headers: with names in lower case.
    refusal: the answer, where the server sent no stream.
    """

    chunks: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    whole: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    refusal: Reply | None = None


@dataclass(frozen=True)
class Client:
    """Sends requests to one server. url: without a path. timeout: seconds of silence that are borne."""

    url: str
    timeout: float = 120.0

    def get(self, path: str) -> Reply:
        return self.post(path, None, "GET")

    def post(self, path: str, body: Any, method: str = "POST") -> Reply:
        """Send a JSON object, or bytes as they are. Raises OSError or HTTPException if no answer comes."""
        with self._asked(method, path, body) as answer:
            return read(answer)

    def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        leave_after: int | None = None,
        into: Streamed | None = None,
    ) -> Streamed:
        """Read a stream to its end, or close the connection after so many events.

        into: gets what is read as it comes, so that it is there if the connection breaks.
        """
        found = Streamed() if into is None else into
        start = time.perf_counter()
        with self._asked("POST", path, {**body, "stream": True}) as answer:
            found.headers = {name.lower(): value for name, value in answer.getheaders()}
            if "text/event-stream" not in answer.getheader("content-type", ""):
                found.refusal = read(answer)
                return found
            while leave_after is None or len(found.chunks) < leave_after:
                line = answer.readline()
                if not line:
                    break
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip().decode()
                if data == DONE:
                    found.whole = True
                    break
                found.chunks.append((time.perf_counter() - start, json.loads(data)))
        return found

    def raw(self, data: bytes, waits: bool) -> bytes:
        """Send bytes as they are, and close the connection; waits: read what comes back first."""
        place = urlsplit(self.url)
        with socket.create_connection((place.hostname or "", place.port or 80), self.timeout) as connection:
            connection.sendall(data)
            parts = []
            while waits and (part := connection.recv(65536)):
                parts.append(part)
        return b"".join(parts)

    @contextmanager
    def _asked(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=self.timeout)
        try:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, sent, {} if body is None else JSON)
            yield connection.getresponse()
        finally:
            connection.close()


def read(answer: http.client.HTTPResponse) -> Reply:
    headers = {name.lower(): value for name, value in answer.getheaders()}
    return Reply(answer.status, headers, answer.read())


def delta_text(chunk: Mapping[str, Any]) -> dict[int, str]:
    """Return the text that a chunk adds to each choice, of a chat or a plain completion."""
    texts = {}
    for choice in chunk.get("choices", ()):
        text = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
        if text:
            texts[choice.get("index", 0)] = text
    return texts
