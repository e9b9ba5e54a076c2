"""The training loop: resuming, logs, checkpoints, schedule; held-out measures."""

from __future__ import annotations

import copy
import errno
import json
import math
import signal
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from support.training_world import (
    FAST,
    VOCAB,
    WIDTH,
    Oracle,
    lm_head,
    losses,
    require_exact_resume,
    sequences,
    tiny_head,
    trainer_for,
    world,
)
from torch import Tensor

from eagle_fsd.core.process.signals import ENDING
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.target.architecture import LogitsTransform
from eagle_fsd.training import loss as loss_module
from eagle_fsd.training import trainer as trainer_module
from eagle_fsd.training.data import shards as shards_module
from eagle_fsd.training.data.shards import FeatureSequence, write_shard
from eagle_fsd.training.held_out import HeldOut, best_tokens, evaluate, hold_out
from eagle_fsd.training.loss import (
    LossWeights,
    unroll,
)
from eagle_fsd.training.readout import Readout
from eagle_fsd.training.run import folder as runs_module
from eagle_fsd.training.run.folder import BEST, CHECKPOINT, LOG, read_checkpoint, read_log, save_atomically
from eagle_fsd.training.run.process import stop_on_signals
from eagle_fsd.training.schedule import initialise, learning_rate_at, widen


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    config = replace(FAST, noise=0.1, accumulate=2)
    require_exact_resume(lambda folder: trainer_for(folder, config), tmp_path)


@pytest.mark.parametrize("kill_after", [2, 8])
def test_a_killed_run_leaves_every_step_once_in_the_log(tmp_path: Path, kill_after: int) -> None:
    """Killed before the first checkpoint and after the second, in the middle of a line of the log."""
    config = replace(FAST, checkpoint_every=4)
    trainer_for(tmp_path / "whole", config).run()
    killed = trainer_for(tmp_path / "killed", config)
    step = killed.train_step

    def kill(batch: object) -> dict[str, object]:
        if killed.step == kill_after:
            raise KeyboardInterrupt
        return step(batch)

    killed.train_step = kill
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    with (tmp_path / "killed" / LOG).open("a") as log:
        log.write('{"step": 9, "lo')
    trainer_for(tmp_path / "killed", config).run()

    def steps(folder: Path) -> list[tuple[int, bool]]:
        records = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
        return [(record["step"], "loss" in record) for record in records]

    assert steps(tmp_path / "killed") == steps(tmp_path / "whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_a_run_heeds_signals_and_ignores_those_that_its_process_ignores(number: signal.Signals) -> None:
    """A script has its jobs in the background ignore Ctrl-C, which is meant for another process then."""
    usual = signal.signal(number, signal.SIG_DFL)
    try:
        for handler, wanted in ((signal.SIG_DFL, number), (signal.SIG_IGN, 0)):
            signal.signal(number, handler)
            run = SimpleNamespace(stop=0)
            with stop_on_signals(run):
                signal.raise_signal(number)
            assert run.stop == wanted and signal.getsignal(number) is handler
    finally:
        signal.signal(number, usual)


@pytest.mark.parametrize("minutes", [0.0, 60.0])
def test_a_run_that_has_ended_shows_no_progress_beyond_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, minutes: float
) -> None:
    """Nor a bar of no step, when it is started again. Its last step may be of more batches than are left."""
    config = replace(FAST, accumulate=2, epochs=3, minutes=minutes)
    trainer = trainer_for(tmp_path, config)
    steps = config.epochs * trainer.steps_per_epoch
    assert steps == 4.5
    trainer.run()
    shown = capsys.readouterr().err
    assert "done=100.0%" in shown and trainer.step == math.ceil(steps)
    assert minutes or f" {trainer.step}/{trainer.step} [" in shown
    with caplog.at_level("INFO"):
        trainer_for(tmp_path, config).run()
    assert capsys.readouterr().err == ""
    assert f"ended at step {trainer.step}" in caplog.messages


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Whatever the losses depend on must be what it was; the run's length and its pauses need not."""
    config, data = replace(FAST, epochs=0.5), sequences()[2:]
    trainer_for(tmp_path, config).run()
    assert trainer_for(tmp_path, replace(config, epochs=2, eval_every=3)).resume()
    last = data[-1]
    changes: dict[str, dict[str, Any]] = {
        "tokens": {"sequences": [*data[:-1], replace(last, tokens=last.tokens.flip(0))]},
        "learn": {"sequences": [*data[:-1], replace(last, learn=~last.learn)]},
        "sequences": {"sequences": data[:-1]},
        "feature_std": {"sequences": [replace(one, features=1.01 * one.features) for one in data]},
        "embedding": {"embedding": lm_head() + 1},
        "lm_head": {"readout": Readout(lm_head() + 1)},
        "bias": {"readout": Readout(lm_head(), torch.zeros(VOCAB))},
        r"logits\.scale": {"readout": Readout(lm_head(), None, LogitsTransform(scale=0.5))},
        r"logits\.cap": {"readout": Readout(lm_head(), None, LogitsTransform(cap=30.0))},
        "common": {"common": torch.arange(6)},
        "start": {"head": tiny_head(seed=9)},
        r"head\.rms_norm_eps": {"head": DraftHead(replace(tiny_head().config, rms_norm_eps=1e-5))},
        r"config\.learning_rate": {"config": replace(config, learning_rate=1e-4)},
        r"config\.loss\.decay": {"config": replace(config, loss=LossWeights(decay=0.5))},
    }
    for field, change in changes.items():
        other = trainer_for(tmp_path, **({"config": config} | change))
        with pytest.raises(ValueError, match=rf"is of another run \(.*{field} was .*, now .*--output"):
            other.run()


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_checkpoint_that_is_not_whole_is_named(tmp_path: Path, kept: float) -> None:
    trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()
    path = tmp_path / CHECKPOINT
    data = path.read_bytes()
    for broken in (data[: int(kept * len(data))], b"text"):
        path.write_bytes(broken)
        with pytest.raises(
            ValueError, match=r"checkpoint\.pt is not a whole checkpoint .*; remove it to start again"
        ) as error:
            trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()
        assert "\n" not in str(error.value)


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()
    log = (tmp_path / LOG).read_text()
    (tmp_path / LOG).write_text(log + '{"loss": 1.0}\n')
    with pytest.raises(ValueError, match=rf"{LOG}:{log.count(chr(10)) + 1} has no step: .*; delete it"):
        trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()
    torch.save({"run": {}}, tmp_path / CHECKPOINT)
    with pytest.raises(ValueError, match=r"no checkpoint of a run: it has no head, optimizer, .*; remove it"):
        trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no space left"), "no space left"),
        (OSError(errno.ENOSPC, "full"), r"cannot be written \(full\): free some space"),
        (SafetensorError("it (os error 28)"), r"cannot be written \(it \(os error 28\)\): free some space"),
        (SafetensorError("it (os error 5)"), r"cannot be written \(it \(os error 5\)\)$"),
    ],
)
def test_what_is_cut_short_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    """Writers say of a full disk what they like; the user reads one line."""

    def half(_: object, place: Path | BinaryIO) -> None:
        (place.write_bytes if isinstance(place, Path) else place.write)(b"half")
        raise error

    one = sequences(1)
    writers = {
        "a.pt": lambda path: save_atomically({"step": 1}, path),
        "a.safetensors": lambda path: write_shard(path, one, torch.float32),
        "a.json": lambda path: write_atomically(path, "text"),
    }
    for name, write in writers.items():
        write(tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in writers}
    monkeypatch.setattr(runs_module.torch, "save", half)
    monkeypatch.setattr(shards_module, "save_file", half)
    monkeypatch.setattr(Path, "write_text", lambda path, text, encoding: half(text, path))
    for name, write in writers.items():
        with pytest.raises(OSError, match=message):
            write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before[name]


def test_the_best_head_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([1.5, 2.5, 2.5, 2.0])  # of two that are equal, the first one
    monkeypatch.setattr(trainer_module, "evaluate", lambda *_: {"chain_tau": next(results)})
    trainer = trainer_for(tmp_path, FAST)
    for step in range(4):
        trainer.step = step
        with torch.no_grad():
            trainer.head.fc.weight.fill_(step)
        trainer.evaluate_and_keep()
    trainer.save()
    again = trainer_for(tmp_path, FAST)
    assert again.resume() and again.best == 2.5
    best = read_checkpoint(tmp_path / BEST)
    assert (
        best["step"] == 1 and best["held_out"] == {"chain_tau": 2.5} and best["head"]["fc.weight"].eq(1).all()
    )


def test_a_run_whose_best_head_is_gone_keeps_another(tmp_path: Path) -> None:
    """A damaged one is to be removed: then the last head is the best that is left."""
    trainer_for(tmp_path, FAST).run()
    (tmp_path / BEST).unlink()
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    save_atomically(state | {"best": 99.0}, tmp_path / CHECKPOINT)
    again = trainer_for(tmp_path, FAST)
    again.run()
    assert read_checkpoint(tmp_path / BEST)["step"] == again.step and again.best < 99


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [BEST, LOG])
@pytest.mark.parametrize("evaluations", [1, 2])
def test_a_run_that_is_killed_in_its_last_evaluation_ends_as_a_whole_one(
    name: str, evaluations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the best head is written, and between that and the log."""
    config = replace(FAST, eval_every=9 if evaluations == 2 else 100)
    whole = trainer_for(tmp_path / "whole", config)
    whole.run()
    killed = trainer_for(tmp_path / "killed", config)
    last, save, log = whole.step, trainer_module.save_atomically, killed.log

    def stop_before_the_head(state: dict[str, Any], path: Path) -> None:
        if path.name == BEST and killed.step == last:
            raise KeyboardInterrupt
        save(state, path)

    def stop_before_the_log(record: dict[str, Any]) -> None:
        if "held_out" in record and killed.step == last:
            raise KeyboardInterrupt
        log(record)

    scores = iter([1.5, 2.5, 2.5] if evaluations == 2 else [2.5, 2.5])
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "evaluate", lambda *_: {"chain_tau": next(scores)})
        if name == BEST:
            patch.setattr(trainer_module, "save_atomically", stop_before_the_head)
        else:
            killed.log = stop_before_the_log
        with pytest.raises(KeyboardInterrupt):
            killed.run()
        patch.setattr(trainer_module, "save_atomically", save)
        again = trainer_for(tmp_path / "killed", config)
        assert again.run() == {"chain_tau": 2.5} == again.known_result()
    best = read_checkpoint(tmp_path / "killed" / BEST)
    assert best["step"] == last == again.step
    held = [record["step"] for record in read_log(tmp_path / "killed") if "held_out" in record]
    assert held == ([9, last] if evaluations == 2 else [last])


@pytest.mark.covering(1)
@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_target_may_be_of_another_precision_than_the_training(
    tmp_path: Path, dtype: torch.dtype, bfloat16: bool
) -> None:
    data, table = [replace(one, features=one.features.to(dtype)) for one in sequences()], lm_head().to(dtype)
    config = replace(FAST, bfloat16=bfloat16, noise=0.1)
    readout = Readout(table)
    parts = {"sequences": data[2:], "held_out": data[:2]}
    trainer_for(tmp_path, config, embedding=table, readout=readout, **parts).run()
    trainer_for(tmp_path / "exact", replace(FAST, noise=0.1)).run()
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "exact"), rel=0.05)


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_does_harm(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, FAST)
    trainer.head.fc.weight.register_hook(lambda gradient: gradient * math.inf)
    before = copy.deepcopy(trainer.head.state_dict())
    with pytest.raises(ValueError, match=r"its gradient's norm (nan|inf) at step 0: .*--learning-rate"):
        trainer.run()
    assert all(torch.equal(value, before[name]) for name, value in trainer.head.state_dict().items())
    assert not (tmp_path / CHECKPOINT).exists()


def test_gradients_are_clipped_and_a_step_has_the_rate_of_its_place(tmp_path: Path) -> None:
    trainer, rates = trainer_for(tmp_path, replace(FAST, clip=0.01, unroll_after=4 / 12)), []
    trainer.step = 4
    assert trainer.progress() == trainer.config.unroll_after
    wanted, step = learning_rate_at(trainer.progress(), trainer.config), trainer.optimizer.step
    trainer.optimizer.step = lambda rate: rates.append(rate) or step(rate)
    report = trainer.train_step(next(trainer.lessons()))
    assert rates == [wanted] and wanted < trainer.config.learning_rate
    assert len(report.record()["cross_entropy"]) == trainer.config.unroll
    squares = [parameter.grad.square().sum() for parameter in trainer.head.parameters()]
    assert report.norm > 0.02 and torch.stack(squares).sum().sqrt().item() == pytest.approx(0.01, rel=1e-3)


def test_a_step_is_the_mean_of_its_batches(tmp_path: Path) -> None:
    """Its loss, its gradient, and the entropies of those batches that have a draft so deep."""
    trainer = trainer_for(tmp_path, replace(FAST, accumulate=2, clip=1e9, unroll_after=0.0))
    trainer.data.sequences[0] = replace(
        one := trainer.data.sequences[0], learn=torch.arange(len(one.tokens)) == 2
    )
    share = [trainer.lesson(0, [0]), trainer.lesson(1, [1, 2])]
    losses, entropies = zip(*(trainer.loss_of(lesson, 2) for lesson in share), strict=True)
    wanted = torch.autograd.grad(sum(losses) / 2, list(trainer.head.parameters()))
    report = trainer.train_step(share)
    assert report.loss == pytest.approx(sum(losses).item() / 2)
    assert report.norm == pytest.approx(float(torch.cat([one.flatten() for one in wanted]).norm()), rel=1e-4)
    first, second = (one.tolist() for one in entropies)
    assert math.isnan(first[1]) and not math.isnan(second[1])
    assert report.record()["cross_entropy"] == pytest.approx([(first[0] + second[0]) / 2, second[1]])


def test_every_batch_of_every_seed_has_noise_of_its_own(tmp_path: Path) -> None:
    trainers = [trainer_for(tmp_path / str(seed), replace(FAST, seed=seed)) for seed in range(3)]
    assert len({trainer.lesson(place, [0]).seed for trainer in trainers for place in range(3)}) == 9


def test_drafting_steps_begin_after_their_share_of_the_run(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, FAST)
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    steps = [len(record["cross_entropy"]) for record in records if "loss" in record]
    assert steps == [1 if step < 0.3 * len(steps) else 2 for step in range(len(steps))]


def test_processes_divide_the_batches_of_a_step(tmp_path: Path) -> None:
    trainer, shares = trainer_for(tmp_path, FAST), []
    trainer.batches_per_step, trainer.step = 4, 1
    for place in range(2):
        trainer.accelerator = SimpleNamespace(process_index=place, num_processes=2)
        shares.append([number for number, _ in next(trainer.shares())])
    assert shares == [[4, 6], [5, 7]]


@pytest.mark.parametrize(("mine", "other"), [((0, 9.0), (15, 4.0)), ((2, 4.0), (0, 9.0))])
def test_processes_follow_the_latest_clock_and_any_signal(
    tmp_path: Path, mine: tuple[int, float], other: tuple[int, float]
) -> None:
    trainer = trainer_for(tmp_path, FAST)
    trainer.stop, trainer.seconds = mine
    both = lambda own: torch.cat((own, torch.tensor([other], dtype=own.dtype)))  # noqa: E731
    trainer.accelerator = SimpleNamespace(num_processes=2, gather=both)
    assert trainer.ends()
    assert (trainer.stop, trainer.seconds) == (max(mine[0], other[0]), 9.0)


def test_a_run_that_is_stopped_evaluates_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take minutes, of which a machine that shuts down gives few."""
    trainer = trainer_for(tmp_path, FAST)
    monkeypatch.setattr(trainer_module, "evaluate", lambda *_: pytest.fail("it evaluates"))
    step = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", lambda share: (step(share), setattr(trainer, "stop", 15))[0])
    assert trainer.run() == {} and read_checkpoint(tmp_path / CHECKPOINT, "step")["step"] == 1
    assert not (tmp_path / BEST).exists()


@pytest.mark.parametrize("bfloat16", [True, False])
def test_a_head_computes_in_the_precision_of_its_run(tmp_path: Path, bfloat16: bool) -> None:
    trainer, seen = trainer_for(tmp_path, replace(FAST, bfloat16=bfloat16)), []
    trainer.head.fc.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    trainer.model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[2].weight.dtype))
    trainer.train_step(next(trainer.lessons()))
    assert set(seen) == {torch.bfloat16 if bfloat16 else torch.float32} and len(seen) > 1
    assert all(weight.dtype == torch.float32 for weight in trainer.head.parameters())


def test_the_clock_counts_steps_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which --minutes ends a run. Each takes a second here."""
    clock = count()
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer = trainer_for(tmp_path, FAST)
    trainer.run()
    seconds = {record["step"]: record["seconds"] for record in read_log(tmp_path) if "loss" in record}
    assert seconds == {step: step + (step - 1) // FAST.eval_every for step in range(1, trainer.step + 1)}
    again = trainer_for(tmp_path, FAST)
    assert again.resume() and again.seconds == trainer.seconds > trainer.step


def test_minutes_end_the_schedule_too(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, replace(FAST, minutes=2.0))
    trainer.seconds = 90.0
    assert trainer.progress() == 0.75
    trainer.step, trainer.seconds = int(3 * trainer.steps_per_epoch), 0.0
    assert trainer.progress() == 0.75


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="features are 16 wide, head 8"):
        trainer_for(tmp_path, FAST, DraftHead(HeadConfig(8, 8, 2, 2, 4, VOCAB)))


@pytest.mark.parametrize(
    ("loss", "transform", "depth"),
    [
        (LossWeights(regression=0.5), LogitsTransform(), 5),
        (LossWeights(), LogitsTransform(scale=2.0, cap=5.0), 3),
    ],
)
def test_a_toy_is_learned_at_every_depth(
    tmp_path: Path, loss: LossWeights, transform: LogitsTransform, depth: int
) -> None:
    """Under a soft-cap by the cross-entropy alone, through the cap's slope, at the depths that are taught."""
    head = tiny_head()
    initialise(head, 0, lm_head())
    config = replace(
        FAST,
        epochs=60,
        batch_tokens=120,
        unroll=3,
        eval_every=1000,
        checkpoint_every=1000,
        learning_rate=3e-2,
        loss=loss,
    )
    readout = Readout(lm_head(), None, transform)
    trainer = trainer_for(tmp_path, config, head, count=32, readout=readout)
    trainer.held_out = replace(hold_out(sequences(2), readout), depth=depth)
    before = evaluate(head, trainer.held_out, lm_head())
    after = trainer.run()
    assert before["chain_tau"] < 3 and min(after["top1"]) > 0.9, (before, after)
    assert len(after["top1"]) == depth and after["chain_tau"] > depth, after
    assert (tmp_path / BEST).is_file()


def test_a_head_starts_by_passing_the_feature_through() -> None:
    head = tiny_head(fc_bias=True)
    initialise(head, 0, lm_head())
    rest = torch.cat([value.flatten() for name, value in head.named_parameters() if "weight" in name])
    assert torch.equal(head.fc.weight[:, WIDTH:], torch.eye(WIDTH))
    size = lm_head().square().mean().sqrt()
    assert 0 < head.fc.weight[:, :WIDTH].abs().max() * size < 0.1 and head.fc.bias.eq(0).all()
    assert rest.abs().median() < 0.1 and rest.abs().max() <= 1


def test_a_widened_head_computes_what_it_did_and_learns_with_every_unit() -> None:
    head = tiny_head()
    features, embeddings = torch.randn(2, 1, 5, WIDTH).unbind(0)
    inputs = (
        features,
        embeddings,
        torch.arange(5)[None],
        partial(F.scaled_dot_product_attention, enable_gqa=True),
    )
    before, had = head(*inputs), head.config.intermediate_size
    widen(head, 3 * had, 0)
    after, mlp = head(*inputs), head.layers[0].mlp
    torch.testing.assert_close(after, before)
    assert head.config.intermediate_size == mlp.up_proj.out_features == mlp.down_proj.in_features == 3 * had
    assert {"layers.0.mlp.up_proj.weight"} <= {name for name, value in head.named_parameters()}
    noise, old = (part.square().mean() for part in mlp.gate_proj.weight.split((2 * had, had))[::-1])
    assert 0.8 < noise / old < 1.25
    after.square().sum().backward()
    assert mlp.down_proj.weight.grad[:, had:].abs().max(0).values.gt(0).all(), "no unit is dead"
    copy = DraftHead(head.config)
    copy.load_state_dict(head.state_dict())
    with pytest.raises(ValueError, match=rf"^intermediate_size is 1: the head has {3 * had} inner units, .*"):
        widen(head, 1, 0)


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    config = replace(FAST, warmup=0.1)
    rates = [learning_rate_at(progress / 100, config) for progress in range(101)]
    assert rates[10] == pytest.approx(config.learning_rate) and max(rates) == rates[10]
    assert rates[100] == pytest.approx(0, abs=1e-12) and rates[:11] == sorted(rates[:11])


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0},
        {"epochs": float("inf")},
        {"learning_rate": float("inf")},
        {"seed": -1},
        {"seed": 2**63 // 1_000_003},
        {"unroll": 0},
        {"noise": -1.0},
        {"warmup": 1.0},
        {"unroll_after": 1.0},
        {"accumulate": 0},
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(FAST, **change)


def test_evaluation_counts_chains_that_follow_the_text() -> None:
    result = evaluate(Oracle(), hold_out(sequences(3), Readout(lm_head())), lm_head(), k=2)
    assert result["top1"] == [1.0] * 5 and result["chain_tau"] == 6.0 and result["chain2_tau"] == 6.0


def test_chains_equal_a_plain_count() -> None:
    """A draft from each root, step by step: alive while every greedy token was named and the text took it."""
    generator, depth, k = torch.Generator().manual_seed(0), 3, 2
    data, greedy = [], []
    for one in sequences(24):  # a text that leaves the greedy path at a third of its places
        other = torch.randint(VOCAB, one.tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(one.tokens.shape, generator=generator) < 0.33, other, one.tokens)
        learn = torch.rand(tokens.shape, generator=generator) < 0.8
        data.append(FeatureSequence(tokens, learn, world()[tokens]))
        greedy.append((3 * tokens + 1) % VOCAB)

    class Forgetful(Oracle):
        def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: object) -> Tensor:
            tokens = (embeddings @ lm_head().T).argmax(-1)
            return torch.where(tokens[..., None] % 5 == 0, world()[(tokens + 1) % VOCAB], world()[tokens])

    head = Forgetful()
    drafts, arrived = [0] * depth, [0] * depth
    hits, alive = ([[0] * depth, [0] * depth] for _ in range(2))  # top 1, top k
    for one, goal in zip(data, greedy, strict=True):
        steps = unroll(head, one.features[None, :-1], F.embedding(one.tokens[None, 1:], lm_head()), depth)
        best = [(step[0] @ lm_head().T).topk(k).indices.tolist() for step in steps]
        last = len(one.tokens) - 1
        for root in range(1, last + 1):
            lives = [True, True]
            for step in range(depth):
                at = root + step  # the token after which the draft predicts
                if at > last or not one.learn[at]:
                    break
                drafts[step] += 1
                arrived[step] += lives[0]
                for which, wide in enumerate((1, k)):
                    right = int(goal[at]) in best[step][at - 1][:wide]
                    hits[which][step] += right
                    lives[which] = lives[which] and right
                    alive[which][step] += lives[which]
                    if at < last and one.tokens[at + 1] != goal[at]:
                        lives[which] = False
    named = partial(best_tokens, readout=Readout(lm_head()))
    result = evaluate(head, HeldOut(data, greedy, named, depth), lm_head(), k=k)
    share = [[count / of for count, of in zip(row, drafts, strict=True)] for row in alive]
    assert 0 < share[0][2] < share[0][1] < share[0][0] < 1
    for which, name in enumerate(("top1", "top2")):
        wanted = [count / of for count, of in zip(hits[which], drafts, strict=True)]
        assert result[name] == pytest.approx(wanted, abs=1e-4)
    wanted = [now / before for now, before in zip(alive[0], arrived, strict=True)]
    assert result["chain"] == pytest.approx(wanted, abs=1e-4)
    assert result["chain_tau"] == pytest.approx(1 + sum(share[0]), abs=1e-3)
    assert result["chain2_tau"] == pytest.approx(1 + sum(share[1]), abs=1e-3)
    assert result["positions"] == drafts[0]


def test_no_draft_is_right_more_often_than_it_is_made() -> None:
    """Where the drafts that end early are the wrong ones, a ratio of two depths' shares would be above 1."""

    class Improving(Oracle):
        """At the first drafting step right after the first token alone, later always."""

        steps = 0

        def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: object) -> Tensor:
            self.steps += 1
            right = super().forward(features, embeddings, positions, attend)
            return torch.where((positions[..., None] > 0) & (self.steps == 1), -right, right)

    one = sequences(1)[0]
    one = FeatureSequence(one.tokens[:4], torch.tensor([False, True, True, True]), one.features[:4])
    named = partial(best_tokens, readout=Readout(lm_head()))
    result = evaluate(Improving(), HeldOut([one], [(3 * one.tokens + 1) % VOCAB], named, 3), lm_head())
    assert result["top1"] == [0.3333, 1.0, 1.0]  # of three drafts, then of two, then of the first one alone
    assert result["chain"] == [0.3333, 1.0, 1.0]


def test_what_no_draft_reaches_is_0_and_not_nan() -> None:
    """As JSON has no NaN: a text of two tokens, and one whose drafts end after a step."""
    one = sequences(1)[0]
    few = [
        FeatureSequence(one.tokens[:2], torch.tensor([False, True]), one.features[:2]),
        FeatureSequence(one.tokens[:3], torch.tensor([False, True, False]), one.features[:3]),
    ]
    for data, positions in ((few[:1], 0), (few, 1)):
        result = evaluate(Oracle(), replace(hold_out(data, Readout(lm_head())), depth=2), lm_head())
        assert result["positions"] == positions
        for name in ("top1", "top8", "chain"):
            assert result[name] == [positions, 0.0]
        assert result["chain_tau"] == result["chain8_tau"] == 1 + positions


def test_the_best_tokens_are_all_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Readout(lm_head()[:3])
    assert best_tokens(world()[:5], 8, few).sort().values.tolist() == [[0, 1, 2]] * 5
    assert best_tokens(world()[:0], 8, few).shape == (0, 3)
    whole = best_tokens(world()[:5], 3, few)
    monkeypatch.setattr(loss_module, "ON_A_CPU", 2)
    assert best_tokens(world()[:5], 2, few).equal(whole[:, :2])


def test_held_out_texts_may_be_ranked_by_another_function() -> None:
    def best(features: Tensor, k: int) -> Tensor:
        return torch.full((len(features), k), 7)

    held = hold_out(sequences(2), Readout(lm_head()), best=best)
    assert held.best(world()[:2], 3).tolist() == [[7] * 3] * 2
    for sequence, greedy in zip(held.sequences, held.greedy, strict=True):  # which is the target's still
        assert greedy.equal((3 * sequence.tokens + 1) % VOCAB)


def test_held_out_tokens_are_a_float32_argmax() -> None:
    """In bfloat16 both logits are 1."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]], dtype=torch.bfloat16)
    one = FeatureSequence(torch.zeros(3), torch.ones(3), torch.ones(3, 2, dtype=torch.bfloat16))
    held = hold_out([one], Readout(weight))
    assert held.greedy[0].tolist() == [1, 1, 1] and held.best(one.features, 1).tolist() == [[1]] * 3
