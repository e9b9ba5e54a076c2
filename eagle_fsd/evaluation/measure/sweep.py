"""Rules x samplings x tasks: generate every cell's answers, and keep of each what quality and speed rest on.

A cell is a task under one rule, sampling and tree. All cells answer a batch of samples before any goes on to
the next, and their order rotates: what the machine does meanwhile is shared, and a sweep that is stopped has
seen every rule on the same samples. Rows go to a JSONL file as they are made and are not made twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.rule_names import describe
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.decoding.request import remaining_positions
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation import prompt_sets
from eagle_fsd.evaluation.analysis.rule_labels import name_rule
from eagle_fsd.evaluation.measure.observers import DistanceMeter, Meter, StepMeter
from eagle_fsd.evaluation.rows import rows_of_answers, sole_writer
from eagle_fsd.evaluation.tasks import PROMPTS, Sample, Task
from eagle_fsd.evaluation.tasks.base import user
from eagle_fsd.evaluation.tasks.mt_bench import MT_BENCH
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.jsonl import append_row, drop_torn_line
from eagle_fsd.text.chat import encode_as_trained

WARM_UP = 32  # tokens, for what a process does once, such as compiling
SET = 100_000  # more samples than any set of prompts has: sets that are asked together share no seed
COUNTED = ("finish_reason", "steps", "new_tokens", "exact_accepts", "fuzzy_accepts")


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
        """Load at most `limit` samples after the first `skip`, as chats that wait for the answer."""
        samples = task.load(path, limit, skip)
        return cls(task, samples, encoded(samples, engine), range(skip, skip + len(samples)))

    @classmethod
    def of_prompts(
        cls, paths: Sequence[Path], engine: EagleFSD, limit: int | None, skip: int, max_new_tokens: int
    ) -> Questions:
        """Load files of prompts as one task without a score; with several a sample is named SET/ID."""
        samples, numbers = [], []
        names = [prompt_sets.set_name(path) for path in paths]
        for place, path in enumerate(paths):
            for number, prompt in enumerate(prompt_sets.prompts_of(path, skip, limit), skip):
                own = str(number) if len(paths) == 1 else f"{names[place]}/{number}"
                samples.append(Sample(own, (user(prompt),), {}))
                numbers.append(SET * place + number)
        # MT-Bench is a task of prompts alone, as these are.
        task = replace(MT_BENCH, name=PROMPTS + "+".join(names), version=1, max_new_tokens=max_new_tokens)
        return cls(task, samples, encoded(samples, engine), numbers)


def encoded(samples: Sequence[Sample], engine: EagleFSD) -> list[list[int]]:
    """Encode samples as token ids. Raises ValueError for one that leaves the target no position."""
    prompts = [encode_as_trained(engine.tokenizer, sample.messages) for sample in samples]
    for sample, prompt in zip(samples, prompts, strict=True):
        remaining_positions(engine.target, f"sample {sample.id!r}", len(prompt))
    return prompts


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
        """Return what every row of the cell says of it; of weights in the dtype, nothing more than that."""
        dtype = str(engine.dtype).removeprefix("torch.")
        return {
            "task": self.questions.task.name,
            "version": self.questions.task.version,
            "rule": describe(self.rule),
            "sampling": asdict(self.sampling),
            "tree": asdict(self.tree),
            "max_new_tokens": self.max_new_tokens,
            "dtype": dtype,
            **({} if engine.weight_format == dtype else {"weight_format": engine.weight_format}),
            "base_model": engine.base_model,
            "ea_model": engine.ea_model,
            "draft_vocab_size": engine.draft_vocab_size,
        }

    def key(
        self, engine: EagleFSD, models: Mapping[str, Any], expected: Sequence[AcceptanceRule] = ()
    ) -> str:
        """Return what the rows of one cell share, and no others: its settings and the models' weights.

        models: the engine's identity. expected: see `run`. What the files are called does not matter, so that
        another checkout takes the rows up.
        """
        settings, target = self.settings(engine), models["target"]
        named = ("base_model", "ea_model")
        made = [
            {name: value for name, value in settings.items() if name not in named},
            {**models, "target": {name: value for name, value in target.items() if name != "name"}},
        ]
        return digest_json([*made, list(map(describe, expected))] if expected else made)

    def seed_of(self, place: int) -> int:
        """Return what names a sample's draws in rows: the same under every rule and beside any other."""
        return self.seed + self.questions.numbers[place]


def run(
    engine: EagleFSD,
    cells: Sequence[Cell],
    output: Path,
    batch_size: int,
    provenance: Mapping[str, object],
    expected: Sequence[AcceptanceRule] = (),
    timed: bool = True,
) -> list[list[dict[str, Any]]]:
    """Make the rows that `output` lacks and append them; returns each cell's rows, in its samples' order.

    expected: rules of which the rows say what they are expected to do with the trees of lossless texts.
    timed: whether seconds matter. Without expected rules a short answer that does not count then comes
    first: what a process does once would else be in the seconds of one rule alone.
    Raises ValueError if another run is at work on the file.
    """
    with sole_writer(output):
        drop_torn_line(output)
        done = rows_of_answers(output)
        models, cold = engine.identity(), timed and not expected
        keys = {id(cell): cell.key(engine, models, expected) for cell in cells}

        def whose(cell: Cell, place: int) -> tuple[str, str, int]:
            return keys[id(cell)], cell.questions.samples[place].id, cell.seed_of(place)

        with tqdm(total=sum(len(cell.questions.samples) for cell in cells), unit="answer") as bar:
            for cell, places in turns(cells, batch_size):
                missing = [
                    one for one in places if not answers(done.get(whose(cell, one)), cell, one, output)
                ]
                if missing:
                    if cold:
                        warm_up(engine, cell, missing)
                        cold = False
                    bar.set_postfix_str(name_rule(describe(cell.rule)).label, refresh=False)
                    shared = {"key": keys[id(cell)], **cell.settings(engine)}
                    shared |= {"batch_size": batch_size, "runtime": engine.runtime}
                    count = len(missing)
                    meter = StepMeter(expected, count) if expected else DistanceMeter(cell.rule.mode, count)
                    for row in answer(engine, cell, missing, meter):
                        row = {**shared, **row, **provenance}
                        append_row(output, row)
                        done[row["key"], row["sample"], row["seed"]] = row
                bar.update(len(places))
    return [[done[whose(cell, place)] for place in range(len(cell.questions.samples))] for cell in cells]


def warm_up(engine: EagleFSD, cell: Cell, places: Sequence[int]) -> None:
    """Begin the answers to a batch of a cell, and forget them."""
    prompts = [cell.questions.prompts[place] for place in places]
    most = min(WARM_UP, cell.max_new_tokens)
    options = {"max_new_tokens": most, "rule": cell.rule, "tree": cell.tree, "seed": 0}
    prompt_sets.answer(engine, prompts, cell.sampling, **options)


def answers(row: Mapping[str, Any] | None, cell: Cell, place: int, output: Path) -> bool:
    """Return whether a row is there. Raises ValueError if it is the sample's answer to another prompt."""
    asked = cell.questions
    known = digest_json(asked.prompts[place])
    if row is not None and row.get("prompt", known) != known:  # older rows say nothing: trusted
        raise ValueError(
            f"{output}: sample {asked.samples[place].id!r} of {asked.task.name} was another prompt when it "
            "was answered: its file has changed; name another output"
        )
    return row is not None


def turns(cells: Sequence[Cell], batch_size: int) -> Iterator[tuple[Cell, Sequence[int]]]:
    """Yield every cell with every batch of its samples' places; a task's cells take turns, batch by batch.

    Prompts of like length share a batch: shorter ones are padded, and padding costs as much as a prompt.
    """
    tasks: dict[int, list[Cell]] = {}
    for cell in cells:
        tasks.setdefault(id(cell.questions), []).append(cell)
    for mine in tasks.values():
        prompts = mine[0].questions.prompts
        places = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        for number, part in enumerate(prompt_sets.batches(places, batch_size)):
            for cell in prompt_sets.rotated(mine, number):
                yield cell, part


def answer(engine: EagleFSD, cell: Cell, places: Sequence[int], meter: Meter) -> Iterator[dict[str, Any]]:
    """Answer one batch of a cell; yields what its rows say of each sample, the meter's fields among it."""
    questions = cell.questions
    prompts = [questions.prompts[place] for place in places]
    output = prompt_sets.answer(
        engine,
        prompts,
        cell.sampling,
        max_new_tokens=cell.max_new_tokens,
        rule=cell.rule,
        tree=cell.tree,
        # Streams of other seeds have nothing in common with these.
        seed=[(cell.seed, questions.numbers[place]) for place in places],
        observer=meter,
    )
    seconds = (output.stats[0].seconds - meter.seconds) / len(places)  # a batch's rows share its time
    for row, (place, tokens, stats) in enumerate(zip(places, output.new_tokens, output.stats, strict=True)):
        sample = questions.samples[place]
        text = engine.tokenizer.decode(tokens, skip_special_tokens=True)
        yield {
            "sample": sample.id,
            "seed": cell.seed_of(place),
            "prompt": digest_json(prompts[row]),
            "prompt_tokens": len(prompts[row]),
            "token_ids": tokens,
            "text": text,
            **{name: getattr(stats, name) for name in COUNTED},
            "seconds": seconds,
            **meter.row(row),
            "scores": questions.task.score(sample.reference, text),
        }
