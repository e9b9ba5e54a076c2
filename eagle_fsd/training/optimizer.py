"""Optimizer for the draft head: Muon for matrices, AdamW for vectors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.overrides import TorchFunctionMode

from eagle_fsd.core.devices import multiplies_bfloat16
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.training.loss import Head
from eagle_fsd.training.schedule import root_mean_square

MOMENTUM = 0.95
PACE = "pace"  # of a group of weights: its learning rate relative to the others'


class WithoutBfloat16(TorchFunctionMode):
    """Lets Muon, which orthogonalizes in bfloat16, do so in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # a copy, as bfloat16() makes: it is written to
        return func(*args, **(kwargs or {}))


class HeadOptimizer:
    """Muon (Jordan et al. 2024) for every matrix of a head, AdamW for norms and biases.

    Muon moves a matrix equally far along all its singular directions, by the root mean square that AdamW has
    at the same rate (Liu et al., arXiv 2502.16982). `fc` reads embeddings and features of very different
    sizes, and would learn slowest from the smallest. Therefore Muon works on a copy of `fc` that is scaled
    for inputs of unit size; the head itself stays unscaled. Only the matrices after `fc` have weight decay.

    The lm_head of an EAGLE-3 head has a row for each token, most of which are rare. Muon would move them all
    equally far, so it takes AdamW, at the rate times its root mean square at the start: Adam moves each
    number by about the rate, and its numbers are far smaller than a norm's.
    """

    def __init__(self, head: Head, weight_decay: float, input_sizes: Tensor) -> None:
        """Divide the head's weights among both, except frozen ones.

        input_sizes: root mean squares [D] of what `fc` reads.
        """
        self.fc, self.sizes = head.fc.weight, input_sizes.to(head.fc.weight)
        self.unit = nn.Parameter(torch.empty_like(self.fc))  # fc, for inputs of unit size
        rows = head.lm_head.weight if isinstance(head, Eagle3Head) else None
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        rest = [parameter for parameter in trained if parameter is not self.fc and parameter is not rows]
        vectors = [parameter for parameter in rest if parameter.ndim != 2]
        behind = [parameter for parameter in rest if parameter.ndim == 2]
        groups = [
            {"params": behind, "weight_decay": weight_decay},
            {"params": [self.unit], "weight_decay": 0.0},
        ]
        self.parts = [
            Muon(groups, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"),
            AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if rows is not None:
            pace = root_mean_square(rows.detach().flatten()).item()
            self.parts[1].add_param_group({"params": [rows], PACE: max(pace, 1e-6)})

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the head from its gradients, at a learning rate."""
        self.unit.copy_(self.fc * self.sizes)
        self.unit.grad = self.fc.grad / self.sizes
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * group.get(PACE, 1.0)
            with nullcontext() if multiplies_bfloat16(self.fc.device) else WithoutBfloat16():
                part.step()
        self.fc.copy_(self.unit / self.sizes)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what `load_state_dict` continues from."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from a state_dict of the same head's optimizer."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
