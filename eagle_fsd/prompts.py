"""Files of prompts: a text file is one prompt, a .jsonl file one a line. Knows no model and no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: of a .jsonl file what each row asks (see prompt_of), else the whole text.

    Raises ValueError for a file that cannot be read, and with its line for a row without a prompt.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"prompt file {str(path)!r} cannot be read ({error.strerror}): it must be a text or .jsonl file; "
            "check the path"
        ) from error
    text = decode_text(data, str(path))
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
        prompt = prompt_of(record) if isinstance(record, dict) else None
        if prompt is None:
            raise ValueError(
                f"{path}, line {number} has no prompt: it needs a string `prompt` or `question`, a list "
                "`turns`, or chat `messages` or `conversations` with a user's turn"
            )
        prompts.append(prompt)
    return prompts


def prompt_of(record: Mapping[str, Any]) -> str | None:
    """What a row of any of the usual shapes asks: `prompt`, `question`, the first of `turns`, or the user's
    first turn of `messages` ({role, content}) or ShareGPT's `conversations` ({from, value}). None if it asks
    nothing.
    """
    turns = record.get("turns")
    found = record.get(
        "prompt", record.get("question", turns[0] if turns and isinstance(turns, list) else None)
    )
    chat = record.get("messages", record.get("conversations"))
    if found is None and isinstance(chat, list):
        for turn in filter(lambda turn: isinstance(turn, dict), chat):
            if turn.get("role", turn.get("from")) in ("user", "human"):
                found = turn.get("content", turn.get("value"))
                break
    return found if isinstance(found, str) else None
