"""How logits are changed before a token is chosen from them, as a frozen dataclass that validates itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

from eagle_fsd.core.checks import format_value, plain, require_integer, require_number

if TYPE_CHECKING:  # torch takes seconds to import, and values are checked without it
    from torch import Tensor

# Takes the token ids [K, L] of K texts and the logits [K, V] of their next tokens, and returns new logits.
Processor = Callable[[Any, Any], "Tensor"]
# The most by which a logit may be changed: larger changes could overflow float32, and no token would be left.
LARGEST = 1e10
# A sequence of token ids, and what is added to the logit of its last one when the text ends with the others.
Bias = tuple[tuple[int, ...], float]


class Walk(Protocol):
    """One text that a constraint follows, token by token.

    complete: whether the text may end here. failure: why it cannot be followed any more; "": it can.
    """

    @property
    def complete(self) -> bool: ...

    @property
    def failure(self) -> str: ...

    def allowed(self) -> Tensor:
        """Return which tokens may come next: [V] bool on the CPU. End tokens are not among them."""

    def advance(self, token: int) -> None:
        """Take in a token that is allowed."""

    def back(self) -> None:
        """Take the last token back."""


class Constraint(Protocol):
    """Rules tokens out by all that came before them, such as a grammar. Equal ones allow the same texts.

    name: of the option that it came from.
    """

    @property
    def name(self) -> str: ...

    def begin(self) -> Walk:
        """Return the walk of a text that has no token yet."""


@dataclass(frozen=True)
class Processing:
    """What changes the target's logits at every node of a tree before temperature, top_k, top_p and min_p.

    Each does what the option of this name does in Hugging Face's `generate`, in its order: logit_bias (there
    sequence_bias), repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size,
    bad_words_ids, min_new_tokens, suppress_tokens, the caller's own, and last the constraint.

    repetition_penalty: divides the positive logits of tokens that the text has, its prompt included, and
      multiplies negative ones; above 1 discourages repetition, 1 is off (CTRL, arXiv 1909.05858).
    presence_penalty, frequency_penalty: are subtracted from the logits of tokens that the answer has, once,
      and once for each time; 0 is off. Hugging Face has neither; the formula is that of OpenAI's API.
    no_repeat_ngram_size: no n tokens come twice in a text, its prompt included; 0 is off.
    bad_words_ids: sequences that never come. A sequence of one end token has no effect.
    suppress_tokens: tokens that never come.
    logit_bias: pairs of a sequence and what is added to the logit of its last token after the others.
    min_new_tokens: no end token comes earlier.
    own: functions of token ids [K, L] and logits [K, V] that return new logits, such as Hugging Face's
      LogitsProcessor objects. They must depend on their arguments only, since they see paths of a tree that
      the text may never take, K at a time.
    constraint: restricts the answer's tokens. Where it allows only an end token, min_new_tokens is ignored.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    logit_bias: tuple[Bias, ...] = ()
    min_new_tokens: int = 0
    own: tuple[Processor, ...] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        require_number("repetition_penalty", self.repetition_penalty, 1 / LARGEST, LARGEST, "1 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            require_number(name, getattr(self, name), -LARGEST, LARGEST, "0 turns it off, 0.5 is usual")
        require_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, "0 turns it off")
        require_integer("min_new_tokens", self.min_new_tokens, 0, "0 turns it off")
        for processor in self.own:
            if not callable(processor):
                raise ValueError(
                    f"logits_processor holds {format_value(processor)}: it must be a function of token ids "
                    "and logits, such as a LogitsProcessor; leave it out"
                )

    @classmethod
    def of(
        cls,
        bad_words_ids: object = None,
        suppress_tokens: object = None,
        logit_bias: object = None,
        logits_processor: object = None,
        **numbers: Any,
    ) -> Processing:
        """Return the processing of values as callers write them, with lists and mappings of any kind.

        logit_bias: a mapping of tokens, or tuples of them, to numbers, or Hugging Face's list of pairs.
        logits_processor: one function, or several. None: nothing. Raises ValueError for bad values.
        """
        own: Any = logits_processor if isinstance(logits_processor, Iterable) else [logits_processor]
        return cls(
            bad_words_ids=as_sequences("bad_words_ids", bad_words_ids),
            suppress_tokens=as_tokens("suppress_tokens", suppress_tokens, some=False),
            logit_bias=as_biases(logit_bias),
            own=() if logits_processor is None else tuple(own),
            **numbers,
        )

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        return self != UNPROCESSED

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens a text has."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for a token that the target does not have."""
        for name, sequences in (
            ("bad_words_ids", self.bad_words_ids),
            ("suppress_tokens", (self.suppress_tokens,)),
            ("logit_bias", [tokens for tokens, _ in self.logit_bias]),
        ):
            for token in (token for tokens in sequences for token in tokens):
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} has the token {token}: the target's tokens are 0..{vocab_size - 1}; leave "
                        "it out"
                    )


def as_tokens(name: str, value: object, some: bool = True) -> tuple[int, ...]:
    """Return one token id or several, tensors and arrays among them, as a tuple. some: there must be one.

    Raises ValueError if they are not token ids.
    """
    found = plain(value)
    several = isinstance(found, Iterable) and not isinstance(found, (str, bytes, Mapping))
    given: tuple[Any, ...] = () if found is None else tuple(found) if several else (found,)
    for token in map(plain, given):
        if not isinstance(token, Integral) or isinstance(token, bool) or int(token) < 0:
            raise ValueError(
                f"{name} has {format_value(token)}: a token id is an integer of at least 0; fix it"
            )
    if some and not given:
        raise ValueError(f"{name} has an empty sequence: it must have a token id at least; leave it out")
    return tuple(map(int, given))


def as_sequences(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Return sequences of token ids as tuples. Raises ValueError for anything else."""
    if value is None:
        return ()
    given = plain(value)
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        raise ValueError(f"{name} is {format_value(value)}: it must be a list of lists of token ids; fix it")
    found: list[tuple[int, ...]] = []
    for one in map(plain, given):
        if not isinstance(one, Iterable):
            raise ValueError(
                f"{name} has {format_value(one)}: it must be a list of token ids; write [{one!r}]"
            )
        found.append(as_tokens(name, one))
    return tuple(found)


def require_words(words: Iterable[str | Sequence[int]]) -> None:
    """Raise ValueError for a word that must not come and has no character, or no token."""
    if not all(words):
        raise ValueError("a bad word is empty: write a word of a character at least")


def as_biases(value: object) -> tuple[Bias, ...]:
    """Return biases as pairs of a sequence and a number. Raises ValueError for anything else."""
    given: Any = () if value is None else value
    try:
        pairs = [(tokens, bias) for tokens, bias in (value.items() if isinstance(value, Mapping) else given)]
    except (TypeError, ValueError) as error:  # ValueError: some have more or fewer than two parts
        raise ValueError(
            f"logit_bias is {format_value(value)}: it must map tokens to numbers, such as {{42: -5.0}}; fix "
            "it"
        ) from error
    found = {as_tokens("logit_bias", tokens): plain(bias) for tokens, bias in pairs}
    for bias in found.values():
        if bias != -math.inf:
            require_number("logit_bias", bias, -LARGEST, LARGEST, "-100 all but rules a token out")
    return tuple((tokens, float(bias)) for tokens, bias in found.items())


UNPROCESSED = Processing()
