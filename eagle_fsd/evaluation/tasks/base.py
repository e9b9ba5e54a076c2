"""A task: samples that are asked as chats, and a score of the text that answers one. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import one_line, require_integer
from eagle_fsd.evaluation.tasks.source import Source, rows_of

PROMPTS = "prompts/"  # what begins the name of a set of prompts, a task without a score
Message = dict[str, str]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Sample:
    """One question.

    messages: the chat that waits for the answer, few-shot examples inside; reference: what scoring needs,
    JSON-ready.
    """

    id: str
    messages: tuple[Message, ...]
    reference: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A benchmark as data.

    version: grows with any change of the prompt or of the scoring; rows carry it, and no row of another
        version is scored.
    ask: a row of the source and its number (from 0) to (id, messages, reference); ValueError for a bad row.
    judge: a reference and a text to the value of every metric, 0 to 1; None for a task of prompts alone.
    metrics: the names that judge returns, the main one first.
    weights: a metric's mean is weighted by the score of this name; an IFEval prompt has several
        instructions.
    """

    name: str
    version: int
    source: Source
    ask: Callable[[Mapping[str, Any], int], tuple[str, list[Message], dict[str, Any]]]
    max_new_tokens: int
    judge: Callable[[Mapping[str, Any], str], dict[str, float]] | None = None
    metrics: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()

    def load(self, path: Path | None = None, limit: int | None = None, skip: int = 0) -> list[Sample]:
        """Load at most `limit` samples after the first `skip`.

        path: a JSONL file, or a folder that holds one of `source.files`; None: the folder $EAGLE_FSD_DATA
        where it is set, else the Hub. Raises ValueError, one line, for a task that is missing, broken or of
        another version.
        """
        require_integer("skip", skip, 0, "0 begins with the first sample")
        if limit is not None:
            require_integer("limit", limit, 1, "leave it out for all samples")
        origin, rows = rows_of(self.name, self.source, path)
        samples: dict[str, Sample] = {}
        for place, (number, row) in enumerate(rows):
            if row.get("version", self.version) != self.version:
                raise ValueError(
                    f"{origin}:{number}: is version {row['version']} of {self.name}: this is version "
                    f"{self.version}; take the file of that version, or the release that reads this one"
                )
            try:
                name, messages, reference = self.ask(row, place)
            except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
                said = f"has no {error}" if isinstance(error, KeyError) else one_line(error, 300)
                raise ValueError(
                    f"{origin}:{number}: {said}; a row of {self.name} needs {self.source.fields}"
                ) from error
            if name in samples:
                raise ValueError(f"{origin}:{number}: sample {name!r} is there twice; delete one")
            samples[name] = Sample(name, tuple(messages), reference)
        if skip >= len(samples):
            raise ValueError(f"skip is {skip}: {origin} has {len(samples)} samples; lower it")
        return list(samples.values())[skip : None if limit is None else skip + limit]

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


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def text_of(row: Mapping[str, Any], name: str) -> str:
    """Return a row's field that must be text. Raises ValueError for an empty one."""
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}: it must be text")
    return value
