"""Products with weights of few bits as nodes of a graph: TileProduct's where it can, else OpenVINO's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.operators.tile_layout import tiles_of
from eagle_fsd.runtime.openvino.weight_formats import Blocks, multiply_blocks


def multiply_tiles(rows: Any, parts: Sequence[Blocks]) -> list[Any]:
    """Return the outputs of rows [..., in] times weights of one kind, [..., out] each.

    The operators must be there.
    """
    tiles = [tiles_of(blocks) for blocks in parts]
    known = [one for one in tiles if one is not None]
    if len(known) < len(tiles):
        return multiply_blocks(rows, parts)
    data = np.concatenate([one.data for one in known])
    given = [rows, library.openvino().opset13.constant(data)]
    widths = [one.width for one in known]
    attributes = {"kind": known[0].kind, "widths": widths, "span": known[0].span}
    return list(library.node_factory().create("TileProduct", given, attributes).outputs())
