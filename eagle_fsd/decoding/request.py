"""What is decoded: prompts as one batch, the terms of each text, and the tokens that end it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verdict, Verified
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.padding import Array, Rows, as_ids, infer_mask, unpad
from eagle_fsd.core.processing import UNPROCESSED, Processing, as_tokens
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.decoding.logits.processing import TextProcessor
from eagle_fsd.decoding.prompts.prompt_cache import PromptCache
from eagle_fsd.target.media.table import Media, MediaTable
from eagle_fsd.target.model import TargetModel

# Finish reasons: of a text whose options leave it no token, and of one that was ended from outside.
FAILED, INTERRUPTED = "failed", "interrupted"


class Observer(Protocol):
    """Looks at every step of a batch and changes nothing.

    emitted: how many of the verdict's tokens each row emitted, by the row's number in the request. If steps
    are recorded (see step_recorder.py), the next step overwrites all these tensors: copy what you keep.
    """

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None: ...


@dataclass(frozen=True)
class Prompts:
    """Prompts to answer. rows: the token ids of each. limits: the most new tokens of each."""

    rows: list[list[int]]
    limits: list[int]

    @classmethod
    def from_padded(
        cls,
        target: TargetModel,
        input_ids: Tensor,
        attention_mask: Rows | None,
        max_new_tokens: int,
        end_tokens: Sequence[int],
    ) -> Prompts:
        """Read prompts [B, L], padded as attention_mask [B, L] says.

        Limits end at the target's last position. Without a mask the model's pad tokens are padding, unless
        they are among end_tokens, as in Hugging Face's `generate`. Raises ValueError if the input holds no
        token ids, or a prompt fills the whole context.
        """
        if attention_mask is None:
            attention_mask = infer_mask(input_ids, target.pad_token_id, end_tokens)
        tokens, lengths = unpad(input_ids, attention_mask, target.media.end)
        rows = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        return cls(rows, limits_of(target, rows, max_new_tokens, "row {} of the batch"))

    @classmethod
    def from_lists(
        cls,
        target: TargetModel,
        prompts: Tensor | Iterable[Sequence[int] | Array],
        max_new_tokens: int,
        end_tokens: Sequence[int],
    ) -> Prompts:
        """Read prompts of any lengths, each a list of token ids, of which all are text.

        A tensor or array [B, L] is read by `from_padded`, without a mask. Limits end at the target's last
        position. Raises ValueError if there is no prompt, or for one that holds no token ids, or fills the
        whole context.
        """
        if hasattr(prompts, "tolist"):
            return cls.from_padded(target, as_ids(prompts), None, max_new_tokens, end_tokens)
        if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
            raise ValueError(
                f"prompts is a {type(prompts).__name__}: it must hold the token ids of each prompt; pass a "
                'list of them, such as a tokenizer\'s encoded["input_ids"]'
            )
        rows = []
        for number, prompt in enumerate(prompts):
            try:
                ids = as_ids([prompt])
                if ids.ndim > 2:
                    raise ValueError(
                        f"it has shape {list(ids.shape[1:])}: it must be the token ids of one text, [L]; "
                        "pass every row for itself"
                    )
                tokens, _ = unpad(ids, None, target.media.end)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
            rows += tokens.tolist()
        if not rows:
            raise ValueError("prompts is empty: give the token ids of one at least")
        return cls(rows, limits_of(target, rows, max_new_tokens, "prompt {}"))

    def repeated(self, copies: int) -> Prompts:
        """Return the prompts with each `copies` times in a row."""
        places = [place for place in range(len(self)) for _ in range(copies)]
        return Prompts([self.rows[place] for place in places], [self.limits[place] for place in places])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """The number of each prompt's tokens."""
        return list(map(len, self.rows))

    @property
    def context(self) -> int:
        """The length of the longest text about halfway through its generation."""
        return max(self.lengths) + max(self.limits) // 2


def limits_of(
    target: TargetModel, rows: Sequence[Sequence[int]], max_new_tokens: int, name: str
) -> list[int]:
    """Return the most new tokens of each prompt. name: what an error calls one, with {} for its number.

    Raises ValueError for one that fills the whole context, or has parts of images.
    """
    for number, row in enumerate(rows):
        target.media.require_whole(row, name.format(number))
    return [
        min(max_new_tokens, remaining_positions(target, name.format(number), len(row)))
        for number, row in enumerate(rows)
    ]


def remaining_positions(target: TargetModel, prompt: str, length: int) -> int:
    """Return how many of the target's positions a prompt of this length leaves for the answer.

    prompt: what an error calls it.
    """
    positions = target.max_positions
    if length >= positions:
        raise ValueError(
            f"{prompt} has {length} tokens: the target has {positions} positions, and one must be left for "
            "the answer; shorten the prompt"
        )
    return positions - length


def end_token_ids(target: TargetModel, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the tokens that end a text: the caller's, or else the model's own."""
    if eos_token_id is None:
        return target.eos_token_ids
    ids = as_tokens("eos_token_id", eos_token_id, some=False)
    for token in ids:
        if token >= target.vocab_size:
            raise ValueError(
                f"eos_token_id has {token}: the target's tokens are 0..{target.vocab_size - 1}; None takes "
                "the model's own"
            )
    return ids


@dataclass(frozen=True)
class Terms:
    """How a text's tokens are chosen and which tokens end it. Rows with equal terms share an accept step."""

    eos_token_ids: tuple[int, ...]
    rule: AcceptanceRule = Lossless()  # noqa: RUF009  # it is frozen
    sampling: SamplingConfig = SamplingConfig()  # noqa: RUF009
    processing: Processing = UNPROCESSED

    @property
    def any_tree(self) -> bool:
        """Whether a text gets the same tokens with every draft tree."""
        return (self.exact and self.sampling.greedy) or self.shares_noise

    @property
    def exact(self) -> bool:
        """Whether only the target's own draws are emitted."""
        return getattr(self.rule, "exact", False)

    @property
    def shares_noise(self) -> bool:
        """Whether the draft knows the noise that draws the tokens; see core/randomness/noise.py.

        Not where a rule may move probability onto drafted tokens: what it moves is only known if the tree is
        independent of the draws.
        """
        return self.exact and self.sampling.warm and getattr(self.rule, "share_noise", True)


class Stopper(Protocol):
    """Called after every step with the tokens that one text emitted in it.

    Returns how many of them to emit if the text ends in this step; None: it goes on.
    """

    def __call__(self, tokens: Sequence[int], /) -> int | None: ...


class TokenLogprob(NamedTuple):
    """A token, its log-probability under the target, and the likeliest tokens in its place with theirs.

    They are the target's own: before penalties, biases, the temperature and all else that the options do.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Text:
    """One text that is decoded. number: its name among others. limit: the most new tokens.

    prompt: its token ids. words: these as a tokenizer knows them, with placeholders where images and sounds
    are; empty: they are the same. media: its images and sounds, which stay as long as it does. stream: of
    random numbers, if it goes through a Scheduler. top_logprobs: how many likeliest tokens `logprobs` has for
    each of the new tokens; None: it has nothing. stopper: may end it early. new_tokens: what it has emitted.
    failure: why it ended with the finish reason FAILED.
    """

    number: int
    limit: int
    terms: Terms
    stats: GenerationStats = field(default_factory=GenerationStats)
    prompt: Sequence[int] = ()
    stream: tuple[int, int] = (0, 0)
    top_logprobs: int | None = None
    stopper: Stopper | None = None
    new_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failure: Exception | None = None
    words: Sequence[int] = ()
    media: Sequence[Media] = ()
    _processor: TextProcessor | None = None

    def see(self, table: MediaTable) -> None:
        """Hold the images and sounds of the prompt. Raises ValueError unless they are whole and kept."""
        table.require_whole(self.prompt, f"prompt {self.number}")
        self.media, self.words = table.of_prompt(self.prompt), table.words_of(self.prompt)

    @property
    def processor(self) -> TextProcessor:
        """What changes the logits of its next tokens, in the state that its new tokens have brought about."""
        if self._processor is None:
            terms = self.terms
            self._processor = TextProcessor(terms.processing, self.words or self.prompt, terms.eos_token_ids)
        mine = self._processor
        mine.add(self.new_tokens[len(mine.text) - mine.prompt_length :])
        return mine

    @property
    def length(self) -> int:
        """The number of its tokens, those of its prompt included."""
        return len(self.prompt) + len(self.new_tokens)

    @property
    def done(self) -> bool:
        return self.stats.finish_reason is not None


def interrupt(texts: Iterable[Text]) -> None:
    """Note of the texts that are not done that they are ended from outside."""
    for text in texts:
        text.stats.finish_reason = text.stats.finish_reason or INTERRUPTED


@dataclass(frozen=True)
class Request:
    """One batch to decode.

    prompts: the token ids of each, one at least; limits: the most new tokens of each. observer: sees every
    step. logprobs: see Text.top_logprobs. stoppers: one for each prompt, or none. prompt_cache: for a
    single text, or for those of `generate_many`.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    eos_token_ids: Sequence[int]
    rule: AcceptanceRule
    tree: TreeConfig
    sampling: SamplingConfig
    observer: Observer | None = None
    processing: Processing = UNPROCESSED
    logprobs: int | None = None
    stoppers: Sequence[Stopper] = ()
    prompt_cache: PromptCache | None = None

    @property
    def longest_text(self) -> int:
        """The most tokens that a text may have, its prompt included."""
        return max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits, strict=True))

    def texts(self) -> list[Text]:
        """Return the texts of the rows, none of which has a token yet."""
        terms = Terms(tuple(self.eos_token_ids), self.rule, self.sampling, self.processing)
        stoppers: Sequence[Stopper | None] = self.stoppers or [None] * len(self.prompts)
        rows = zip(self.prompts, self.limits, stoppers, strict=True)
        return [
            Text(number, limit, terms, prompt=prompt, top_logprobs=self.logprobs, stopper=stopper)
            for number, (prompt, limit, stopper) in enumerate(rows)
        ]
