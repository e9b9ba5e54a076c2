"""Calls of functions in texts: what a chat template has, and a reader that sees the text in any pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.tiny_tokenizer import TEMPLATE, TOOL_TEMPLATE, byte_tokenizer

from eagle_fsd.text.chat import encode_chat
from eagle_fsd.text.tool_calls import (
    OWN_FORMAT,
    Call,
    CallFormat,
    CallReader,
    call_format,
    call_grammar,
    call_text,
    describe_functions,
    read_call,
    text_and_calls,
)

A, B = call_text("a", {"x": "</b> \n"}), call_text("b", {})
TAGS = call_text("a", {"x": '"</tool_call> <tool_call>{'})
OPEN_STRING = '<tool_call>{"name": "a", "arguments": {"x": "}}</tool_call>'
CALLS = [Call("a", '{"x": "</b> \\n"}'), Call("b", "{}")]
TEXTS: dict[str, tuple[str, str, list[Call]]] = {
    "": ("", "", []),
    "text": ("a < b, <tool> and\n\n<tool_cal", "a < b, <tool> and\n\n<tool_cal", []),
    "call": (A, "", CALLS[:1]),
    "calls": (f"\n{A}\n\n{B}\n", "\n", CALLS),
    "text around": (f"one {A} two {B} three\n", "one  two  three\n", CALLS),
    "broken": ("<tool_call>{</tool_call> <tool_call>", "<tool_call>{</tool_call> <tool_call>", []),
    "tags in a string": (f"{TAGS} {B}", "", [Call("a", '{"x": "\\"</tool_call> <tool_call>{"}'), CALLS[1]]),
    "a string without end": (f"{OPEN_STRING} so {A}", f"{OPEN_STRING} so ", CALLS[:1]),
    "unknown": (call_text("c", {}) + B, call_text("c", {}), CALLS[1:]),
    "no object": ('<tool_call>{"name": "a", "arguments": 3}</tool_call>',) * 2 + ([],),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_reader_finds_the_same_in_any_pieces(name: str) -> None:
    text, content, calls = TEXTS[name]
    for seed in range(30):
        draw, reader, shown, found, rest = random.Random(seed), CallReader(["a", "b"], True), "", [], text
        while rest:
            size = len(text) if seed == 0 else draw.choice([1, 2, 5])
            more, new = text_and_calls(reader.add(rest[:size]))
            shown, found, rest = shown + more, found + new, rest[size:]
            assert content.startswith(shown)
        more, new = text_and_calls(reader.add("", last=True))
        assert (shown + more, found + new) == (content, calls) and reader.calls == calls
    reader = CallReader(["a", "b"], True, several=False)
    assert text_and_calls(reader.add(text, last=True)) == (content, calls[:1])


def test_text_and_calls_come_in_their_order() -> None:
    found = CallReader(["a", "b"], True).add(TEXTS["text around"][0], last=True)
    assert found == ["one ", CALLS[0], " two ", CALLS[1], " three\n"]


def test_a_call_and_what_is_none_are_told_as_soon_as_they_end() -> None:
    long = call_text("a", {"x": "-" * 99 + "</tool_call>"})
    assert len(CallReader(["a", "b"], True).add(f"{long} {B}")) == 2
    broken = TEXTS["no object"][0]
    assert CallReader(["a"], True).add(f"{broken} so") == [broken, " so"]


def test_a_bare_call_is_a_whole_answer() -> None:
    whole = '{"name": "a", "parameters": {"x": [1, {}]}}'
    reader = CallReader(["a"], tagged=False)
    assert [reader.add(part) for part in (whole[:9], whole[9:])] == [[], []]
    assert reader.add("", last=True) == [Call("a", '{"x": [1, {}]}')]
    assert CallReader(["b"], tagged=False).add(whole, last=True) == [whole]
    for wrong in ("", "[1]", '"a"', '{"name": "a", "arguments": "x"}', "{"):
        assert read_call(wrong, ["a"]) is None


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("tagged", [True, False])
def test_a_call_that_is_cut_off_is_neither_text_nor_a_call(free: bool, tagged: bool) -> None:
    """Wherever it is cut; a call whose closing tag alone is missing is whole."""
    inner = '\n{"name": "a", "arguments": {"x": {"y": "</tool_call>}"}}}'
    whole = f"<tool_call>{inner}\n</tool_call>" if tagged else inner
    begun = len("<tool_call>") if tagged and free else 0  # a tag's own beginning may be text
    for end in range(begun, len(whole) + 1):
        for size in (1, 7, len(whole)):
            reader = CallReader(["a"], tagged, free=free)
            parts = [whole[start : min(start + size, end)] for start in range(0, end, size)] or [""]
            found = [one for part in parts for one in reader.add(part)] + reader.add("", last=True, cut=True)
            shown, calls = text_and_calls(found)
            complete = end >= whole.index("}}}") + 3
            if tagged or not free:  # bare calls are forced
                assert shown == ""
            assert calls == ([Call("a", '{"x": {"y": "</tool_call>}"}}')] if complete else [])


@pytest.mark.parametrize(
    "text",
    [
        "write <tool_call> before it, and",
        '<tool_call>{"name": "b", "argu',
        "<tool_call>now(",
        '{"name": "a", "argu',
        '<tool_call>{"name": "a", "arguments": 3</tool_call> and',
        "a <tool_cal",
        "1 <",
    ],
)
def test_text_that_is_cut_off_stays_text_if_it_begins_no_call(text: str) -> None:
    assert text_and_calls(CallReader(["a"], True).add(text, last=True, cut=True)) == (text, [])
    found = CallReader(["a"], True).add(f"{A}so {text}", last=True, cut=True)
    assert text_and_calls(found) == (f"so {text}", CALLS[:1])


BARE = TOOL_TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TOOL_TEMPLATE, CallFormat(True, True)),
        (
            TOOL_TEMPLATE.replace("<tool_call>\n", "<tool_call>").replace('\n"\n    "</tool', "</tool"),
            CallFormat(True, True, "", "\n"),
        ),
        (BARE, CallFormat(True, False)),
        (TEMPLATE, OWN_FORMAT),
        ("{{ raise_exception('no') }}", OWN_FORMAT),
    ],
    ids=["tagged", "no line before", "bare", "unknown", "refuses"],
)
def test_what_a_template_has_is_seen_in_what_it_writes(template: str, expected: CallFormat) -> None:
    assert call_format(byte_tokenizer(template)) == expected


def test_a_tag_that_is_a_special_token_is_not_seen_in_answers() -> None:
    tokenizer = byte_tokenizer(TOOL_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    assert call_format(tokenizer) == CallFormat(True, False)


def test_a_call_is_written_as_templates_do() -> None:
    function = {"name": "a", "arguments": {"x": 1}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]
    tokenizer = byte_tokenizer(TOOL_TEMPLATE)
    assert call_text("a", {"x": 1}) in tokenizer.decode(encode_chat(tokenizer, turns)[0])
    described = describe_functions([{"name": "a", "parameters": {}}, {"name": "b"}])
    assert [json.loads(line)["name"] for line in described.splitlines() if line.startswith('{"name": "') and
            "its name" not in line] == ["a", "b"]  # fmt: skip


def test_what_is_no_json_that_python_can_hold_is_no_call() -> None:
    assert read_call("[" * 100_000, ["f"]) is None
    half = read_call('{"name": "f", "arguments": {"text": "hi \\ud83d"}}', ["f"])
    assert half is not None and json.loads(half.arguments) == {"text": "hi \ud83d"}


def test_arguments_stay_as_they_were_written() -> None:
    """Numbers too: Python would write Infinity, which is no JSON, and round the others."""
    for arguments in (
        '{"n": 1e999}',
        '{ "n":1E5 , "m": [12345678901234567890.5,\n-0]}',
        '{"s": "\\ud83d \\" } : ", "s": {}}',
    ):
        for text in (
            f'{{"name": "f", "arguments": {arguments}}}',
            f' {{"x": "arguments" , "arguments" : {arguments} , "name":\n"f"}}\n',
            f'{{"parameters":{arguments},"name":"f"}}',
            f'{{"arguments": 1, "name": "g", "name": "f", "arguments": {arguments}}}',
        ):
            assert read_call(text, ["f"]) == Call("f", arguments)
    assert read_call('{"name": "f"}', ["f"]) == Call("f", "{}")
    for constant in ("NaN", "-Infinity"):
        assert read_call(f'{{"name": "f", "arguments": {{"n": {constant}}}}}', ["f"]) is None


FREE = {"a": 1, "b": [2]}


@pytest.mark.parametrize(
    ("parameters", "allowed", "refused"),
    [
        ({"type": "object", "properties": {"a": {}}}, [{}, {"a": 1}], [FREE, {"b": 1}]),
        ({"properties": {"a": {}}, "required": ["a"], "title": "f"}, [{"a": 1}], [{}, FREE]),
        ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
        ({"type": "object"}, [{}, FREE], []),
        ({"properties": {"a": {}}, "additionalProperties": True}, [FREE], []),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "array"}}, [FREE], [{"b": 1}]),
        ({"properties": {"a": {}}, "patternProperties": {"^b": {}}}, [FREE], []),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, [FREE], [{"a": 1}]),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, [{"b": [2], "a": 1}], []),
        (
            {"properties": {"a": {"properties": {"c": {}}}}},
            [{"a": {"c": 1}}],
            [FREE, {"a": {"c": 1, "d": 2}}],
        ),
    ],
    ids=str,
)
def test_a_forced_call_has_no_argument_that_its_function_does_not_name(
    parameters: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    """Unless the schema speaks of others."""
    grammar = call_grammar([{"name": "a", "parameters": parameters}], OWN_FORMAT, several=False)
    for arguments in (*allowed, *refused):
        assert takes(grammar, call_text("a", arguments)) == (arguments in allowed), arguments


def takes(grammar: str, text: str) -> bool:
    """Return whether a text is a whole answer in a grammar."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    matcher.consume_tokens(tokenizer.tokenize_str(text))
    return matcher.is_accepting()


@pytest.mark.parametrize(
    "form",
    [OWN_FORMAT, CallFormat(True, True, "", ""), CallFormat(True, False)],
    ids=["own", "tight", "bare"],
)
def test_a_grammar_has_one_call_or_several_and_text_before_them(form: CallFormat) -> None:
    functions = [{"name": "a", "parameters": {"properties": {"x": {}}}}, {"name": "b"}]
    first, second, wrong = (call_text(*one, form) for one in (("a", {"x": 1}), ("b", {}), ("a", 3)))
    if not form.tagged:
        first, second, wrong = (
            text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
            for text in (first, second, wrong)
        )
    for several in (True, False):
        grammar = call_grammar(functions, form, several)
        assert takes(grammar, first) and takes(grammar, second)
        assert takes(grammar, f"{first}\n{second}") == (several and form.tagged)
        assert not takes(grammar, wrong) and not takes(grammar, f"so {first}") and not takes(grammar, "so")
    if form.tagged:
        free = call_grammar(functions, form, several=True, free=True)
        assert all(takes(free, text) for text in ("so", first, f"so {first}\n{second}"))
        assert not takes(free, f"so {first} and")
        schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]})
        formed = call_grammar(functions, form, several=True, answer=schema)
        assert all(takes(formed, text) for text in ('{"a": 1}', first, f"{first}\n{second}"))
        wrong = ('{"a": 2}', "so", f"so {first}", f'{{"a": 1}}{first}')
        assert not any(takes(formed, text) for text in wrong)
