"""Products with weights of few bits as nodes of a graph: TileProduct's where it can, else OpenVINO's own."""

from __future__ import annotations

from typing import Any

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.operators.tile_layout import tiles_of
from eagle_fsd.runtime.openvino.weight_formats import Blocks, multiply_blocks


def multiply_tiles(rows: Any, blocks: Blocks) -> Any:
    """Return the node of rows [..., in] times a weight in blocks: [..., out]. The operator must be there."""
    tiles = tiles_of(blocks)
    if tiles is None:
        return multiply_blocks(rows, blocks)
    given = [rows, library.openvino().opset13.constant(tiles.data)]
    attributes = {"kind": tiles.kind, "width": tiles.width, "span": tiles.span}
    return library.node_factory().create("TileProduct", given, attributes)
