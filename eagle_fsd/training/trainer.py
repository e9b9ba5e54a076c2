"""Train a head on examples with features: the loop. It knows no text and no names of models.

Everything random in a batch comes from the seed and the batch's place in the run. A run that was stopped or
killed therefore continues with exactly the losses of one that was not. With `minutes` the schedule follows
the clock, and no two runs are the same. Several processes divide the batches of a step among them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from eagle_fsd.core.devices import release_freed_memory
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.files.fingerprints import digest_tensors, sample_values
from eagle_fsd.files.jsonl import append_row
from eagle_fsd.training.batching import (
    Lesson,
    add_noise,
    batch_plan,
    collate,
    features_std,
    input_sizes,
    tokens_of_batch,
)
from eagle_fsd.training.data.prefetch import prefetch
from eagle_fsd.training.data.shards import Features, FeatureSequence
from eagle_fsd.training.eagle3.loss import best_drafted, eagle3_loss
from eagle_fsd.training.held_out import evaluate, hold_out
from eagle_fsd.training.loss import Batch, Head, LossWeights, head_loss, moved_to
from eagle_fsd.training.optimizer import HeadOptimizer
from eagle_fsd.training.readout import Readout
from eagle_fsd.training.run.folder import (
    BEST,
    CHECKPOINT,
    LOG,
    Report,
    cut_log,
    flatten,
    read_checkpoint,
    read_log,
    refuse_other_run,
    save_atomically,
)
from eagle_fsd.training.run.process import memory_in_use, stop_on_signals
from eagle_fsd.training.schedule import TrainConfig, learning_rate_at

logger = logging.getLogger(__name__)

RELEASE_EVERY = 20  # steps
AHEAD = 2  # batches that are read and padded while a GPU works on an earlier one
REPORT_EVERY = 20  # steps that a GPU does before the host reads their losses
SAMPLE = 64  # sequences that the sizes of features and embeddings are measured on


class HeadLoss(nn.Module):
    """The head and its loss as one module: data-parallel wrappers need one forward per batch."""

    def __init__(self, head: Head, weights: LossWeights, feature_std: float) -> None:
        super().__init__()
        self.head, self.weights, self.feature_std = head, weights, feature_std

    def forward(self, batch: Batch, embedding: Tensor, readout: Readout, steps: int) -> tuple[Tensor, Tensor]:
        if isinstance(self.head, Eagle3Head):
            return eagle3_loss(self.head, batch, embedding, readout, steps, self.weights)
        return head_loss(self.head, batch, embedding, readout, self.feature_std, steps, self.weights)


class Trainer:
    """The state of one run in `folder`: head, optimizer, step and seconds so far."""

    def __init__(
        self,
        head: Head,
        data: Features,
        numbers: Sequence[int],
        held_out: Sequence[FeatureSequence],
        embedding: Tensor,
        readout: Readout,
        common: Tensor,
        config: TrainConfig,
        folder: str | Path,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Prepare a run.

        numbers: the examples of `data` to train on. held_out: others, to measure the head on. common: the
        softmax's tokens (see softmax_tokens); for an EAGLE-3 head those that it drafts.
        """
        sample = data.read(numbers[:SAMPLE])
        self.eagle3 = isinstance(head, Eagle3Head)
        width, wanted, best = sample[0].inputs.shape[1], head.config.hidden_size, None
        if isinstance(head, Eagle3Head):
            wanted, best = head.config.fc_inputs, best_drafted(head)
        if width != wanted or sample[0].features.shape[1] != embedding.shape[1]:
            raise ValueError(
                f"features are {width} wide, head {wanted}, embedding {embedding.shape[1]}; "
                "extract the features with the target that the head is made for"
            )
        self.accelerator = accelerator or Accelerator()
        self.device = self.accelerator.device
        self.data, self.numbers, self.config = data, list(numbers), config
        self.embedding, self.readout = embedding.to(self.device), readout.to(self.device)
        self.held_out = hold_out(held_out, self.readout, device=self.device, best=best)
        self.common = common.cpu()  # where batches are made
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lengths = [len(data.tokens[number]) for number in self.numbers]
        self.feature_std = features_std(sample)
        self.dtype = torch.bfloat16 if config.bfloat16 else torch.float32
        self.head = head.to(self.device)
        self.batches_per_step = config.accumulate * self.accelerator.num_processes
        self.identity = self.run_identity()
        sizes = input_sizes(sample, None if self.eagle3 else embedding)
        self.optimizer = HeadOptimizer(self.head, config.weight_decay, sizes)
        self.model = self.accelerator.prepare(HeadLoss(self.head, config.loss, self.feature_std))
        plan = batch_plan(self.lengths, config.batch_tokens, config.seed, 0)
        self.steps_per_epoch = len(plan) / self.batches_per_step
        self.step, self.seconds, self.best = 0, 0.0, -1.0
        self.resumed_at = 0  # the step that this process began with
        self.stop = 0  # the signal that asked for it
        # On a CPU nothing overlaps, and the loss of a step is known when it ends.
        self.ahead, self.report_every = (0, 1) if self.device.type == "cpu" else (AHEAD, REPORT_EVERY)
        self.unread: list[Report] = []

    def progress(self) -> float:
        """Return the share of the run that is done, from 0; the run ends at 1."""
        by_steps = self.step / (self.config.epochs * self.steps_per_epoch)
        by_time = self.seconds / (60 * self.config.minutes) if self.config.minutes else 0.0
        return max(by_steps, by_time)

    def batches(self, first: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the run's batches from the place `first` on, epoch after epoch: (place, numbers)."""
        place = count()
        for epoch in count():
            for picked in batch_plan(self.lengths, self.config.batch_tokens, self.config.seed, epoch):
                if (here := next(place)) >= first:
                    yield here, [self.numbers[index] for index in picked]

    def shares(self) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield this process's batches of every step, from the current step on."""
        stream = self.batches(self.step * self.batches_per_step)
        while True:
            whole = list(islice(stream, self.batches_per_step))
            yield whole[self.accelerator.process_index :: self.accelerator.num_processes]

    def lessons(self) -> Generator[list[Lesson], None, None]:
        """Yield the lessons of every step from the current one on. Close the generator to end its thread."""
        return prefetch(lambda share: [self.lesson(*one) for one in share], self.shares(), self.ahead)

    def lesson(self, place: int, numbers: Sequence[int]) -> Lesson:
        """Make the batch at a place of the run. It is the same whenever and wherever it is made."""
        batch = collate(self.data.read(numbers))
        tokens = self.common if self.eagle3 else tokens_of_batch(self.common, batch)
        lesson = Lesson(batch, tokens, self.config.seed * 1_000_003 + place)
        return lesson.pinned() if self.device.type == "cuda" else lesson

    def train_step(self, share: Sequence[Lesson]) -> Report:
        """Update the head from this process's batches, and report the result."""
        progress = self.progress()
        rate = learning_rate_at(progress, self.config)
        depth = self.config.unroll if progress >= self.config.unroll_after else 1
        self.head.zero_grad()
        parts = []
        for index, lesson in enumerate(share):
            # Processes exchange gradients once per step, with the last batch.
            last = index == len(share) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss, entropies = self.loss_of(lesson, depth)
                self.accelerator.backward(loss / len(share))
            parts.append(torch.cat((loss.detach()[None], entropies)))
        parts = self.accelerator.gather(torch.stack(parts))
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        values = torch.cat((parts[:, 0].mean()[None], norm.detach()[None], parts[:, 1:].nanmean(0)))
        report = Report(self.step, rate, values)
        self.unread.append(report)
        if len(self.unread) >= self.report_every:
            self.check()  # before the step: on a CPU no head ever holds a NaN
        self.optimizer.step(rate)
        self.step += 1
        return report

    def check(self) -> None:
        """Wait for the steps that are not logged yet. Raises ValueError if a loss or gradient is not finite.

        Nothing is evaluated or written before this check, so that no checkpoint ever holds a NaN.
        """
        for report in self.unread:
            if not math.isfinite(report.loss + report.norm):
                raise ValueError(
                    f"the loss is {report.loss} and its gradient's norm {report.norm} at step {report.step}: "
                    "both must be finite; lower --learning-rate, or check the features"
                )

    def log_steps(self) -> None:
        """Check and log the steps that are not logged yet."""
        self.check()
        for report in self.unread:
            self.log(report.record())
        self.unread.clear()

    def loss_of(self, lesson: Lesson, depth: int) -> tuple[Tensor, Tensor]:
        """Compute the loss of one batch, and the cross-entropy [depth] of every drafting step."""
        batch, tokens = lesson.batch.to(self.device), moved_to(self.device, lesson.tokens)
        batch = add_noise(batch, self.config.noise, self.feature_std, lesson.seed)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bfloat16):
            # Whether a token is the target's best is a question of all of them.
            readout = (self.readout if self.eagle3 else self.readout.restrict(tokens)).to(self.dtype)
            return self.model(batch, self.embedding, readout, depth)

    def run(self) -> dict[str, Any]:
        """Train from the folder's checkpoint to the end of the schedule, and return the last evaluation.

        SIGTERM, Ctrl-C and a terminal that closes end the run early and set `stop`.
        """
        self.resume()
        shown = self.accelerator.is_main_process and self.progress() < 1
        if self.accelerator.is_main_process:
            cut_log(self.folder, self.step)
        result: dict[str, Any] = {}
        total = None if self.config.minutes else math.ceil(self.config.epochs * self.steps_per_epoch)
        bar = tqdm(total=total, initial=self.step, unit="step", mininterval=10, disable=not shown)
        with stop_on_signals(self), bar, closing(self.lessons()) as lessons:
            while not self.ends():
                started = time.monotonic()
                report = self.train_step(next(lessons))
                self.seconds += time.monotonic() - started
                report.seconds = self.seconds
                bar.update()
                if self.step % RELEASE_EVERY == 0:
                    release_freed_memory()
                    report.memory = memory_in_use(self.device)
                evaluates = self.step % self.config.eval_every == 0
                saves = self.step % self.config.checkpoint_every == 0
                if evaluates or saves or len(self.unread) >= self.report_every:
                    self.log_steps()
                    bar.set_postfix_str(f"loss={report.loss:.3f}, done={min(self.progress(), 1):.1%}", False)
                if evaluates:
                    result = self.evaluate_and_keep()
                if saves:
                    self.save()
        self.log_steps()
        self.save()  # now: whoever interrupts the last evaluation loses no step
        if not self.stop:
            result = self.known_result() or self.evaluate_and_keep()
            self.save()
        return result

    def ends(self) -> bool:
        """Return whether the run ends here, by its schedule or by a signal to any of its processes.

        To agree on that and on one clock waits for a GPU. Without a clock they do so where losses are read.
        """
        if self.accelerator.num_processes > 1:
            if not (self.config.minutes or self.step % self.report_every == 0 or self.progress() >= 1):
                return False
            mine = torch.tensor([[float(self.stop), self.seconds]], device=self.device)
            stop, seconds = self.accelerator.gather(mine).amax(0).tolist()
            self.stop, self.seconds = int(stop), seconds
        return bool(self.stop) or self.progress() >= 1

    def evaluate_and_keep(self) -> dict[str, Any]:
        """Keep the head with the best expected chain length, and log the held-out accuracy.

        The log comes last, so that an evaluation that it holds is not missing beside it, whatever happens.
        """
        if not self.accelerator.is_main_process:
            return {}
        started = time.monotonic()
        result = evaluate(self.head, self.held_out, self.embedding)
        self.seconds += time.monotonic() - started
        if result["chain_tau"] > self.best or not (self.folder / BEST).is_file():
            self.best = result["chain_tau"]
            save_atomically(
                {"head": self.head.state_dict(), "step": self.step, "held_out": result}, self.folder / BEST
            )
        self.log({"step": self.step, "held_out": result})
        logger.info("step %d: %s", self.step, result)
        return result

    def known_result(self) -> dict[str, Any]:
        """Return the evaluation that the log holds of this step; empty if there is none, or no best head."""
        held = [record for record in read_log(self.folder) if "held_out" in record]
        if not (self.folder / BEST).is_file():
            return {}
        return held[-1]["held_out"] if held and held[-1]["step"] == self.step else {}

    def log(self, record: dict[str, Any]) -> None:
        """Write one record to the run's log and to its trackers."""
        if self.accelerator.is_main_process:
            append_row(self.folder / LOG, record)
            self.accelerator.log(flatten(record), step=record["step"])

    def save(self) -> None:
        """Write the checkpoint that `resume` reads."""
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "run": self.identity,
        }
        if self.accelerator.is_main_process:
            save_atomically(state, self.folder / CHECKPOINT)

    def resume(self) -> bool:
        """Continue from the folder's checkpoint, if any. Raises ValueError if it is of another run."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        state = read_checkpoint(path, "run", "head", "optimizer", "step", "seconds", "best")
        refuse_other_run(path, state["run"], self.identity)
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.resumed_at = self.step
        logger.info("%s at step %d", "ended" if self.progress() >= 1 else "resumed", self.step)
        return True

    def run_identity(self) -> dict[str, Any]:
        """Return what a checkpoint must have in common with the run that resumes it."""
        return {
            "config": asdict(self.config),
            "batches_per_step": self.batches_per_step,
            "head": asdict(self.head.config),
            "start": digest_tensors(self.head.parameters()),
            "sequences": len(self.numbers),
            "tokens": digest_tensors(self.data.tokens[number] for number in self.numbers),
            "learn": digest_tensors(self.data.learn[number] for number in self.numbers),
            "common": digest_tensors([self.common]),
            "embedding": digest_tensors([sample_values(self.embedding, 4096)]),
            "lm_head": digest_tensors([sample_values(self.readout.weight, 4096)]),
            "bias": None if self.readout.bias is None else digest_tensors([self.readout.bias]),
            "logits": asdict(self.readout.transform),
            "optimizer": "Muon",  # earlier versions used AdamW: their runs cannot be resumed
            "feature_std": f"{self.feature_std:.4g}",  # its last digits vary with the number of threads
        }
