"""What a request asks for: fields that are refused, and the rule that its extra fields make."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("fastapi", reason='the server needs the extra: pip install "eagle-fsd[serve]"')
pytest.importorskip("prometheus_client", reason='the server needs the extra: pip install "eagle-fsd[serve]"')

from pydantic import ValidationError

from eagle_fsd import AutoThreshold, Fuzzy, Lossless, SamplingConfig, TreeConfig, Typical
from eagle_fsd.acceptance.other_rules import Cactus, PublishedFSD
from eagle_fsd.acceptance.rule_names import RULES
from eagle_fsd.core.config import Form
from eagle_fsd.core.processing import UNPROCESSED, Processing
from eagle_fsd.serving.choices import Chooser, Defaults, Limits, requested_rule
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.requests.completions import ChatRequest, CompletionRequest
from eagle_fsd.serving.requests.responses import ResponsesRequest
from eagle_fsd.serving.requests.unsupported import IN_PLACE, UNSUPPORTED, WITHOUT_EFFECT, Unsupported
from eagle_fsd.serving.tools.plan import turns_of
from eagle_fsd.serving.work.tree import ServedTree
from eagle_fsd.text.tool_calls import OWN_FORMAT, CallFormat

CHAT = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": CHAT, **fields})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_done_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    assert name not in ChatRequest.model_fields and name not in CompletionRequest.model_fields
    for value in (None, *UNSUPPORTED[name]):
        assert chat(**{name: value}) == chat()
    with pytest.raises(Unsupported, match=f"^{name} is not supported by this server: leave it out"):
        chat(**{name: "something else"})
    with pytest.raises(Unsupported):
        chat(**{name: 0.5})


def test_a_boolean_is_no_number() -> None:
    with pytest.raises(Unsupported):
        chat(best_of=True)
    with pytest.raises(ValidationError):
        chat(presence_penalty=False)
    with pytest.raises(ValidationError):
        chat(temperature=True)
    with pytest.raises(ValidationError):
        chat(max_tokens=True)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_names_a_client_changes_nothing(name: str) -> None:
    assert chat(**{name: "me"}) == chat()


def test_what_clients_send_of_their_own_accord_is_taken() -> None:
    sent = {"service_tier": "auto", "store": False, "modalities": ["text"], "functions": [], "echo": False}
    sent |= {"function_call": "auto", "metadata": {"a": "b"}, "user": "c", "safety_identifier": "d"}
    sent |= {"reasoning_effort": "none", "skip_special_tokens": True, "length_penalty": 1.0, "priority": 0}
    assert chat(**sent, prompt_cache_key="e", cache_prompt=True) == chat()
    streamed = {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": False}
    assert chat(stream=True, stream_options=streamed).stream_options.include_usage


def test_what_is_marked_to_be_cached_is_read_as_usual() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f"}}
    part = {"type": "text", "text": "Hi"}
    plain = chat(messages=[{"role": "user", "content": [part]}], tools=[tool])
    marked = [{"role": "user", "content": [{**part, **mark}], **mark}]
    assert chat(messages=marked, tools=[{**tool, **mark}]) == plain


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_not_done_under_one_name_is_done_under_another(name: str) -> None:
    assert IN_PLACE[name] in ChatRequest.model_fields
    with pytest.raises(Unsupported, match=f"^{name} is .*, or send {IN_PLACE[name]} in its place$"):
        chat(**{name: ["x"]})


def test_as_much_is_taken_as_is_said() -> None:
    most = {"stop": ["x" * 200] * 16, "seed": 2**63 - 1, "suppress_tokens": [1] * 1024, "top_logprobs": 20}
    assert chat(**most, logprobs=True).stop == most["stop"]
    more = {"stop": ["x" * 201], "seed": 2**63, "suppress_tokens": [1] * 1025, "top_logprobs": 21}
    more |= {"max_tokens": 0, "threshold": math.nan}
    for name, value in more.items():
        with pytest.raises(ValidationError, match=name):
            chat(**{"logprobs": True, name: value})


def test_how_many_likely_tokens_are_told() -> None:
    asked = ({}, {"top_logprobs": 0}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3})
    assert [chat(**one).top_tokens for one in asked] == [None, None, 0, 3]
    plain = [CompletionRequest(prompt="a", logprobs=count) for count in (None, False, 0, 3)]
    assert [one.top_tokens for one in plain] == [None, None, 0, 3]


def test_a_template_is_given_what_is_there() -> None:
    assert chat(chat_template_kwargs={"a": 1}).template == {"a": 1}
    assert chat(chat_template_kwargs={"a": 1}, documents=["b"]).template == {"a": 1, "documents": ["b"]}


def test_null_means_absent() -> None:
    nothing = dict.fromkeys(("temperature", "stop", "n", "stream", "stream_options", "seed", "threshold"))
    assert chat(**nothing) == chat()


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x"}}


@pytest.mark.parametrize(
    ("without", "within"),
    [
        (
            {"messages": CHAT},
            {"messages": [{**CHAT[0], "name": None, "tool_call_id": None, "tool_calls": None}]},
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": None}]}]},
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}]},
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": None, "type": None}]}]},
        ),
        (
            {"stream": True, "stream_options": {}},
            {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}},
        ),
        (
            {"response_format": SCHEMA},
            {"response_format": {**SCHEMA, "json_schema": {"name": "x", "schema": None, "strict": None}}},
        ),
        ({"response_format": SCHEMA}, {"response_format": {**SCHEMA, "json_schema": {"name": None}}}),
        (
            {"structured_outputs": {"regex": "a"}},
            {"structured_outputs": {"regex": "a", "json": None, "choice": None, "grammar": None}},
        ),
        (
            {"tools": [TOOL]},
            {"tools": [{**TOOL, "function": {"name": "f", "description": None, "parameters": None}}]},
        ),
    ],
    ids=lambda one: next(iter(one)),
)  # fmt: skip
def test_null_means_absent_in_every_part(without: dict[str, Any], within: dict[str, Any]) -> None:
    expected, found = chat(**without), chat(**within)
    assert found.model_dump(exclude={"response_format"}) == expected.model_dump(exclude={"response_format"})
    assert found.form == expected.form


@pytest.mark.parametrize("name", ["content", "role"])
def test_null_does_not_stand_for_what_must_be_there(name: str) -> None:
    with pytest.raises(ValidationError, match=r"missing|required"):
        chat(messages=[{**CHAT[0], name: None}])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_name_of_who_speaks_changes_nothing(role: str) -> None:
    """OpenAI's API allows one in messages of these roles; chat templates show none."""
    turn = {"role": role, "content": "x"}
    for known in (OWN_FORMAT, CallFormat(known=True, tagged=True)):
        named, plain = (
            turns_of(chat(messages=[one]).messages, None, known) for one in ({**turn, "name": "me"}, turn)
        )
        assert named == plain


def test_prompts_come_in_four_forms() -> None:
    for prompt, expected in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
    ):
        assert list(CompletionRequest.model_validate({"prompt": prompt}).prompts) == expected


def test_parts_of_a_message_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "developer", "content": parts, "refusal": None, "tool_calls": []}
    for known in (OWN_FORMAT, CallFormat(known=True, tagged=True)):
        turns, arguments = turns_of(chat(messages=[message]).messages, None, known)
        assert turns == [{"role": "system", "content": "ab"}] and arguments == {}


HALF = Fuzzy(0.5, "tv", mode="paper", child="target", min_p=0.1)
AUTO = AutoThreshold(0.05, "js", child="target")


@pytest.mark.parametrize(
    ("usual", "said", "expected"),
    [
        (HALF, {}, HALF),
        (HALF, {"threshold": 0.1}, Fuzzy(0.1, "tv", mode="paper", child="target", min_p=0.1)),
        (HALF, {"threshold": 0.1, "divergence": "js"}, Fuzzy(0.1, mode="paper", child="target", min_p=0.1)),
        (HALF, {"rule": "fuzzy"}, HALF),
        (HALF, {"rule": "lossless"}, Lossless()),
        (HALF, {"rule": "typical"}, Typical()),
        (HALF, {"rule": "js:0.3:min_p=0.2"}, Fuzzy(0.3, min_p=0.2)),
        (HALF, {"rule": "cactus:0.2"}, Cactus(0.2)),
        (HALF, {"rule": "fsd_paper", "threshold": 0.4}, PublishedFSD(0.4)),
        (HALF, {"threshold": "auto"}, AutoThreshold(divergence="tv", mode="paper", child="target")),
        (HALF, {"quality_budget": 0.1, "divergence": "js"}, AutoThreshold(0.1, mode="paper", child="target")),
        (Fuzzy(0.0), {"quality_budget": 0.1}, AutoThreshold(0.1)),
        (Fuzzy(0.3, "tv"), {"quality_budget": 0.1}, AutoThreshold(0.1, "tv")),
        (
            Fuzzy(0.3, price=2.0),
            {"threshold": "auto"},
            AutoThreshold(mode="hybrid", price=2.0, cost="tokens"),
        ),
        (Lossless(), {"threshold": "auto"}, AutoThreshold()),
        (Lossless(), {}, Lossless()),
        (Lossless(), {"threshold": 0.3}, Fuzzy(0.3)),
        (Lossless(), {"threshold": "inf"}, Fuzzy(math.inf)),  # as timings write it
        (AUTO, {"threshold": "inf"}, Fuzzy(math.inf, child="target")),
        (Lossless(), {"rule": "fuzzy"}, Fuzzy(0.0)),
        (Typical(), {"threshold": 0.3, "divergence": "tv"}, Fuzzy(0.3, "tv")),
        (AUTO, {}, AUTO),
        (AUTO, {"quality_budget": 0.1}, AutoThreshold(0.1, child="target")),
        (AUTO, {"divergence": "tv"}, AutoThreshold(0.05, "tv", child="target")),
        (AUTO, {"threshold": 0.2}, Fuzzy(0.2, child="target")),
        (AUTO, {"threshold": 0}, Fuzzy(0.0, child="target")),
        (AUTO, {"rule": "lossless"}, Lossless()),
    ],
)
def test_what_a_request_does_not_say_is_as_in_the_servers_rule(usual: Any, said: Any, expected: Any) -> None:
    assert requested_rule(chat(**said), usual) == expected


@pytest.mark.parametrize(
    ("usual", "said", "message"),
    [
        (HALF, {"divergence": "js"}, "^divergence is 'js': a threshold belongs to it"),
        (Lossless(), {"divergence": "js"}, "^divergence is 'js': a threshold belongs to it"),
        (HALF, {"divergence": "kl", "threshold": 0.1}, "^divergence is 'kl': it must be one of"),
        (HALF, {"rule": "js:0.3", "threshold": 0.1}, "^threshold is 0.1: the rule 'js:0.3' has values"),
        (HALF, {"rule": "js:0.3:min_p=x"}, "min_p is 'x'"),
        (HALF, {"rule": "js:0.3:cost=kl"}, "^rule is 'js:0.3:cost=kl': its cost has no effect"),
        (HALF, {"rule": "exact"}, "^rule is 'exact': it must be one of lossless, .*, such as js:0.3$"),
        (HALF, {"rule": "lossless:0.3"}, "^rule is 'lossless:0.3': lossless text has no value '0.3'; leave"),
        (HALF, {"rule": "typical", "threshold": 0.1}, "^threshold is 0.1 for the rule typical"),
        (HALF, {"rule": "lossless", "threshold": 0.1}, "^threshold is 0.1 for the rule lossless"),
        (HALF, {"rule": "cactus", "threshold": "auto"}, "^threshold is 'auto' for the rule cactus"),
        (HALF, {"threshold": 0.1, "quality_budget": 0.1}, "^quality_budget is 0.1: it finds the threshold"),
        (HALF, {"quality_budget": 2}, "^quality_budget is 2"),
        (HALF, {"threshold": -1}, "^threshold is -1"),
    ],
)
def test_values_that_do_not_fit_are_refused(usual: Any, said: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requested_rule(chat(**said), usual)


def test_every_rule_can_be_named() -> None:
    for name, rule in RULES.items():
        assert type(requested_rule(chat(rule=name), Lossless())) is rule


class Calibrated:
    """An engine that counts how often its calibration is read."""

    class target:
        eos_token_ids, vocab_size, max_positions = (1,), 9, 12

    asked = 0

    def __init__(self) -> None:
        self.required: list[Any] = []

    def within_budget(self, wanted: AutoThreshold, sampling: Any, tree: TreeConfig) -> Any:
        assert tree == TreeConfig(4, 3, 2), "a budget holds for a tree"
        self.asked += 1
        return Fuzzy(10 * wanted.quality_budget), None

    @property
    def settler(self) -> Any:
        return self

    def require_rule(self, rule: Any) -> None:
        self.required.append(rule)


def chooser(limits: Limits | None = None, usual: Defaults | None = None) -> Chooser:
    model: Any = Calibrated()
    return Chooser(model, limits or Limits(), usual or Defaults(), ServedTree(TreeConfig(4, 3, 2)))


def test_a_calibrated_threshold_is_looked_up_once() -> None:
    """Looking it up reads all of the head's weights."""
    choose = chooser()
    model: Any = choose.model
    choices = [choose(chat(quality_budget=budget, seed=4)) for budget in (0.02, 0.02, 0.05)]
    assert [choice.terms.rule.threshold for choice in choices] == [0.2, 0.2, 0.5]
    assert model.asked == 2 and model.required == [choice.terms.rule for choice in choices]
    assert choices[0].seed is None  # greedy draws nothing
    assert choose(chat(temperature=1, seed=4)).seed == 4
    for _ in range(2):
        choose(chat(quality_budget=0.02, temperature=1))
        choose(chat(quality_budget=0.05))
    assert model.asked == 3  # a budget holds for a sampling


def test_what_a_request_says_holds_though_it_is_zero() -> None:
    """It switches off what the server has of its own."""
    processing = Processing.of(presence_penalty=0.5)
    usual = Defaults(SamplingConfig(0.8, 20, 0.9, 0.1), Lossless(), processing=processing)
    choose = chooser(usual=usual)
    terms = choose(chat()).terms
    assert (terms.sampling, terms.processing) == (usual.sampling, usual.processing)
    off = choose(chat(temperature=0, top_k=0, top_p=1, min_p=0, presence_penalty=0)).terms
    assert (off.sampling, off.processing) == (SamplingConfig(), UNPROCESSED)
    assert choose(chat(seed=0)).seed == 0
    assert choose(chat(min_tokens=3)).terms.processing.min_new_tokens == 3
    assert [choose(chat(max_tokens=limit)).limit for limit in (None, 7)] == [1024, 7]
    assert choose(chat(stop_token_ids=[5, 8])).terms.eos_token_ids == (1, 5, 8)
    for token in (9, -1):
        with pytest.raises(ApiError, match=f"^stop_token_ids has the token {token}: ids go from 0 to 8; "):
            choose(chat(stop_token_ids=[token]))


@pytest.mark.parametrize(("said", "most"), [(None, 11), (50, 11), (5, 5)])
def test_a_prompt_leaves_room_for_a_token(said: int | None, most: int) -> None:
    choose = chooser(Limits(max_prompt_tokens=said))
    choose.require_prompt([8] * most, "prompt")
    with pytest.raises(ApiError, match=f"prompt has {most + 1} tokens: at most {most} are taken") as found:
        choose.require_prompt([8] * (most + 1), "prompt")
    for known in ("prompt is too long", "maximum context length"):  # litellm and langchain seek these words
        assert known in str(found.value)
    with pytest.raises(ApiError, match="prompt has the token 9: ids go from 0 to 8"):
        choose.require_prompt([9], "prompt")


def test_a_form_that_asks_for_any_text_stands_beside_another() -> None:
    """In both kinds of chats, and under the name of the field that asks for one."""
    beside = {"structured_outputs": {"regex": "a"}}
    response = ResponsesRequest.model_validate({"input": "x", "text": {"format": {"type": "text"}}, **beside})
    for one in (response, chat(response_format={"type": "text"}, **beside)):
        assert one.form == Form("regex", "a") and one.form_name == "structured_outputs"
    assert chat(response_format={"type": "text"}).form_name is None
    assert chat(response_format={"type": "json_object"}).form_name == "response_format"
