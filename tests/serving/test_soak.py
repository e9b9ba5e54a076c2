"""Half a minute of clients that come, go, break off and send nonsense: every answer is the right one."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='this needs an extra: pip install "eagle-fsd[serve]" httpx')

import httpx
from support.serving import running, settings, until
from support.tiny_engine import chat_ids, text_alone

from eagle_fsd import Fuzzy
from eagle_fsd.serving.choices import Limits

CLIENTS = 8
SECONDS = float(os.environ.get("EAGLE_FSD_SOAK_SECONDS", "30"))
URL = "/v1/chat/completions"
HOSTILE: list[Any] = [
    {"content": b"{"},
    {"content": b"[" * 50_000},
    {"content": b"x" * 3_000},
    {"json": {"messages": [], "n": -1}},
    {"json": {"messages": [{"role": "user", "content": "x" * 900}]}},
    {"json": {"messages": [{"role": "user", "content": "x"}], "logprobs": "some"}},
]


class Client:
    """One client, with random numbers of its own. outcomes: what it met, counted."""

    def __init__(self, url: str, seed: int) -> None:
        self.http = httpx.Client(base_url=url, timeout=60, headers={"content-type": "application/json"})
        self.draw = random.Random(seed)
        self.outcomes: dict[str, int] = {}

    def run(self, end: float) -> dict[str, int]:
        while time.monotonic() < end:
            kind = self.draw.choice(("whole", "stream", "leave", "hostile"))
            outcome = getattr(self, kind)()
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.http.close()
        return self.outcomes

    def request(self) -> tuple[dict[str, Any], str]:
        """Return a random request and the text that it must get."""
        draw = self.draw
        messages = [{"role": "user", "content": "".join(draw.choices("abc xyz", k=draw.randint(1, 60)))}]
        limit, seed = draw.randint(1, 40), draw.randint(0, 5)
        temperature, threshold = draw.choice((0.0, 1.0)), draw.choice((0.0, 0.2))
        asked = {"messages": messages, "max_tokens": limit, "seed": seed}
        asked |= {"temperature": temperature, "threshold": threshold}
        options: dict[str, Any] = {"max_new_tokens": limit, "seed": seed, "temperature": temperature}
        return asked, text_alone(chat_ids(messages), rule=Fuzzy(threshold), **options)

    def whole(self) -> str:
        asked, expected = self.request()
        answer = self.http.post(URL, json=asked)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 0
            return "busy"
        assert answer.json()["choices"][0]["message"]["content"] == expected
        return "answered"

    def stream(self) -> str:
        asked, expected = self.request()
        with self.http.stream("POST", URL, json={**asked, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        if answer.status_code == 429:
            return "busy"
        assert lines.pop() == "data: [DONE]"
        deltas = [httpx.Response(200, text=line[6:]).json()["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content", "") for delta in deltas) == expected
        return "answered"

    def leave(self) -> str:
        asked, _ = self.request()
        body = {**asked, "stream": True, "max_tokens": 200}
        with self.http.stream("POST", URL, json=body) as answer:
            next(answer.iter_lines(), None)
        return "left"

    def hostile(self) -> str:
        answer = self.http.post(URL, **self.draw.choice(HOSTILE))
        assert answer.status_code in (400, 413, 429) and set(answer.json()["error"]) >= {"message", "type"}
        return "refused"


@pytest.mark.slow
def test_nothing_is_lost_and_no_token_is_wrong() -> None:
    limits = Limits(max_rows=3, max_queue=3, max_body=2_000)
    with running(settings(limits=limits)) as (url, service):
        end = time.monotonic() + SECONDS
        with ThreadPoolExecutor(CLIENTS) as pool:
            counts = list(pool.map(lambda seed: Client(url, seed).run(end), range(CLIENTS)))
        until(lambda: service.worker.running == service.worker.waiting == 0)
        assert service.worker.alive
    met = {name for count in counts for name in count}
    assert met == {"answered", "busy", "left", "refused"}, met
