"""The OpenVINO runtime in one weight format: it compiles networks and products, and makes their caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eagle_fsd.core.checks import require_choice
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.network import Layout, Network, Product, Traceable, trace
from eagle_fsd.runtime.openvino.weight_formats import (
    BFLOAT16,
    FORMATS,
    INT8,
    PACKED,
    Blocks,
    Encoder,
    compress,
    round_to_int8,
)


@dataclass
class OpenVINO:
    """Compiles networks for the CPU. weight_format: one of FORMATS. packed: finds a file's own blocks.

    weight_bytes: of all that was compiled so far.
    """

    weight_format: str
    packed: Encoder | None = None
    weight_bytes: int = 0
    rounded: dict[str, int] = field(default_factory=lambda: {"products": 0, "weights": 0})

    def __post_init__(self) -> None:
        require_choice("weight_format", self.weight_format, FORMATS)
        library.require()

    def network(self, module: nn.Module, work: Traceable, layout: Layout) -> Network:
        """Trace and compile a network on blocks; see network.trace."""
        return Network(self._compile(trace(module, work, layout)), layout.masks)

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Compile the product with a weight [out, in]."""
        return Product(self._compile(product_model(weight, bias)))

    def encode(self, weight: Any) -> Blocks | None:
        """Return a weight's blocks in this format; None if it stays as it is."""
        if self.weight_format == INT8:
            return round_to_int8(weight)
        if self.weight_format == PACKED and self.packed is not None:
            return self.packed(weight)
        return None

    def _compile(self, model: Any) -> Any:
        few_bits = self.weight_format in (INT8, PACKED)
        if few_bits:
            compress(model, self.encode)
        self.weight_bytes += sum(constant.get_byte_size() for constant in constants(model))
        precision = "bf16" if self.weight_format == BFLOAT16 else "f32"
        return library.compile_graph(model, precision, few_bits)


def constants(model: Any) -> Sequence[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]


def product_model(weight: Tensor, bias: Tensor | None) -> Any:
    """Return an openvino.Model of rows [n, in] times a weight [out, in]: [n, out]."""
    import openvino
    from openvino import opset13 as ops

    rows = ops.parameter([-1, weight.shape[1]], np.float32)
    plain = weight.detach().float().contiguous().numpy()
    made = ops.matmul(rows, openvino.op.Constant(plain, shared_memory=True), False, True)
    if bias is not None:
        made = ops.add(made, openvino.op.Constant(bias.detach().float().contiguous().numpy()))
    return openvino.Model([made], [rows], "product")
