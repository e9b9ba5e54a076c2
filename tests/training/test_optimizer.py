"""The head's optimizer against slow twins: singular values, and weights that read inputs of unit size."""

from __future__ import annotations

import copy

import pytest
import torch
from support.training_world import WIDTH, noise, tiny_head
from torch.optim import AdamW, Muon

from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.training import optimizer as optimizer_module
from eagle_fsd.training.optimizer import MOMENTUM, HeadOptimizer

RATE = 0.01


def sizes() -> torch.Tensor:
    return torch.rand(2 * WIDTH, generator=torch.Generator().manual_seed(1)) + 0.05


def give_gradients(head: DraftHead, seed: int) -> None:
    for index, parameter in enumerate(head.parameters()):
        parameter.grad = noise(*parameter.shape, seed=100 * seed + index)


def test_weight_decay_is_for_the_matrices_behind_fc() -> None:
    head = tiny_head()
    before = copy.deepcopy(head.state_dict())
    optimizer = HeadOptimizer(head, 0.2, sizes())
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(RATE)
    for name, parameter in head.named_parameters():
        kept = 1 - RATE * 0.2 if parameter.ndim == 2 and name != "fc.weight" else 1
        assert torch.allclose(parameter, kept * before[name], atol=1e-6), name


def test_a_matrix_moves_equally_far_along_all_directions_of_its_gradient() -> None:
    """The first step, by singular value decomposition; Newton and Schulz come as near to 1 as 0.5 to 1.5."""
    head = tiny_head()
    before = copy.deepcopy(head.state_dict())
    optimizer = HeadOptimizer(head, 0.0, sizes())
    give_gradients(head, 0)
    optimizer.step(RATE)
    moved = {name: parameter.detach() - before[name] for name, parameter in head.named_parameters()}
    matrices = {name: value for name, value in moved.items() if value.ndim == 2}
    assert len(matrices) == 8  # fc, four of attention, three of the MLP
    for name, value in matrices.items():
        gradient = head.get_parameter(name).grad
        if name == "fc.weight":
            value, gradient = value * sizes(), gradient / sizes()
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        along = left.T @ value @ right.T / (-RATE * 0.2 * max(value.shape) ** 0.5)
        assert along.diagonal().min() > 0.4 and along.diagonal().max() < 1.6, name
        assert (along - along.diagonal().diag()).abs().max() < 0.1, name


@pytest.mark.parametrize("fast", [True, False])
def test_muon_computes_in_bfloat16_where_that_is_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Its first step against a twin in float64. Where bfloat16 is emulated, float32 is many times as fast."""
    monkeypatch.setattr(optimizer_module, "multiplies_bfloat16", lambda device: fast)
    head = tiny_head()
    optimizer = HeadOptimizer(head, 0.0, sizes())
    before = copy.deepcopy(head.state_dict())
    give_gradients(head, 0)
    gradients = [one.grad.clone() for one in head.parameters()]
    optimizer.step(RATE)
    off = []
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2 and name != "fc.weight":
            wanted = orthogonalized(parameter.grad.double())
            moved = (before[name] - parameter.detach()) / (RATE * 0.2 * max(parameter.shape) ** 0.5)
            off.append(float((moved - wanted).norm() / wanted.norm()))
    assert len(off) == 7 and (max(off) < 0.05 and min(off) > 1e-3 if fast else max(off) < 1e-4)
    assert all(torch.equal(one.grad, its) for one, its in zip(head.parameters(), gradients, strict=True))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return what five steps of Newton and Schulz make of a matrix, by its singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


def test_fc_learns_at_the_pace_that_inputs_of_unit_size_would_give() -> None:
    """Its slow twin: Muon on weights times the sizes, which read inputs over the sizes."""
    head = tiny_head()
    optimizer = HeadOptimizer(head, 0.0, sizes())
    scaled = torch.nn.Parameter(head.fc.weight.detach() * sizes())
    twin = Muon([scaled], lr=RATE, weight_decay=0.0, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for seed in range(5):
        inputs = noise(40, 2 * WIDTH, seed=seed) * sizes()
        head.zero_grad()
        twin.zero_grad()
        for weight, x in ((head.fc.weight, inputs), (scaled, inputs / sizes())):
            torch.nn.functional.linear(x, weight).sin().square().sum().backward()
        optimizer.step(RATE)
        twin.step()
    assert torch.allclose(head.fc.weight * sizes(), scaled, atol=2e-3)  # Muon computes in bfloat16
    assert not torch.allclose(head.fc.weight, tiny_head().fc.weight, atol=1e-2)


def test_vectors_take_adamw_without_weight_decay() -> None:
    head, twin = tiny_head(), tiny_head()
    optimizer = HeadOptimizer(head, 0.2, sizes())
    vectors = {name: one for name, one in twin.named_parameters() if one.ndim == 1}
    adam = AdamW(vectors.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        give_gradients(head, seed)
        give_gradients(twin, seed)
        optimizer.step(RATE)
        adam.step()
    assert vectors and all(torch.equal(head.get_parameter(name), one) for name, one in vectors.items())


def test_a_reloaded_optimizer_goes_on_to_the_bit() -> None:
    head = tiny_head()
    optimizer = HeadOptimizer(head, 0.1, sizes())
    for seed in range(2):
        give_gradients(head, seed)
        optimizer.step(RATE)
    other = copy.deepcopy(head)
    again = HeadOptimizer(other, 0.1, sizes())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, steps in ((head, optimizer), (other, again)):
        give_gradients(one, 2)
        steps.step(RATE)
    pairs = zip(head.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
