"""Files of prompts: a text file is one prompt, a .jsonl file one a line. Knows no model and no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: of a .jsonl file each row's `prompt`, or the first of its `turns`; else the
    whole text.

    Raises OSError for a file that cannot be read, ValueError with file and line for a row without a prompt.
    """
    text = decode_text(path.read_bytes(), str(path))
    return jsonl_prompts(text, path) if path.suffix == ".jsonl" else [text]


def decode_text(data: bytes, origin: str) -> str:
    """UTF-8 bytes as text, with plain line ends and without a final one."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin} is not UTF-8 at byte {error.start}: convert it to UTF-8") from error


def jsonl_prompts(text: str, path: Path) -> list[str]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): write one object a line"
            ) from error
        fields = record if isinstance(record, dict) else {}
        turns = fields.get("turns") or [None]
        prompt = fields.get("prompt", turns[0] if isinstance(turns, list) else None)
        if not isinstance(prompt, str):
            raise ValueError(
                f"{path}, line {number} has no prompt: it needs a string `prompt` or a list `turns`"
            )
        prompts.append(prompt)
    return prompts
