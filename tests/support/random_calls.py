"""Random calls of an engine of few tokens, whatever drafts for it, and exceptions in the middle of them."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_fsd import Fuzzy, Lossless, TreeConfig
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.specs import spec_for
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.model import TargetModel
from support.eagle3 import eagle3_head
from support.tiny_engine import shaken
from support.tiny_models import tiny_head

VOCAB_SIZE = 24  # so few tokens that drafts are often right
LENGTHS = (1, 1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 255, 256, 257, 300)


def head(target: TargetModel, made: Any) -> DrafterSpec | None:
    return spec_for(made, target, torch.float32)


def model_spec(target: TargetModel, model: Any) -> DrafterSpec:
    return DraftModelSpec.for_target(TargetModel(model), target)


FEW = torch.arange(0, VOCAB_SIZE, 2)
DRAFTERS: dict[str, Callable[[TargetModel], DrafterSpec | None]] = {
    "none": lambda target: None,
    "eagle": lambda target: head(target, tiny_head(4, vocab_size=VOCAB_SIZE)),
    "the text's tokens": lambda target: head(target, tiny_head(4, vocab_size=VOCAB_SIZE).restrict(FEW, 6)),
    "short": lambda target: head(target, tiny_head(4, vocab_size=VOCAB_SIZE, trained_positions=14)),
    "eagle3": lambda target: head(target, eagle3_head(4, vocab_size=VOCAB_SIZE, draft_vocab_size=12)),
    "itself": lambda target: model_spec(target, target.model),
    "near": lambda target: model_spec(target, shaken(target.model)),
    "first layers": lambda target: model_spec(target, first_layers(target.model, 1)),
    "lookup": lambda target: LookupSpec.for_target(target, worth=0.0),
}
RULES = (
    Lossless(),
    Lossless(share_noise=False),
    Fuzzy(0.0),
    Fuzzy(math.inf, price=math.inf, mode="swap"),
    Fuzzy(0.4),
    Fuzzy(0.3, mode="paper", exact_prefix=3),
    Fuzzy(math.inf, "tv", child="target", max_consecutive=1),
    Fuzzy(math.inf, price=1.5),
    Fuzzy(math.inf, price=0.3, mode="swap"),
)
SIZES = ("1/1/1", "2/1/1", "6/5/4/0.05", "8/4/8/0.1", "12/4/8/0.2", "40/6/6")
TREES = [TreeConfig.parse(size) for size in SIZES]


@dataclass
class Call:
    """What a caller asks for. options: of `generate`. streams: of random numbers, by row."""

    prompts: list[list[int]]
    options: dict[str, Any]
    streams: list[tuple[int, int]]


def random_call(draw: random.Random, known: Sequence[Sequence[int]], trees: Sequence[TreeConfig]) -> Call:
    """Return any call with one of these trees. known: texts that its prompts may continue."""
    prompts, options = random_prompts(draw, known), random_options(draw)
    options |= {"rule": draw.choice(RULES), "tree": draw.choice(trees)}
    return Call(prompts, options, [(draw.randrange(3), row) for row in range(len(prompts))])


def random_options(draw: random.Random) -> dict[str, Any]:
    """Return options of `generate` but for the rule and the tree."""
    options: dict[str, Any] = {
        "max_new_tokens": draw.choice([1, 2, 5, 12, 30, 60]),
        "temperature": draw.choice([0.0, 0.0, 0.3, 0.6, 0.8, 1.3]),
        "eos_token_id": draw.sample(range(VOCAB_SIZE), draw.choice([0, 0, 1, 3])),
    }
    if options["temperature"]:
        options |= {"top_k": draw.choice([0, 0, 5]), "top_p": draw.choice([1.0, 1.0, 0.9, 0.5])}
    if draw.random() < 0.25:
        own: dict[str, Any] = {
            "repetition_penalty": draw.choice([1.3, 0.8]),
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [draw.sample(range(VOCAB_SIZE), size) for size in (1, 1, 2)],
            "logit_bias": {tuple(draw.sample(range(VOCAB_SIZE), size)): 1.5 for size in (1, 2)},
            "min_new_tokens": min(5, options["max_new_tokens"]),
        }
        options |= {name: own[name] for name in draw.sample(sorted(own), 2)}
    return options


def random_prompts(draw: random.Random, known: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return up to five prompts: new ones, such as repeat themselves, and continuations of known ones."""
    found = []
    start = draw.choices(range(VOCAB_SIZE), k=draw.choice([3, 70])) if draw.random() < 0.2 else []
    for _ in range(draw.choice([1, 1, 2, 3, 5])):
        prompt = draw.choices(range(VOCAB_SIZE), k=draw.choice(LENGTHS))
        if draw.random() < 0.5:
            prompt = (prompt[: draw.choice([1, 3, 7])] * len(prompt))[: len(prompt)]
        if known and draw.random() < 0.4:
            before = draw.choice(known)
            prompt = [*before[: draw.randint(1, len(before))], *prompt[:9]]
        found.append([*start, *prompt][:400])
    return found


def padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts of any tokens, left-padded, and their attention mask."""
    widest = max(map(len, prompts))
    ids = [[0] * (widest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def seeds(variable: str, few: int, many: int) -> list[Any]:
    """Return the seeds to run: a few in every run, many in slow ones, or the one that a variable names."""
    if asked := os.environ.get(variable):
        return [int(asked)]
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= few)) for seed in range(many)]


class Interrupted(Exception):
    """What a history raises in the middle of a call."""


@contextmanager
def interrupting(owner: type, name: str, call: int) -> Iterator[None]:
    """Let a method raise Interrupted at its call of this number, once it has done its work."""
    inner, count = getattr(owner, name), itertools.count(1)

    def interrupted(*given: Any, **keywords: Any) -> Any:
        made = inner(*given, **keywords)
        if next(count) == call:
            raise Interrupted
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        yield
