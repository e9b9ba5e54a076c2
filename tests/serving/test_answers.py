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


def on_the_loop() -> bool:
    """Whether this thread is the one that answers all requests."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 20}),
    ],
)
def test_large_answers_are_written_beside_the_loop_in_small_parts(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """json.dumps lets no other thread run, so that neither the loop nor a single call may do it all."""
    written: list[tuple[int, bool]] = []

    def dumps(data: Any, **options: Any) -> str:
        text = json.dumps(data, **options)
        written.append((len(text), on_the_loop()))
        return text

    noted = SimpleNamespace(dumps=dumps)
    with TestClient(create_app(tiny_engine(), settings())) as client:
        monkeypatch.setattr(answers, "json", noted)
        monkeypatch.setattr(errors, "json", noted)
        answer = client.post(path, json={**body, "max_tokens": 60, "n": 3})
    assert answer.status_code == 200 and len(answer.content) > 30_000
    assert answer.headers["content-type"] == "application/json"
    assert answer.text == json.dumps(answer.json())
    assert not any(there for _, there in written)
    assert max(length for length, _ in written) < len(answer.content) / 10


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
