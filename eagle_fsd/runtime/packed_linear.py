"""Linear layers that also keep their weight in a backend's blocked order.

A tree then costs a CPU little more than a token: over the few rows of a tree a stock layer runs far below
what memory and the vector units give. The blocked copy takes the weights' memory a second time; the plain
weight stays, for whatever else reads it. matmul_backends.py chooses the backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.files.fingerprints import sample_values
from eagle_fsd.runtime.matmul_backends import ONEDNN, MatmulBackend, backend_for

MADE = ("packed", "sample", "sample_then")  # of the weight, and again for every copy of a layer
SAMPLE = 64  # values of a weight by which a change is noticed that left no other trace
_counting = threading.Lock()  # threads may want plain layers at the same time


class PackedLinear(nn.Linear):
    """A stand-in for an nn.Linear, with its very parameters.

    backend: the preferred one. Falls back to another that supports the weight, else to nn.Linear.
    packed: the weight as `version` of it was. `forward` packs it again where the weight was exchanged or
    changed in place, `repack_changed` also where that was done through `weight.data`.
    plain: how many callers want the plain weight for now. Training and autocast always take it.
    """

    def __init__(self, linear: nn.Linear, backend: MatmulBackend = ONEDNN) -> None:
        nn.Module.__init__(self)
        self.preferred = backend
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training, self.plain = linear.training, 0
        self._pack()

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]  # asked for once: this is called hundreds of times in a step
        usable = self.packed is not None and x.dtype == weight.dtype and x.numel()
        if self.plain or not usable or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        if self.version != weight_version(weight):
            self._pack()
        return self.backend.multiply(x, self.packed, weight, self.bias)

    def repack_changed(self) -> None:
        """Pack the weight again if it is another one by now, however it was changed."""
        if self.packed is None:
            return
        weight = self._parameters["weight"]
        if self.version != weight_version(weight) or not torch.equal(self.sample, self.sample_then):
            self._pack()

    def _pack(self) -> None:
        version, sample = weight_version(self.weight), sample_values(self.weight, SAMPLE)
        backend = backend_for(self.weight, self.preferred)
        packed = backend and backend.pack(self.weight.detach())
        # The version last: until it is there, other threads pack for themselves.
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
    """What a change of the tensor in place changes, as far as torch counts such changes, or an exchange."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


def repack_changed(module: nn.Module) -> None:
    """Pack the layers inside again whose weights were changed since, by a merged adapter for one."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.repack_changed()


def pack_linears(module: nn.Module, backend: MatmulBackend | None = ONEDNN) -> nn.Module:
    """Put packed layers in the place of the plain linear ones inside a module, where that is possible.

    Layers of any other kind (quantised, adapted) stay as they are. backend: the preferred one, of
    `measure_fastest_backend` or, where numbers must come out the same on every run, as features do, always
    the same one; None leaves the module as it is.
    """
    made: dict[nn.Module, PackedLinear] = {}  # a layer may stand in several places
    for parent in list(module.modules()) if backend else ():
        for name, child in list(parent._modules.items()):  # named_children skips repeats
            if type(child) is nn.Linear and backend_for(child.weight):
                if child not in made:
                    made[child] = PackedLinear(child, backend)
                setattr(parent, name, made[child])
    return module


def take_rows(
    linear: nn.Linear, rows: Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> nn.Linear:
    """A layer of these outputs [K] of another alone, on a device and in a dtype, packed if the other is."""
    rows = rows.to(linear.weight.device)
    made = nn.Linear(linear.in_features, len(rows), bias=linear.bias is not None, device="meta")
    made.weight = nn.Parameter(linear.weight.detach()[rows].to(device, dtype), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach()[rows].to(device, dtype), requires_grad=False)
    return PackedLinear(made, linear.preferred) if isinstance(linear, PackedLinear) else made


def backend_names(module: nn.Module) -> list[str]:
    """The names of the backends that the layers inside are packed for; none where none is packed."""
    layers = (layer for layer in module.modules() if isinstance(layer, PackedLinear))
    return sorted({layer.backend.name for layer in layers if layer.backend})


@contextmanager
def plain_linears(module: nn.Module) -> Iterator[None]:
    """The module as it was before packing, for a while."""
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
