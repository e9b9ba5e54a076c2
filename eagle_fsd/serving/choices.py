"""From a request to the terms of its texts: sampling, rule, limits and random streams."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.rule_names import build_rule, describe, parse_rule, rule_fields
from eagle_fsd.core.checks import format_value, one_line, require_integer
from eagle_fsd.core.config import HYBRID, AutoThreshold, Kind, SamplingConfig, TreeConfig
from eagle_fsd.core.processing import UNPROCESSED, Constraint, Processing, as_biases, as_sequences, as_tokens
from eagle_fsd.core.randomness.streams import SEED_LIMIT, fresh_seed
from eagle_fsd.decoding.request import Terms
from eagle_fsd.hub.resolve import shown_name
from eagle_fsd.serving.errors import ApiError, of_value, wrong_value
from eagle_fsd.serving.requests.generation import Chat, Decoding
from eagle_fsd.serving.tools.plan import ToolPlan, plan_tools
from eagle_fsd.serving.work.tree import ServedTree
from eagle_fsd.text.chat import require_tokenizer
from eagle_fsd.text.grammar import compile_form, require_form
from eagle_fsd.text.stop_strings import words_as_tokens
from eagle_fsd.text.tool_calls import CallFormat, call_format

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
AUTO, FUZZY = "auto", "fuzzy"
SHORTER = 11  # bits: a drawn seed goes through JSON, whose readers may keep 53 bits of a number
KEPT_RULES = 256  # calibrated rules that are remembered: finding one reads the head's weights


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    max_rows: texts that are decoded together. max_queue: texts that may wait beside them. max_prompt_tokens:
    of one prompt; None is what the target holds. max_body: bytes. request_timeout: seconds, from the body's
    arrival to the answer's end. cache_tokens, prefix_tokens: of all texts, see Scheduler.
    """

    max_rows: int = 8
    max_queue: int = 64
    max_prompt_tokens: int | None = None
    max_body: int = 2**20
    request_timeout: float = 600.0
    cache_tokens: int | None = None
    prefix_tokens: int = 8192  # some chats; 380 MB with the default target in float32

    @property
    def most_texts(self) -> int:
        return self.max_rows + self.max_queue


@dataclass(frozen=True)
class Defaults:
    """What a request that says nothing gets. max_new_tokens: of each text. stops: stop strings."""

    sampling: SamplingConfig = SamplingConfig()  # noqa: RUF009  # it is frozen
    rule: AcceptanceRule | AutoThreshold = field(default_factory=lambda: Fuzzy(0.0))
    max_new_tokens: int = 1024
    processing: Processing = UNPROCESSED
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What one request settled on.

    seed: None if nothing is drawn. described: the rule and its fields, for the timings.
    tools: what may be called.
    """

    terms: Terms
    limit: int
    seed: int | None
    described: dict[str, Any]
    tools: ToolPlan | None = None

    @property
    def stream(self) -> int:
        """The seed of the random streams. The engine's are not negative: s below 0 stands for 2**63 + s."""
        return (self.seed or 0) % SEED_LIMIT


class Chooser:
    """Settles requests for one engine.

    tree: of every text. adapts: whether its head changes, so that no calibration holds for it.
    """

    def __init__(
        self, model: EagleFSD, limits: Limits, defaults: Defaults, tree: ServedTree, adapts: bool = False
    ) -> None:
        self.model, self.limits, self.defaults, self.adapts = model, limits, defaults, adapts
        self.tree = tree
        self._calibrated: dict[tuple[AutoThreshold, SamplingConfig, TreeConfig], AcceptanceRule] = {}
        self._calibrating = threading.Lock()
        self.encoding = threading.Lock()  # a tokenizer is not made for several threads

    @cached_property
    def calls(self) -> CallFormat:
        """How the model's chat template writes function calls."""
        with self.encoding:
            return call_format(require_tokenizer(self.model.tokenizer))

    def __call__(self, request: Decoding) -> Choice:
        """Return what the request asks for. Raises ApiError for what it may not ask for."""
        tools = self.plan(request)
        limit = self.defaults.max_new_tokens if request.limit is None else request.limit
        try:
            if request.min_tokens is not None:
                remedy = "lower it, or let the text be longer"
                require_integer("min_tokens", request.min_tokens, 0, remedy, limit)
            sampling = dataclasses.replace(self.defaults.sampling, **said_of(request, SAMPLING))
            processing = self.processing(request)
            rule = self.settle(request, sampling)
        except ValueError as error:
            raise of_value(error, list(type(request).model_fields)) from error
        seed = fresh_seed() >> SHORTER if request.seed is None else request.seed
        ends = () if request.ignore_eos else self.model.target.eos_token_ids
        ends = (*ends, *request.stop_token_ids)
        if (constraint := self.constraint(request, tools, ends)) is not None:
            processing = dataclasses.replace(processing, constraint=constraint)
        return Choice(
            Terms(ends, rule, sampling, processing),
            limit,
            None if sampling.greedy else seed,
            rule_fields(rule),
            tools,
        )

    def plan(self, request: Decoding) -> ToolPlan | None:
        """Return what the request's tools come to."""
        if not isinstance(request, Chat) or not (request.functions or request.call_choice is not None):
            return None
        with naming(request.form_name):  # what is wrong with the form alone is not the tools' fault
            if request.form is not None:
                require_form(request.form)
        return plan_tools(request, self.calls)

    def constraint(self, request: Decoding, tools: ToolPlan | None, ends: Sequence[int]) -> Constraint | None:
        """Return what the form of the answer allows. Raises ApiError for one that cannot be followed."""
        with naming(request.form_name if tools is None else "tools"):
            form = request.form if tools is None else tools.form
            if form is None:
                return None
            if not ends:
                raise ValueError("no token ends it; leave ignore_eos out, or name one in stop_token_ids")
            return compile_form(form, self.model.tokenizer, self.model.target.vocab_size)

    def processing(self, request: Decoding) -> Processing:
        """Return what changes the logits: what the request says, and else the server's own."""
        said = said_of(request, PENALTIES)
        if request.min_tokens is not None:
            said["min_new_tokens"] = request.min_tokens
        if "suppress_tokens" in request.model_fields_set:
            said["suppress_tokens"] = as_tokens("suppress_tokens", request.suppress_tokens, some=False)
        if "logit_bias" in request.model_fields_set:
            said["logit_bias"] = as_biases({token_of(key): bias for key, bias in request.logit_bias.items()})
        if "bad_words" in request.model_fields_set:
            with self.encoding:
                words = words_as_tokens(self.model.tokenizer, request.bad_words)
            said["bad_words_ids"] = as_sequences("bad_words", words)
        found = dataclasses.replace(self.defaults.processing, **said)
        found.require_vocabulary(self.model.target.vocab_size)
        self.require_tokens(request.stop_token_ids, "stop_token_ids", "leave it out")
        return found

    def settle(self, request: Decoding, sampling: SamplingConfig) -> AcceptanceRule:
        """Return the rule, with its threshold from the head's calibration where that is wanted."""
        rule = requested_rule(request, self.defaults.rule)
        if isinstance(rule, AutoThreshold):
            if self.adapts:
                asked = "threshold" if request.quality_budget is None else "quality_budget"
                raise ValueError(
                    f"{asked} is {getattr(request, asked)!r} for a head that adapts: a calibration holds for "
                    "a head as it was; send a threshold that is a number"
                )
            with self._calibrating:
                rule = self._from_calibration(rule, sampling)
        self.model.settler.require_rule(rule)
        return rule

    def _from_calibration(self, wanted: AutoThreshold, sampling: SamplingConfig) -> AcceptanceRule:
        """Return the fastest rule inside a budget. Errors are told without the place of the head's folder."""
        key = (wanted, sampling, self.tree.size)
        if key not in self._calibrated:
            try:
                found, _ = self.model.settler.within_budget(*key)
            except ValueError as error:
                folder = str(self.model.head_folder)
                raise ValueError(str(error).replace(folder, shown_name(folder))) from error
            if len(self._calibrated) >= KEPT_RULES:
                self._calibrated.clear()
            self._calibrated[key] = found
        return self._calibrated[key]

    def require_prompt(self, ids: Sequence[int], name: str) -> None:
        """Raise ApiError unless these token ids are a prompt for this target."""
        target = self.model.target
        most = target.max_positions - 1
        if self.limits.max_prompt_tokens is not None:
            most = min(most, self.limits.max_prompt_tokens)
        if not ids:
            raise wrong_value(f"{name} has no tokens: write something to answer", name)
        if len(ids) > most:
            # Client libraries know this error by these words, since many servers give it no code.
            why = "the prompt is too long for the maximum context length"
            message = f"{name} has {len(ids)} tokens: at most {most} are taken, so {why}; shorten it"
            raise ApiError(400, message, "context_length_exceeded", name)
        self.require_tokens(ids, name)

    def require_tokens(self, ids: Sequence[int], name: str, remedy: str = "encode it again") -> None:
        """Raise ApiError unless these are token ids of this target."""
        size = self.model.target.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            said = f"{name} has the token {format_value(wrong)}"
            raise wrong_value(f"{said}: ids go from 0 to {size - 1}; {remedy}", name)


@contextmanager
def naming(name: str | None) -> Iterator[None]:
    """Tell a ValueError within as the error of this field."""
    try:
        yield
    except ValueError as error:
        raise wrong_value(f"{name}: {one_line(error)}", name) from error


def said_of(request: Decoding, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of those of these fields that a request has."""
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def requested_rule(
    request: Decoding, usual: AcceptanceRule | AutoThreshold
) -> AcceptanceRule | AutoThreshold:
    """Return the rule that a request asks for; what it does not say is as in the server's own rule.

    `rule` is a name, or a rule with values, such as js:0.3:min_p=0.1. A threshold where the server's rule has
    none means the fuzzy rule. Raises ValueError for values that do not fit together.
    """
    said = said_of(request, ("threshold", "divergence", "quality_budget"))
    if request.rule is not None and ":" in request.rule:
        for name, value in said.items():
            raise ValueError(
                f"{name} is {value!r}: the rule {request.rule!r} has values of its own; put it there"
            )
        return parse_rule(request.rule)
    name = rule_name(usual) if request.rule is None else request.rule
    if said.get("threshold") == AUTO or "quality_budget" in said:
        return auto_threshold(name, said, usual)
    if request.rule is None and said and not isinstance(usual, AutoThreshold):
        name = name if "threshold" in field_names(usual) else FUZZY
    base = usual if name == rule_name(usual) else without_threshold(name)
    if isinstance(base, AutoThreshold):
        if "threshold" not in said:
            return dataclasses.replace(base, **said)
        how = {name: getattr(base, name) for name in Kind._fields if getattr(base, name) is not None}
        base = Fuzzy(0.0, **how)
    if "divergence" in said and "threshold" not in said:
        raise ValueError(
            f"divergence is {said['divergence']!r}: a threshold belongs to it; send threshold too"
        )
    if said.keys() - field_names(base):
        return build_rule(name, **said)  # which says what fields the rule has
    return dataclasses.replace(base, **said)  # type: ignore[type-var]


def token_of(key: str) -> int:
    """Return the token id that a key of logit_bias is. Raises ValueError if it is none."""
    if re.fullmatch("0|[1-9][0-9]{0,17}", key) is None:  # one way to write each, so that none comes twice
        raise ValueError(
            f'logit_bias has the key {format_value(key)}: it must be a token id, such as "42"; fix it'
        )
    return int(key)


def without_threshold(name: str) -> AcceptanceRule:
    """Return the rule of this name as the command line makes it where nothing else is said."""
    return Fuzzy(0.0) if name == FUZZY else build_rule(name)


def auto_threshold(name: str, said: dict[str, Any], usual: AcceptanceRule | AutoThreshold) -> AutoThreshold:
    """Return the threshold of a budget. What the request leaves open is the server's.

    A mode that every rule has without a flag asks for none, and neither do price and cost of a rule that does
    not plan: any that were calibrated will do.
    """
    if said.get("threshold", AUTO) != AUTO:
        raise ValueError(
            f"quality_budget is {said['quality_budget']!r}: it finds the threshold; leave threshold out, or "
            'send "auto"'
        )
    if name not in (FUZZY, "lossless"):
        asked = "quality_budget" if "quality_budget" in said else "threshold"
        raise ValueError(
            f"{asked} is {said[asked]!r} for the rule {name}: only fuzzy is calibrated; send that rule"
        )
    known = {one: getattr(usual, one) for one in field_names(AutoThreshold()) if hasattr(usual, one)}
    if not (isinstance(usual, AutoThreshold) or known.get("price")):
        known |= {"price": None, "cost": None}
        if known.get("mode") == HYBRID:
            known["mode"] = None
    return AutoThreshold(**known | {key: value for key, value in said.items() if key != "threshold"})


def rule_name(rule: AcceptanceRule | AutoThreshold) -> str:
    return FUZZY if isinstance(rule, AutoThreshold) else str(describe(rule)["name"])


def field_names(rule: object) -> set[str]:
    return {one.name for one in dataclasses.fields(rule)}  # type: ignore[arg-type]
