"""Every answer says its request's id: the client's own where it is short and printable, else a new one."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='this needs an extra: pip install "eagle-fsd[serve]"')

from starlette.testclient import TestClient
from support.serving import running, settings
from support.tiny_engine import CHAT, tiny_engine

from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.entry.request_ids import CLIENTS_OWN, HEADER, HEADERS

URL, THERE = "/v1/chat/completions", "http://there"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = create_app(tiny_engine(), settings(key="secret", cors_origins=[THERE]))
    with TestClient(app, raise_server_exceptions=False) as made:
        made.headers["authorization"] = "Bearer secret"
        yield made


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("HEAD", "/health", None, 200),
        ("GET", "/page/style.css", None, 200),
        ("POST", URL, {"messages": CHAT, "max_tokens": 2}, 200),
        ("POST", URL, {"messages": CHAT, "max_tokens": 2, "stream": True}, 200),
        ("POST", URL, {"messages": CHAT, "n": 0}, 400),
        ("GET", URL, None, 405),
        ("GET", "/none", None, 404),
    ],
)
def test_every_answer_has_one_of_its_own(
    client: TestClient, method: str, path: str, body: object, status: int
) -> None:
    answers = [client.request(method, path, json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status] * 2
    ids = [answer.headers[HEADER] for answer in answers]
    assert ids == [answer.headers["request-id"] for answer in answers]
    assert len(set(ids)) == 2 and all(CLIENTS_OWN.fullmatch(one.encode()) for one in ids)
    assert client.request(method, path, json=body, headers={HEADER: "mine-7"}).headers[HEADER] == "mine-7"


def test_so_has_an_answer_of_the_gate_and_one_to_a_page_of_elsewhere(client: TestClient) -> None:
    refused = client.get("/v1/models", headers={"authorization": "none", HEADER: "mine"})
    assert (refused.status_code, refused.headers[HEADER]) == (401, "mine")
    asks = {"origin": THERE, "access-control-request-method": "POST"}
    assert client.options(URL, headers=asks).headers[HEADER]
    shown = client.get("/v1/models", headers={"origin": THERE}).headers["access-control-expose-headers"]
    assert {*HEADERS, "retry-after", "x-should-retry"} == set(shown.split(", "))


@pytest.mark.parametrize("given", ["x" * 129, "", "two words", "tab\there", "\u00e9"])
def test_a_clients_own_that_is_long_or_not_printable_is_not_taken(client: TestClient, given: str) -> None:
    answer = client.get("/health", headers=[(HEADER.encode(), given.encode("latin-1"))])
    assert answer.headers[HEADER].startswith("req_")


def test_the_log_names_a_request_and_what_failed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eagle_fsd")
    client.get("/v1/models/a%0Ab", headers={HEADER: "first"})
    assert caplog.messages == ["first: GET /v1/models/a%0Ab from testclient: 404"]
    with monkeypatch.context() as broken:
        broken.setattr(Scheduler, "step", lambda _: 1 / 0)
        body = {"messages": CHAT}
        assert client.post(URL, json=body, headers={HEADER: "second"}).status_code == 500
    assert "that ended a text of second" in caplog.messages
    monkeypatch.setattr(client.app.state.service, "answer_of", lambda *_: 1 / 0)
    answer = client.post(URL, json=body, headers={HEADER: "third"})
    assert (answer.status_code, answer.headers[HEADER]) == (500, "third")
    assert any(message.startswith("third failed") for message in caplog.messages)


def test_a_real_server_says_each_once_also_where_it_was_sent_no_http() -> None:
    with running(settings()) as (url, _service):
        port = int(url.rpartition(":")[2])
        for sent in (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
            b"\x16\x03\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(sent)
                answer = b"".join(iter(lambda: client.recv(4096), b""))
            for header in HEADERS:
                assert answer.lower().count(f"\r\n{header}: req_".encode()) == 1
