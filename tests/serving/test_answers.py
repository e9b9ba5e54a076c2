"""What answers cost beside others: large ones are written off the loop, in small parts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

from starlette.testclient import TestClient
from support.serving import settings
from support.tiny_engine import CHAT, tiny_engine

from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.serving import errors
from eagle_fsd.serving.answers import answer as answers
from eagle_fsd.serving.answers.answer import Answer, json_in_parts
from eagle_fsd.serving.app import create_app

RESPONSE = {
    "input": CHAT,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 20,
    "max_output_tokens": 180,
}


def on_the_loop() -> bool:
    """Whether this thread is the one that answers all requests."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The length of every JSON text of answers, and whether it was written on the loop."""
    found: list[tuple[int, bool]] = []

    def dumps(data: Any, **options: Any) -> str:
        text = json.dumps(data, **options)
        found.append((len(text), on_the_loop()))
        return text

    noted = SimpleNamespace(dumps=dumps)
    monkeypatch.setattr(answers, "json", noted)
    monkeypatch.setattr(errors, "json", noted)
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 20, "max_tokens": 180}),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 20, "max_tokens": 60, "n": 3}),
        ("/v1/responses", RESPONSE),
    ],
)
def test_large_answers_are_written_beside_the_loop_in_small_parts(
    written: list[tuple[int, bool]], path: str, body: dict[str, Any]
) -> None:
    """json.dumps lets no other thread run, so that neither the loop nor a single call may do it all."""
    with TestClient(create_app(tiny_engine(), settings())) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200 and len(answer.content) > 30_000
    assert answer.headers["content-type"] == "application/json"
    assert answer.text == json.dumps(answer.json())
    assert not any(there for _, there in written)
    assert max(length for length, _ in written) < len(answer.content) / 10
    assert sum(length for length, _ in written) < len(answer.content), "nothing is written in vain"


def test_the_end_of_a_response_is_written_beside_the_loop(written: list[tuple[int, bool]]) -> None:
    """It repeats four times what came in small events before."""
    with TestClient(create_app(tiny_engine(), settings())) as client:
        answer = client.post("/v1/responses", json={**RESPONSE, "stream": True})
    assert "event: response.incomplete" in answer.text
    on_it = sum(length for length, there in written if there)
    assert 0 < on_it < sum(length for length, _ in written) / 3


@pytest.mark.parametrize("levels", range(5))
def test_json_in_parts_is_json(levels: int) -> None:
    for data in ({"a": [1, {"b": [None, 0.5, []]}, "\ud800é"], "c": {}}, [], {}, "x", [[[[[1], 2]]]]):
        assert json_in_parts(data, levels) == json.dumps(data)
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_in_parts({"a": float("nan")}, levels)


def test_what_one_text_of_a_prompt_had_to_read_is_not_cached() -> None:
    prompt, other = [1, 2], [1, 2]
    jobs = [
        SimpleNamespace(prompt=one, stats=GenerationStats(reused_tokens=reused))
        for one, reused in ((prompt, 2), (prompt, 0), (other, 1))
    ]
    assert Answer.cached_tokens.fget(SimpleNamespace(jobs=jobs)) == 1
