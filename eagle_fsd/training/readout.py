"""Turn features into the target's logits: its lm_head and the transform after it, for all tokens or some."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.files.fingerprints import is_plain
from eagle_fsd.target.architecture import PLAIN, LogitsTransform
from eagle_fsd.target.model import TargetModel

AT_ONCE = 256  # rows of the identity in one product


@torch.no_grad()
def plain_rows(target: TargetModel) -> Tensor:
    """Return a copy of the rows [V, d] of a target's lm_head.

    A quantised layer is multiplied with the identity, so that nothing need be known of its format.
    """
    weight = getattr(target.lm_head, "weight", None)
    if is_plain(weight):
        return weight.detach().clone()
    bias = getattr(target.lm_head, "bias", None)
    parts = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device).split(AT_ONCE)
    columns = [target.raw_logits(part) - (0 if bias is None else bias.to(target.device)) for part in parts]
    return torch.cat([part.to(target.dtype) for part in columns]).T.contiguous()


@dataclass(frozen=True)
class Readout:
    """The map from features to the target's logits of S tokens. It is constant in training.

    weight [S, d] and bias [S] (or None) are rows of the target's lm_head. transform is applied to their
    product.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitsTransform = PLAIN

    @classmethod
    def from_target(cls, target: TargetModel) -> Readout:
        """Copy the target's readout of all V tokens, so that the target need not stay in memory."""
        bias = getattr(target.lm_head, "bias", None)
        return cls(
            plain_rows(target),
            None if bias is None else bias.detach().clone(),
            target.logits_transform,
        )

    def restrict(self, tokens: Tensor) -> Readout:
        """Return the readout of these tokens [S] alone, in their order."""
        bias = None if self.bias is None else self.bias[tokens]
        return replace(self, weight=self.weight[tokens], bias=bias)

    def to(self, *place: torch.device | str | torch.dtype) -> Readout:
        """Return the same readout on a device, in a dtype, or both."""
        bias = None if self.bias is None else self.bias.to(*place)
        return replace(self, weight=self.weight.to(*place), bias=bias)

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [N, S] float32 of features [N, d]; the product is computed in the weight's dtype."""
        product = F.linear(features.to(self.weight.dtype), self.weight, self.bias)
        return self.transform(product.float())
