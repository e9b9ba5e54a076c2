"""Random requests that are answered side by side: each answer is what its texts are alone, by plain twins.

EAGLE_FSD_REQUESTS=7 runs seed 7 alone, with -m "slow or not slow".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='this needs an extra: pip install "eagle-fsd[serve]" httpx')

from support.random_calls import seeds
from support.random_requests import Told, random_fields, random_limits, send, told_alone
from support.serving import running, settings, until
from support.tiny_engine import new_engine
from support.tiny_models import VOCAB

from eagle_fsd.serving.choices import Defaults
from eagle_fsd.serving.work import scheduling

CLIENTS, REQUESTS = 6, 30


def draw_request(draw: random.Random) -> dict[str, Any]:
    """Return any plain completion."""
    start = draw.choices(range(3, VOCAB), k=draw.choice([0, 0, 40]))
    prompts = [
        [*start, *draw.choices(range(3, VOCAB), k=draw.choice([1, 2, 7, 30, 90]))]
        for _ in range(draw.choice([1, 1, 2]))
    ]
    own = {"logprobs": draw.choice([0, 2]), "ignore_eos": True}
    prompt = prompts[0] if len(prompts) == 1 else prompts
    return {"prompt": prompt, **random_fields(draw, [1, 3, 12, 40], own)}


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    return body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]


def require_answer(body: dict[str, Any], wanted: Sequence[Told], url: str) -> None:
    choices, usage, error = send(f"{url}/v1/completions", body)
    assert not error, (error, body)
    assert {choice["index"] for choice in choices} == set(range(len(wanted)))
    for place, told in enumerate(wanted):
        mine = [choice for choice in choices if choice["index"] == place]
        assert "".join(one["text"] for one in mine) == told.text, (body, place)
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [told.reason], body
        if body.get("return_token_origins"):
            assert "".join(piece["text"] for one in mine for piece in one["origins"]) == told.text
        tables = [one["logprobs"] for one in mine if one["logprobs"]]
        if told.logprobs is None:
            assert not tables
            continue
        found = [value for table in tables for value in table["token_logprobs"]]
        assert found == pytest.approx(told.logprobs, abs=1e-3), body
        tops = [top for table in tables for top in table["top_logprobs"]]
        tokens = [token for table in tables for token in table["tokens"]]
        assert all(token in top for token, top in zip(tokens, tops, strict=True))
        assert {len(top) - body["logprobs"] for top in tops} <= {0, 1} and len(tops) == told.tokens
        places = [place for table in tables for place in table["text_offset"]]
        assert places == sorted(places) and len(places) == told.tokens
    assert usage["completion_tokens"] == sum(told.tokens for told in wanted)
    assert usage["prompt_tokens"] == sum(map(len, prompts_of(body)))


@pytest.mark.parametrize("seed", seeds("EAGLE_FSD_REQUESTS", 1, 20))
def test_answers_are_those_of_their_texts_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, model = random.Random(seed), new_engine()
    bodies = [draw_request(draw) for _ in range(REQUESTS)]
    wanted = []
    for body in bodies:
        each = [prompt for prompt in prompts_of(body) for _ in range(body["n"])]
        wanted.append([told_alone(model, body, prompt, place) for place, prompt in enumerate(each)])
    monkeypatch.setattr(scheduling, "SLICE", draw.choice([4, 50, 512]))
    configured = settings(limits=random_limits(draw, 300), defaults=Defaults(max_new_tokens=40))
    with running(configured, new_engine()) as (url, service), ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda body, told: require_answer(body, told, url), bodies, wanted))
        until(lambda: service.worker.running == service.worker.waiting == 0)
