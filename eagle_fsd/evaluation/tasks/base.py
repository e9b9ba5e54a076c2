"""A task: samples that are asked as chats, and a score of the text that answers one. Knows no model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eagle_fsd.core.checks import one_line, require_integer
from eagle_fsd.files.jsonl import read_jsonl

Item = TypeVar("Item")
FOLDER = "EAGLE_FSD_DATA"
# By task: chats that are shown before a question. Written for this project; none is in any split.
EXAMPLES = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
EXTRA = "pip install 'eagle-fsd[eval]'"
PROMPTS = "prompts/"  # what begins the name of a set of prompts, a task without a score
Message = dict[str, str]  # {"role": "user", "content": "..."}
Asked = tuple[str, list[Message], dict[str, Any]]  # a sample's id, messages and reference


@dataclass(frozen=True)
class Sample:
    """One question. messages: the chat that waits for the answer; reference: what scoring needs, as JSON."""

    id: str
    messages: tuple[Message, ...]
    reference: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A benchmark as data.

    version: grows with any change of the prompt or of the scoring; rows carry it. ask: a row and its number
    (from 0) to a sample's parts; ValueError for a bad row. files: names that a data folder may give the
    task's file; fields: what a row needs, in words for an error; hub: the data set's id on the Hub, its
    configuration and its split. judge: a reference and a text to the value of every metric, 0 to 1; None for
    a task of prompts alone. weights: a metric's mean is weighted by the score of this name.
    """

    name: str
    version: int
    ask: Callable[[Mapping[str, Any], int], Asked]
    max_new_tokens: int
    files: tuple[str, ...]
    fields: str = ""
    hub: tuple[str, str | None, str] | None = None
    judge: Callable[[Mapping[str, Any], str], dict[str, float]] | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()

    def load(self, path: Path | None = None, limit: int | None = None, skip: int = 0) -> list[Sample]:
        """Load at most `limit` samples after the first `skip`.

        path: a JSONL file, or a folder that holds one of `files`; None: the folder $EAGLE_FSD_DATA where it
        is set, else the Hub. Raises ValueError for a task that is missing or broken.
        """
        origin, rows = rows_of(self, path)
        samples: dict[str, Sample] = {}
        for place, (number, row) in enumerate(rows):
            try:
                name, messages, reference = self.ask(row, place)
            except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
                said = f"has no {error}" if isinstance(error, KeyError) else one_line(error, 300)
                raise ValueError(
                    f"{origin}:{number}: {said}; a row of {self.name} needs {self.fields}"
                ) from error
            if name in samples:
                raise ValueError(f"{origin}:{number}: sample {name!r} is there twice; delete one")
            samples[name] = Sample(name, tuple(messages), reference)
        return taken(list(samples.values()), origin, skip, limit)

    def score(self, reference: Mapping[str, Any], text: str) -> dict[str, float]:
        """Score an answer, which ends at the first of `stops`; {} for a task of prompts alone."""
        return {} if self.judge is None else self.judge(reference, cut(text, self.stops))

    def require_version(self, version: object) -> None:
        """Raise ValueError for rows that another version of the task made."""
        if version != self.version:
            raise ValueError(
                f"version is {version!r}: {self.name} is version {self.version} here, and scores of two "
                f"versions do not compare; generate the rows again, or score them with the release that made "
                f"them"
            )


def cut(text: str, stops: Sequence[str]) -> str:
    """Cut a text before the first of the stop strings; it stays whole where none occurs."""
    if "" in stops:
        raise ValueError("a stop string is empty: it would end every text before its start; leave it out")
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def require_range(skip: int, limit: int | None) -> None:
    """Raise ValueError for numbers of samples that cannot be."""
    require_integer("skip", skip, 0, "0 begins with the first one")
    if limit is not None:
        require_integer("limit", limit, 1, "leave it out for all")


def taken(items: list[Item], origin: object, skip: int, limit: int | None) -> list[Item]:
    """Return at most `limit` items after the first `skip`. Raises ValueError where none is left."""
    require_range(skip, limit)
    if not items:
        raise ValueError(f"{origin} has no samples: there must be one at least; name another file")
    if skip >= len(items):
        raise ValueError(f"skip is {skip}: {origin} has {len(items)} samples; lower it")
    return items[skip : None if limit is None else skip + limit]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def few_shot(name: str, ask: Callable[..., str], *question: Any) -> list[Message]:
    """Return the chat of a question behind the examples of a task. ask: writes a question out."""
    messages = []
    for *shown, said in EXAMPLES[name]:
        messages += [user(ask(*shown)), {"role": "assistant", "content": said}]
    return [*messages, user(ask(*question))]


def strict_and_flexible(right: object, strict: object, flexible: object) -> dict[str, float]:
    """Score what an answer says that it is, and what it may mean."""
    return {"strict": float(strict == right), "flexible": float(flexible == right)}


def text_of(row: Mapping[str, Any], name: str) -> str:
    """Return a row's field that must be text. Raises ValueError for an empty one."""
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}: it must be text")
    return value


def rows_of(task: Task, path: Path | None) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    """Find a task's rows; returns where, in words, and the rows with their line numbers, from 1."""
    found = path or (Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None)
    if found is None:
        return hub_rows(task)
    if found.is_dir():
        files = [found / file for file in task.files if (found / file).is_file()]
        if not files:
            raise ValueError(
                f"{found}: has no {' or '.join(task.files)}, the file of {task.name}; put it there, name the "
                f"file itself, or unset {FOLDER} to take the Hub's"
            )
        found = files[0]
    return str(found), read_jsonl(found)


def hub_rows(task: Task) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    """Load the rows of the data set on the Hub; its id stands for the path in errors."""
    local = f"give a JSONL file, or set {FOLDER} to a folder with {' or '.join(task.files)}"
    if task.hub is None:
        raise ValueError(f"{task.name} has no data set on the Hub: {local}")
    repository, subset, split = task.hub
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{task.name} comes from the Hub through datasets: {EXTRA}; or {local}") from error
    try:
        rows = datasets.load_dataset(repository, subset, split=split)
    except Exception as error:
        raise ValueError(
            f"{task.name} cannot be loaded from the Hub ({one_line(error, 300)}): {local}"
        ) from error
    return repository, ((number, dict(row)) for number, row in enumerate(rows, 1))
