"""The application through a client without a network: answers, streams, errors, limits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

from starlette.testclient import TestClient
from support.serving import settings
from support.tiny_engine import CHAT, NAME, TREE, chat_ids, text_alone, tiny_engine

from eagle_fsd import EagleFSD, Fuzzy, Lossless, Typical
from eagle_fsd.acceptance.rule_names import parse_rule, rule_fields
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.processing import Processing
from eagle_fsd.decoding.request import Terms
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.serve import build_parser, make_settings
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.choices import Defaults, Limits
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.metrics import Metrics
from eagle_fsd.serving.work.jobs import Job, News
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.streamed import StreamedText

URL = "/v1/chat/completions"


def client_of(**fields: Any) -> TestClient:
    return TestClient(create_app(tiny_engine(), settings(**fields)), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of() as made:
        yield made


def post(client: TestClient, url: str = URL, **body: Any) -> Any:
    if url == URL:
        body = {"messages": CHAT, **body}
    return client.post(url, json=body)


def events(response: Any) -> list[Any]:
    """Return the chunks of a stream, which must end as OpenAI's do."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    *lines, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def error_of(response: Any, status: int) -> dict[str, Any]:
    """Return the error of a response, which must be in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert error["code"], "a program must be told what went wrong"
    return error


# -- texts ----------------------------------------


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {}),
        ({"seed": 0, "temperature": 0.8, "top_k": 20}, {"temperature": 0.8, "top_k": 20, "seed": 0}),
        (
            {"seed": 6, "temperature": 1, "top_p": 0.9, "threshold": 0.2},
            {"temperature": 1.0, "top_p": 0.9, "seed": 6, "rule": Fuzzy(0.2)},
        ),
        ({"threshold": 0.3, "divergence": "tv"}, {"rule": Fuzzy(0.3, "tv")}),
    ],
    ids=["greedy", "sampled", "fuzzy", "tv"],
)
def test_a_text_is_the_engines_own_whole_and_streamed(client: TestClient, asked: Any, options: Any) -> None:
    expected = text_alone(chat_ids(), max_new_tokens=20, **options)
    whole = post(client, max_tokens=20, **asked).json()
    assert whole["object"] == "chat.completion" and whole["model"] == NAME
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected}
    assert choice["finish_reason"] == "length"
    chunks = events(post(client, max_completion_tokens=20, stream=True, **asked))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_several_choices_draw_from_streams_of_their_own(client: TestClient) -> None:
    """As the rows of a batch of the engine do, and so does a list of prompts."""
    ids = chat_ids()
    texts = [text_alone(ids, max_new_tokens=12, temperature=1.0, seed=[(3, row)]) for row in range(3)]
    asked = {"max_tokens": 12, "temperature": 1, "seed": 3, "n": 3}
    answer = post(client, **asked).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == texts and len(set(texts)) == 3
    counts = {"prompt_tokens": len(ids), "completion_tokens": 36, "total_tokens": len(ids) + 36}
    assert {key: answer["usage"][key] for key in counts} == counts
    found = [""] * 3
    for chunk in events(post(client, stream=True, **asked)):
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["delta"].get("content", "")
    assert found == texts


def test_several_choices_stream_with_stops_and_logprobs_as_they_come_whole(client: TestClient) -> None:
    asked = {"max_tokens": 12, "temperature": 1, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 1}
    first = post(client, **asked).json()["choices"][0]["message"]["content"]
    asked["stop"] = [first[5:7], "nothing says this"]
    whole = post(client, **asked).json()["choices"]
    assert {choice["finish_reason"] for choice in whole} == {"stop", "length"}
    found = [{"text": "", "logprobs": [], "reason": None} for _ in whole]
    for chunk in events(post(client, stream=True, **asked)):
        (choice,) = chunk["choices"]
        mine = found[choice["index"]]
        assert mine["reason"] is None, "nothing comes behind the end"
        mine["text"] += choice["delta"].get("content", "")
        mine["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        mine["reason"] = choice["finish_reason"]
    for mine, choice in zip(found, whole, strict=True):
        assert (mine["text"], mine["reason"]) == (choice["message"]["content"], choice["finish_reason"])
        names = [one["token"] for one in choice["logprobs"]["content"]]
        assert [one["token"] for one in mine["logprobs"]] == names


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "Bye"], [5, 6, 7], [[5, 6, 7], [8]]])
def test_completions_continue_texts_and_token_ids(client: TestClient, prompt: Any) -> None:
    body = post(client, "/v1/completions", prompt=prompt, n=2, max_tokens=10, temperature=1, seed=2).json()
    lists = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [tiny_engine().tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in lists]
    expected = [
        text_alone(one, max_new_tokens=10, temperature=1.0, seed=[(2, 2 * row + place)])
        for row, one in enumerate(ids)
        for place in range(2)
    ]
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_a_stop_string_ends_a_text_and_is_never_shown(client: TestClient) -> None:
    text = text_alone(chat_ids(), max_new_tokens=40)
    stop = text[10:13]
    expected = text[: text.index(stop)]
    answer = post(client, max_tokens=40, stop=[stop, "never seen"]).json()
    assert answer["choices"][0] | {"message": None} == {
        "index": 0, "message": None, "logprobs": None, "finish_reason": "stop"
    }  # fmt: skip
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["completion_tokens"] == text.index(stop) + len(stop)
    shown = ""
    for chunk in events(post(client, max_tokens=40, stop=stop, stream=True)):
        shown += chunk["choices"][0]["delta"].get("content", "")
        assert expected.startswith(shown) and chunk["choices"][0]["delta"] != {"content": ""}
    assert shown == expected


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_what_a_step_emits_behind_a_stop_string_is_not_counted(client: TestClient, threshold: float) -> None:
    """As `generate` counts: every stop inside a step's tokens, and streamed as well."""
    text = text_alone(chat_ids(), max_new_tokens=24, rule=Fuzzy(threshold))
    model, cut = tiny_engine(), 0
    for place in range(2, 10):
        stop = text[place - 2 : place + 1]
        asked = {"max_tokens": 24, "stop": stop, "threshold": threshold}
        (alone,) = model.generate(
            [chat_ids()], max_new_tokens=24, rule=Fuzzy(threshold), tree=TREE, stop_strings=stop
        ).stats
        whole = post(client, **asked).json()["timings"]
        *_, last = events(post(client, stream=True, **asked))
        for timings in (whole, last["timings"]):
            assert timings["predicted_n"] == alone.new_tokens and timings["steps"] == alone.steps
            assert timings["tau"] == round(alone.tau, 3)
            found = timings["exact_accepts"], timings["fuzzy_accepts"]
            assert found == (alone.exact_accepts, alone.fuzzy_accepts)
        cut += alone.new_tokens < alone.steps + alone.exact_accepts + alone.fuzzy_accepts
    assert cut


def test_an_end_token_ends_a_text_unless_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_alone(chat_ids(), max_new_tokens=20)
    end = tiny_engine().tokenizer.encode(text[7], add_special_tokens=False)[0]
    monkeypatch.setattr(TargetModel, "eos_token_ids", (end,))
    with client_of() as client:
        (choice,) = post(client, max_tokens=20).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text[: text.index(text[7]) + 1]
        (choice,) = post(client, max_tokens=20, ignore_eos=True).json()["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", text)


def test_usage_comes_in_a_chunk_without_choices(client: TestClient) -> None:
    options = {"include_usage": True}
    *chunks, last = events(post(client, max_tokens=9, stream=True, stream_options=options))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 9
    assert last["usage"]["prompt_tokens"] == len(chat_ids())
    assert chunks and all(chunk["usage"] is None for chunk in chunks)
    assert all("usage" not in chunk for chunk in events(post(client, max_tokens=9, stream=True)))


def test_timings_say_how_the_draft_did(client: TestClient) -> None:
    asked = {"max_tokens": 40, "threshold": 0.1, "temperature": 1, "seed": 2}
    timings = post(client, **asked).json()["timings"]
    stats = tiny_engine().generate(
        [chat_ids()], max_new_tokens=40, temperature=1.0, seed=2, rule=Fuzzy(0.1), tree=settings().tree
    )
    (alone,) = stats.stats
    assert timings["steps"] == alone.steps and timings["tau"] == round(alone.tau, 3) > 1.2
    assert timings["exact_accepts"] == alone.exact_accepts > 0
    assert timings["fuzzy_accepts"] == alone.fuzzy_accepts > 0
    settled = {"rule": "fuzzy", "threshold": 0.1, "divergence": "js", "mode": "hybrid", "seed": 2}
    assert {key: timings[key] for key in settled} == settled and "price" not in timings
    exact = post(client, max_tokens=4, threshold=0).json()["timings"]
    assert {key: exact[key] for key in rule_fields(Lossless())} == rule_fields(Lossless())
    assert timings["predicted_n"] == 40 and timings["predicted_per_second"] > 0 and timings["prompt_ms"] > 0
    chunks = events(post(client, stream=True, timings_per_token=True, **asked))
    made = [chunk["timings"]["predicted_n"] for chunk in chunks[1:]]
    assert made == sorted(made) and made[-1] == 40


@pytest.mark.parametrize("rule", ["js:inf:mode=swap:price=1.5:min_p=0.1", "tv:0.3", "typical:0.2:0.1:paper"])
def test_timings_say_with_what_rule_a_text_can_be_made_again(client: TestClient, rule: str) -> None:
    asked = {"max_tokens": 24, "temperature": 1, "seed": 3}
    first = post(client, rule=rule, **asked).json()
    names = [*asdict(Fuzzy()), *asdict(Typical())]
    said = {key: value for key, value in first["timings"].items() if key in names and value is not None}
    again = ":".join([first["timings"]["rule"], *(f"{key}={value}" for key, value in said.items())])
    assert parse_rule(again) == parse_rule(rule)
    assert post(client, rule=again, **asked).json()["choices"] == first["choices"]


def test_a_seed_that_was_drawn_gives_the_text_again(client: TestClient) -> None:
    first = post(client, max_tokens=12, temperature=1).json()
    seed = first["timings"]["seed"]
    again = post(client, max_tokens=12, temperature=1, seed=seed).json()
    assert seed < 2**53 and again["choices"] == first["choices"]
    assert post(client, max_tokens=2).json()["timings"]["seed"] is None


def test_origins_say_how_every_token_came(client: TestClient) -> None:
    asked = {"max_tokens": 40, "threshold": 0.1, "temperature": 1, "seed": 2, "return_token_origins": True}
    answer = post(client, **asked).json()
    (choice,) = answer["choices"]
    counts = {"drafted": 0, "fuzzy": 0, "target": 0}
    for piece in choice["origins"]:
        counts[piece["origin"]] += len(piece["text"])  # a token is a character
    timings = answer["timings"]
    assert counts["drafted"] == timings["exact_accepts"] and counts["fuzzy"] == timings["fuzzy_accepts"]
    assert "".join(piece["text"] for piece in choice["origins"]) == choice["message"]["content"]
    streamed = [
        (piece["text"], piece["origin"])
        for chunk in events(post(client, stream=True, **asked))
        for piece in chunk["choices"][0]["origins"]
    ]
    characters = [(char, origin) for text, origin in streamed for char in text]
    assert characters == [(char, one["origin"]) for one in choice["origins"] for char in one["text"]]
    assert "origins" not in post(client, max_tokens=2).json()["choices"][0]


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.4}, {}),
    ({"presence_penalty": 0.8, "frequency_penalty": 0.4}, {}),
    ({"no_repeat_ngram_size": 1}, {}),
    ({"temperature": 1.0, "min_p": 0.3, "seed": 3}, {}),
    ({"logit_bias": {"7": 4, "8": -100.0}}, {"logit_bias": {7: 4.0, 8: -100.0}}),
    ({"min_tokens": 9, "stop_token_ids": [17, 60, 25]}, {"min_new_tokens": 9, "eos_token_id": [17, 60, 25]}),
    ({"suppress_tokens": list(range(4, 50))}, {}),
]


@pytest.mark.parametrize(("fields", "options"), CHANGES, ids=lambda one: "-".join(one) or "same")
def test_what_changes_logits_does_what_the_engine_does(
    client: TestClient, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    kept = {key: value for key, value in fields.items() if key not in ("min_tokens", "stop_token_ids")}
    wanted = text_alone(chat_ids(), max_new_tokens=24, **{**kept, **options})
    body = post(client, max_tokens=24, **fields).json()
    assert body["choices"][0]["message"]["content"] == wanted != text_alone(chat_ids(), max_new_tokens=24)


def test_as_many_tokens_may_be_asked_for_as_a_text_may_have() -> None:
    """And the server's own least number gives way to a request's limit."""
    with client_of(defaults=Defaults(processing=Processing.of(min_new_tokens=30))) as client:
        for asked in ({"max_tokens": 9}, {"max_tokens": 9, "min_tokens": 9}):
            assert post(client, **asked).json()["usage"]["completion_tokens"] == 9


def test_bad_words_never_come(client: TestClient) -> None:
    usual = post(client, max_tokens=24).json()["choices"][0]["message"]["content"]
    found = post(client, max_tokens=24, bad_words=[usual[:1]]).json()["choices"][0]["message"]["content"]
    assert usual[:1] not in found and found


@pytest.mark.parametrize("chat", [True, False])
def test_logprobs_are_those_of_the_engine_whole_and_streamed(client: TestClient, chat: bool) -> None:
    alone = tiny_engine().generate([chat_ids()], tree=TREE, max_new_tokens=12, logprobs=2).logprobs[0]
    held = tiny_engine().tokenizer.decode([one.token for one in alone])[:11]  # back, since a stop begins so
    path, asked = URL, {"messages": CHAT, "logprobs": True, "top_logprobs": 2}
    if not chat:
        path, asked = "/v1/completions", {"prompt": chat_ids(), "logprobs": 2}
    asked["stop"] = f"{held}never"
    whole = client.post(path, json={**asked, "max_tokens": 12}).json()["choices"][0]["logprobs"]
    lines = client.post(path, json={**asked, "max_tokens": 12, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [one["choices"][0]["logprobs"] for one in events if one["choices"][0]["logprobs"]]
    assert len(parts) > 1
    decode = tiny_engine().tokenizer.decode
    if chat:
        streamed = [entry for part in parts for entry in part["content"]]  # from a kept prompt: it rounds
        assert [one["token"] for one in streamed] == [one["token"] for one in whole["content"]]
        values = [one["logprob"] for one in whole["content"]]
        assert [one["logprob"] for one in streamed] == pytest.approx(values, abs=1e-4)
        assert [entry["token"] for entry in whole["content"]] == [decode([one.token]) for one in alone]
        for entry, one in zip(whole["content"], alone, strict=True):
            assert entry["logprob"] == pytest.approx(one.logprob, abs=1e-4)
            assert bytes(entry["bytes"]).decode() == entry["token"]
            best = [(top["token"], pytest.approx(top["logprob"], abs=1e-4)) for top in entry["top_logprobs"]]
            assert best == [(decode([token]), value) for token, value in one.top]
        return
    streamed = {key: [item for part in parts for item in part[key]] for key in whole}
    assert streamed["tokens"] == whole["tokens"] and streamed["text_offset"] == whole["text_offset"]
    assert streamed["token_logprobs"] == pytest.approx(whole["token_logprobs"], abs=1e-4)
    assert list(map(list, streamed["top_logprobs"])) == list(map(list, whole["top_logprobs"]))
    assert whole["tokens"] == [decode([one.token]) for one in alone]
    assert whole["token_logprobs"] == pytest.approx([one.logprob for one in alone], abs=1e-4)
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert "".join(whole["tokens"])[offset:].startswith(token)


# -- errors ----------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"surprise": 1}, "surprise", "unknown_field"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"bad_words": [""]}, "bad_words.0", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_field"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_field"),
        ({"response_format": {"type": "json_object"}}, "response_format", "invalid_value"),  # its tokenizer
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
            "messages.0.tool_call_id",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url.url",
            "missing_field",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": {}}]}]},
            "messages.0.content.0.more",
            "unknown_field",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "missing_field",
        ),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context_length_exceeded"),
        ({"messages": None}, "messages", "missing_field"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens", "invalid_value"),
        ({"min_tokens": 11, "max_completion_tokens": 10}, "min_tokens", "invalid_value"),
        ({"min_tokens": 1025}, "min_tokens", "invalid_value"),  # the server's own max_tokens is 1024
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 73}, "n", "invalid_value"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_value"),
        ({"stop": [""]}, "stop.0", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"threshold": -0.1}, "threshold", "invalid_value"),
        ({"threshold": "high"}, "threshold", "invalid_value"),
        ({"threshold": 0.1, "divergence": "kl"}, "divergence", "invalid_value"),
        ({"rule": "nonsense"}, "rule", "invalid_value"),
        ({"quality_budget": 0.1}, "quality_budget", "invalid_value"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_the_field(
    client: TestClient, body: Any, param: str, code: str
) -> None:
    error = error_of(post(client, **body), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param.rpartition(".")[2] in error["message"] or param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"messages": NaN}',
        b'{"messages": "\\ud800"}',
    ],
)
def test_a_malformed_body_is_refused(client: TestClient, body: bytes) -> None:
    error = error_of(client.post(URL, content=body, headers={"content-type": "application/json"}), 400)
    asked = body.startswith(b'{"')  # for something, so that a field is wrong
    assert error["code"] == ("invalid_value" if asked else "invalid_json")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"prompt": "café"}'.encode("latin-1"), "the body is not UTF-8 at byte 15: send it as UTF-8"),
        (b"{'prompt': 1}", r"the body is not JSON \(.+ at character 1\): send one JSON object"),
    ],
)
def test_a_body_that_cannot_be_read_says_where(client: TestClient, body: bytes, message: str) -> None:
    """Some programs send Latin-1, and some shells keep single quotes."""
    answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = error_of(answer, 400)
    assert re.fullmatch(message, error["message"]) and error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("url", "asked", "param"),
    [
        (URL, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (URL, {"messages": CHAT, "\ud800": 1}, None),
        ("/v1/responses", {"input": "\ud800", "instructions": "x"}, "input"),
        ("/v1/responses", {"input": "x", "instructions": "\ud800"}, "instructions"),
    ],
)
def test_half_a_character_is_refused_where_it_stands(
    client: TestClient, url: str, asked: Any, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    assert error_of(client.post(url, content=json.dumps(asked), headers=headers), 400)["param"] == param


def test_a_list_of_the_wrong_length_is_told_in_plain_words(client: TestClient) -> None:
    assert (
        error_of(post(client, messages=[]), 400)["message"]
        == "messages is []: List should have at least 1 item"
    )
    message = error_of(post(client, stop=["x"] * 17), 400)["message"]
    assert message.endswith("List should have at most 16 items")


def test_a_form_is_no_request(client: TestClient) -> None:
    """A web page may send a plain form anywhere without asking; JSON it may not."""
    body = json.dumps({"messages": CHAT})
    error = error_of(client.post(URL, content=body, headers={"content-type": "text/plain"}), 400)
    assert "application/json" in error["message"]


def test_unknown_models_and_routes(client: TestClient) -> None:
    assert error_of(post(client, model="gpt-5"), 404)["code"] == "model_not_found"
    error_of(client.get("/v1/models/gpt-5"), 404)
    error = error_of(client.get("/v2/chat"), 404)
    assert error["code"] == "not_found" and error["message"].startswith(
        "/v2/chat is no route of this server: "
    )
    for method, path, allowed in (("GET", URL, "POST"), ("DELETE", "/health", "GET"), ("PUT", "/", "GET")):
        refused = client.request(method, path)
        error = error_of(refused, 405)
        assert refused.headers["allow"] == allowed and error["code"] == "method_not_allowed"
        assert error["message"] == f"{method} is no method of {path}: send {allowed}"
    error = error_of(post(client, "/v1/completions", prompt=[96]), 400)
    assert error["param"] == "prompt" and "0 to 95" in error["message"]
    for prompt in ([], "", [""], [[]]):
        error_of(post(client, "/v1/completions", prompt=prompt), 400)


def test_a_request_can_clear_what_the_server_bans_and_stops_at() -> None:
    with client_of() as client:
        plain = post(client, "/v1/completions", prompt="Hi", max_tokens=12).json()["choices"][0]
    first, later = plain["text"][0], plain["text"][3]
    token = tiny_engine().tokenizer(first, add_special_tokens=False).input_ids[0]
    banned = {"suppress_tokens": (token,), "bad_words_ids": ((token,),)}
    processing = Processing(**banned, logit_bias=(((token,), -5.0),))
    clear = {"stop": [], "suppress_tokens": [], "logit_bias": {}, "bad_words": []}
    with client_of(defaults=Defaults(stops=(later,), processing=processing)) as client:
        said = [
            post(client, "/v1/completions", prompt="Hi", max_tokens=12, **more).json()["choices"][0]
            for more in ({}, clear, dict.fromkeys(clear))
        ]
    assert said[1]["text"] == plain["text"] and said[1]["finish_reason"] == plain["finish_reason"]
    assert said[0] == said[2] and not said[0]["text"].startswith(first)


def test_a_key_is_asked_for_where_there_is_one() -> None:
    with client_of(key="secret") as client:
        for said in (None, "Bearer secreT", "secret", "Basic secret"):
            headers = {} if said is None else {"authorization": said}
            error = error_of(client.get("/v1/models", headers=headers), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert error_of(post(client), 401)
        assert client.get("/metrics").status_code == 401
        for scheme in ("Bearer", "bearer"):
            assert client.get("/v1/models", headers={"authorization": f"{scheme} secret"}).status_code == 200
        assert client.get("/health").json() == {"status": "ok"}


def test_without_a_key_only_this_machine_may_call() -> None:
    """A web page's name may be made to point at this machine, and its requests then carry that name."""
    with client_of(hosts=["localhost", "[::1]"]) as client:
        for host, status in (
            ("localhost:80", 200),
            ("LOCALHOST", 200),
            ("[::1]:80", 200),
            ("evil.example", 403),
        ):
            assert client.get("/v1/models", headers={"host": host}).status_code == status
        assert error_of(client.get("/", headers={"host": "evil.example:80"}), 403)["code"] == "invalid_host"


def test_limits_are_kept() -> None:
    limits = Limits(max_prompt_tokens=25, max_body=2000, request_timeout=0.0)
    with client_of(limits=limits) as client:
        body = json.dumps({"messages": CHAT, "user": "x" * 2000})
        assert error_of(client.post(URL, content=body), 413)["code"] == "body_too_large"
        assert error_of(client.post(URL, content=b"x" * 40_000), 413)
        assert error_of(client.post(URL, content=iter([b"x" * 900] * 3)), 413)
        message = {"role": "user", "content": "x" * 20}
        error = error_of(post(client, messages=[message]), 400)
        assert error["code"] == "context_length_exceeded" and "at most 25" in error["message"]
        for stream in (False, True):
            late = post(client, stream=stream, max_tokens=100)
            assert error_of(late, 504)["code"] == "timeout"
            assert late.headers["x-should-retry"] == "false"


def test_other_pages_may_call_only_where_that_is_said(client: TestClient) -> None:
    asks = {"origin": "http://there", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.options(URL, headers=asks).headers
    with client_of(cors_origins=["http://there"], key="secret") as other:
        allowed = other.options(URL, headers=asks)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "http://there"
        assert (
            "access-control-allow-origin"
            in other.get("/v1/models", headers={"origin": "http://there"}).headers
        )
        assert other.options(URL, headers={**asks, "origin": "http://elsewhere"}).status_code == 400
        # Some browsers ask this of a page of the internet that calls a private address.
        private = {**asks, "access-control-request-private-network": "true"}
        assert other.options(URL, headers=private).status_code == 200


# -- other routes ----------------------------------------


def test_openapi_tells_of_the_errors_that_there_are(client: TestClient) -> None:
    found = client.get("/openapi.json").json()
    assert set(found["paths"][URL]["post"]["responses"]) == {"200", "4XX"}
    assert "HTTPValidationError" not in found["components"]["schemas"]


def test_models_are_listed(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card == client.get(f"/v1/models/{NAME}").json()
    assert client.get("/v1/models/").json() == listed
    assert (card["id"], card["object"], card["max_model_len"]) == (NAME, "model", 256)


def test_no_answer_says_where_on_the_machine_the_models_lie(tmp_path: Path) -> None:
    """Those of folders are shown by the folder's own name."""
    folder = tmp_path / "my-head"
    folder.mkdir()
    whole = tiny_engine()
    model = EagleFSD(
        whole.target, whole.drafter, whole.tokenizer, str(tmp_path / "my-model"), str(folder), None, folder
    )
    args = build_parser().parse_args(["--total-tokens", "8", "--depth", "3", "--tree-top-k", "3"])
    with TestClient(create_app(model, make_settings(args, model, generation_options(args)))) as client:
        client.headers["host"] = "localhost"
        card = client.get("/v1/models").json()["data"][0]
        assert (card["id"], card["draft"]) == ("my-model", "my-head")
        assert post(client, model="my-model", max_tokens=2).json()["model"] == "my-model"
        missing = error_of(post(client, threshold="auto"), 400)["message"]
        (folder / "calibration.json").write_text("{")
        broken = error_of(post(client, threshold="auto"), 400)["message"]
    for message in (missing, broken):
        assert "my-head" in message and str(tmp_path) not in message


def test_tokens_there_and_back(client: TestClient) -> None:
    found = post(client, "/tokenize", prompt="Hello", add_special_tokens=False).json()
    assert found["count"] == 5 and found["max_model_len"] == 256
    assert post(client, "/detokenize", tokens=found["tokens"]).json() == {"prompt": "Hello"}
    assert post(client, "/tokenize", prompt="Hello").json()["count"] == 6
    assert post(client, "/tokenize", messages=CHAT).json()["tokens"] == chat_ids()
    error_of(post(client, "/tokenize"), 400)
    error_of(post(client, "/tokenize", prompt="Hello", messages=CHAT), 400)
    error_of(post(client, "/detokenize", tokens=[-1]), 400)


def test_token_ids_become_text_whatever_a_prompt_may_have() -> None:
    """A whole text with its answer fills all positions of the target, where a prompt leaves room for more."""
    with client_of(limits=Limits(max_prompt_tokens=25)) as client:
        for count in (0, 26, 256, 300):
            ids = tiny_engine().tokenizer.encode("x", add_special_tokens=False) * count
            assert post(client, "/detokenize", tokens=ids).json() == {"prompt": "x" * count}
        for token in (-1, 96):
            error = error_of(post(client, "/detokenize", tokens=[5, token]), 400)
            assert (error["param"], error["code"]) == ("tokens", "invalid_value")


def test_a_text_that_never_fits_is_refused_in_a_clients_words() -> None:
    with client_of(limits=Limits(cache_tokens=100)) as client:
        assert post(client, max_tokens=4).status_code == 200
        error = error_of(post(client, max_tokens=90), 400)
    said = f"the prompt has {len(chat_ids())} tokens and may get 90 more, so that it needs"
    assert error["message"].startswith(said)


@pytest.mark.parametrize("prefix_tokens", [0, 4096])
def test_the_next_turn_of_a_chat_reads_only_what_is_new(prefix_tokens: int) -> None:
    with client_of(limits=Limits(prefix_tokens=prefix_tokens)) as client:
        first = post(client, max_tokens=24).json()
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        said = first["choices"][0]["message"]["content"]
        turns = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": "why"}]
        second = post(client, messages=turns, max_tokens=24, n=2).json()
        page = client.get("/metrics").text
    ids = chat_ids(turns)
    assert [choice["message"]["content"] for choice in second["choices"]] == 2 * [
        text_alone(ids, max_new_tokens=24)
    ]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    for answer, reused in ((first, 0), (second, cached)):  # what is read costs time, what is reused does not
        timings = answer["timings"]
        assert (timings["cache_n"], timings["prompt_n"]) == (
            reused,
            answer["usage"]["prompt_tokens"] - reused,
        )
        speed = 1000 * timings["prompt_n"] / timings["prompt_ms"]
        assert timings["prompt_per_second"] == pytest.approx(speed, rel=0.01)
    assert (len(chat_ids()) <= cached < len(ids)) if prefix_tokens else cached == 0
    assert f"eagle_fsd_prefix_cache_hits_total {2.0 * cached}" in page


def test_metrics_count_what_was_done() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with client_of() as client:
        answer = post(client, max_tokens=20, threshold=0.2).json()
        error_of(post(client, n=0), 400)
        for path in (f"/v1/models/{NAME}", "/v1/models/a/b", "/page/style.css", "/page/none", "/", "/no"):
            client.get(path)
        client.delete("/page/style.css")
        page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    samples = [one for family in text_string_to_metric_families(page.text) for one in family.samples]
    values = {
        (sample.name.removeprefix("eagle_fsd_"), *sorted(sample.labels.values())): sample.value
        for sample in samples
    }
    timings = answer["timings"]
    assert values["generation_tokens_total",] == 20
    assert values["prompt_tokens_total",] == len(chat_ids())
    assert values["spec_decode_num_drafts_total",] == timings["steps"]
    assert values["spec_decode_num_fuzzy_tokens_total",] == timings["fuzzy_accepts"] > 0
    accepted = timings["exact_accepts"] + timings["fuzzy_accepts"]
    assert values["spec_decode_num_accepted_tokens_total",] == accepted
    assert values["request_success_total", "length"] == 1
    answers = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in samples
        if sample.name == "eagle_fsd_http_requests_total"
    }
    assert answers == {
        (URL, "200"): 1, (URL, "400"): 1, ("/v1/models/{name:path}", "200"): 1, ("other", "404"): 1,
        ("/v1/models/{name:path}", "404"): 1, ("/page/{name}", "200"): 1, ("/page/{name}", "404"): 1,
        ("/page/{name}", "405"): 1, ("/", "200"): 1,
    }  # fmt: skip
    assert values["time_to_first_token_seconds_count",] == values["e2e_request_latency_seconds_count",] == 1
    assert values["inter_token_latency_seconds_count",] + 3 >= 19
    assert values["num_requests_running",] == values["num_requests_waiting",] == 0
    assert values["step_seconds", "verify"] > 0


def test_metrics_count_an_answer_that_nothing_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of() as client:
        monkeypatch.setattr(client.app.state.service, "answer_of", lambda *_: 1 / 0)
        assert error_of(post(client), 500)["code"] == "internal_server_error"
        page = client.get("/metrics").text
    assert f'eagle_fsd_http_requests_total{{route="{URL}",status="500"}} 1.0' in page


def test_seconds_of_steps_go_on_after_a_batch_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do those of reading a prompt, which are measured from one point of them to another."""
    with client_of() as client:
        worker = client.app.state.service.worker
        assert post(client, max_tokens=4).status_code == 200
        before = [worker.phase_seconds(phase) for phase in ("prefill", "verify")]
        with monkeypatch.context() as broken:
            broken.setattr(Scheduler, "step", lambda _: 1 / 0)
            error_of(post(client), 500)
        after = [worker.phase_seconds(phase) for phase in ("prefill", "verify")]
    assert all(0 < one <= other for one, other in zip(before, after, strict=True))


def blank_job(number: int) -> Job:
    return Job([1], 1, Terms(()), (0, number), StreamedText(tiny_engine().tokenizer), print)


def test_texts_that_have_a_place_do_not_wait_though_no_step_has_begun() -> None:
    worker = client_of(limits=Limits(max_rows=2, max_queue=1)).app.state.service.worker  # not started
    jobs = [blank_job(number) for number in range(4)]
    for number, job in enumerate(jobs[:3]):
        assert (worker.running, worker.waiting) == (number, 0)
        worker.submit([job])
    assert (worker.running, worker.waiting) == (2, 1)
    with pytest.raises(ApiError, match="busy, and 1 text waits already: try again in 11 s"):
        worker.submit(jobs[3:])
    worker.cancel(jobs[1:2])
    assert worker._take_in()
    assert [job.stream[1] for job in worker._texts.values()] == [0, 2]  # first come, first served


def test_a_stop_is_looked_for_behind_the_prompt_that_a_text_continues() -> None:
    """A word has its space there, and none at the beginning of a text."""
    job = Job([7], 1, Terms(()), (0, 0), StreamedText(tiny_engine().tokenizer, ("a",), [7]), print)
    assert job.stopping == (("a",), [7]) and blank_job(0).stopping is None


def test_a_busy_server_says_how_long_its_texts_took_lately() -> None:
    worker, job = client_of(limits=Limits(max_rows=2)).app.state.service.worker, blank_job(0)
    now = time.perf_counter()
    job.clock.started = now - 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now)
        worker._count(job, News(finish_reason="stop"))
    assert worker.line.turn(1, now) == 30  # it was alone, and texts may take longer


def test_metrics_measure_from_the_arrival_and_between_single_tokens() -> None:
    metrics, job = Metrics(), blank_job(0)
    job.clock.submitted, job.clock.started = 1.0, 3.0
    metrics.started(job)
    metrics.emitted(job, 4, 5.0)
    job.clock.last = 5.0
    metrics.emitted(job, 4, 7.0)
    sums = {
        "request_queue_time_seconds": 2,
        "time_to_first_token_seconds": 4,
        "inter_token_latency_seconds": 2,
    }
    for name, seconds in sums.items():
        assert metrics.registry.get_sample_value(f"eagle_fsd_{name}_sum") == seconds


def test_what_was_read_before_is_no_time_of_this_prompt() -> None:
    with client_of() as client:
        client.app.state.service.worker.phase_seconds = lambda _: 100.0
        assert post(client, max_tokens=4).json()["timings"]["prompt_ms"] == 0


@pytest.mark.parametrize("seed", [-1, -(2**63), -12345])
def test_a_seed_below_zero_is_one_of_the_engines(client: TestClient, seed: int) -> None:
    asked = {"max_tokens": 12, "temperature": 1, "seed": seed}
    expected = text_alone(chat_ids(), max_new_tokens=12, temperature=1.0, seed=seed + 2**63)
    answer = post(client, **asked).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["timings"]["seed"] == seed
    (item,) = client.post("/v1/responses", json={"input": "Hi", **asked, "max_tokens": None}).json()["output"]
    assert item["content"][0]["text"].startswith(expected)
    body = {**asked, "prompt": chat_ids()}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected


def test_top_k_of_minus_one_is_all() -> None:
    few = Defaults(sampling=SamplingConfig(temperature=1.0, top_k=2))
    with client_of(defaults=few) as client:
        asked = {"max_tokens": 20, "seed": 5}
        texts = {
            k: post(client, **asked, **({} if k is None else {"top_k": k})).json()["choices"]
            for k in (None, 0, -1)
        }
    assert texts[-1] == texts[0] != texts[None]
