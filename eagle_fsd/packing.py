"""Linear layers that also keep their weight in a library's blocked order: a tree then costs a CPU little more
than a token.

Over the few rows of a tree a stock layer runs far below what memory and the vector units give. The blocked
copy takes the weights' memory a second time; the plain weight stays, for whatever else reads it. Which
library: libraries.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.libraries import ONEDNN, Library, library_for


class PackedLinear(nn.Linear):
    """A stand-in for an nn.Linear, with its very parameters.

    library: what multiplies; another one where it does not take the weight, and none where none does. packed:
    the weight as it was when it was packed, loaded or last moved: one that is changed in place is not seen.
    Training, autocast and `plain_linears` take the plain weight.
    """

    def __init__(self, linear: nn.Linear, library: Library = ONEDNN) -> None:
        nn.Module.__init__(self)
        self.preferred = library
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training, self.plain = linear.training, False
        self._pack()

    def forward(self, x: Tensor) -> Tensor:
        usable = self.packed is not None and x.dtype == self.weight.dtype and x.numel()
        if self.plain or not usable or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return self.library.multiply(x, self.packed, self.weight, self.bias)

    def _pack(self) -> None:
        self.library = library_for(self.weight, self.preferred)
        self.packed: Tensor | None = self.library and self.library.pack(self.weight.detach())

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


def pack_linears(module: nn.Module, library: Library | None = ONEDNN) -> nn.Module:
    """Put packed layers in the place of the plain linear ones inside a module, where that is possible.

    Layers of any other kind (quantised, adapted) stay as they are. library: the preferred one, of
    `fastest_library` or, where numbers must come out the same on every run, as features do, always the same
    one; None leaves the module as it is.
    """
    made: dict[nn.Module, PackedLinear] = {}  # a layer may stand in several places
    for parent in list(module.modules()) if library else ():
        for name, child in list(parent._modules.items()):  # named_children skips repeats
            if type(child) is nn.Linear and library_for(child.weight):
                if child not in made:
                    made[child] = PackedLinear(child, library)
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
    return PackedLinear(made, linear.preferred) if isinstance(linear, PackedLinear) else made


def libraries_of(module: nn.Module) -> list[str]:
    """The names of the libraries that the layers inside are packed for; none where none is packed."""
    layers = (layer for layer in module.modules() if isinstance(layer, PackedLinear))
    return sorted({layer.library.name for layer in layers if layer.library})


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
