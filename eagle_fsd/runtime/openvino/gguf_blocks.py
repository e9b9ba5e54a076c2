"""The quantised weights of a .gguf file, as the blocks that they already are: nothing is quantised again.

A weight is found by its content, row by row, so no model family and no tensor's name is known here: its rows
may be in another order than in the file (as Llama's queries and keys are), or come from several tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from eagle_fsd.runtime.openvino.weight_formats import Blocks, PackedRows

CHUNK = 2**18  # numbers that are worked on at once: few enough for a processor's cache


# -- finding ----------------------------------------


@dataclass
class GGUFBlocks:
    """Returns the blocks of weights whose rows are in a .gguf file. It is an Encoder."""

    path: Path
    _indices: dict[tuple[str, int], RowIndex] = field(default_factory=dict, repr=False)

    def __call__(self, weight: np.ndarray) -> Blocks | None:
        """Return a float32 weight's [out, in] blocks; None unless the file has all its rows in one type."""
        weight = np.ascontiguousarray(weight, dtype=np.float32)
        for kind, columns in self._tensors:
            if columns != weight.shape[1]:
                continue
            if (packed := self._index(kind, columns).gather(weight)) is not None:
                return unpack(kind, packed)
        return None

    def _index(self, kind: str, columns: int) -> RowIndex:
        key = kind, columns
        if key not in self._indices:
            self._indices[key] = RowIndex(kind, self._tensors[key])
        return self._indices[key]

    @cached_property
    def _tensors(self) -> dict[tuple[str, int], list[np.ndarray]]:
        """The file's packed rows [rows, bytes], not read yet, by ggml type and number of columns."""
        import gguf

        tensors: dict[tuple[str, int], list[np.ndarray]] = {}
        for tensor in gguf.GGUFReader(self.path).tensors:
            kind = tensor.tensor_type.name
            if kind in LAYOUTS and len(tensor.shape) > 1 and tensor.n_elements:
                rows = tensor.data.reshape(-1, tensor.data.shape[-1])
                tensors.setdefault((kind, int(tensor.shape[0])), []).append(rows)
        return tensors


class RowIndex:
    """Finds rows by their plain values in tensors of one ggml type and width. It keeps 16 bytes a row."""

    def __init__(self, kind: str, tensors: Sequence[np.ndarray]) -> None:
        self.kind, self.tensors = kind, tensors
        checksums = np.concatenate([checksum(rows) for part in tensors for rows in self._plain(part)])
        self.order = np.argsort(checksums)
        self.checksums = checksums[self.order]
        self.starts = np.cumsum([0, *(len(part) for part in tensors)])

    def gather(self, weight: np.ndarray) -> np.ndarray | None:
        """Return the packed rows [out, bytes] of a weight; None if one of them is not here."""
        sums = np.concatenate([checksum(rows) for rows in chunks(weight, weight.shape[1])])
        places = np.minimum(np.searchsorted(self.checksums, sums), len(self.checksums) - 1)
        if not np.array_equal(self.checksums[places], sums):
            return None
        packed = self._packed(self.order[places])
        begin = 0
        for rows in self._plain(packed):  # equal checksums alone prove nothing
            end = begin + len(rows)
            if not np.array_equal(rows.view(np.uint32), weight[begin:end].view(np.uint32)):
                return None
            begin = end
        return packed

    def _packed(self, rows: np.ndarray) -> np.ndarray:
        """Return the packed rows of these numbers, which count through all tensors."""
        packed = np.empty((len(rows), self.tensors[0].shape[1]), dtype=np.uint8)
        owners = np.searchsorted(self.starts, rows, side="right") - 1
        for owner in np.unique(owners):
            here = owners == owner
            packed[here] = self.tensors[owner][rows[here] - self.starts[owner]]
        return packed

    def _plain(self, packed: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the plain values of packed rows, some rows at a time, computed as all loaders do."""
        from gguf import quants

        codec = getattr(quants, self.kind)
        for rows in chunks(packed, 2 * packed.shape[1]):  # a byte holds one or two numbers
            yield codec.dequantize_rows(rows)


def chunks(rows: np.ndarray, numbers_a_row: int) -> Iterator[np.ndarray]:
    step = max(1, CHUNK // numbers_a_row)
    return (rows[begin : begin + step] for begin in range(0, len(rows), step))


def checksum(rows: np.ndarray) -> np.ndarray:
    """Return a 64-bit checksum of each row [n, columns] of floats; different rows hardly ever share one."""
    pairs = rows.view(np.uint64)  # [n, columns / 2]
    # An odd factor for each place. Without the shift, signs, which are the highest bits, cancel each other.
    factors = np.random.default_rng(0).integers(2**63, size=pairs.shape[1], dtype=np.uint64)
    mixed = pairs ^ (pairs >> np.uint64(31))
    mixed *= 2 * factors + 1
    return mixed.sum(axis=1)


# -- unpacking ----------------------------------------


@dataclass(frozen=True)
class BlockLayout:
    """How a ggml type keeps weights, in groups: w = scale * (integer + centre) + minimum.

    The integers are centred because small ones lose least where the other factor is rounded to 8 bits.

    fields: of one block, in the file's order. `low` has the lowest bits of the integers, `low_bits` of each,
    and `high` the next `high_bits` of each. scales: reads a block's scales and minima from its fields.
    """

    fields: list[tuple[str, str] | tuple[str, str, tuple[int, ...]]]
    group: int
    centre: int
    scales: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
    low_bits: int = 4
    high_bits: int = 0

    @property
    def names(self) -> set[str]:
        """The names of a block's fields."""
        return {name for name, *_ in self.fields}

    @property
    def bits(self) -> int:
        return 4 if self.low_bits + self.high_bits == 4 else 8

    def integers(self, blocks: np.ndarray) -> np.ndarray:
        """Return the centred integers [n, G, group] int8 of blocks [n]."""
        made = spread(blocks["low"], self.low_bits)
        if self.high_bits:
            made |= spread(blocks["high"], self.high_bits).reshape(made.shape) << np.uint8(self.low_bits)
        made = made.reshape(len(blocks), -1, self.group).view(np.int8)
        made -= np.int8(self.centre)
        return made


def unpack(kind: str, packed: np.ndarray) -> Blocks:
    """Return packed rows [out, bytes] of a ggml type as Blocks."""
    layout = LAYOUTS[kind]
    integers, scales, offsets = [], [], []
    for rows in chunks(packed, 2 * packed.shape[1]):
        blocks = rows.reshape(-1).view(np.dtype(layout.fields))
        integers.append(layout.integers(blocks).reshape(len(rows), -1, layout.group))
        scale, minimum = layout.scales(blocks)  # [n, G]
        scales.append(scale.reshape(len(rows), -1))
        if minimum is not None:
            offsets.append((minimum + scale * np.float32(layout.centre)).reshape(len(rows), -1))
    joined = np.concatenate(offsets) if offsets else None
    source = PackedRows(kind, packed)
    return Blocks(np.concatenate(integers), np.concatenate(scales), joined, layout.bits, source)


def spread(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of `bits` bits in bytes [n, runs, width]: [n, runs, 8 / bits, width].

    The lowest bits of all bytes of a run come first, then the next ones.
    """
    count, runs, width = packed.shape
    made = np.empty((count, runs, 8 // bits, width), dtype=np.uint8)
    for place in range(8 // bits):
        np.right_shift(packed, np.uint8(bits * place), out=made[:, :, place])
    made &= np.uint8(2**bits - 1)
    return made


def scale_alone(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    return blocks["d"].astype(np.float32)[:, None], None


def scale_and_minimum(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return blocks["d"].astype(np.float32)[:, None], blocks["m"].astype(np.float32)[:, None]


def scales_of_8_bits(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    return blocks["d"].astype(np.float32)[:, None] * blocks["scales"], None


def scales_of_6_bits(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, minima = split_scales_of_6_bits(blocks["scales"])
    # The minima of these types are kept with the other sign.
    return blocks["d"].astype(np.float32)[:, None] * scales, -blocks["m"].astype(np.float32)[:, None] * minima


def split_scales_of_6_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight minima [n, 8] uint8 from three groups of four bytes [n, 3, 4].

    The first four bytes hold four scales and the highest bits of the other four; the next four bytes the same
    of the minima; the last four bytes the lowest bits of the other scales and minima.
    """
    scales, minima, rest = (packed[:, place] for place in range(3))
    low, top = np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([scales & low, rest & np.uint8(0xF) | scales >> np.uint8(2) & top], axis=1)
    minima = np.concatenate([minima & low, rest >> np.uint8(4) | minima >> np.uint8(2) & top], axis=1)
    return scales, minima


D, M = ("d", "<f2"), ("m", "<f2")  # floats of 16 bits
LOW_32, LOW_256 = ("low", "u1", (1, 16)), ("low", "u1", (4, 32))
HIGH_32, HIGH_256 = ("high", "u1", (4, 1)), ("high", "u1", (1, 32))
LOW_6_BITS, HIGH_6_BITS = ("low", "u1", (2, 64)), ("high", "u1", (2, 32))
K_SCALES = ("scales", "u1", (3, 4))
LAYOUTS = {
    "Q4_0": BlockLayout([D, LOW_32], 32, 8, scale_alone),
    "Q4_1": BlockLayout([D, M, LOW_32], 32, 8, scale_and_minimum),
    "Q5_0": BlockLayout([D, HIGH_32, LOW_32], 32, 16, scale_alone, high_bits=1),
    "Q5_1": BlockLayout([D, M, HIGH_32, LOW_32], 32, 16, scale_and_minimum, high_bits=1),
    "Q8_0": BlockLayout([D, ("low", "u1", (1, 32))], 32, 0, scale_alone, low_bits=8),
    "Q4_K": BlockLayout([D, M, K_SCALES, LOW_256], 32, 8, scales_of_6_bits),
    "Q5_K": BlockLayout([D, M, K_SCALES, HIGH_256, LOW_256], 32, 16, scales_of_6_bits, high_bits=1),
    "Q6_K": BlockLayout(
        [LOW_6_BITS, HIGH_6_BITS, ("scales", "i1", (16,)), D], 16, 32, scales_of_8_bits, high_bits=2
    ),
}
