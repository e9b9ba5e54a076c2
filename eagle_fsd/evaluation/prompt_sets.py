"""Prompt sets: files in, chat prompts as token ids out, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.checks import require_integer
from eagle_fsd.text.chat import encode
from eagle_fsd.text.prompt_files import read_prompts


def prompt_sets(
    paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, skip: int = 0, limit: int | None = None
) -> dict[str, list[list[int]]]:
    """The chat prompts of every file by the set's name, at most `limit` after the first `skip`: token ids."""
    return {set_name(path): chat_prompts(path, tokenizer, skip, limit) for path in paths}


def chat_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, skip: int = 0, limit: int | None = None
) -> list[list[int]]:
    """A file's prompts, at most `limit` after the first `skip`, as chats of one user turn that wait for the
    answer: token ids. ValueError where none is left."""
    return [encode(tokenizer, prompt)[0].tolist() for prompt in prompts_of(path, skip, limit)]


def prompts_of(path: Path, skip: int = 0, limit: int | None = None) -> list[str]:
    """A file's prompts, at most `limit` after the first `skip`; ValueError where none is left."""
    require_range(skip, limit)
    prompts = read_prompts(path)
    if skip >= len(prompts):
        raise ValueError(f"skip is {skip}: {path} has {len(prompts)} prompts; lower --skip")
    return prompts[skip : None if limit is None else skip + limit]


def set_name(path: Path) -> str:
    """prompts_gsm8k.jsonl is the set gsm8k."""
    return path.stem.removeprefix("prompts_")


def require_range(skip: int, limit: int | None) -> None:
    """ValueError for numbers of prompts that cannot be."""
    require_integer("skip", skip, 0, "0 begins with the first prompt")
    if limit is not None:
        require_integer("limit", limit, 1, "leave --limit out for all prompts")


def require_own_names(paths: Sequence[Path]) -> None:
    """ValueError where two files would be one set: their prompts would be taken for the same samples."""
    names = [set_name(path) for path in paths]
    for name, path in zip(names, paths, strict=True):
        if names.count(name) > 1:
            raise ValueError(
                f"{path}: another file is the prompt set {name!r} as well: every file needs a name of its "
                "own; rename one"
            )


def batches(count: int, size: int) -> Iterator[range]:
    """Index ranges of `size` that cover 0..count-1."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
