"""Prompt sets: files in, chat prompts as token ids out, in batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle_fsd.prompts import read_prompts
from eagle_fsd.text import encode


def chat_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> list[list[int]]:
    """A file's first `limit` prompts as chats of one user turn that wait for the answer: token ids."""
    return [encode(tokenizer, prompt)[0].tolist() for prompt in read_prompts(path)[:limit]]


def set_name(path: Path) -> str:
    """prompts_gsm8k.jsonl is the set gsm8k."""
    return path.stem.removeprefix("prompts_")


def batches(count: int, size: int) -> Iterator[range]:
    """Index ranges of `size` that cover 0..count-1."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
