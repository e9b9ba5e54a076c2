"""Reads prompt files: a text file is one prompt, a .jsonl file one per line. Knows no model or tokenizer."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_fsd.files.jsonl import LIST_REMEDY, read_jsonl

logger = logging.getLogger(__name__)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: for a .jsonl file each row's (see find_prompt), else the whole text.

    What else a chat says is left out, with a warning. Raises ValueError if the file cannot be read, is JSON
    of another ending, or a row has no prompt; the error then names its line.
    """
    if is_jsonl(path):
        rows = list(read_jsonl(path))
        prompts = [require_prompt(record, f"{path}:{number}") for number, record in rows]
        if shortened := sum(says_more(record) for _, record in rows):
            warn_of_rest(path, shortened, len(rows))
        return prompts
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a text or .jsonl file") from error
    if path.suffix in (".json", ".ndjson"):  # prompts or one, whichever is in it: its name does not say
        raise ValueError(
            f"{path} is a {path.suffix} file: prompts must be rows of a .jsonl file, or the whole of a .txt "
            f"file; rename it, or {LIST_REMEDY}"
        )
    return [decode_text(data, str(path))]


@functools.cache  # commands that check their files first read them twice
def warn_of_rest(path: Path, shortened: int, count: int) -> None:
    logger.warning(
        "%s: only the user's first turn of a chat is a prompt; %s of %s rows say more (system messages, "
        "later turns), which is left out",
        path,
        shortened,
        count,
    )


def is_jsonl(path: Path) -> bool:
    """Return whether a file has rows of JSON, by its name."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


def read_asked(path: Path) -> list[str]:
    """Return everything that users ask in a file, in all turns. Rows are recognised in a file of any name.

    Raises ValueError if the file cannot be read, or nobody asks anything in a row.
    """
    if not (is_jsonl(path) or begins_with_row(path)):
        return read_prompts(path)
    found: list[str] = []
    for number, record in read_jsonl(path):
        if not (asked := asked_texts(record)):
            raise without_prompt(f"{path}:{number}")
        found += asked
    return found


def begins_with_row(path: Path) -> bool:
    """Return whether a file has a JSON object at its beginning."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # whoever reads it says what is wrong
        return file.read(1024).lstrip().startswith(b"{")
    return False


def decode_text(data: bytes, origin: str) -> str:
    """Decode UTF-8 bytes, with plain line ends and without a final one."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin} is not UTF-8 at byte {error.start}: convert it to UTF-8") from error


def require_prompt(record: Mapping[str, Any], place: str) -> str:
    """Return a row's prompt. Raises ValueError naming `place` if it has none."""
    prompt = find_prompt(record)
    if prompt is None:
        raise without_prompt(place)
    return prompt


def without_prompt(place: str) -> ValueError:
    return ValueError(
        f"{place}: has no prompt: it needs a string `prompt`, `question` or `instruction`, a list `turns`, "
        "or chat `messages`, `conversations` or `prompt` with a user's turn"
    )


def find_prompt(record: Mapping[str, Any]) -> str | None:
    """Return the prompt of a row in any of the usual formats; None if it has none.

    It is `prompt`, `question`, the first of `turns`, Alpaca's `instruction` with its `input`, or the user's
    first turn of `messages` ({role, content}), of ShareGPT's `conversations` ({from, value}) or of TRL's
    `prompt`, which is a list of messages. A turn may say its text in parts.
    """
    turns, prompt = record.get("turns"), record.get("prompt")
    first = turns[0] if turns and isinstance(turns, list) else None
    words = None if is_chat(prompt) else prompt
    # A merged table has all columns, most of them null.
    found = first_known(words, record.get("question"), first, instruction_of(record))
    if found is None:
        found = next((words_of(turn) for turn in chat_turns(record) if asks(turn)), None)
        found = joined_parts(found)
    return found if isinstance(found, str) else None


def instruction_of(record: Mapping[str, Any]) -> Any:
    """Return what a row of Alpaca asks: its instruction, and after a blank line its input if it has one."""
    asked, more = record.get("instruction"), record.get("input")
    if isinstance(asked, str) and isinstance(more, str):
        return "\n\n".join(text for text in (asked, more) if text.strip())
    return asked


def is_chat(words: Any) -> bool:
    """Return whether a value is a list of messages, and not a text in parts."""
    return isinstance(words, list) and all(
        isinstance(turn, Mapping) and not turn.keys().isdisjoint(("role", "from")) for turn in words
    )


def joined_parts(words: Any) -> Any:
    """Return what a turn says as one text where it stands in parts of text, else as it is."""
    if not isinstance(words, list):
        return words
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in words]
    return "".join(parts) if parts and all(isinstance(part, str) for part in parts) else words


def says_more(record: Mapping[str, Any]) -> bool:
    """Return whether a row is a chat with a system message, or with further turns of the user."""
    turns = chat_turns(record)
    return "system" in map(speaker_of, turns) or sum(map(asks, turns)) > 1


def chat_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a row that is a chat, none of any other."""
    prompt = record.get("prompt")
    chat = first_known(
        record.get("messages"), record.get("conversations"), prompt if is_chat(prompt) else None
    )
    return [turn for turn in chat if isinstance(turn, dict)] if isinstance(chat, list) else []


def asked_texts(record: Mapping[str, Any]) -> list[str]:
    """Return what users ask in a row of any of these formats, in all its turns."""
    found: list[str] = []
    values = [record.get(name) for name in ("prompt", "question", "turns", "messages", "conversations")]
    for value in (*values, instruction_of(record)):
        for one in value if isinstance(value, list) else [value]:
            text = one
            if isinstance(one, Mapping):
                text = words_of(one) if asks(one) else None
            parts = text if isinstance(text, list) else [text]  # OpenAI's clients may write text in parts
            texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
            found += [text for text in texts if isinstance(text, str) and text.strip()]
    return found


def speaker_of(turn: Mapping[str, Any]) -> Any:
    """Return whose a turn of a chat is."""
    return turn.get("role", turn.get("from"))


def asks(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn of a chat is the user's."""
    return speaker_of(turn) in ("user", "human")


def words_of(turn: Mapping[str, Any]) -> Any:
    """Return what a turn of a chat says."""
    return turn.get("content", turn.get("value"))


def first_known(*values: Any) -> Any:
    """Return the first value that is not None, if any."""
    return next((value for value in values if value is not None), None)
