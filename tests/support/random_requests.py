"""Random requests to a server, and plain twins of what they are answered with: each text alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from eagle_fsd import EagleFSD
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.decoding.steps.failures import NothingAllowed
from eagle_fsd.serving.choices import PENALTIES, Limits
from support.tiny_engine import TREE
from support.tiny_models import VOCAB

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
    """What an answer says of one text. logprobs: of its tokens, or None.

    reason: why it ended, "" where its options left no token. stopped: whether a stop string ended it.
    """

    text: str
    reason: str
    tokens: int
    stopped: bool = False
    logprobs: list[float] | None = None


def random_fields(draw: random.Random, limits: Sequence[int], own: dict[str, Any]) -> dict[str, Any]:
    """Return what any request may say beside its prompt. limits: of its tokens. own: fields it may have."""
    limit = draw.choice(limits)
    some: dict[str, Any] = {
        "top_k": draw.choice([3, 20, -1]),
        "top_p": draw.choice([0.5, 0.9]),
        "min_p": 0.05,
        "stop": [
            "".join(draw.choices("aeiou rst", k=draw.choice([1, 1, 2]))) for _ in range(draw.choice([1, 3]))
        ],
        "stop_token_ids": draw.sample(range(VOCAB), 3),
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
        "no_repeat_ngram_size": 2,
        "min_tokens": min(2, limit),
        "logit_bias": {str(token): draw.choice([-2.0, 3.0]) for token in draw.sample(range(VOCAB), 3)},
        "return_token_origins": True,
        "timings_per_token": True,
        **own,
    }
    always = {
        "max_tokens": limit,
        "temperature": draw.choice([0.0, 0.5, 1.0]),
        "seed": draw.choice([0, 1, 2, -1]),
        "rule": draw.choice(RULES),
        "n": draw.choice([1, 1, 3]),
        "stream": draw.random() < 0.5,
    }
    return always | {name: some[name] for name in draw.sample(sorted(some), draw.choice([0, 1, 2, 4]))}


def random_limits(draw: random.Random, cache_tokens: int) -> Limits:
    """Return the limits of any server. cache_tokens: as few as hold one text."""
    return Limits(
        max_rows=draw.choice([1, 3, 6]),
        max_queue=200,
        cache_tokens=draw.choice([None, cache_tokens]),
        prefix_tokens=draw.choice([0, cache_tokens]),
    )


def told_alone(model: EagleFSD, body: dict[str, Any], prompt: Sequence[int], place: int, **more: Any) -> Told:
    """Return the text of a request at this place as the engine gives it alone. more: its other options."""
    ends = [] if body.get("ignore_eos") else list(model.target.eos_token_ids)
    names = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)
    options = {name: body[name] for name in names if name in body} | more
    if options.get("top_k") == -1:
        options["top_k"] = 0
    if "logit_bias" in body:
        options["logit_bias"] = {(int(key),): bias for key, bias in body["logit_bias"].items()}
    options |= {
        "max_new_tokens": body["max_tokens"],
        "min_new_tokens": body.get("min_tokens", 0),
        "eos_token_id": [*ends, *body.get("stop_token_ids", ())],
        "rule": parse_rule(body["rule"]),
        "seed": [(body["seed"] % 2**63, place)],
        "tree": TREE,
    }
    tokens: list[int] = []
    stream, reason = model.stream([list(prompt)], **options), ""
    try:
        for step in stream:
            tokens += step
        reason = str(stream.stats.finish_reason)
    except NothingAllowed:
        pass
    told = Told(decode(model, tokens), reason, len(tokens))
    for count in range(1, len(tokens) + 1):
        before = decode(model, tokens[:count])
        if found := [before.find(stop) for stop in body.get("stop", ()) if stop in before]:
            told = Told(before[: min(found)], "stop", count, stopped=True)
            break
    if "logprobs" in body:
        told.logprobs = target_logprobs(model, prompt, tokens[: told.tokens])
    return told


def decode(model: EagleFSD, tokens: Sequence[int]) -> str:
    return model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@torch.inference_mode()
def target_logprobs(model: EagleFSD, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the target's own log-probability of each of these tokens after a prompt."""
    logits = model.target.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(tokens, dtype=torch.long)[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def send(address: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Return an answer's choices, or those of all chunks in turn, its usage, and the code of its error."""
    asked = body | ({"stream_options": {"include_usage": True}} if body["stream"] else {})
    answer = httpx.post(address, json=asked, timeout=300)
    if answer.status_code != 200:
        return [], {}, answer.json()["error"]["code"]
    if not body["stream"]:
        whole = answer.json()
        return whole["choices"], whole["usage"], ""
    lines = [line for line in answer.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    error = chunks.pop()["error"]["code"] if "error" in chunks[-1] else ""
    assert not any("error" in chunk for chunk in chunks), chunks
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return choices, chunks[-1].get("usage", {}), error
