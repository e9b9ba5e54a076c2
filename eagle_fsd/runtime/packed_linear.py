"""Linear layers that also keep their weight in a backend's blocked order.

On a CPU a tree then costs little more than a token: with only the few rows of a tree, a stock layer uses the
memory and the vector units poorly. The blocked copy doubles the weights' memory, because the plain weight
stays for everything else that reads it. matmul_backends.py chooses the backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.files.fingerprints import sample_values, whole
from eagle_fsd.runtime.matmul_backends import ONEDNN, MatmulBackend, backend_for, is_stock

MADE = ("packed", "sample", "sample_then")  # made from the weight, and made again for a copy of the layer
SAMPLE = 64  # how many values of a weight are compared to notice a change that left no other trace
_counting = threading.Lock()  # threads may want plain layers at the same time


class PackedLinear(nn.Linear):
    """A stand-in for an nn.Linear that shares its parameters.

    backend: the preferred one. Falls back to another that supports the weight, else to nn.Linear.
    packed: the weight at its `version`. `forward` packs it again if the weight was replaced or changed in
    place; `repack_changed` also notices a change through `weight.data`.
    plain: how many callers want the plain weight for now. Training and autocast always use it.
    """

    def __init__(self, linear: nn.Linear, backend: MatmulBackend = ONEDNN) -> None:
        nn.Module.__init__(self)
        self.preferred = backend
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training, self.plain = linear.training, 0
        self._pack()

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]  # not self.weight: that lookup is slow, and this runs often
        usable = self.packed is not None and x.dtype == weight.dtype and x.numel()
        if self.plain or not usable or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        if self.version != weight_version(weight):
            self._pack()
        return self.backend.multiply(x, self.packed, weight, self.bias)

    def repack_changed(self) -> None:
        """Pack the weight again if it was changed in any way."""
        if self.packed is None:
            return
        weight = self._parameters["weight"]
        if self.version != weight_version(weight) or not torch.equal(self.sample, self.sample_then):
            self._pack()

    def _pack(self) -> None:
        version, sample = weight_version(self.weight), sample_values(self.weight, SAMPLE)
        backend = backend_for(self.weight, self.preferred)
        packed = backend and backend.pack(self.weight.detach())
        # The version comes last: until it is set, other threads pack for themselves.
        self.backend, self.packed = backend, packed
        self.sample, self.sample_then, self.version = sample, sample.clone(), version

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._pack()

    def __getstate__(self) -> dict[str, Any]:  # for copies: a packed tensor has no storage to copy
        return {name: value for name, value in self.__dict__.items() if name not in MADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        super()._apply(fn, recurse)
        self._pack()
        return self


def weight_version(weight: Tensor) -> tuple[int, int]:
    """Return a value that changes if the tensor is replaced, or changed in a way that torch counts."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


def repack_changed(module: nn.Module) -> None:
    """Pack layers inside the module again if their weights were changed, for example by a merged adapter."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.repack_changed()


def pack_linears(module: nn.Module, backend: MatmulBackend | None = ONEDNN) -> nn.Module:
    """Replace the plain linear layers inside a module by packed ones, if a backend supports them.

    Layers of any other kind (quantised, adapted) stay as they are. backend: the preferred one, from
    `find_fastest_backend`, or always the same one if numbers must be equal in every run, as for features;
    None leaves the module as it is.
    """
    made: dict[nn.Module, PackedLinear] = {}  # a layer may be used in several places
    for parent in list(module.modules()) if backend else ():
        for name, child in list(parent._modules.items()):  # named_children skips repeats
            if is_stock(child) and backend_for(child.weight):
                if child not in made:
                    made[child] = PackedLinear(child, backend)
                setattr(parent, name, made[child])
    return module


def take_rows(
    linear: nn.Linear, rows: Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> nn.Linear:
    """Return a linear layer with only the outputs `rows` [K] of another; it is packed if the other is."""
    rows = rows.to(linear.weight.device)
    made = nn.Linear(linear.in_features, len(rows), bias=linear.bias is not None, device="meta")
    made.weight = nn.Parameter(whole(linear.weight).detach()[rows].to(device, dtype), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(whole(linear.bias).detach()[rows].to(device, dtype), requires_grad=False)
    return PackedLinear(made, linear.preferred) if isinstance(linear, PackedLinear) else made


def backend_names(module: nn.Module) -> list[str]:
    """Return the names of the backends that the layers inside are packed for; empty if none is packed."""
    layers = (layer for layer in module.modules() if isinstance(layer, PackedLinear))
    return sorted({layer.backend.name for layer in layers if layer.backend})


@contextmanager
def plain_linears(module: nn.Module) -> Iterator[None]:
    """Let a module's packed layers use their plain weights inside the block."""
    packed = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    with _counting:
        for layer in packed:
            layer.plain += 1
    try:
        yield
    finally:
        with _counting:
            for layer in packed:
                layer.plain -= 1
