"""Function calls in a chat: how a model writes them, the grammar that forces them, and reading them.

A tagged call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as the templates of Qwen and Hermes
have it. Functions are {"name", "description", "parameters"}; the last is a JSON schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle_fsd.text.chat import encode_chat
from eagle_fsd.text.grammar import WHITE_SPACE, closed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGGED_CALL = re.compile(rf"{OPEN}(\s*)\{{.*?\}}(\s*){CLOSE}", re.DOTALL)
NAME_OF_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"')
PROBE = "probe_of_tools"  # a name that no template has of its own
ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True)
class CallFormat:
    """How a chat template writes function calls.

    known: whether it shows functions to the model. tagged: whether a call stands between tags; else it is
    bare JSON. before, after: the white space inside the tags.
    """

    known: bool
    tagged: bool
    before: str = "\n"
    after: str = "\n"


# Written into messages for a template that knows no functions.
OWN_FORMAT = CallFormat(known=False, tagged=True)


def call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """Find out how a chat template has calls, by what it makes of one."""
    user = {"role": "user", "content": "x"}
    function = {"name": PROBE, "description": "", "parameters": ANY_ARGUMENTS}
    shown = written(tokenizer, [user], [{"type": "function", "function": function}])
    if PROBE not in shown:
        return OWN_FORMAT
    call = {"type": "function", "function": {"name": PROBE, "arguments": {"one": 1}}}
    turns = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, user]
    found = TAGGED_CALL.search(written(tokenizer, turns, []))
    if found is None or read_call(found[0].removeprefix(OPEN).removesuffix(CLOSE), [PROBE]) is None:
        return CallFormat(known=True, tagged=False)
    return CallFormat(True, True, found[1], found[2])


def written(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> str:
    """Return a chat as an answer's text would show it, without special tokens; "" if it cannot be written."""
    try:
        ids = encode_chat(tokenizer, turns, {"tools": list(tools)} if tools else {})[0]
    except ValueError:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def describe_functions(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return what a system message says where the template says nothing of functions."""
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in functions)
    return (
        f"You may call these functions, one a line, each with the JSON schema of its parameters:\n{lines}\n"
        f'To call one, write {OPEN}\n{{"name": "its name", "arguments": {{...}}}}\n{CLOSE}'
    )


def call_text(name: str, arguments: Mapping[str, Any], form: CallFormat = OWN_FORMAT) -> str:
    """Return a tagged call."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}{form.before}{call}{form.after}{CLOSE}"


def call_grammar(
    functions: Sequence[Mapping[str, Any]],
    form: CallFormat,
    several: bool,
    free: bool = False,
    answer: str | None = None,
) -> str:
    """Return a grammar (Lark) of answers that call one of these functions.

    several: or more, one after the other, where calls are tagged. free: an answer may also be any text, or
    have any text before its calls. answer: the schema of the JSON that it may be in place of that. Both are
    for tagged calls only.
    """
    first = again = end = ""
    if form.tagged:
        first = again = quoted(OPEN + form.before)
        end = quoted(form.after + CLOSE)
    rules = ["start: calls"]
    if free:
        # The lazy rule ends with the first tag that is complete, so that no text goes on behind it.
        rules = ["start: TEXT | calls", f"free[lazy]: TEXT {quoted(OPEN)}", "TEXT: /(?s:.*)/"]
        first = f"free {quoted(form.before)}" if form.before else "free"
    elif answer is not None:
        wanted = {"x-guidance": WHITE_SPACE, **closed(json.loads(answer))}
        rules = ["start: answer | calls", f"answer: %json {json.dumps(wanted)}"]
    more = f' ("\\n" {again} call {end})*' if several and form.tagged else ""
    rules.append(f"calls: {first} call {end}{more}")
    rules.append("call: " + " | ".join(f"call{place}" for place in range(len(functions))))
    for place, function in enumerate(functions):
        schema = {"x-guidance": WHITE_SPACE, **of_arguments(function.get("parameters") or ANY_ARGUMENTS)}
        begin = quoted(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules += [
            f'call{place}: {begin} arguments{place} "}}"',
            f"arguments{place}: %json {json.dumps(schema)}",
        ]
    return "\n".join(rules)


def of_arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that allows only the objects of this one: other arguments would be no call."""
    schema = closed(schema)
    parts = schema.get("allOf", [])
    if schema.get("type") == "object" or not isinstance(parts, list):
        return schema
    return {**schema, "allOf": [*parts, ANY_ARGUMENTS]}


def quoted(text: str) -> str:
    """Return a text as a string of the grammar's language."""
    # JSON may have the control character DEL as it is, which that language has not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class Call:
    """One call of a function. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


def read_call(text: str, names: Sequence[str]) -> Call | None:
    """Return the call that a JSON text is; None if it is none, or of no function of these names."""
    try:
        found = json.loads(text, parse_constant=refuse_constant)
        if not isinstance(found, Mapping) or found.get("name") not in names:
            return None
        key = "arguments" if "arguments" in found else "parameters"
        if not isinstance(found.get(key, {}), Mapping):
            return None
        return Call(found["name"], written_values(text).get(key, "{}"))
    except (ValueError, RecursionError):
        return None


def refuse_constant(constant: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON has not."""
    raise ValueError(f"{constant} is no JSON")


def written_values(text: str) -> dict[str, str]:
    """Return the values of a JSON object by their names, as they are written. text: right JSON.

    Writing what was read would change numbers: 1e999 would be Infinity, and long fractions would be rounded.
    """
    decoder, found, end = json.JSONDecoder(), {}, 0
    while (begin := text.find('"', end)) >= 0:
        name, end = decoder.raw_decode(text, begin)
        begin = text.index(":", end) + 1
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        _, end = decoder.raw_decode(text, begin)
        found[name] = text[begin:end]
    return found


def may_become_call(text: str, names: Sequence[str]) -> bool:
    """Return whether a text that was cut off may be the beginning of a call of a function of these names."""
    name = NAME_OF_CALL.match(text)
    return text.strip()[:1] in ("", "{") and (name is None or name[1] in names)


def ends_in_string(text: str) -> bool:
    """Return whether a text is the beginning of JSON that ends inside a string."""
    try:
        json.loads(f'{text}"')
    except json.JSONDecodeError as error:
        return error.pos > len(text)  # with its string closed, all of it is right
    except (ValueError, RecursionError):  # numbers and depths that Python does not read
        return False
    return True


def length_of_beginning(tag: str, text: str) -> int:
    """Return how many characters at a text's end are the beginning of a tag."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def text_and_calls(parts: Sequence[str | Call]) -> tuple[str, list[Call]]:
    """Return all text of an answer's parts, and its calls."""
    calls = [part for part in parts if isinstance(part, Call)]
    return "".join(part for part in parts if isinstance(part, str)), calls


class CallReader:
    """Takes calls out of an answer as its text arrives.

    names: of the functions. tagged: see CallFormat; a bare call is the whole answer. What only looks like a
    call stays text. several: whether there may be more than one; the others are left out. free: whether the
    answer may be text; else it is calls.
    """

    def __init__(self, names: Sequence[str], tagged: bool, several: bool = True, free: bool = True) -> None:
        self.names, self.tagged, self.several, self.free = names, tagged, several, free
        self.calls: list[Call] = []
        self._held = ""
        self._sought = 0  # closing tags before it are inside a string
        self._after_call = False  # and no text since

    def add(self, text: str, last: bool = False, cut: bool = False) -> list[str | Call]:
        """Take more text; return what of it is text, and the calls that are complete, in their order.

        last: no more comes. cut: since a limit or a stop string ended it, perhaps inside a call.
        """
        self._held += text
        found: list[str | Call] = []
        while self.tagged:
            start = self._held.find(OPEN)
            if start < 0:
                break
            found.append(self._between(self._held[:start]))
            self._held = self._held[start:]
            end = self._end_of_call(whole=last and not cut)
            if end < 0:
                break
            whole, self._held, self._sought = self._held[:end], self._held[end:], 0
            found.append(self._take(whole, whole.removeprefix(OPEN).removesuffix(CLOSE)))
        if last:
            rest, self._held = self._held, ""
            found.append(self._take_rest(rest, cut))
        elif self.tagged and not self._held.startswith(OPEN):
            kept = self._length_to_hold()
            ready = self._held[: len(self._held) - kept]
            self._held = self._held[len(ready) :]
            found.append(self._between(ready))
        return [one for one in found if one]

    def _end_of_call(self, whole: bool) -> int:
        """Return where the call ends with which the held text begins; -1: not yet.

        A string of its arguments may hold a closing tag. If no later one ends a call, the first one does.
        whole: the answer has come to its own end.
        """
        while (place := self._held.find(CLOSE, self._sought)) >= 0:
            inner = self._held[len(OPEN) : place]
            if read_call(inner, self.names) is not None:
                return place + len(CLOSE)
            if not ends_in_string(inner):
                whole = True
                break
            self._sought = place + 1
        first = self._held.find(CLOSE) if whole else -1
        return first + len(CLOSE) if first >= 0 else -1

    def _take(self, whole: str, inner: str) -> str | Call:
        """Note a call and return it; if it is none, return it as text, and if it is one too many, no text."""
        call = read_call(inner, self.names)
        self._after_call = call is not None
        if call is None:
            return whole
        if self.calls and not self.several:
            return ""
        self.calls.append(call)
        return call

    def _take_rest(self, rest: str, cut: bool) -> str | Call:
        """Return what an answer's end is, in which no call is complete with its tags: text, or one call.

        A call that was cut off is neither text nor a call: its markup is not for readers, and arguments that
        lack their end are not for programs. Only its closing tag may be missing.
        """
        inner = rest.removeprefix(OPEN)
        if cut and (not self.free or (inner != rest and may_become_call(inner, self.names))):
            return self._take("", inner[: len(inner) - length_of_beginning(CLOSE, inner)])
        return self._between(rest) if self.tagged else self._take(rest, rest)

    def _between(self, text: str) -> str:
        """Return text that is no call; white space alone after one is none either."""
        if self._after_call and not text.strip():
            return ""
        self._after_call = False
        return text

    def _length_to_hold(self) -> int:
        """Return how many characters at the end may belong to a call: white space, and a tag's beginning."""
        text = self._held
        tag = length_of_beginning(OPEN, text)
        rest = text[: len(text) - tag]
        return tag + len(rest) - len(rest.rstrip())
