"""What every request passes before the application, whatever the application would say."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from eagle_fsd.serving.entry.gate import DRAINED, Gate

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, of any type; so do releases of FastAPI before 0.132 where no type is said."""
    body = (await receive()).get("body", b"")
    await PlainTextResponse(b"echo:" + body)(scope, receive, send)


def gated(**fields: Any) -> TestClient:
    usual = {"key": None, "hosts": (), "max_body": 100, "is_open": bool, "answered": lambda *_: None}
    return TestClient(Gate(echo, **{**usual, **fields}))


@pytest.mark.parametrize(("size", "status"), [(100, 200), (101, 413)])
def test_a_body_may_be_as_large_as_is_said(size: int, status: int) -> None:
    headers = {"content-type": "application/json"}
    assert gated().post("/", content=b"1" * size, headers=headers).status_code == status


def test_a_body_that_is_too_large_is_read_up_to_a_point_before_it_is_refused() -> None:
    """Else its sender, who is still writing, would not see the error."""
    parts = [{"type": "http.request", "body": b"1" * 100, "more_body": True} for _ in range(2 * DRAINED)]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(Gate(echo, None, (), 100, bool, lambda *_: None)(scope, receive, send))
    assert sent[0]["status"] == 413 and len(parts) == DRAINED - 1 > 3


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        (None, 400),
        ("", 400),
        ("text/plain", 400),
        ("text/plain; application/json", 400),
        ("application/jsonx", 400),
        ("multipart/form-data; boundary=application/json", 400),
        ("application/x-www-form-urlencoded", 400),
    ],
)
def test_a_body_must_be_sent_as_json(content_type: str | None, status: int) -> None:
    """A web page may send the types of plain forms, and a body without a type, anywhere without asking."""
    headers = {} if content_type is None else {"content-type": content_type}
    answer = gated().post("/", content=b"{}", headers=headers)
    assert answer.status_code == status
    if status == 200:
        assert answer.text == "echo:{}"
    else:
        error = json.loads(answer.text)["error"]
        assert error["code"] == "invalid_json" and "sent as application/json" in error["message"]
    assert gated().post("/", headers=headers).text == "echo:", "of no body there is nothing to say"
