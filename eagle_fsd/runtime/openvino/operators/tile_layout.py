"""Weights of few bits as TileProduct reads them; tiles.hpp says what lies where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_fsd.runtime.openvino.gguf_blocks import LAYOUTS, split_scales_of_6_bits
from eagle_fsd.runtime.openvino.weight_formats import GROUP, Blocks

TILE, CHUNK, LINE = 32, 32, 64  # outputs side by side, inputs that share an activation's scale, bytes
INT8 = "int8"  # the kind of weights that were rounded to 8 bits here, with scales in float32
SPANS = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256}  # inputs that share a header, where these are not 64
SPAN = 64


@dataclass(frozen=True)
class Tiles:
    """A weight [width, in] for TileProduct. data: [tiles, bytes] uint8."""

    kind: str
    data: np.ndarray
    width: int
    span: int


def tiles_of(blocks: Blocks) -> Tiles | None:
    """Return a weight's tiles; None if TileProduct does not know its kind, or if spans do not divide it."""
    if blocks.source is not None:
        kind, columns = blocks.source.kind, blocks.integers[0].size
        if columns % SPANS.get(kind, SPAN):
            return None
        return join(kind, *parts_of_rows(kind, padded(blocks.source.rows)), len(blocks.integers))
    if blocks.kind == (8, GROUP, False, None) and not blocks.integers[0].size % SPAN:
        integers = padded(blocks.integers.reshape(len(blocks.integers), -1)).view(np.uint8)
        return join(INT8, [padded(blocks.scales)], integers, 4, len(blocks.integers))
    return None


def padded(rows: np.ndarray) -> np.ndarray:
    """Return rows [n, ...] with zeros behind them, so that they fill whole tiles."""
    missing = -len(rows) % TILE
    return rows if not missing else np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])


def parts_of_rows(kind: str, packed: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Return the scales and minima of rows of a ggml type, their integers [n, in], and how many high bits.

    Scales and minima are [n, numbers]: first those of whole spans, then those of groups.
    """
    layout = LAYOUTS[kind]
    blocks = packed.reshape(-1).view(np.dtype(layout.fields))
    integers = (layout.integers(blocks).view(np.uint8) + np.uint8(layout.centre)).reshape(len(packed), -1)
    numbers = [blocks["d"]]
    if "scales" not in layout.names:
        numbers += [blocks["m"]] if "m" in layout.names else []
    elif "m" in layout.names:
        numbers += [-blocks["m"], *split_scales_of_6_bits(blocks["scales"])]
    else:
        numbers.append(blocks["scales"])
    high = 4 if layout.low_bits == 8 else layout.high_bits
    return [one.reshape(len(packed), -1) for one in numbers], integers, high


def join(kind: str, numbers: Sequence[np.ndarray], integers: np.ndarray, high: int, width: int) -> Tiles:
    """Lay scales, minima and integers together, in the order in which TileProduct reads them."""
    tiles, span = len(integers) // TILE, SPANS.get(kind, SPAN)
    spans = integers.shape[1] // span

    def header_of(one: np.ndarray) -> np.ndarray:
        """Turn [n, numbers] into [tiles, spans, bytes], those of TILE outputs side by side."""
        turned = one.reshape(tiles, TILE, spans, -1).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(turned).reshape(tiles, spans, -1).view(np.uint8)

    parts = [header_of(one) for one in numbers]
    missing = -sum(part.shape[2] for part in parts) % LINE
    parts.append(np.zeros((tiles, spans, missing), np.uint8))
    parts.append(planes_of(integers.reshape(tiles, TILE, spans, span), high))
    return Tiles(kind, np.concatenate(parts, axis=2).reshape(tiles, -1), width, span)


def planes_of(integers: np.ndarray, high: int) -> np.ndarray:
    """Return the planes [tiles, spans, bytes] of integers [tiles, TILE, spans, span] with 4 + `high` bits.

    A register has four inputs of each output of a tile, and eight of them are a CHUNK. With fewer than 8 bits
    register j shares its low plane with register j + 4, and a high plane with those beside it.
    """
    tiles, _, spans, span = integers.shape
    chunks = span // CHUNK
    registers = integers.reshape(tiles, TILE, spans, chunks, 8, 4).transpose(4, 0, 2, 3, 1, 5)
    registers = registers.reshape(8, tiles, spans, chunks, TILE * 4)
    if high == 4:
        planes = list(registers)
    else:
        low, rest = registers & np.uint8(0xF), registers >> np.uint8(4)
        planes = [share_bytes(low[j::4], 4) for j in range(4)]
        planes += [share_bytes(part, high) for part in np.split(rest, high or 1) if high]
    return np.stack(planes, axis=3).reshape(tiles, spans, -1)


def share_bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return bytes that hold the numbers [8 / bits, ...] of `bits` bits, the first one lowest."""
    made = np.zeros_like(numbers[0])
    for place, number in enumerate(numbers):
        made |= number << np.uint8(bits * place)
    return made
