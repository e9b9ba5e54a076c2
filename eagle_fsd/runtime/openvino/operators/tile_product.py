"""Products with weights of few bits as nodes of a graph: TileProduct's where it can, else OpenVINO's own."""

from __future__ import annotations

import functools
from typing import Any

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.operators.tile_layout import tiles_of
from eagle_fsd.runtime.openvino.weight_formats import FEW_BITS, Blocks, multiply_blocks


def operator_of(weight_format: str) -> str | None:
    """Return the name of the compiled operator that multiplies in a format; None: OpenVINO does."""
    found = library.operator() if weight_format in FEW_BITS else None
    return None if found is None else found.parent.name


def multiply_tiles(rows: Any, blocks: Blocks) -> Any:
    """Return the node of rows [..., in] times a weight in blocks: [..., out]. The operator must be there."""
    tiles = tiles_of(blocks)
    if tiles is None:
        return multiply_blocks(rows, blocks)
    given = [rows, library.openvino().opset13.constant(tiles.data)]
    attributes = {"kind": tiles.kind, "width": tiles.width, "span": tiles.span}
    return factory().create("TileProduct", given, attributes)


@functools.cache
def factory() -> Any:
    """Return what makes nodes of the operator."""
    from openvino.utils.node_factory import NodeFactory

    made = NodeFactory()
    made.add_extension(str(library.operator()))
    return made
