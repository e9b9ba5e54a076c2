"""Random requests that are answered side by side: each answer is what its texts are alone, by plain twins.

EAGLE_FSD_REQUESTS=7 runs seed 7 alone, with -m "slow or not slow".
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='this needs an extra: pip install "eagle-fsd[serve]" httpx')

import httpx
import torch
from support.random_calls import seeds
from support.serving import running, settings, until
from support.tiny_engine import TREE, new_engine
from support.tiny_models import VOCAB

from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.serving.choices import PENALTIES, Defaults, Limits
from eagle_fsd.serving.work import worker

CLIENTS, REQUESTS = 6, 30
RULES = (
    "lossless",
    "lossless:share_noise=false",
    "js:0.4",
    "js:0.3:paper",
    "tv:inf",
    "js:inf:swap:price=0.3",
)


@dataclass
class Told:
    """What an answer says of one text. logprobs: of its tokens, or None."""

    text: str
    reason: str
    tokens: int
    logprobs: list[float] | None


def draw_request(draw: random.Random) -> dict[str, Any]:
    """Return any plain completion."""
    start = draw.choices(range(3, VOCAB), k=draw.choice([0, 0, 40]))
    prompts = [
        [*start, *draw.choices(range(3, VOCAB), k=draw.choice([1, 2, 7, 30, 90]))]
        for _ in range(draw.choice([1, 1, 2]))
    ]
    body: dict[str, Any] = {
        "prompt": prompts[0] if len(prompts) == 1 else prompts,
        "max_tokens": draw.choice([1, 3, 12, 40]),
        "temperature": draw.choice([0.0, 0.5, 1.0]),
        "seed": draw.randrange(3),
        "rule": draw.choice(RULES),
        "n": draw.choice([1, 1, 3]),
        "stream": draw.random() < 0.5,
    }
    some: dict[str, Any] = {
        "top_k": draw.choice([3, 20]),
        "top_p": draw.choice([0.5, 0.9]),
        "min_p": 0.05,
        "stop": [
            "".join(draw.choices("aeiou rst", k=draw.choice([1, 1, 2]))) for _ in range(draw.choice([1, 3]))
        ],
        "stop_token_ids": draw.sample(range(VOCAB), 3),
        "ignore_eos": True,
        "logprobs": draw.choice([0, 2]),
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
        "no_repeat_ngram_size": 2,
        "min_tokens": min(2, body["max_tokens"]),
        "logit_bias": {str(token): draw.choice([-2.0, 3.0]) for token in draw.sample(range(VOCAB), 3)},
        "return_token_origins": True,
        "timings_per_token": True,
    }
    return body | {name: some[name] for name in draw.sample(sorted(some), draw.choice([0, 1, 2, 4]))}


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    return body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]


class Twin:
    """Says what a request must be answered with: each text alone."""

    def __init__(self) -> None:
        self.model = new_engine()

    def answer(self, body: dict[str, Any]) -> list[Told]:
        each = [prompt for prompt in prompts_of(body) for _ in range(body["n"])]
        return [self.text(body, prompt, place) for place, prompt in enumerate(each)]

    def text(self, body: dict[str, Any], prompt: Sequence[int], place: int) -> Told:
        ends = [] if body.get("ignore_eos") else list(self.model.target.eos_token_ids)
        names = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)
        options = {name: body[name] for name in names if name in body}
        if "logit_bias" in body:
            options["logit_bias"] = {(int(key),): bias for key, bias in body["logit_bias"].items()}
        made = self.model.generate(
            [list(prompt)],
            max_new_tokens=body["max_tokens"],
            min_new_tokens=body.get("min_tokens", 0),
            eos_token_id=[*ends, *body.get("stop_token_ids", ())],
            rule=parse_rule(body["rule"]),
            seed=[(body["seed"], place)],
            tree=TREE,
            **options,
        )
        tokens, reason = made.new_tokens[0], made.stats[0].finish_reason
        text, taken = self.decode(tokens), len(tokens)
        for count in range(1, len(tokens) + 1):
            before = self.decode(tokens[:count])
            if found := [before.find(stop) for stop in body.get("stop", ()) if stop in before]:
                text, taken, reason = before[: min(found)], count, "stop"
                break
        logprobs = None
        if "logprobs" in body:
            logprobs = self.logprobs(prompt, tokens[:taken])
        return Told(text, str(reason), taken, logprobs)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.model.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        logits = self.model.target.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def send(url: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return an answer's choices, or those of all chunks in turn, and its usage."""
    asked = body | ({"stream_options": {"include_usage": True}} if body["stream"] else {})
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        whole = answer.json()
        return whole["choices"], whole["usage"]
    lines = [line for line in answer.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert not any("error" in chunk for chunk in chunks), chunks
    return [choice for chunk in chunks for choice in chunk["choices"]], chunks[-1]["usage"]


def require_answer(body: dict[str, Any], wanted: Sequence[Told], url: str) -> None:
    choices, usage = send(url, body)
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
        tops = [len(top) for table in tables for top in table["top_logprobs"]]
        assert tops == [body["logprobs"]] * told.tokens
        places = [place for table in tables for place in table["text_offset"]]
        assert places == sorted(places) and len(places) == told.tokens
    assert usage["completion_tokens"] == sum(told.tokens for told in wanted)
    assert usage["prompt_tokens"] == sum(map(len, prompts_of(body)))


@pytest.mark.parametrize("seed", seeds("EAGLE_FSD_REQUESTS", 2, 20))
def test_answers_are_those_of_their_texts_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, twin = random.Random(seed), Twin()
    bodies = [draw_request(draw) for _ in range(REQUESTS)]
    wanted = [twin.answer(body) for body in bodies]
    monkeypatch.setattr(worker, "SLICE", draw.choice([4, 50, 512]))
    limits = Limits(
        max_rows=draw.choice([1, 3, 6]),
        max_queue=200,
        cache_tokens=draw.choice([None, 300]),
        prefix_tokens=draw.choice([0, 300]),
    )
    configured = settings(limits=limits, defaults=Defaults(max_new_tokens=40))
    with running(configured, new_engine()) as (url, service), ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda body, told: require_answer(body, told, url), bodies, wanted))
        until(lambda: service.worker.running == service.worker.waiting == 0)
