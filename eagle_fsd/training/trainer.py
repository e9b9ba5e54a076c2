"""The training loop: sequences with features in, a trained head out; knows no text and no models' names.

Everything random at step s comes from (seed, s), so a run that was stopped, or killed, goes on with the very
losses of one that was not. With `minutes` the schedule follows the clock, and no two runs are the same.
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_fsd.checkpoint import one_line
from eagle_fsd.head import DraftHead
from eagle_fsd.identity import differences, digest, spread
from eagle_fsd.training.batching import add_noise, batch_plan, collate, features_std, tokens_of_batch
from eagle_fsd.training.evaluation import HeldOut, evaluate
from eagle_fsd.training.features import FeatureSequence, whole_file, write_atomically
from eagle_fsd.training.loss import Batch, head_loss
from eagle_fsd.training.schedule import TrainConfig, learning_rate_at, make_optimizers

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
LOG = "log.jsonl"
# What torch.load raises for a file that is cut short or another's.
DAMAGE = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, LookupError, TypeError, ValueError)


class Trainer:
    """The state of one run in `folder`: head, optimizers, step and seconds so far."""

    def __init__(
        self,
        head: DraftHead,
        sequences: Sequence[FeatureSequence],
        held_out: HeldOut,
        embedding: Tensor,
        lm_head: Tensor,
        common: Tensor,
        config: TrainConfig,
        folder: str | Path,
    ) -> None:
        width = sequences[0].features.shape[1]
        if width != head.config.hidden_size or width != embedding.shape[1]:
            raise ValueError(
                f"features are {width} wide, head {head.config.hidden_size}, embedding {embedding.shape[1]}; "
                "extract the features with the target that the head is made for"
            )
        self.head, self.sequences, self.held_out, self.config = head, sequences, held_out, config
        self.embedding, self.lm_head, self.common = embedding, lm_head, common
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lengths = [len(sequence.tokens) for sequence in sequences]
        self.feature_std = features_std(sequences)
        self.dtype = torch.bfloat16 if config.bfloat16 else torch.float32
        self.optimizers = make_optimizers(head, config)
        self.step, self.seconds, self.best = 0, 0.0, -1.0
        self.steps_per_epoch = len(batch_plan(self.lengths, config.batch_tokens, config.seed, 0))
        self.stop = False
        self.identity = self.run_identity()

    def progress(self) -> float:
        by_steps = self.step / max(self.config.epochs * self.steps_per_epoch, 1)
        by_time = self.seconds / (60 * self.config.minutes) if self.config.minutes else 0.0
        return max(by_steps, by_time)

    def batches(self) -> Iterator[Batch]:
        """Batches from the current step on, epoch after epoch."""
        done = 0
        epoch = 0
        while True:
            plan = batch_plan(self.lengths, self.config.batch_tokens, self.config.seed, epoch)
            for numbers in plan[max(self.step - done, 0) :]:
                yield collate([self.sequences[number] for number in numbers])
            done += len(plan)
            epoch += 1

    def train_step(self, batch: Batch) -> dict[str, Any]:
        progress = self.progress()
        rate = learning_rate_at(progress, self.config)
        steps = self.config.unroll if progress >= self.config.unroll_after else 1
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        noisy = add_noise(
            batch, self.config.noise, self.feature_std, self.config.seed * 1_000_003 + self.step
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bfloat16):
            weight = self.lm_head[tokens_of_batch(self.common, batch)].to(self.dtype)  # [S, d]
            loss, entropies = head_loss(
                self.head,
                noisy,
                self.embedding,
                weight,
                self.feature_std,
                steps,
                self.config.loss,
            )
        if not torch.isfinite(loss):
            raise ValueError(
                f"the loss is {loss.item()} at step {self.step}: lower --learning-rate, or check the features"
            )
        if loss.requires_grad:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return {"loss": loss.item(), "cross_entropy": entropies, "norm": norm.item(), "lr": rate}

    def run(self) -> dict[str, Any]:
        """Train to the end of the schedule, from the folder's checkpoint on, and return the last evaluation.

        SIGTERM and Ctrl-C end it early, with `stop` set.
        """
        self.resume()
        self.cut_log()
        result: dict[str, Any] = {}
        with stop_on_signals(self), tqdm(initial=self.step, unit="step", mininterval=10) as bar:
            for batch in self.batches():
                if self.stop or self.progress() >= 1:
                    break
                started = time.monotonic()
                report = self.train_step(batch)
                self.seconds += time.monotonic() - started
                bar.update()
                bar.set_postfix(loss=f"{report['loss']:.3f}", done=f"{self.progress():.1%}", refresh=False)
                self.log({"step": self.step, "seconds": round(self.seconds, 1), **report})
                if self.step % self.config.eval_every == 0:
                    result = self.evaluate_and_keep()
                if self.step % self.config.checkpoint_every == 0:
                    self.save()
        if not self.stop:
            result = self.evaluate_and_keep()
        self.save()
        return result

    def evaluate_and_keep(self) -> dict[str, Any]:
        """Held-out accuracy into the log; the head with the best expected chain length is kept."""
        started = time.monotonic()
        result = evaluate(self.head, self.held_out, self.embedding)
        self.seconds += time.monotonic() - started
        self.log({"step": self.step, "held_out": result})
        logger.info("step %d: %s", self.step, result)
        if result["chain_tau"] > self.best:
            self.best = result["chain_tau"]
            save_atomically(
                {"head": self.head.state_dict(), "step": self.step, "held_out": result}, self.folder / BEST
            )
        return result

    def log(self, record: dict[str, Any]) -> None:
        with (self.folder / LOG).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")

    def save(self) -> None:
        state = {
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "run": self.identity,
        }
        save_atomically(state, self.folder / CHECKPOINT)

    def resume(self) -> bool:
        """Take up the folder's checkpoint, if there is one; one of another run or setting is a ValueError."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        state = read_checkpoint(path)
        if changed := differences(fixed(state["run"]), fixed(self.identity)):
            raise ValueError(f"{path} is of another run ({changed}); name another --output, or remove it")
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(saved))
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        logger.info("resumed at step %d", self.step)
        return True

    def cut_log(self) -> None:
        """Drop what a run that was killed logged after its last checkpoint: those steps are taken again."""
        path = self.folder / LOG
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # the last may be torn
            write_atomically(path, "".join(line for line in whole if json.loads(line)["step"] <= self.step))

    def run_identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that resumes it."""
        return {
            "config": asdict(self.config),
            "head": asdict(self.head.config),
            "sequences": len(self.sequences),
            "tokens": digest(sequence.tokens for sequence in self.sequences),
            "learn": digest(sequence.learn for sequence in self.sequences),
            "common": digest([self.common]),
            "embedding": digest([spread(self.embedding, 4096)]),
            "lm_head": digest([spread(self.lm_head, 4096)]),
            "feature_std": f"{self.feature_std:.4g}",  # its last digits vary with the number of threads
        }


def fixed(run: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's identity that a resumed run may not change; its length and its pauses it may."""
    free = ("epochs", "minutes", "eval_every", "checkpoint_every")
    return run | {"config": {name: value for name, value in run["config"].items() if name not in free}}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A file of save_atomically; ValueError for what is none."""
    with path.open("rb") as file:
        try:
            return dict(torch.load(file, map_location="cpu", weights_only=True))
        except DAMAGE as error:
            raise ValueError(
                f"{path} is not a whole checkpoint ({one_line(error, 80)}); remove it to start again"
            ) from error


def save_atomically(state: dict[str, Any], path: Path) -> None:
    with whole_file(path) as partial:
        torch.save(state, partial)


@contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and Ctrl-C let the step finish, and the run writes its checkpoint and ends.

    A second one is the system's again.
    """

    def request_stop(number: int, _frame: object) -> None:
        logger.warning("signal %d: writing a checkpoint after this step", number)
        trainer.stop = True
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, request_stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
