"""Write the target's own answers to many prompts, without a draft head.

A pool of rows is decoded together, and finished rows give their places to the next prompts. An answer depends
only on its prompt and seed, up to the rounding of kernels that see other rows beside it: it is the text that
the engine's plain decoding gives for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.target.model import TargetModel


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, at least one, and how its answer is sampled: from the stream (seed, number)."""

    number: int
    tokens: Sequence[int]
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True)
class Answer:
    """An answer's token ids, without the end token. complete: whether the target ended it."""

    number: int
    tokens: list[int]
    complete: bool


def write_answers(
    target: TargetModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    rows: int = 64,
) -> Iterator[Answer]:
    """Yield every question's answer when it ends, shortest prompts first.

    rows: how many are decoded together. Raises ValueError for a prompt that is empty or leaves no position
    for an answer.
    """
    require_integer("max_new_tokens", max_new_tokens, 1, "ask for at least one token")
    require_integer("rows", rows, 1, "64 suits a CPU")
    scheduler = Scheduler.for_many(target, None, TreeConfig(1), rows)
    for question in sorted(questions, key=lambda question: len(question.tokens)):
        terms = Terms(target.eos_token_ids, sampling=question.sampling)
        stream = (question.seed, question.number)
        scheduler.admit(Text(question.number, max_new_tokens, terms, prompt=question.tokens, stream=stream))
    for text, _ in scheduler.run():
        if text.done:
            complete = text.stats.finish_reason == "stop"
            yield Answer(text.number, text.new_tokens[:-1] if complete else text.new_tokens, complete)
