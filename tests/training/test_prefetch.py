"""Batches made ahead of the step that takes them: order, bounds, errors and the thread's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from support.training_world import FAST, losses, trainer_for

from eagle_fsd.training.data.prefetch import prefetch
from eagle_fsd.training.run.folder import CHECKPOINT, read_log


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_items_come_in_order_and_no_more_than_asked_for_are_made_ahead(ahead: int) -> None:
    made: list[int] = []

    def make(item: int) -> int:
        made.append(item)
        return item * item

    with closing(prefetch(make, count(), ahead)) as squares:
        for number in range(5):
            assert next(squares) == number * number
            wait_for(lambda wanted=number + ahead: len(made) == wanted + 1)
        time.sleep(0.02)
        assert made == list(range(5 + ahead))
    assert not threads()
    assert list(prefetch(make, range(4), ahead)) == [0, 1, 4, 9] and not threads()


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_is_raised_at_its_item(ahead: int) -> None:
    def make(item: int) -> int:
        if item == 2:
            raise ValueError("shard 2 is damaged")
        return item

    items = prefetch(make, count(), ahead)
    assert list(islice(items, 2)) == [0, 1]
    with pytest.raises(ValueError, match="shard 2 is damaged"):
        next(items)
    assert not threads()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_made_ahead_change_no_loss(tmp_path: Path, accumulate: int) -> None:
    """As on a GPU: in a thread, losses read now and then; the log and the head are the same."""
    config = replace(FAST, noise=0.1, accumulate=accumulate)
    plain = trainer_for(tmp_path / "plain", config)
    plain.run()
    ahead = trainer_for(tmp_path / "ahead", config)
    ahead.ahead, ahead.report_every = 2, 5
    tracked: list[tuple[int, bool]] = []
    ahead.accelerator.log = lambda record, step: tracked.append((step, "loss" in record))
    ahead.run()
    assert tracked == [(record["step"], "loss" in record) for record in read_log(tmp_path / "ahead")]
    assert not threads()
    untimed = [
        [{name: value for name, value in record.items() if name != "seconds"} for record in read_log(folder)]
        for folder in (tmp_path / "plain", tmp_path / "ahead")
    ]
    assert untimed[0] == untimed[1]
    for name, value in plain.head.state_dict().items():
        assert torch.equal(value, ahead.head.state_dict()[name]), name


def test_a_run_with_batches_ahead_goes_on_exactly_where_it_stopped(tmp_path: Path) -> None:
    config = replace(FAST, noise=0.1)
    trainer_for(tmp_path / "whole", config).run()
    first = trainer_for(tmp_path / "parts", config)
    first.ahead, first.report_every = 2, 4
    step = first.train_step

    def stop_after_five(share: object) -> object:
        report = step(share)
        if first.step == 5:
            first.stop = 15
        return report

    first.train_step = stop_after_five
    first.run()
    assert first.step == 5 and not threads()
    second = trainer_for(tmp_path / "parts", config)
    second.ahead, second.report_every = 3, 7
    second.run()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_shards_that_cannot_be_read_end_the_run_and_its_thread(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, FAST)
    trainer.ahead = 2
    trainer.data.read = lambda numbers: (_ for _ in ()).throw(ValueError("shard_00001 is damaged"))
    with pytest.raises(ValueError, match="shard_00001 is damaged"):
        trainer.run()
    assert not threads()


def test_losses_that_are_read_late_are_read_before_anything_is_written(tmp_path: Path) -> None:
    """A gradient of NaN between two reports ends the run before its head reaches a checkpoint."""
    trainer = trainer_for(tmp_path, replace(FAST, checkpoint_every=3, eval_every=100))
    trainer.report_every = 50
    calls = count()
    trainer.head.fc.weight.register_hook(lambda gradient: gradient * (torch.nan if next(calls) == 4 else 1))
    with pytest.raises(ValueError, match=r"norm nan at step 4: .*--learning-rate"):
        trainer.run()
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert saved["step"] == 3 and all(value.isfinite().all() for value in saved["head"].values())
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 3]
