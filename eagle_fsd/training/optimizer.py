"""Optimizer for the draft head: Muon for matrices, AdamW for vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from eagle_fsd.drafting.eagle_head import DraftHead

MOMENTUM = 0.95


class HeadOptimizer:
    """Muon (Jordan et al. 2024) for every matrix of a head, AdamW for norms and biases.

    Muon moves a matrix equally far along all its singular directions, by the root mean square that AdamW has
    at the same rate (Liu et al., arXiv 2502.16982). `fc` reads embeddings and features of very different
    sizes, and would learn slowest from the smallest. Therefore Muon works on a copy of `fc` that is scaled
    for inputs of unit size; the head itself stays unscaled. Only the matrices after `fc` have weight decay.
    """

    def __init__(self, head: DraftHead, weight_decay: float, input_sizes: Tensor) -> None:
        """Divide the head's weights among both. input_sizes [2 d]: root mean squares of what `fc` reads."""
        self.fc, self.sizes = head.fc.weight, input_sizes.to(head.fc.weight)
        self.unit = nn.Parameter(torch.empty_like(self.fc))  # fc, for inputs of unit size
        rest = [parameter for parameter in head.parameters() if parameter is not self.fc]
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

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the head from its gradients, at a learning rate."""
        self.unit.copy_(self.fc * self.sizes)
        self.unit.grad = self.fc.grad / self.sizes
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
        self.fc.copy_(self.unit / self.sizes)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what `load_state_dict` continues from."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from a state_dict of the same head's optimizer."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
