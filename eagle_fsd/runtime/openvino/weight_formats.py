"""Weights in few bits: the formats, and how the products of a graph are given weights in one of them.

A block of GROUP weights of one row shares a scale, and in some formats an offset: w = scale * integer +
offset. The offsets make a second, small product: of the sums of the activations over each block. So the
integers' product stays symmetric, which is the form that processors multiply fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_fsd.runtime.openvino.library import openvino

FLOAT32, BFLOAT16, INT8, PACKED = "float32", "bfloat16", "int8", "packed"
FORMATS = (FLOAT32, BFLOAT16, INT8, PACKED)
FEW_BITS = (INT8, PACKED)  # these round activations too
# In these a .gguf file's own blocks are kept. In float32 they are multiplied as the numbers that they stand
# for, in packed with rounded activations.
OWN_BLOCKS = (FLOAT32, PACKED)
GROUP = 32


@dataclass(frozen=True)
class PackedRows:
    """Rows [out, bytes] uint8 of a ggml type, as they are in a file."""

    kind: str
    rows: np.ndarray


@dataclass(frozen=True)
class Blocks:
    """A weight [out, in] as integers of few bits. G: in / group blocks a row.

    integers: [out, G, group] int8. scales: [out, G] float32. offsets: the same, or None. bits: 4 if all
    integers are in -8..7, else 8. source: the rows of a file that they were read from, if any.
    """

    integers: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    bits: int
    source: PackedRows | None = None

    @property
    def group(self) -> int:
        return int(self.integers.shape[2])

    @property
    def kind(self) -> tuple[int, int, bool, str | None]:
        """What weights must have in common to be one product."""
        return self.bits, self.group, self.offsets is not None, self.source and self.source.kind

    def plain(self) -> np.ndarray:
        """Return the weight [out, in] float32 that the blocks stand for."""
        whole = self.integers * self.scales[:, :, None]
        if self.offsets is not None:
            whole = whole + self.offsets[:, :, None]
        return whole.reshape(len(self.integers), -1).astype(np.float32)

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """Return the blocks of weights of one kind, one below the other."""
        offsets = [part.offsets for part in parts if part.offsets is not None]
        sources = [part.source for part in parts if part.source is not None]
        return cls(
            np.concatenate([part.integers for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(offsets) if offsets else None,
            parts[0].bits,
            PackedRows(sources[0].kind, np.concatenate([one.rows for one in sources])) if sources else None,
        )


# Returns a weight's [out, in] blocks, or None for one that stays as it is.
Encoder = Callable[[np.ndarray], Blocks | None]
# Returns the outputs of rows [..., in] times weights of one kind: [..., out] each.
Multiplier = Callable[[Any, Sequence[Blocks]], list[Any]]


def round_to_int8(weight: np.ndarray) -> Blocks | None:
    """Round a weight to 8 bits, one scale for each GROUP weights of a row; None if rows do not divide."""
    rows, columns = weight.shape
    if columns % GROUP:
        return None
    blocks = weight.reshape(rows, -1, GROUP)
    scales = np.abs(blocks).max(-1) / np.float32(127)
    safe = np.where(scales > 0, scales, np.float32(1))
    return Blocks(np.rint(blocks / safe[:, :, None]).astype(np.int8), scales, None, 8)


def compress(model: Any, encode: Encoder, multiply: Multiplier) -> int:
    """Give the products of an openvino.Model weights in few bits, in place, and return how many got them.

    Products of one input become one product if their weights are of one kind: fewer, larger ones are faster.
    """
    inputs: dict[tuple[str, int], list[Any]] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            rows = node.input_value(0)
            inputs.setdefault((rows.get_node().get_friendly_name(), rows.get_index()), []).append(node)
    count = 0
    for nodes in inputs.values():  # not all at once: their blocks would take as much memory as the graph
        groups: dict[Any, list[tuple[Any, Blocks]]] = {}
        for node in nodes:
            if (weight := constant_weight(node)) is not None and (blocks := encode(weight)) is not None:
                groups.setdefault(blocks.kind, []).append((node, blocks))
        for products in groups.values():
            replace_products(products, multiply)
            count += len(products)
    model.validate_nodes_and_infer_types()
    return count


def constant_weight(node: Any) -> np.ndarray | None:
    """Return the weight [out, in] of a product with a constant matrix; None for any other product."""
    source, transposed = node.input_value(1).get_node(), node.get_attributes()["transpose_b"]
    if source.get_type_name() == "Convert":  # from another dtype of floats
        source = source.input_value(0).get_node()
    if source.get_type_name() != "Constant" or len(source.get_output_shape(0)) != 2:
        return None
    if node.get_attributes()["transpose_a"]:
        return None
    weight = np.asarray(source.data, dtype=np.float32)
    return weight if transposed else np.ascontiguousarray(weight.T)


def replace_products(products: Sequence[tuple[Any, Blocks]], multiply: Multiplier) -> None:
    """Put one product with blocks in the place of products of one input."""
    rows = products[0][0].input_value(0)
    made = multiply(rows, [blocks for _, blocks in products])
    for (node, _), output in zip(products, made, strict=True):
        node.output(0).replace(output)


def multiply_blocks(rows: Any, parts: Sequence[Blocks]) -> list[Any]:
    """Return the outputs of rows [..., in] times weights of one kind, [..., out] each, by one product."""
    ops = openvino().opset13
    made = multiply_joined(rows, Blocks.join(parts))
    if len(parts) == 1:
        return [made.output(0)]
    widths = np.array([len(blocks.integers) for blocks in parts], dtype=np.int64)
    return list(ops.variadic_split(made, ops.constant(np.int64(-1)), ops.constant(widths)).outputs())


def multiply_joined(rows: Any, blocks: Blocks) -> Any:
    """Return the node of rows [..., in] times a weight in blocks: [..., out]."""
    ops = openvino().opset13
    count, groups, group = blocks.integers.shape
    weight = ops.convert(integer_constant(blocks), np.float32)
    weight = ops.multiply(weight, ops.constant(np.ascontiguousarray(blocks.scales[:, :, None])))
    weight = ops.reshape(weight, ops.constant(np.array([count, groups * group])), special_zero=False)
    made = ops.matmul(rows, weight, transpose_a=False, transpose_b=True)
    if blocks.offsets is None:
        return made
    rank = len(rows.get_partial_shape())
    shape = ops.constant(np.array([*[0] * (rank - 1), groups, group]))
    sums = ops.reduce_sum(ops.reshape(rows, shape, special_zero=True), ops.constant(np.int64(rank)))
    return ops.add(made, ops.matmul(sums, ops.constant(blocks.offsets), False, True))


def integer_constant(blocks: Blocks) -> Any:
    """Return a constant [out, G, group] of 4 or 8 bits."""
    ov = openvino()
    if blocks.bits == 8:
        return ov.op.Constant(np.ascontiguousarray(blocks.integers))
    nibbles = blocks.integers.reshape(-1).view(np.uint8) & 0xF
    tensor = ov.Tensor(ov.Type.i4, ov.Shape(list(blocks.integers.shape)))
    tensor.data.reshape(-1).view(np.uint8)[:] = nibbles[::2] | (nibbles[1::2] << 4)
    return ov.op.Constant(tensor, shared_memory=True)
