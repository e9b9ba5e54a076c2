"""Requests that would cost much or fail inside: they are refused early, and by the name of the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

from starlette.testclient import TestClient
from support.serving import settings
from support.tiny_engine import CHAT, tiny_engine

from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.prompts import PromptReader

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(tiny_engine(), settings()), raise_server_exceptions=False) as made:
        yield made


def refusal(client: TestClient, path: str = CHATS, **body: Any) -> dict[str, Any]:
    """Return the error of a request, which must be the client's fault and say so on one line."""
    if path == CHATS:
        body = {"messages": CHAT, **body}
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    return error


# -- more texts than find room ----------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "begins"),
    [
        (CHATS, {"n": 73}, "n", "n is 73: at most 72 texts"),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 37}, "n", "n is 37 for 2 prompts: at most 72 texts"),
        (COMPLETIONS, {"prompt": ["a"] * 73}, "prompt", "prompt has 73 texts: at most 72 are taken"),
        (COMPLETIONS, {"prompt": ["a"] * 73, "n": 2}, "prompt", "prompt has 73 texts: at most 72 are taken"),
    ],
)
def test_too_many_texts_are_refused_before_any_is_encoded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str, begins: str
) -> None:
    encoded: list[Any] = []
    encode = PromptReader.encode
    monkeypatch.setattr(
        PromptReader, "encode", lambda self, *asked: encoded.append(asked) or encode(self, *asked)
    )
    error = refusal(client, path, **body)
    assert error["param"] == param and error["message"].startswith(begins)
    assert not encoded


def test_a_lossless_rule_with_values_is_answered_and_told(client: TestClient) -> None:
    """It is the only rule whose description leaves out the values that it has by default."""
    asked = {"messages": CHAT, "max_tokens": 3, "rule": "lossless:share_noise=false"}
    timings = client.post(CHATS, json=asked).json()["timings"]
    assert (timings["rule"], timings["threshold"], timings["share_noise"]) == ("lossless", 0, False)


# -- values that cannot be read ----------------------------------------


@pytest.mark.parametrize("schema", ["[1]", "{bad", "", '{"const": NaN}', '{"a":' * 100_000])
def test_a_schema_that_is_none_is_refused(client: TestClient, schema: str) -> None:
    error = refusal(client, structured_outputs={"json": schema})
    assert error["param"] == "structured_outputs" and "must be a JSON object" in error["message"]


def test_a_schema_with_a_number_that_json_lacks_is_refused(client: TestClient) -> None:
    for wanted, name in (
        (b'"structured_outputs": {"json": {"const": NaN}}', "structured_outputs"),
        (
            b'"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": Infinity}}}',
            "response_format",
        ),
    ):
        body = json.dumps({"messages": CHAT}).encode()[:-1] + b", " + wanted + b"}"
        answer = client.post(CHATS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == name
