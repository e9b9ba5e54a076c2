"""The stand-in for a CUDA graph refuses what a stream refuses, and nothing that a stream takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.op_recorder import OpRecorder
from torch import Tensor

X = torch.arange(12.0).view(3, 4)
MASK, HOST = X > 3, torch.ones(3)
ON_DEVICE = torch.empty(3, device="meta")  # where the host is another device

REFUSED: dict[str, Callable[[], object]] = {
    "a mask as an index": lambda: X[MASK],
    "a byte mask as an index": lambda: X[MASK.to(torch.uint8)],
    "writing through a mask": lambda: X.clone().index_put_((MASK,), X[0, 0]),
    "masked_select": lambda: X.masked_select(MASK),
    "nonzero": lambda: X.nonzero(),
    "where with one argument": lambda: torch.where(MASK),
    "unique": lambda: X.unique(),
    "unique by rows": lambda: torch.unique(X, dim=0),
    "unique_consecutive": lambda: torch.unique_consecutive(X),
    "repeat_interleave by a tensor": lambda: torch.repeat_interleave(X, X[:, 1].long(), dim=0),
    "bincount": lambda: torch.bincount(X[0].long()),
    "isin of forty": lambda: torch.isin(X, torch.arange(40.0)),
    "equal": lambda: torch.equal(X, X),
    "item": lambda: X.sum().item(),
    "a choice": lambda: 1 if X.sum() else 2,
    "a Python number": lambda: float(X[0, 0]),
    "a list": lambda: X.tolist(),
    "numbers of the host's": lambda: X[0, :3] + torch.tensor([1.0, 2.0, 3.0]),
    "a list as an index": lambda: X[[0, 2]],
    "an array": lambda: torch.from_numpy(HOST.numpy()),
    "a copy to the device": lambda: HOST.to("meta"),
    "a copy into a tensor there": lambda: ON_DEVICE.copy_(HOST),
    "an index from the host": lambda: ON_DEVICE[HOST.long()],
    "a gather by the host's indices": lambda: ON_DEVICE.gather(0, HOST.long()),
}
TAKEN: dict[str, Callable[[], Tensor]] = {
    "indices": lambda: X[X[:, 0].long() % 3],
    "slices": lambda: X[1:, :2] * 2,
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "where": lambda: torch.where(MASK, X, 0.0),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2, dim=1),
    "isin of three": lambda: torch.isin(X, torch.arange(3.0)),
    "sort, topk, cumsum, scatter": lambda: X.sort(-1).values.cumsum(-1).scatter(1, X.topk(2).indices, 0.0),
    "new tensors": lambda: torch.arange(4) + torch.zeros(3, 4) + X,
    "another dtype": lambda: X.long().double(),
}


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED)
def test_what_makes_the_host_wait_or_comes_from_it_is_refused(work: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        OpRecorder()(work, repeatable=False)


@pytest.mark.parametrize("work", TAKEN.values(), ids=TAKEN)
def test_what_a_stream_captures_is_recorded(work: Callable[[], Tensor]) -> None:
    kept = torch.empty_like(work())
    replay, result = OpRecorder()(lambda: kept.copy_(work()), repeatable=True)
    replay()
    assert result is kept and torch.equal(result, work())


def test_results_in_memory_that_a_capture_allocates_are_refused() -> None:
    """Replays of other captures may overwrite it."""
    with pytest.raises(AssertionError, match="memory that the capture allocated"):
        OpRecorder()(lambda: X + 1, repeatable=True)
