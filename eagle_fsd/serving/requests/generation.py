"""What requests for texts share. A field that is unknown or asks for what is unsupported is refused by name.

Values must have their JSON type: "5" is no number. null means that a field is absent.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WrapValidator,
    model_validator,
)

from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.requests.messages import Message
from eagle_fsd.serving.requests.unsupported import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    Table,
    drop_what_asks_for_nothing,
)
from eagle_fsd.serving.tools.choice import Word
from eagle_fsd.serving.tools.fields import (
    Function,
    OrText,
    Strict,
    StructuredOutputs,
    at_most,
    excess_of,
)
from eagle_fsd.text.chat import ChatEnd, require_template

MOST_STOPS, LONGEST_STOP = 16, 200
MOST_IDS = 1024  # entries of a list of tokens or words: each costs time in every step
MOST_LOGPROBS = 20
SEEDS = 2**63  # from 0 on; there are as many below 0


def as_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(
            f"stop is {format_json(value)}: it must be a string, or a list of strings; send that, or leave "
            "it out"
        )
    return stops


def require_threshold(value: Any, _check: Any) -> Any:
    """Take "inf" as well, since JSON has no number for it; timings write it so."""
    if value is None or value == "auto":
        return value
    if value == "inf":
        return math.inf
    with contextlib.suppress(OverflowError):  # an integer may be larger than any float
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise ValueError(
        f'threshold is {format_json(value)}: it must be a number of at least 0, "inf" or "auto"; send one'
    )


def all_if_minus_one(top_k: int | None) -> int | None:
    """Take vLLM's way to ask for all tokens as well."""
    return 0 if top_k == -1 else top_k


def end_not_inside(arguments: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError where arguments of a chat template say what stands behind the turns: see Endable."""
    for name in ("continue_final_message", "add_generation_prompt"):
        if name in arguments:
            raise ValueError(f"{name} is a field of the request: send it beside chat_template_kwargs")
    return arguments


Template = Annotated[dict[str, Any], AfterValidator(require_template)]
TemplateOfEndable = Annotated[
    dict[str, Any], AfterValidator(end_not_inside), AfterValidator(require_template)
]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(Strict):
    """The body of a request."""

    @model_validator(mode="before")
    @classmethod
    def require_modest_fields(cls, data: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if name in known and (excess := excess_of(value)):
                raise ValueError(f"{name} has {excess}: send fewer")
        return data


class Decoding(Body):
    """How a text is decoded, which any request may say.

    repetition_penalty to min_tokens: see choices.py. stop_token_ids: tokens that end a text as well.
    threshold, divergence, rule, quality_budget: how far a text may be from the target's, see choices.py.
    structured_outputs: what form the text has. ignore_eos: end tokens do not end a text.

    source: the field that has the prompt. form_field: the one that says what form the text has, in place of
    structured_outputs. unsupported, without_effect: see requests/unsupported.py.
    """

    source: ClassVar[str]
    form_field: ClassVar[str]
    unsupported: ClassVar[Table] = UNSUPPORTED
    without_effect: ClassVar[Sequence[str]] = WITHOUT_EFFECT

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, AfterValidator(all_if_minus_one)] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_IDS), at_most(MOST_IDS)] = {}
    bad_words: Annotated[list[Stop], Field(max_length=MOST_IDS)] = []
    suppress_tokens: Annotated[list[int], Field(max_length=MOST_IDS)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_IDS)] = []
    min_tokens: int | None = None
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS), BeforeValidator(as_stops), OrText()] = []
    stream: bool = False
    threshold: Annotated[float | str | None, WrapValidator(require_threshold)] = None
    divergence: str | None = Field(None, max_length=200)
    rule: str | None = Field(None, max_length=200)
    quality_budget: float | None = None
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def take_what_is_done(cls, data: Any) -> Any:
        return drop_what_asks_for_nothing(data, cls.unsupported)

    @model_validator(mode="after")
    def require_stream(self) -> Decoding:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options is for streams: leave it out, or set stream to true")
        return self

    @model_validator(mode="after")
    def require_one_form(self) -> Decoding:
        if self.structured_outputs is not None and self.own_form is not None:
            raise ValueError(
                f"structured_outputs beside {self.form_field}: a text has one form; leave one out"
            )
        return self

    @property
    @abstractmethod
    def own_form(self) -> Form | None:
        """The form that `form_field` says."""

    @property
    def form_name(self) -> str | None:
        """The field that says what form the text has; None: it may have any."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return None if self.own_form is None else self.form_field

    @property
    def form(self) -> Form | None:
        """What form the text has."""
        return self.own_form if self.structured_outputs is None else self.structured_outputs.form

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """The most new tokens of a text."""

    @property
    def count(self) -> int:
        """How many texts each prompt gets."""
        return 1

    @property
    def goes_on(self) -> bool:
        """Whether a text goes on with what its prompt ends with."""
        return False

    @property
    def wants_origins(self) -> bool:
        """Whether texts come in pieces that say how their tokens came."""
        return False

    @property
    @abstractmethod
    def top_tokens(self) -> int | None:
        """How many likeliest tokens are reported beside each token; None: no log-probabilities at all."""


class Templated(Body):
    """What the model's chat template writes. chat_template_kwargs: for it. source: the field of the turns."""

    source: ClassVar[str]
    chat_template_kwargs: Template = {}

    @property
    @abstractmethod
    def turns(self) -> Sequence[Message]:
        """What was said so far."""

    @property
    def preamble(self) -> Mapping[str, str | None]:
        """What else than the turns' own field says something in them, by the names of its fields."""
        return {}

    @property
    def has_images(self) -> bool:
        return any(message.images for message in self.turns)

    @property
    def template(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        return self.chat_template_kwargs

    @property
    def end(self) -> ChatEnd:
        """What the model reads behind the turns."""
        return "waiting"


class Endable(Templated):
    """A chat that says what stands behind its turns, as vLLM has it.

    continue_final_message: the answer goes on with the last turn, which is the assistant's. In place of it,
    add_generation_prompt: false leaves the beginning of an answer out, and nothing takes its place.
    """

    chat_template_kwargs: TemplateOfEndable = {}
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    @property
    def end(self) -> ChatEnd:
        if self.continue_final_message:
            return "open"
        return "closed" if self.add_generation_prompt is False else "waiting"

    @model_validator(mode="after")
    def require_open_end(self) -> Endable:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError(
                "continue_final_message beside add_generation_prompt: an answer is a new turn, or goes on "
                "with the last one; set one of them to false"
            )
        last = self.turns[-1] if self.turns else None
        if last is None or last.role != "assistant":
            said = "no messages" if last is None else f"a last message of the role {last.role}"
            raise ValueError(
                f"continue_final_message with {said}: it goes on with one of the assistant; add that, or "
                "leave it out"
            )
        if last.tool_calls:
            raise ValueError(
                "continue_final_message with a last message that has tool_calls: a call is its end; send "
                "their results, or leave it out"
            )
        return self


class Chat(Templated, Decoding):
    """A request for the next turn of a chat. For its functions and their calls, see tools/plan.py."""

    @property
    @abstractmethod
    def functions(self) -> Sequence[Function]:
        """What may be called."""

    @property
    @abstractmethod
    def called(self) -> str | None:
        """The function that is called in any case, if one is named."""

    @property
    @abstractmethod
    def allowed(self) -> Sequence[str] | None:
        """The names of the functions that are offered; None: all are."""

    @property
    @abstractmethod
    def call_choice(self) -> Word | None:
        """Whether functions are called; None: the request does not say."""

    @property
    @abstractmethod
    def several_calls(self) -> bool:
        """Whether an answer may have more than one call."""
