"""Forms of texts with the real library: what comes out has the form, whatever the rule."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason='forms need an extra: pip install "eagle-fsd[schema]"')

from support.schema_engine import END_ID, schema_engine
from support.tiny_models import VOCAB
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, Fuzzy, GenerationOptions, Lossless, TreeConfig
from eagle_fsd.acceptance.other_rules import PublishedFSD
from eagle_fsd.core.config import Form
from eagle_fsd.decoding.steps.failures import NothingAllowed
from eagle_fsd.text.grammar import compile_form

TREE = TreeConfig(8, 3, 3)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "who": {"enum": ["ann", "bob", None]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["ok", "n", "who", "list"],
    "additionalProperties": False,
}


def require_form(text: str) -> None:
    """Assert by hand what SCHEMA says."""
    found = json.loads(text)
    assert set(found) == {"ok", "n", "who", "list"} and isinstance(found["ok"], bool)
    assert type(found["n"]) is int and 0 <= found["n"] <= 999 and found["who"] in ("ann", "bob", None)
    assert len(found["list"]) <= 3 and all(isinstance(one, bool) for one in found["list"])


def prompts(count: int) -> torch.Tensor:
    return torch.randint(4, VOCAB, (count, 6), generator=torch.Generator().manual_seed(5))


def texts(model: EagleFSD, count: int = 6, **options: Any) -> list[str]:
    made = model.generate(prompts(count), tree=TREE, **{"max_new_tokens": 200, "seed": 1, **options})
    assert [row.finish_reason for row in made.stats] == ["stop"] * count
    assert all(row[-1] == END_ID and END_ID not in row[:-1] for row in made.new_tokens)
    return [model.tokenizer.decode(row, skip_special_tokens=True) for row in made.new_tokens]


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rule", [Lossless(), Fuzzy(1e9), Fuzzy(1e9, mode="paper", price=0.01), PublishedFSD(1e9)], ids=str
)
def test_json_has_its_schema_whatever_the_rule(rule: Any, temperature: float) -> None:
    for text in texts(schema_engine(), rule=rule, temperature=temperature, json_schema=SCHEMA):
        require_form(text)


def test_greedy_texts_are_those_of_a_reader_that_starts_anew_for_every_token() -> None:
    model = schema_engine()
    made = model.generate(prompts(6), tree=TREE, max_new_tokens=120, json_schema=json.dumps(SCHEMA))
    form = compile_form(Form.json_schema(SCHEMA), model.tokenizer, VOCAB)
    assert form is not None
    for prompt, found in zip(prompts(6).tolist(), made.new_tokens, strict=True):
        text: list[int] = []
        while len(text) < 120 and END_ID not in text:
            walk = form.begin()
            for token in text:
                walk.advance(token)
            allowed = walk.allowed()
            allowed[END_ID] = walk.complete
            with torch.no_grad():
                logits = model.target.model(torch.tensor([[*prompt, *text]])).logits[0, -1]
            text.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        assert text == found
    assert sum(row.exact_accepts for row in made.stats) > 10


def test_a_walk_comes_back_to_where_it_was() -> None:
    """Also from the end of a text, where the form allows nothing more."""
    tokenizer = schema_engine().tokenizer
    form = compile_form(Form("regex", "(ab|cd)*x"), tokenizer, VOCAB + 8)
    assert form is not None
    walk = form.begin()
    a, b, x = tokenizer.convert_tokens_to_ids(["a", "b", "x"])
    first = walk.allowed()
    assert first.shape == (VOCAB + 8,) and first.nonzero()[:, 0].tolist() == sorted(
        tokenizer.convert_tokens_to_ids(["a", "c", "x"])
    )
    for token in (a, b, x):
        walk.advance(token)
    assert walk.complete and not walk.allowed().any() and not walk.failure
    for _ in range(3):
        walk.back()
    assert torch.equal(walk.allowed(), first) and not walk.complete
    walk.advance(b)  # refused: it can only be a limit of the library that was reached
    assert walk.failure and "\n" not in walk.failure and not walk.allowed().any() and not walk.complete
    assert torch.equal(form.begin().allowed(), first)
    try:
        torch.set_default_device("meta")  # where there is no data
        again = form.begin().allowed()
    finally:
        torch.set_default_device(None)
    assert torch.equal(again, first)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_regular_expressions_and_grammars(temperature: float) -> None:
    model = schema_engine()
    for text in texts(model, regex=r"(yes|no|[a-c]{2,5}-\d)", temperature=temperature):
        assert re.fullmatch(r"yes|no|[a-c]{2,5}-\d", text)
    lark = 'start: "say " WORD ("," WORD)~0..2\nWORD: /[a-z]{1,4}/'
    for text in texts(model, grammar=lark, temperature=temperature, rule=Fuzzy(1e9)):
        assert re.fullmatch(r"say [a-z]{1,4}(,[a-z]{1,4}){0,2}", text)


def test_stop_strings_penalties_and_limits_hold_beside_a_form() -> None:
    model = schema_engine()
    made = model.generate(prompts(4), tree=TREE, max_new_tokens=40, regex="(ab|cd)+x", stop_strings=["cd"])
    for row in made.new_tokens:
        text = model.tokenizer.decode(row, skip_special_tokens=True)
        assert re.fullmatch(r"(ab)*(cd|x)", text)
    (text,) = texts(model, 1, regex="(ab|cd)+", min_new_tokens=20)
    assert len(text) >= 20 and re.fullmatch("(ab|cd)+", text)
    for text in texts(model, regex="[a-h]{6}", no_repeat_ngram_size=1, rule=Fuzzy(1e9)):
        assert len(set(text)) == 6
    made = model.generate(prompts(2), tree=TREE, max_new_tokens=5, json_schema=SCHEMA)
    assert [row.finish_reason for row in made.stats] == ["length"] * 2
    white = r"[ \n\t]{30}"
    assert not re.search(white, "".join(texts(model, json_schema=SCHEMA, temperature=2.0)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be followed: Invalid type: foo"),
        ({"json_schema": {"uniqueItems": True}}, "json_schema cannot be followed: .*uniqueItems"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema cannot be followed: .*nowhere"),
        ({"json_schema": "{"}, r"json_schema is '\{': it must be a JSON object"),
        ({"json_schema": [1]}, r"json_schema is \[1\]: it must be a JSON object"),
        ({"json_schema": {"a": {1}}}, "json_schema is .* it must be a JSON object"),
        ({"regex": ""}, "regex is '': it must be a non-empty string"),
        ({"regex": "(ab"}, "regex cannot be followed: .*unclosed group"),
        ({"regex": "a(?=b)"}, "regex cannot be followed: .*look-around"),
        ({"grammar": "hello"}, "grammar cannot be followed: .*Expected token"),
        ({"grammar": "start: x"}, "grammar cannot be followed: .*unknown name"),
        ({"regex": "a", "grammar": "b"}, "grammar beside regex: a text has one form"),
        ({"json_schema": {}, "regex": "b"}, "regex beside json_schema: a text has one form"),
    ],
)
def test_forms_that_cannot_be_followed_are_named(options: Mapping[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as found:
        schema_engine().generate(prompts(1), max_new_tokens=3, tree=TREE, **options)
    assert "\n" not in str(found.value)


@pytest.mark.slow
def test_a_form_that_is_too_hard_ends_with_the_reason() -> None:
    with pytest.raises(NothingAllowed, match=r"regex cannot be followed any further .*too many expressions"):
        schema_engine().generate(prompts(1), max_new_tokens=9, tree=TREE, regex="((a{100}){100}){100}")


def test_what_a_form_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = schema_engine()
    with pytest.raises(ValueError, match="regex needs an end token"):
        model.generate(prompts(1), regex="a", eos_token_id=[])
    with pytest.raises(ValueError, match="regex is not supported for the target alone"):
        model.target_alone(prompts(1), regex="a")
    bare = EagleFSD(model.target, model.drafter)
    with pytest.raises(ValueError, match="regex needs a fast tokenizer: the target has none"):
        bare.generate(prompts(1), regex="a")
    words = EagleFSD(model.target, model.drafter, tiny_tokenizer())  # which does not say what its bytes are
    with pytest.raises(ValueError, match="regex: the target's tokenizer cannot be followed"):
        words.generate(prompts(1), regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        ValueError, match=r'json_schema needs llguidance: run pip install "eagle-fsd\[schema\]"'
    ):
        model.generate(prompts(1), json_schema={})


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
CLOSED = [
    (A, ['{"a": 1}', "{}"], ['{"a": 1, "b": 2}', '{"b": 1}']),
    ({"type": "object"}, ['{"b": 1}'], []),
    ({**A, "additionalProperties": True}, ['{"a": 1, "b": 2}'], []),
    ({**A, "required": ["b"]}, ['{"a": 1, "b": 2}'], ["{}"]),
    ({"type": "array", "items": A}, ['[{"a": 1}]'], ['[{"b": 1}]']),
    ({"type": "object", "properties": {"x": A}}, ['{"x": {"a": 1}}'], ['{"x": {"b": 1}}', '{"y": 1}']),
    ({"anyOf": [A, {"type": "null"}]}, ['{"a": 1}', "null"], ['{"b": 1}']),
    ({"$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"a": 1}'], ['{"b": 1}']),
    # Parts of one object stay open, and so do definitions, which may be such parts.
    ({"allOf": [A, B]}, ['{"a": 1, "b": 2}'], ['{"a": null, "b": 2}']),
    ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"b": 2}'], []),
    ({**B, "$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"b": 2, "a": 1}'], []),
    ({"required": ["b"], "anyOf": [A, B]}, ['{"b": 2}', '{"a": 1, "b": 2}'], ['{"a": 1}']),
    ({"type": "array", "items": {"allOf": [A, {"properties": {"x": B}}]}}, ['[{"x": {"b": 1}}]'], []),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), CLOSED, ids=str)
def test_an_object_has_no_property_that_its_schema_does_not_name(
    schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    """Unless it speaks of others: a small model would add properties for ever."""
    tokenizer = schema_engine().tokenizer
    for text in (*allowed, *refused):
        grammar = compile_form(Form.json_schema(schema), tokenizer, VOCAB)
        assert grammar is not None
        walk = grammar.begin()
        fits = all(walk.allowed()[token] and walk.advance(token) is None for token in tokenizer.encode(
            text, add_special_tokens=False
        ))  # fmt: skip
        assert (fits and walk.complete) == (text in allowed), text


def test_forms_are_equal_by_what_they_say() -> None:
    tokenizer = schema_engine().tokenizer
    one, two = (compile_form(Form("regex", "a+"), tokenizer, VOCAB) for _ in range(2))
    assert one == two and one != compile_form(Form("regex", "b+"), tokenizer, VOCAB)
    assert compile_form(None, None, VOCAB) is None
    assert GenerationOptions(json_schema={"a": 1}).form == GenerationOptions(json_schema='{"a":  1}').form
