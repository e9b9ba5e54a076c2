"""Linear layers that also keep their weight in oneDNN's blocked order: a tree then costs a CPU little more
than a token.

Over the few rows of a tree a stock layer runs far below what memory and the vector units give. The blocked
copy takes the weights' memory a second time; the plain weight stays, for whatever else reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 16  # oneDNN blocks a weight for about so many rows; measured alike from 1 to 512


class PackedLinear(nn.Linear):
    """A stand-in for an nn.Linear, with its very parameters.

    packed: the weight as it was when it was packed, loaded or last moved: one that is changed in place is not
    seen. Training, autocast and `plain_linears` take the plain weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training, self.plain = linear.training, False
        self._pack()

    def forward(self, x: Tensor) -> Tensor:
        usable = self.packed is not None and x.dtype == self.weight.dtype and x.numel()
        if self.plain or not usable or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _pack(self) -> None:
        self.packed: Tensor | None = None
        if packable(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._pack()

    def __getstate__(self) -> dict[str, Any]:  # for copies: a packed tensor has no storage to copy
        return {name: value for name, value in self.__dict__.items() if name != "packed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        super()._apply(fn, recurse)
        self._pack()
        return self


def packable(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or bfloat16


def pack_linears(module: nn.Module) -> nn.Module:
    """Put packed layers in the place of the plain linear ones inside a module, where that is possible.

    Layers of any other kind (quantised, adapted) stay as they are.
    """
    made: dict[nn.Module, PackedLinear] = {}  # a layer may stand in several places
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # named_children skips repeats
            if type(child) is nn.Linear and packable(child.weight):
                if child not in made:
                    made[child] = PackedLinear(child)
                setattr(parent, name, made[child])
    return module


def linear_of_rows(
    linear: nn.Linear, rows: Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> nn.Linear:
    """A layer of these outputs [K] of another alone, on a device and in a dtype, packed if the other is."""
    rows = rows.to(linear.weight.device)
    made = nn.Linear(linear.in_features, len(rows), bias=linear.bias is not None, device="meta")
    made.weight = nn.Parameter(linear.weight.detach()[rows].to(device, dtype), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach()[rows].to(device, dtype), requires_grad=False)
    return PackedLinear(made) if isinstance(linear, PackedLinear) else made


def is_packed(module: nn.Module) -> bool:
    """Whether any layer inside is packed."""
    return any(isinstance(layer, PackedLinear) for layer in module.modules())


@contextmanager
def plain_linears(module: nn.Module) -> Iterator[None]:
    """The module as it was before packing, for a while."""
    packed = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    before = [layer.plain for layer in packed]
    for layer in packed:
        layer.plain = True
    try:
        yield
    finally:
        for layer, plain in zip(packed, before, strict=True):
            layer.plain = plain
