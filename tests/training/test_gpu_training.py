"""Training on a GPU, which tests/support pretends: the heads and figures of a CPU, and few waits for it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eagle3 import eagle3_head
from support.pretended_cuda_calls import NAME, pretended_cuda
from support.tiny_models import prompts_of, tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from support.training_world import FAST, losses, noise, run_command, sequences, trainer_for
from torch import Tensor

from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.files.provenance import processor
from eagle_fsd.training.batching import add_noise, collate
from eagle_fsd.training.commands import head as head_command
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.eagle3.new_head import make_trainable
from eagle_fsd.training.held_out import evaluate
from eagle_fsd.training.readout import Readout
from eagle_fsd.training.run.folder import BEST, read_checkpoint, read_log
from eagle_fsd.training.schedule import TrainConfig
from eagle_fsd.training.trainer import REPORT_EVERY, Trainer

SHORT = replace(FAST, epochs=3, noise=0.2)
KINDS = ("eagle", "eagle3", "bfloat16")


def eagle3_data(count: int) -> list[FeatureSequence]:
    rows = prompts_of([8 + number % 5 for number in range(count)], seed=3)
    return [
        FeatureSequence(
            torch.tensor(row),
            torch.arange(len(row)) >= 2,
            noise(len(row), 32, seed=place),
            noise(len(row), 96, seed=99 + place),
        )
        for place, row in enumerate(rows)
    ]


def new_trainer(folder: Path, kind: str, config: TrainConfig = SHORT) -> Trainer:
    """Return a run on a GPU where there is one."""
    if kind != "eagle3":
        return trainer_for(folder, replace(config, bfloat16=kind == "bfloat16"))
    head: Eagle3Head = eagle3_head(2)
    make_trainable(head)
    data, lm_head = eagle3_data(10), noise(96, 32, seed=7)
    parts: dict[str, Any] = {"sequences": data[2:], "held_out": data[:2], "common": head.draft_tokens}
    parts |= {"embedding": noise(96, 32, seed=6), "readout": Readout(lm_head)}
    return trainer_for(folder, config, head, **parts)


Result = tuple[list[float], list[Any], dict[str, Tensor]]


def result(folder: Path) -> Result:
    held = [record["held_out"] for record in read_log(folder) if "held_out" in record]
    return losses(folder), held, read_checkpoint(folder / BEST, "head")["head"]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Return the losses and the head of a run of each kind on a CPU."""

    @cache
    def of(kind: str) -> Result:
        folder = tmp_path_factory.mktemp(kind)
        new_trainer(folder, kind).run()
        return result(folder)

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_a_gpu_has_the_losses_and_the_head_of_one_on_a_cpu(
    tmp_path: Path, kind: str, whole: Callable[[str], Result]
) -> None:
    """Its steps do not wait: their losses are read together."""
    with pretended_cuda() as gpu:
        trainer = new_trainer(tmp_path, kind)
        assert trainer.device.type == "cuda" and trainer.head.fc.weight.is_cuda
        trainer.run()
        gpu.waits.clear()
        lessons = trainer.lessons()
        for _ in range(4):
            trainer.train_step(next(lessons))
        lessons.close()
        assert not gpu.waits
        evaluate(trainer.head, trainer.held_out, trainer.embedding)
        assert len(gpu.waits) == len(trainer.held_out.sequences) * trainer.held_out.depth + 3
    on_cpu, on_gpu = whole(kind), result(tmp_path)
    assert len(on_cpu[0]) > 8 and len(on_cpu[1]) == 2
    assert on_gpu[:2] == on_cpu[:2] and same(on_gpu[2], on_cpu[2])


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        *(("eagle", "cpu"), ("eagle3", "gpu")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("eagle", "gpu"), ("eagle3", "cpu"))),
    ],
)
def test_a_run_goes_on_on_another_device(
    tmp_path: Path, kind: str, first: str, whole: Callable[[str], Result]
) -> None:
    """From a checkpoint that was written on the first one. Its figures are those of a run on a CPU alone."""

    def begin() -> None:
        trainer = new_trainer(tmp_path, kind)
        step = trainer.train_step

        def stop_after_five(share: Any) -> Any:
            if trainer.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(share)

        trainer.train_step = stop_after_five  # type: ignore[method-assign]
        trainer.run()

    parts = [begin, lambda: new_trainer(tmp_path, kind).run()]
    for device, part in zip((first, "gpu" if first == "cpu" else "cpu"), parts, strict=True):
        if device == "cpu":
            part()
        else:
            with pretended_cuda():
                part()
    wanted, both = whole(kind), result(tmp_path)
    assert both[:2] == wanted[:2] and same(both[2], wanted[2])


@pytest.mark.parametrize(("minutes", "often"), [(0.0, False), (60.0, True)])
def test_processes_ask_each_other_where_losses_are_read(tmp_path: Path, minutes: float, often: bool) -> None:
    """Whoever asks waits for a GPU, which only a clock is worth. They still end together."""
    with pretended_cuda() as gpu:
        trainer = new_trainer(tmp_path, "eagle", replace(SHORT, minutes=minutes, epochs=100.0))
        ends: list[int] = []
        for at in range(2 * REPORT_EVERY):
            gpu.waits.clear()
            trainer.step = at
            trainer.stop = signal.SIGTERM if at == REPORT_EVERY + 1 else 0
            trainer.accelerator = SimpleNamespace(num_processes=2, gather=lambda own: torch.cat((own, own)))
            if trainer.ends():
                ends.append(at)
            assert bool(gpu.waits) == (often or at % REPORT_EVERY == 0)
    assert ends == ([REPORT_EVERY + 1] if often else [])


def test_noise_is_drawn_where_the_batch_is() -> None:
    batch = collate(sequences(2))
    with pretended_cuda() as gpu:
        there = add_noise(batch.pinned().to(torch.device("cuda")), 0.5, 1.0, seed=3)
        assert there.features.is_cuda and not gpu.waits
        with pytest.raises(RuntimeError, match="generator is of cuda:0"):
            torch.rand(3, generator=torch.Generator("cuda"))


# --- the commands ---

SETTINGS = "--held-out 2 --batch-tokens 128 --float32 --extract-dtype float32 --epochs 1 --unroll 2"


class World:
    """A target on disk, and rows to learn from; commands run on the CPU or on the pretended GPU."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        tiny_model().save_pretrained(folder / "target")
        tiny_tokenizer().save_pretrained(folder / "target")
        words = ("one", "two", "three", "four", "five", "six")
        self.write("prompts", [{"prompt": f"Say {word}"} for word in words])
        self.write("rows", [{"prompt": f"Say {word}", "completion": 3 * word} for word in words])
        patch.setattr(head_command, "plot_curves", lambda folder: None)

    def write(self, name: str, rows: list[dict[str, str]]) -> None:
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, where: str, command: str, line: str) -> Counter[str]:
        """Run a command with its output in this folder, and return where it waited for the GPU."""
        (self.folder / where).mkdir(exist_ok=True)
        line = f"--base-model {{}}/target {line}".replace("OUT", str(self.folder / where))
        line = line.replace("{}", str(self.folder))
        if where == "cpu":
            run_command(command, line)
            return Counter()
        with pretended_cuda() as gpu:
            run_command(command, line)
        return Counter(one.split(" ")[0] for one in gpu.waits)

    def both(self, command: str, line: str, on_cpu: str = "--cpu") -> Counter[str]:
        self.run("cpu", command, f"{line} {on_cpu}")
        return self.run("gpu", command, line)

    def bytes_of(self, name: str) -> list[bytes]:
        return [(self.folder / where / name).read_bytes() for where in ("cpu", "gpu")]

    def device_of(self, where: str, name: str) -> Any:
        return json.loads((self.folder / where / name).read_text())["device"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_features_heads_and_reports_are_those_of_a_cpu(commands: World) -> None:
    """From text to a head of either kind, and its report. Records name the device that did it."""
    commands.both(
        "features", "--data {}/rows.jsonl --eagle3 --taps 1,2,2 --extract-dtype float32 --output OUT"
    )
    assert len(set(commands.bytes_of("rows/shard_00000.safetensors"))) == 1
    for name, more in (("one", ""), ("three", "--eagle3 --taps 1,2,2 --draft-vocab-size 60")):
        line = f"{SETTINGS} {more} --shards OUT/rows --output OUT/{name} --export OUT/{name}/export"
        commands.both("head", line)
        assert len(set(commands.bytes_of(f"{name}/export/model.safetensors"))) == 1, name
        assert commands.device_of("cpu", f"{name}/provenance.json") == processor()
        assert commands.device_of("gpu", f"{name}/provenance.json") == NAME
        report = "--prompts {}/prompts.jsonl --limit 2 --tree 6/2/3 --max-new-tokens 6 --dtype float32"
        commands.both(
            "evaluate", f"{report} --no-pack --ea-model OUT/{name}/export --output OUT/{name}", "--device cpu"
        )
        on_cpu, on_gpu = (json.loads(one) for one in commands.bytes_of(f"{name}/report.json"))
        measured = ("right", "reached", "tau", "accept_histogram", "along_text")
        assert [on_cpu[one] for one in measured] == [on_gpu[one] for one in measured]
        assert on_gpu["error"] == pytest.approx(on_cpu["error"])


def test_a_head_learns_on_from_another_with_features_made_for_each_batch(commands: World) -> None:
    first = f"{SETTINGS} --data {{}}/rows.jsonl --online"
    commands.both("head", f"{first} --eagle3 --taps 1,2,2 --output OUT/new --export OUT/new/export")
    more = "--eagle3 --init-head OUT/new/export --intermediate-size 60"
    commands.both("head", f"{first} {more} --output OUT/old --export OUT/old/export")
    assert len(set(commands.bytes_of("old/export/model.safetensors"))) == 1


def test_answers_of_a_gpu_are_the_targets(commands: World) -> None:
    """And on a machine with a GPU, the record of what a CPU wrote names the CPU."""
    line = "--prompts {}/prompts.jsonl --max-new-tokens 6 --rows 3 --dtype float32 --output OUT/answers.jsonl"
    commands.both("synthesize", line, "--device cpu")
    assert len(set(commands.bytes_of("answers.jsonl"))) == 1
    commands.run("beside", "synthesize", f"{line} --device cpu")
    devices = [commands.device_of(one, "answers.provenance.json") for one in ("cpu", "gpu", "beside")]
    assert devices == [processor(), NAME, processor()]


def test_a_head_that_a_cpu_trained_beside_a_gpu_is_not_said_to_be_a_gpus(commands: World) -> None:
    more = "--data {}/rows.jsonl --cpu --output OUT/run --export OUT/run/export"
    assert not commands.run("beside", "head", f"{SETTINGS} {more}")
    assert commands.device_of("beside", "run/provenance.json") == processor()
    exported = json.loads((commands.folder / "beside" / "run" / "exports.jsonl").read_text())
    assert exported["device"] == processor()
