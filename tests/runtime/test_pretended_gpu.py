"""The stand-in for a GPU: it notices what a GPU refuses, and where the host would wait."""

from __future__ import annotations

import pytest
import torch
from support.gpu_twins import TREE, Twins
from support.pretended_gpu import Again, PretendedGPU, pretended_gpu
from support.tiny_models import tiny_model
from torch import Tensor

from eagle_fsd.core.devices import fetch
from eagle_fsd.target.model import TargetModel


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGPU:
    with pretended_gpu(monkeypatch) as gpu:
        yield gpu


@torch.inference_mode()  # as decoding runs
def test_the_stand_in_notices_what_a_gpu_does(gpu: PretendedGPU) -> None:
    one = torch.arange(3).to("cuda", non_blocking=True)
    both = one + torch.arange(3, device="cuda")
    assert one.device.type == "cuda" and not gpu.waits
    for waits in (
        lambda: both.tolist(),
        lambda: bool(both[0] > 0),
        lambda: both.cpu(),
        lambda: both[both > 1],
        lambda: torch.allclose(both, one),
        lambda: both.nonzero(),
        lambda: both.nonzero(as_tuple=True),
        lambda: torch.where(both > 1),
        lambda: both.repeat_interleave(one),
        lambda: torch.nn.functional.one_hot(one),
        lambda: torch.tensor([both[0], both[1]], device="cuda"),
        lambda: both[[0, 1]],
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: torch.arange(3).to(both.device),
        lambda: one.copy_(torch.arange(3)),
    ):
        gpu.waits.clear()
        waits()
        assert len(gpu.waits) == 1
    gpu.waits.clear()
    for goes_on in (
        lambda: torch.nn.functional.one_hot(one, 3),
        lambda: both.repeat_interleave(2),
        lambda: one.to("cuda", torch.float32) + both.to(torch.float64),
        lambda: one.histc(3, 0, 2),
        lambda: both[one],
    ):
        assert goes_on().device.type == "cuda" and not gpu.waits
    assert (one + 1).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="both devices"):
        one + torch.arange(3)
    with pytest.raises(RuntimeError, match="within a recording"):
        Again(gpu)(lambda: both.tolist(), True)


def test_what_is_fetched_together_is_waited_for_once(gpu: PretendedGPU) -> None:
    """Of any types and shapes, whatever numbers they hold."""
    numbers = torch.tensor([[0.1, -torch.inf, 1e-40], [torch.nan, 3.5, 0.0]])
    parts = [
        *(numbers[0, 0], numbers > 1, numbers.mT, numbers[:, 1], numbers[:, :0]),
        *(numbers.half(), numbers.bfloat16(), torch.tensor([2**62 + 1, -1]), numbers.double()),
    ]
    assert all(one is part for one, part in zip(fetch(*parts), parts, strict=True))
    found = fetch(*(part.to("cuda", non_blocking=True) for part in parts))
    assert len(gpu.waits) == 1
    for one, part in zip(found, parts, strict=True):
        assert type(one) is Tensor and one.dtype == part.dtype and one.shape == part.shape
        assert torch.equal(one.nan_to_num(nan=7.0), part.nan_to_num(nan=7.0))


@pytest.mark.parametrize("fault", ["mixes", "waits"])
def test_a_step_with_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Tensors of the host's among the device's raise; a wait in each step shows, and ends recordings."""
    forward = TargetModel.features

    def wrong(self: TargetModel, tokens: Tensor, *rest: object) -> Tensor:
        tokens = torch.arange(96)[tokens] if fault == "mixes" else tokens[tokens >= 0].view(tokens.shape)
        return forward(self, tokens, *rest)

    both = Twins(tiny_model)
    with both.there(), monkeypatch.context() as patch:
        patch.setattr(TargetModel, "features", wrong)
        if fault == "mixes":
            with pytest.raises(RuntimeError, match="both devices"):
                both.far.generate([[5, 9, 33]], max_new_tokens=4, tree=TREE)
            return
        both.far.generate([[5, 9, 33]], max_new_tokens=8, tree=TREE)
    assert not both.target.stepper.records
    assert any("test" in one or "aten::index" in one for one in both.gpu.waits)
