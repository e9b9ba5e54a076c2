"""HEAD is GET without the body, on every route that has GET."""

from __future__ import annotations

import socket

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason='the server needs the extra: pip install "eagle-fsd[serve]"')

from support.serving import running, settings
from support.tiny_engine import NAME

PLACES = {
    "/": "/",
    "/health": "/health",
    "/metrics": "/metrics",
    "/v1/models": "/v1/models",
    f"/v1/models/{NAME}": "/v1/models/{name:path}",
    "/page/style.css": "/page/{name}",
    "/openapi.json": "/openapi.json",
}
REFUSED = {
    "/v1/chat/completions": 405,
    "/tokenize": 405,
    "/page/none": 404,
    "/v1/models/none": 404,
    "/no": 404,
}


def ask(url: str, method: str, path: str, key: str | None = "secret") -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and every byte behind them."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as place:
        said = "" if key is None else f"authorization: Bearer {key}\r\n"
        place.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{said}connection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: place.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def test_head_is_get_without_its_body() -> None:
    with running(settings(key="secret")) as (url, service):
        for path, route in PLACES.items():
            for key in ("secret", "wrong", None):
                (status, headers, body), other = ask(url, "HEAD", path, key), ask(url, "GET", path, key)
                assert (status, body) == (other[0], b""), path
                assert status == (
                    200 if key == "secret" or path in ("/", "/health", "/page/style.css") else 401
                )
                assert headers["content-type"] == other[1]["content-type"]
                if path != "/metrics":  # which grows
                    assert headers["content-length"] == other[1]["content-length"] == str(len(other[2]))
            assert service.metrics.requests.labels(route, "200")._value.get() >= 2
        for path, expected in REFUSED.items():
            status, headers, body = ask(url, "HEAD", path)
            assert (status, body) == (expected, b"")
            assert ("allow" in headers) == (expected == 405)
        assert service.metrics.requests.labels("other", "200")._value.get() == 0
