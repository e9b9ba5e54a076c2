"""Rules x samplings x tasks: generate every cell's answers, and keep of each what quality and speed rest on.

A cell is a task under one rule, sampling and tree. All cells answer a batch of samples before any goes on to
the next, and their order rotates: what the machine does meanwhile is shared, and a sweep that is stopped has
seen every rule on the same samples. Rows go to a JSONL file as they are made and are not made twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.acceptance import AcceptanceRule
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.engine import EagleFSD, GenerationOutput
from eagle_fsd.evaluation.law_meter import LawMeter
from eagle_fsd.evaluation.likelihood import judged
from eagle_fsd.evaluation.prompts import batches
from eagle_fsd.evaluation.rows import append_row, drop_torn_line, read_rows
from eagle_fsd.evaluation.tasks import Sample, Task
from eagle_fsd.identity import digest, target_identity
from eagle_fsd.padding import left_padded
from eagle_fsd.rules import describe
from eagle_fsd.text import encode_chat


@dataclass(frozen=True)
class Questions:
    """A task's samples as token ids; sample i of the task's own order draws from seed first + i."""

    task: Task
    samples: Sequence[Sample]
    prompts: Sequence[Sequence[int]]
    first: int = 0

    @classmethod
    def load(
        cls, task: Task, engine: EagleFSD, path: Path | None, limit: int | None, skip: int = 0
    ) -> Questions:
        """At most `limit` samples after the first `skip`, as chats that wait for the answer."""
        samples = task.load(path, limit, skip)
        prompts = [encode_chat(engine.tokenizer, sample.messages)[0].tolist() for sample in samples]
        return cls(task, samples, prompts, skip)


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


def run(
    engine: EagleFSD,
    cells: Sequence[Cell],
    output: Path,
    batch_size: int,
    provenance: Mapping[str, object],
) -> None:
    """Make the rows that `output` lacks and append them to it."""
    drop_torn_line(output)
    done = {(row["key"], row["sample"], row["seed"]) for row in read_rows(output)}
    models = identity(engine)
    keys = {
        id(cell): hashlib.sha256(json.dumps([cell.settings(engine), models], sort_keys=True).encode())
        .hexdigest()[:16]
        for cell in cells
    }
    with tqdm(total=sum(len(cell.questions.samples) for cell in cells), unit="answer") as bar:
        for cell, places in turns(cells, batch_size):
            seeds = {place: cell.seed + cell.questions.first + place for place in places}
            missing = [
                place
                for place in places
                if (keys[id(cell)], cell.questions.samples[place].id, seeds[place]) not in done
            ]
            if missing:
                bar.set_postfix_str(rule_word(cell.rule), refresh=False)
                for row in answer(engine, cell, missing, [seeds[place] for place in missing]):
                    append_row(output, {"key": keys[id(cell)], **cell.settings(engine), **row, **provenance})
            bar.update(len(places))


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


def answer(
    engine: EagleFSD, cell: Cell, places: Sequence[int], seeds: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One batch of a cell: what its rows say of each sample."""
    questions = cell.questions
    prompts = [questions.prompts[place] for place in places]
    meter = LawMeter(cell.rule.mode, len(places))
    ids, mask = left_padded(prompts, engine.pad_token_id)
    output: GenerationOutput = engine.generate(
        ids,
        mask,
        max_new_tokens=cell.max_new_tokens,
        rule=cell.rule,
        tree=cell.tree,
        seed=list(seeds),
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
            "seed": seeds[row],
            "prompt_tokens": len(prompts[row]),
            "token_ids": tokens,
            "text": text,
            "reference": sample.reference,
            "finish_reason": stats.finish_reason,
            "steps": stats.steps,
            "new_tokens": stats.new_tokens,
            "exact_accepts": stats.exact_accepts,
            "fuzzy_accepts": stats.fuzzy_accepts,
            "seconds": seconds,
            "batch_size": len(places),
            "law": meter.row(row),
            "log_p": None if verdict is None else verdict.log_p,
            "agreement": None if verdict is None else verdict.agreement,
            "scores": questions.task.score(sample.reference, text),
        }


def identity(engine: EagleFSD) -> list[object]:
    """What tells two pairs of models apart: their weights."""
    head = None if engine.head is None else digest([*engine.head.parameters(), *engine.head.buffers()])
    return [target_identity(engine.base_model, engine.target.model), head]


def rule_word(rule: AcceptanceRule) -> str:
    described = describe(rule)
    return " ".join(str(value) for value in list(described.values())[:4])
