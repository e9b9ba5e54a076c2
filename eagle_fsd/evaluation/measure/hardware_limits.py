"""How close a step comes to what the machine allows: bandwidth, matrix rate, and the target's forwards.

A forward over n nodes reads every weight once and multiplies with it n times. It can be no faster than the
slower of the two, taken at the rates measured here on large tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import nn

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.autotune.step_costs import Costs, measure_costs
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.runtime.matmul_backends import measure_fastest_backend
from eagle_fsd.runtime.packed_linear import pack_linears, plain_linears
from eagle_fsd.runtime.timing import median_seconds

LARGE = 512 * 2**20  # bytes, more than any cache
SQUARE = 2048


@dataclass(frozen=True)
class Machine:
    """Bytes read and floating-point operations done per second."""

    bandwidth: float
    rate: float

    def limit(self, weight_bytes: int, parameters: int, nodes: int) -> float:
        """Return the seconds that a forward over this many nodes takes at least."""
        return max(weight_bytes / self.bandwidth, 2 * parameters * nodes / self.rate)


@torch.inference_mode()
def machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Time sums over a large tensor, and products of large square matrices, on this device in this dtype."""
    block = torch.ones(LARGE // dtype.itemsize, dtype=dtype, device=device)
    bandwidth = LARGE / median_seconds(lambda: block.sum(dtype=dtype), device)
    left = torch.randn(SQUARE, SQUARE, device=device).to(dtype)
    layer = nn.Sequential(nn.Linear(SQUARE, SQUARE, bias=False, device=device, dtype=dtype))
    pack_linears(layer, measure_fastest_backend(layer, [SQUARE]))
    return Machine(bandwidth, 2 * SQUARE**3 / median_seconds(lambda: layer(left), device))


@dataclass(frozen=True)
class Forward:
    """One width: the limit, the linear layers alone, plain and as they are, and the whole verify forward."""

    nodes: int
    limit: float
    plain_linears: float
    linears: float
    verify: float


@torch.inference_mode()
def forwards(
    engine: EagleFSD, here: Machine, context: int, beams: Sequence[int]
) -> tuple[list[Forward], Costs]:
    """Time every width of tree behind `context` tokens of one text."""
    layers = [layer for layer in engine.target.model.modules() if isinstance(layer, nn.Linear)]
    parameters = sum(layer.weight.numel() for layer in layers)
    weight_bytes = sum(layer.weight.numel() * layer.weight.dtype.itemsize for layer in layers)
    costs = measure_costs(engine.target, engine.drafter, beams, 1, context, Lossless(), SamplingConfig())
    found = []
    for nodes, verify in costs.verify.items():
        inputs = [torch.randn(nodes, layer.in_features).to(layer.weight) for layer in layers]

        def multiply(inputs: Sequence[torch.Tensor] = inputs) -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        mine = median_seconds(multiply, engine.device)
        with plain_linears(engine.target.model):
            plain = median_seconds(multiply, engine.device)
        found.append(Forward(nodes, here.limit(weight_bytes, parameters, nodes), plain, mine, verify))
    return found, costs


def table(found: Sequence[Forward]) -> str:
    """Write Markdown, in milliseconds."""
    titles = ["nodes", "limit", "linear layers, stock", "linear layers, ours", "verify forward"]
    rows = []
    for one in found:
        nodes, *seconds = astuple(one)
        times = [f"{1000 * value:.1f}" for value in seconds]
        rows.append([str(nodes), *times, f"{one.verify / one.limit:.2f}"])
    return markdown_table([*titles, "of the limit"], rows)
