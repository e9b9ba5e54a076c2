"""Prompt sets: files in, texts out; and the one way in which measures answer prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.decoding.options import UNTOUCHED
from eagle_fsd.decoding.outputs import GenerationOutput
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.tasks.base import taken
from eagle_fsd.text.prompt_files import read_prompts

Item = TypeVar("Item")
GREEDY = SamplingConfig()


def prompts_of(path: Path, skip: int = 0, limit: int | None = None) -> list[str]:
    """Read at most `limit` prompts of a file after the first `skip`.

    Raises ValueError where none is left, and for what would count like others and is no prompt: a text
    without a word.
    """
    prompts = taken(read_prompts(path), path, skip, limit)
    for number, prompt in enumerate(prompts, skip + 1):
        if not prompt.strip():
            raise ValueError(f"{path}: prompt {number} is empty: each must be a text; delete it")
    return prompts


def set_name(path: Path) -> str:
    """Return the name of a file's set: prompts_gsm8k.jsonl is gsm8k."""
    return path.stem.removeprefix("prompts_")


def require_own_names(paths: Sequence[Path]) -> None:
    """Raise ValueError where two files would be one set: prompts would be taken for the same samples."""
    names = [set_name(path) for path in paths]
    for name, path in zip(names, paths, strict=True):
        if names.count(name) > 1:
            raise ValueError(
                f"{path}: another file is the prompt set {name!r} as well: every file needs a name of its "
                "own; rename one"
            )


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yield all items in order, `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Return the items in turn from the place `number` on, as if they stood in a circle."""
    turn = number % len(items)
    return [*items[turn:], *items[:turn]]


def answer(
    engine: EagleFSD, prompts: Sequence[Sequence[int]], sampling: SamplingConfig = GREEDY, **options: Any
) -> GenerationOutput:
    """Answer prompts (token ids) as one batch; options: further ones of `EagleFSD.generate`.

    What the model's generation_config says about penalties and bans does not count.
    """
    ids, mask = pad_left(prompts, engine.pad_token_id)
    return engine.generate(ids, mask, **{**UNTOUCHED, **asdict(sampling), **options})


def answer_all(
    engine: EagleFSD, prompts: Sequence[Sequence[int]], batch_size: int, said: str, **options: Any
) -> tuple[list[list[int]], GenerationStats]:
    """Answer prompts greedily, in batches in the order given; returns texts and the sum of statistics."""
    texts, stats = [], []
    for part in tqdm(list(batches(prompts, batch_size)), desc=said, unit="batch"):
        output = answer(engine, part, **options)
        stats.append(GenerationStats.total(output.stats, concurrent=True))
        texts += output.new_tokens
    return texts, GenerationStats.total(stats)
