"""Rules x samplings x tasks: generate every cell's answers, and keep of each what quality and speed rest on.

A cell is a task under one rule, sampling and tree. All cells answer a batch of samples before any goes on to
the next, and their order rotates: what the machine does meanwhile is shared, and a sweep that is stopped has
seen every rule on the same samples. Rows go to a JSONL file as they are made and are not made twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.rule_names import describe
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.decoding.outputs import GenerationOutput
from eagle_fsd.decoding.request import Observer
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.analysis.rule_labels import rule_label
from eagle_fsd.evaluation.measure.observers import LawMeter, judged
from eagle_fsd.evaluation.prompt_sets import batches, prompts_of, set_name
from eagle_fsd.evaluation.rows import rows_of_answers
from eagle_fsd.evaluation.tasks import PROMPTS, Sample, Task
from eagle_fsd.evaluation.tasks.base import user
from eagle_fsd.evaluation.tasks.source import Source
from eagle_fsd.files.jsonl import append_row, drop_torn_line
from eagle_fsd.text.chat import encode_chat

SET = 100_000  # more samples than any set of prompts has: sets that are asked together share no seed


@dataclass(frozen=True)
class Questions:
    """A task's samples as token ids. numbers: what each adds to the seed, whatever else is asked with it."""

    task: Task
    samples: Sequence[Sample]
    prompts: Sequence[Sequence[int]]
    numbers: Sequence[int]

    @classmethod
    def load(
        cls, task: Task, engine: EagleFSD, path: Path | None, limit: int | None, skip: int = 0
    ) -> Questions:
        """At most `limit` samples after the first `skip`, as chats that wait for the answer."""
        return cls.encoded(task, task.load(path, limit, skip), engine, skip)

    @classmethod
    def encoded(cls, task: Task, samples: Sequence[Sample], engine: EagleFSD, skip: int) -> Questions:
        """The samples after the first `skip` as token ids."""
        prompts = [encode_chat(engine.tokenizer, sample.messages)[0].tolist() for sample in samples]
        return cls(task, samples, prompts, range(skip, skip + len(samples)))

    @classmethod
    def of_prompts(
        cls, path: Path, engine: EagleFSD, limit: int | None, skip: int, max_new_tokens: int
    ) -> Questions:
        """The same of a file of prompts, a task without a score: `prompts/NAME`."""
        prompts = prompts_of(path, skip, limit)
        task = Task(
            name=f"{PROMPTS}{set_name(path)}",
            version=1,
            source=Source((path.name,), "a prompt"),
            ask=lambda row, place: (str(place), [user(row["prompt"])], {}),
            max_new_tokens=max_new_tokens,
        )
        samples = [
            Sample(str(skip + place), (user(prompt),), {}, max_new_tokens)
            for place, prompt in enumerate(prompts)
        ]
        return cls.encoded(task, samples, engine, skip)

    @classmethod
    def together(cls, parts: Sequence[Questions]) -> Questions:
        """Several sets of prompts as one; a sample is then named SET/ID. A lone set stays as it is."""
        if len(parts) == 1:
            return parts[0]
        names = [part.task.name.removeprefix(PROMPTS) for part in parts]
        return cls(
            replace(parts[0].task, name=PROMPTS + "+".join(names)),
            [
                replace(one, id=f"{name}/{one.id}")
                for name, part in zip(names, parts, strict=True)
                for one in part.samples
            ],
            [prompt for part in parts for prompt in part.prompts],
            [SET * place + number for place, part in enumerate(parts) for number in part.numbers],
        )


@dataclass(frozen=True)
class Cell:
    """A task's answers under one rule."""

    questions: Questions
    rule: AcceptanceRule
    sampling: SamplingConfig
    tree: TreeConfig
    max_new_tokens: int
    seed: int = 0

    def settings(self, engine: EagleFSD) -> dict[str, Any]:
        """What every row of the cell says of it."""
        return {
            "task": self.questions.task.name,
            "version": self.questions.task.version,
            "rule": describe(self.rule),
            "sampling": asdict(self.sampling),
            "tree": asdict(self.tree),
            "max_new_tokens": self.max_new_tokens,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "base_model": engine.base_model,
            "ea_model": engine.ea_model,
            "draft_vocab_size": engine.draft_vocab_size,
        }

    def key(self, engine: EagleFSD, models: Mapping[str, Any] | None = None) -> str:
        """What the rows of one cell share, and no others: its settings and the models' weights.

        models: the engine's identity, where it is known already.
        """
        named = [self.settings(engine), engine.identity() if models is None else models]
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]

    def seed_of(self, place: int) -> int:
        """What names a sample's draws in rows: the same under every rule, and whatever else is asked."""
        return self.seed + self.questions.numbers[place]

    def stream_of(self, place: int) -> tuple[int, int]:
        """The stream that a sample draws from; those of other seeds have nothing in common with it."""
        return self.seed, self.questions.numbers[place]


class Meter(Observer, Protocol):
    """An observer of one batch that has something to say of each row: fields of its JSON object.

    seconds: what observing took, which is not the decoding's.
    """

    seconds: float

    def row(self, row: int) -> dict[str, Any]: ...


def run(
    engine: EagleFSD,
    cells: Sequence[Cell],
    output: Path,
    batch_size: int,
    provenance: Mapping[str, object],
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Make the rows that `output` lacks and append them; returns all its rows, by key, sample and seed."""
    drop_torn_line(output)
    done = rows_of_answers(output)
    models = engine.identity()
    keys = {id(cell): cell.key(engine, models) for cell in cells}
    with tqdm(total=sum(len(cell.questions.samples) for cell in cells), unit="answer") as bar:
        for cell, places in turns(cells, batch_size):
            missing = unanswered(cell, places, keys[id(cell)], done, output)
            if missing:
                bar.set_postfix_str(rule_label(describe(cell.rule)), refresh=False)
                shared = {"key": keys[id(cell)], **cell.settings(engine), "batch_size": batch_size}
                for row in answer(engine, cell, missing, LawMeter(cell.rule.mode, len(missing))):
                    row = {**shared, **row, **provenance}
                    append_row(output, row)
                    done[row["key"], row["sample"], row["seed"]] = row
            bar.update(len(places))
    return done


def unanswered(
    cell: Cell, places: Sequence[int], key: str, done: Mapping[tuple[Any, ...], Any], output: Path
) -> list[int]:
    """The places whose answers are not among the rows that `output` has; ValueError where it has a sample's
    answer to another prompt."""
    missing = []
    for place in places:
        sample, prompt = cell.questions.samples[place].id, cell.questions.prompts[place]
        row = done.get((key, sample, cell.seed_of(place)))
        if row is None:
            missing.append(place)
        elif "prompt" in row and row["prompt"] != digest(prompt):  # rows of before it was kept are trusted
            raise ValueError(
                f"{output}: sample {sample!r} of {cell.questions.task.name} was another prompt when it was "
                "answered: its file has changed; name another output"
            )
    return missing


def digest(prompt: Sequence[int]) -> str:
    """What tells a prompt's token ids from others."""
    return hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()[:16]


def turns(cells: Sequence[Cell], batch_size: int) -> Iterator[tuple[Cell, Sequence[int]]]:
    """Every cell with every batch of its samples' places; the cells of a task take turns, batch by batch."""
    tasks: dict[int, list[Cell]] = {}
    for cell in cells:
        tasks.setdefault(id(cell.questions), []).append(cell)
    for mine in tasks.values():
        for number, places in enumerate(batches(len(mine[0].questions.samples), batch_size)):
            turn = number % len(mine)
            for cell in (*mine[turn:], *mine[:turn]):
                yield cell, places


def answer(engine: EagleFSD, cell: Cell, places: Sequence[int], meter: Meter) -> Iterator[dict[str, Any]]:
    """One batch of a cell: what its rows say of each sample, and of each what the meter does."""
    questions = cell.questions
    prompts = [questions.prompts[place] for place in places]
    ids, mask = pad_left(prompts, engine.pad_token_id)
    output: GenerationOutput = engine.generate(
        ids,
        mask,
        max_new_tokens=cell.max_new_tokens,
        rule=cell.rule,
        tree=cell.tree,
        seed=[cell.stream_of(place) for place in places],
        observer=meter,
        **asdict(cell.sampling),
    )
    # A batch's rows share its time.
    seconds = (output.stats[0].seconds - meter.seconds) / len(places)
    for row, (place, tokens, stats) in enumerate(zip(places, output.new_tokens, output.stats, strict=True)):
        sample = questions.samples[place]
        text = engine.tokenizer.decode(tokens, skip_special_tokens=True)
        verdict = judged(engine.target, prompts[row], tokens)
        yield {
            "sample": sample.id,
            "seed": cell.seed_of(place),
            "prompt": digest(prompts[row]),
            "prompt_tokens": len(prompts[row]),
            "token_ids": tokens,
            "text": text,
            "finish_reason": stats.finish_reason,
            "steps": stats.steps,
            "new_tokens": stats.new_tokens,
            "exact_accepts": stats.exact_accepts,
            "fuzzy_accepts": stats.fuzzy_accepts,
            "seconds": seconds,
            **meter.row(row),
            "log_p": None if verdict is None else verdict.log_p,
            "agreement": None if verdict is None else verdict.agreement,
            "scores": questions.task.score(sample.reference, text),
        }
