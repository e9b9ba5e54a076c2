"""Forms of texts: a JSON schema, a regular expression or a grammar, as a constraint of token ids.

The library is llguidance, of the extra `schema`. It is imported when the first form is wanted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import Form

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

# Between the parts of JSON: nothing, a space, or a new line with its indentation. Where any white space may
# come, a small model may write it for ever.
WHITE_SPACE = {"whitespace_pattern": r"( |\n[ \t]{0,16})?"}
LONGEST_REASON = 300
# What a JSON schema may have beside `properties` that allows or asks for others.
OF_OTHERS = (
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired",
    "dependencies",
)  # fmt: skip
IN_PLACE = ("$ref", "anyOf", "oneOf", "allOf")  # schemas that hold for the same value
JOINING = {"$dynamicRef", "not", "if", "dependentSchemas", "dependencies"}  # so do these, beside others
DEFINITIONS, BY_NAME = ("$defs", "definitions"), ("properties", "patternProperties")
ALONE, IN_LISTS = ("items", "additionalProperties"), ("prefixItems", "anyOf", "oneOf", "allOf")

_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, int], LLTokenizer]] = WeakKeyDictionary()
_making = threading.Lock()


@dataclass(frozen=True)
class Grammar:
    """A form for one tokenizer; see Constraint. start: the state of a text without tokens."""

    form: Form
    tokenizer: LLTokenizer
    start: LLMatcher = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.form.kind

    def begin(self) -> GrammarWalk:
        return GrammarWalk(self.start.deep_copy(), self.tokenizer)


class GrammarWalk:
    """A text in a grammar; see Walk. matcher: at its beginning."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self.matcher, self.ends, self.size = matcher, tokenizer.eos_tokens, tokenizer.vocab_size

    @property
    def complete(self) -> bool:
        return not self.failure and self.matcher.is_accepting()

    @property
    def failure(self) -> str:
        # After its first error, such as a limit of its parser, the library allows nothing.
        return reason(self.matcher.get_error()) if self.matcher.is_error() else ""

    def allowed(self) -> Tensor:
        if self.failure:
            return torch.zeros(self.size, dtype=torch.bool, device="cpu")
        packed = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        # The lowest bit is the first token's.
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
        found = bits.flatten()[: self.size].bool()
        found[self.ends] = False  # the text has end tokens of its own
        return found

    def advance(self, token: int) -> None:
        self.matcher.consume_token(token)

    def back(self) -> None:
        self.matcher.rollback(1)


def compile_form(
    form: Form | None, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> Grammar | None:
    """Compile a form into a constraint for this tokenizer and a target with vocab_size tokens; None: no form.

    Raises ValueError for a form that is wrong or too large, without the library, and for a tokenizer that the
    library does not read.
    """
    if form is None:
        return None
    require_library(form.kind)
    from llguidance import LLMatcher

    known = read_tokenizer(form.kind, tokenizer, vocab_size)
    source = to_grammar(form)
    # The library also writes what it refuses to stderr, unless it is told not to.
    start = LLMatcher(known, source, log_level=0)
    if not start.is_error():
        start.compute_bitmask()  # what is too large shows here, and all texts share the work
    if start.is_error():
        raise ValueError(f"{form.kind} cannot be followed: {reason(start.get_error())}; change it")
    return Grammar(form, known, start)


def require_form(form: Form) -> None:
    """Raise ValueError for a form that cannot be followed, whatever the tokenizer is."""
    require_library(form.kind)
    from llguidance import LLMatcher

    if wrong := LLMatcher.validate_grammar(to_grammar(form)):
        raise ValueError(f"{form.kind} cannot be followed: {reason(wrong)}; change it")


def require_library(name: str) -> None:
    """Raise ValueError unless the library is installed. name: of the option that needs it."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise ValueError(f'{name} needs llguidance: run pip install "eagle-fsd[schema]"') from error


def to_grammar(form: Form) -> str:
    """Return a form in the library's own words. Raises ValueError if it has none."""
    from llguidance import LLMatcher

    if form.kind == "regex":
        return LLMatcher.grammar_from_regex(form.source)
    if form.kind == "grammar":
        return LLMatcher.grammar_from_lark(form.source)
    try:
        source = json.dumps(closed(json.loads(form.source)))
        return LLMatcher.grammar_from_json_schema(source, defaults=WHITE_SPACE)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{form.kind} cannot be followed: {reason(str(error))}; change it") from error


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a JSON schema whose objects have the properties that it names, and no others.

    Where it speaks of others, an object stays open. So do the parts that make up one object together, since
    each of them names only some of its properties; a definition may be such a part.
    """
    joined = any(map(joins, all_schemas(schema)))

    def close(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        found = dict(part)
        for name in BY_NAME + (() if joined else DEFINITIONS):
            if isinstance(inner := part.get(name), Mapping):
                found[name] = {key: close(one) for key, one in inner.items()}
        for name in ALONE + IN_LISTS:
            if name in part and not (name in IN_PLACE and joins(part)):
                inner = part[name]
                found[name] = [close(one) for one in inner] if isinstance(inner, list) else close(inner)
        return {**found, "additionalProperties": False} if names_all(part) else found

    return close(schema)  # type: ignore[no-any-return]


def all_schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a JSON schema and all schemas inside it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for name in BY_NAME + DEFINITIONS + ALONE + IN_LISTS:
        inner = schema.get(name)
        if name in ALONE and isinstance(inner, Mapping):
            yield from all_schemas(inner)
        elif isinstance(inner, Mapping | list):
            for one in inner.values() if isinstance(inner, Mapping) else inner:
                yield from all_schemas(one)


def joins(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas hold for one value, of which each may name some of its properties."""
    own = any(name in schema for name in (*BY_NAME, "required", "additionalProperties"))
    parts = schema.get("allOf", ())
    several = isinstance(parts, list) and len(parts) > 1
    return several or own + sum(name in schema for name in IN_PLACE) > 1 or not JOINING.isdisjoint(schema)


def names_all(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema has properties, and speaks of no others."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, Mapping) or not isinstance(required, list):
        return False
    return not any(key in schema for key in OF_OTHERS) and all(name in list(named) for name in required)


def read_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> LLTokenizer:
    """Return the library's reading of a tokenizer, made once, and again when tokens were added to it."""
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = "none" if tokenizer is None else type(tokenizer).__name__
        raise ValueError(
            f"{name} needs a fast tokenizer: the target has {kind}; choose a target that has one"
        )
    with _making:
        known, sizes = _tokenizers.setdefault(tokenizer, {}), (vocab_size, len(tokenizer))
        if sizes not in known:
            try:  # it must not be smaller than the tokenizer's own
                known[sizes] = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)))
            except ValueError as error:
                raise ValueError(
                    f"{name}: the target's tokenizer cannot be followed ({reason(str(error))}); choose a "
                    "target with another one"
                ) from error
        return known[sizes]


def reason(message: str) -> str:
    """Return the library's error as one short line, without the state that it appends."""
    return one_line(message.split("<state>")[0].strip(), LONGEST_REASON)
