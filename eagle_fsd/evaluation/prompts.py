"""Prompt sets: JSONL files in, chat prompts as token ids out, in batches of left-padded rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase


def read_prompts(path: Path) -> list[str]:
    """The first turn of every row of a JSONL file: `turns[0]` or `prompt`. ValueError names the file and the
    line."""
    if not path.is_file():
        raise ValueError(f"{path}: no such prompt file; give the path of a .jsonl file")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            prompts.append(row["turns"][0] if "turns" in row else row["prompt"])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: needs a JSON object with `turns` or `prompt` ({error!r})"
            ) from error
    return prompts


def set_name(path: Path) -> str:
    """prompts_gsm8k.jsonl is the set gsm8k."""
    return path.stem.removeprefix("prompts_")


def encode_chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of one user turn in the target's chat template, with the assistant's turn opened."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def batches(count: int, size: int) -> Iterator[range]:
    """Index ranges of `size` that cover 0..count-1."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
