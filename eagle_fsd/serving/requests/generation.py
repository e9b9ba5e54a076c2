"""What requests for texts share. A field that is unknown or asks for what is unsupported is refused by name.

Values must have their JSON type: "5" is no number. null means that a field is absent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WrapValidator,
    model_validator,
)

from eagle_fsd.core.config import Form
from eagle_fsd.serving.errors import format_json
from eagle_fsd.serving.requests.unsupported import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    Table,
    drop_what_asks_for_nothing,
)
from eagle_fsd.serving.tools.fields import (
    DEEPEST,
    Function,
    Message,
    OrText,
    Strict,
    StructuredOutputs,
    is_too_deep,
)
from eagle_fsd.text.chat import OWN_ARGUMENTS

MOST_STOPS, LONGEST_STOP = 16, 200
MOST_IDS = 1024  # entries of a list of tokens or words: each costs time in every step
MOST_LOGPROBS = 20
SEEDS = 2**63


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


def require_template(value: Any) -> Any:
    if own := OWN_ARGUMENTS.intersection(value):
        raise ValueError(
            f"chat_template_kwargs has {min(own)}, which is no argument of a template: leave it out"
        )
    return value


Template = Annotated[dict[str, Any], AfterValidator(require_template)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(Strict):
    """The body of a request."""

    @model_validator(mode="before")
    @classmethod
    def require_few_levels(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, Mapping) else ():
            if name in cls.model_fields and is_too_deep(value):
                raise ValueError(f"{name} has more than {DEEPEST} levels of JSON: send fewer")
        return data


class Decoding(Body):
    """How a text is decoded, which any request may say.

    repetition_penalty to min_tokens: see choices.py. stop_token_ids: tokens that end a text as well.
    threshold, divergence, rule, quality_budget: how far a text may be from the target's, see choices.py.
    structured_outputs: what form the text has. ignore_eos: end tokens do not end a text.

    source: the field that has the prompt. unsupported, without_effect: see requests/unsupported.py.
    """

    source: ClassVar[str]
    unsupported: ClassVar[Table] = UNSUPPORTED
    without_effect: ClassVar[Sequence[str]] = WITHOUT_EFFECT

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_IDS)] = {}
    bad_words: Annotated[list[Stop], Field(max_length=MOST_IDS)] = []
    suppress_tokens: Annotated[list[int], Field(max_length=MOST_IDS)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_IDS)] = []
    min_tokens: int | None = None
    seed: int | None = Field(None, ge=0, lt=SEEDS)
    stop: Annotated[list[Stop], BeforeValidator(as_stops), Field(max_length=MOST_STOPS), OrText()] = []
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

    @property
    def form_name(self) -> str | None:
        """The field that says what form the text has; None: it may have any."""
        return None if self.structured_outputs is None else "structured_outputs"

    @property
    def form(self) -> Form | None:
        """What form the text has."""
        return None if self.structured_outputs is None else self.structured_outputs.form

    @property
    def limit(self) -> int | None:
        """The most new tokens of a text."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """How many texts each prompt gets."""
        return 1

    @property
    def wants_origins(self) -> bool:
        """Whether texts come in pieces that say how their tokens came."""
        return False

    @property
    def top_tokens(self) -> int | None:
        """How many likeliest tokens are reported beside each token; None: no log-probabilities at all."""
        return None


class Chat(Decoding):
    """A request for the next turn of a chat. chat_template_kwargs: for the model's chat template.

    parallel_tool_calls: see tools/plan.py, and so for the functions, and whether and which of them is called.
    """

    chat_template_kwargs: Template = {}
    parallel_tool_calls: bool | None = None

    @property
    def turns(self) -> Sequence[Message]:
        """What was said so far."""
        raise NotImplementedError

    @property
    def functions(self) -> Sequence[Function]:
        """What may be called."""
        raise NotImplementedError

    @property
    def called(self) -> str | None:
        """The function that is called in any case, if one is named."""
        raise NotImplementedError

    @property
    def call_choice(self) -> Literal["none", "auto", "required"] | None:
        """Whether functions are called; None: the request does not say."""
        raise NotImplementedError

    @property
    def template(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        return self.chat_template_kwargs
