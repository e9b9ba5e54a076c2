"""The target's own answers to many prompts, one token a step for all rows at once, without a draft head.

A pool of rows is decoded together. Finished rows hand their places to the next prompts in small groups, so
that the pool stays full until the prompts run out. What a prompt is answered with depends on the prompt and
its seed alone, up to the rounding of kernels that see other rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.sampling import RowRandom, draw, warp
from eagle_fsd.core.tree import root_only
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, at least one, and how its answer is sampled."""

    number: int
    tokens: Sequence[int]
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True)
class Answer:
    """New token ids without the end token. complete: whether the target ended it; else it was cut."""

    number: int
    tokens: list[int]
    complete: bool


@dataclass
class Row:
    """A question being answered. root: its newest token, which the target has not read yet."""

    question: Question
    root: int
    answer: list[int]
    random: RowRandom


@torch.inference_mode()
def write_answers(
    target: TargetModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    rows: int = 64,
    eos_token_ids: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Yield every question's answer as it ends, shortest prompts first.

    rows: how many are decoded together. eos_token_ids: None is the target's own. ValueError for a prompt that
    is empty or leaves no position for an answer.
    """
    require_integer("max_new_tokens", max_new_tokens, 1, "ask for at least one token")
    require_integer("rows", rows, 1, "64 suits a CPU")
    for question in questions:
        check_length(question, target.max_positions)
    ends = frozenset(target.eos_token_ids if eos_token_ids is None else eos_token_ids)
    waiting = sorted(questions, key=lambda question: len(question.tokens))[::-1]  # the next one is the last
    pool: list[Row | None] = []  # None: a place whose answer is finished
    session: TargetSession | None = None
    while waiting or any(pool):
        free = [place for place, row in enumerate(pool) if row is None]
        if waiting and (session is None or len(free) >= max(1, rows // 8)):
            places = free if session else range(min(rows, len(waiting)))
            new = [admit(waiting.pop()) for _ in places[: len(waiting)]]
            fresh = prefilled(target, [row.question for row in new], max_new_tokens)
            if session is None:
                session, pool = fresh, [*new]
            else:
                session.cache.replace(places[: len(new)], fresh.cache)
                for place, row in zip(places, new, strict=False):
                    pool[place] = row
        if not waiting and None in pool:
            going = [place for place, row in enumerate(pool) if row]
            session.select(going)
            pool = [pool[place] for place in going]
        for place, token in enumerate(next_tokens(session, pool)):
            row = pool[place]
            if row is None:
                continue
            if token not in ends:
                row.answer.append(token)
                row.root = token
            full = len(row.answer) == min(max_new_tokens, target.max_positions - len(row.question.tokens))
            if token in ends or full:
                yield Answer(row.question.number, row.answer, complete=token in ends)
                pool[place] = None


def check_length(question: Question, positions: int) -> None:
    if not 0 < len(question.tokens) < positions:
        raise ValueError(
            f"prompt {question.number} has {len(question.tokens)} tokens: it must have at least one, and "
            f"fewer than the target's {positions} positions; leave it out"
        )


def admit(question: Question) -> Row:
    return Row(question, question.tokens[-1], [], RowRandom(question.seed, 1))


def prefilled(target: TargetModel, questions: Sequence[Question], max_new_tokens: int) -> TargetSession:
    """A session that has read every question but its last token; equal questions are read once."""
    texts = [tuple(question.tokens) for question in questions]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    lengths = [len(text) - 1 for text in places]
    session = TargetSession(target, len(places), max(lengths) + max_new_tokens + 1)
    tokens = pad_right(list(places), 0).to(target.device)
    session.prefill(tokens[:, :-1], lengths)
    session.select([places[text] for text in texts])
    return session


def next_tokens(session: TargetSession, pool: Sequence[Row | None]) -> list[int]:
    """Run every row's newest token and choose the next; a finished row's place yields a meaningless one."""
    device = session.target.device
    roots = torch.tensor([row.root if row else 0 for row in pool], device=device)
    logits, _ = session.verify(root_only(roots, session.target.vocab_size))  # [B, 1, V]
    session.keep(
        torch.zeros(len(pool), 1, dtype=torch.int64, device=device), [int(bool(row)) for row in pool]
    )
    tokens = logits[:, 0].argmax(-1)  # [B]
    for sampling in {row.question.sampling for row in pool if row} - {SamplingConfig()}:
        places = [place for place, row in enumerate(pool) if row and row.question.sampling == sampling]
        uniforms = torch.cat([pool[place].random.uniform(1)[0] for place in places]).to(device)
        tokens[places] = sampled(logits[places, 0], sampling, uniforms)
    return tokens.tolist()


def sampled(logits: Tensor, sampling: SamplingConfig, uniforms: Tensor) -> Tensor:
    """One token [B] for each row of logits [B, V]."""
    return draw(warp(logits, sampling), uniforms)
