"""What a target makes of features: its lm_head and what becomes of the product, for all tokens or some."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.target.architecture import PLAIN, LogitsTransform
from eagle_fsd.target.model import TargetModel


@dataclass(frozen=True)
class Readout:
    """From features to the target's logits of S tokens, a constant of training.

    weight [S, d] and bias [S], or None, are rows of the target's lm_head; transform is what becomes of their
    product.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitsTransform = PLAIN

    @classmethod
    def of(cls, target: TargetModel) -> Readout:
        """The target's own, of all V tokens; a copy, so that the target need not stay in memory."""
        bias = getattr(target.lm_head, "bias", None)
        return cls(
            target.lm_head.weight.detach().clone(),
            None if bias is None else bias.detach().clone(),
            target.logits_transform,
        )

    def restricted(self, tokens: Tensor) -> Readout:
        """The logits of these tokens [S] alone, in their order."""
        bias = None if self.bias is None else self.bias[tokens]
        return replace(self, weight=self.weight[tokens], bias=bias)

    def to(self, *place: torch.device | str | torch.dtype) -> Readout:
        """The same on a device, in a dtype, or both."""
        bias = None if self.bias is None else self.bias.to(*place)
        return replace(self, weight=self.weight.to(*place), bias=bias)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [N, S] float32 of features [N, d]; the product is taken in the weight's dtype."""
        product = F.linear(features.to(self.weight.dtype), self.weight, self.bias)
        return self.transform(product.float())
