"""Matmul backends that multiply a few rows with a weight packed in their own blocked order.

On a CPU torch gives float32 products to MKL with the plain weight. How much slower that is than oneDNN or MKL
with a packed weight, and up to how many rows, depends on the processor. So the fastest backend is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_fsd.core.devices import multiplies_bfloat16
from eagle_fsd.files.fingerprints import is_plain
from eagle_fsd.files.provenance import cores, processor
from eagle_fsd.files.records import BACKENDS_FILE, recall, record_key, remember
from eagle_fsd.runtime.timing import BUSY, Call, CoreWait, disagreement, time_in_turn

ROWS = (1, 4, 16)  # a plain step, a small tree and a large one
SAMPLE = 2**28  # bytes of weights that are timed: more than most caches hold
LEAST = 2**24  # bytes of weights below which there is nothing to gain or measure
GAIN = 1.05  # packed weights must be this much faster than the stock layers to be worth a second copy
STOCK = "none"  # the name under which stock layers are remembered
BLOCK = 16  # rows that a weight is packed for; any other number works too


@dataclass(frozen=True)
class MatmulBackend:
    """A library that multiplies with packed weights.

    supports: whether it can multiply with this weight on this machine. pack: puts a weight [out, in] in its
    own order. multiply: rows [..., in], the packed weight, the plain one and the bias [out] or None give
    [..., out].
    """

    name: str
    supports: Callable[[Tensor], bool]
    pack: Callable[[Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _onednn_supports(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    bfloat16 = weight.dtype == torch.bfloat16
    return weight.dtype == torch.float32 or (bfloat16 and multiplies_bfloat16(weight.device))


def _onednn_pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK)


def _onednn_multiply(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _mkl_supports(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    # oneDNN's tensors carry the packed weight.
    usable = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return usable and hasattr(torch.ops.mkl, "_mkl_linear")


def _mkl_pack(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight, BLOCK)


def _mkl_multiply(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The op falls back to the stock product unless it is told that the weight was packed for this many rows.
    return torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.numel() // x.shape[-1])


ONEDNN = MatmulBackend("oneDNN", _onednn_supports, _onednn_pack, _onednn_multiply)
MKL = MatmulBackend("MKL", _mkl_supports, _mkl_pack, _mkl_multiply)
BACKENDS = (ONEDNN, MKL)


def backend_for(weight: Tensor, preferred: MatmulBackend = ONEDNN) -> MatmulBackend | None:
    """Return the preferred backend if it supports this weight here, else another one, else None."""
    return next((one for one in (preferred, *BACKENDS) if one.supports(weight)), None)


def find_fastest_backend(module: nn.Module) -> MatmulBackend | None:
    """Return the fastest backend, measured once for layers of these shapes on this machine, then remembered.

    It is not remembered on a busy machine, where repeats disagree or threads wait for a core.
    """
    if not (sample := sample_weights(module)):
        return measure_fastest_backend(module)[0]
    shapes = [[str(weight.dtype), *weight.shape] for weight in sample]
    here = [processor(), cores(), torch.get_num_threads(), torch.__version__]
    key = record_key("library", here, shapes, ROWS, [backend.name for backend in BACKENDS])
    by_name = {backend.name: backend for backend in BACKENDS} | {STOCK: None}
    if (name := recall(key, str, BACKENDS_FILE)) in by_name:
        return by_name[name]
    waiting = CoreWait()
    with waiting.counted():
        found, spread = measure_fastest_backend(module)
    if max(spread, waiting.share) <= BUSY:
        remember(key, found.name if found else STOCK, BACKENDS_FILE)
    return found


def sample_weights(module: nn.Module) -> list[Tensor]:
    """Return up to SAMPLE bytes of the weights that a backend supports; none if they have less than LEAST."""
    weights = supported_weights(module)
    if sum(weight.nbytes for weight in weights) < LEAST:
        return []
    sample, room = [], SAMPLE
    for weight in weights:
        if not sample or weight.nbytes <= room:
            sample.append(weight)
            room -= weight.nbytes
    return sample


def is_stock(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Return whether a layer is torch's own linear layer, with a plain weight.

    Packages that quantise put weights of another class into it, or take its weight or its forward away.
    """
    return (
        type(layer) is nn.Linear and is_plain(getattr(layer, "weight", None)) and "forward" not in vars(layer)
    )


def supported_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers that a backend supports; a tied weight comes once."""
    layers = (layer for layer in module.modules() if is_stock(layer) and backend_for(layer.weight))
    return list({id(layer.weight): layer.weight for layer in layers}.values())


@torch.inference_mode()
def measure_fastest_backend(
    module: nn.Module, rows: Sequence[int] = ROWS
) -> tuple[MatmulBackend | None, float]:
    """Return the backend that multiplies `rows` rows with this module's layers fastest; None: stock layers.

    The numbers of rows count equally. It takes about a second, on up to SAMPLE bytes of the layers. A
    module of less than LEAST bytes is not measured and gets the first backend that supports its weights. The
    second value is the median disagreement of the repeats; see timing.disagreement.
    """
    if not (sample := sample_weights(module)):
        return next((backend_for(weight) for weight in supported_weights(module)), None), 0.0
    stock = [lambda x, weight=weight: F.linear(x, weight) for weight in sample]
    repeats = time_products(stock, sample, rows)
    spreads = [*map(disagreement, repeats)]
    best, least = None, [statistics.median(seconds) / GAIN for seconds in repeats]
    for backend in BACKENDS:
        if all(backend.supports(weight) for weight in sample):
            repeats = time_products(pack_products(backend, sample), sample, rows)
            spreads += map(disagreement, repeats)
            medians = [statistics.median(seconds) for seconds in repeats]
            if sum(mine / theirs for mine, theirs in zip(medians, least, strict=True)) < len(least):
                best, least = backend, medians
    return best, statistics.median(spreads)


def pack_products(backend: MatmulBackend, weights: Sequence[Tensor]) -> list[Callable[[Tensor], Tensor]]:
    """Return the backend's product with each of the weights, as functions."""
    packed = [(backend.pack(weight), weight) for weight in weights]
    return [lambda x, pair=pair: backend.multiply(x, *pair, None) for pair in packed]


def time_products(
    multiply: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[Tensor], rows: Sequence[int]
) -> list[list[float]]:
    """Return the seconds of each repeat of all these products together, for each number of rows."""

    def call(count: int) -> Call:
        inputs = [weight.new_ones(count, weight.shape[1]) for weight in weights]

        def run() -> None:
            for product, x in zip(multiply, inputs, strict=True):
                product(x)

        return Call(run)

    repeats = time_in_turn({count: call(count) for count in rows}, weights[0].device)
    return list(repeats.values())
