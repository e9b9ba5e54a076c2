"""The OpenVINO runtime in one weight format: it compiles networks and products, and makes their caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from eagle_fsd.core.checks import require_choice
from eagle_fsd.files.provenance import cores, machine_memory
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.block_cache import BlockCache, WrittenCache
from eagle_fsd.runtime.openvino.kept.graph_store import GRAPHS, constant_bytes, find_or_make, read
from eagle_fsd.runtime.openvino.kept.head_start import HEAD_START, Compiling, shapes_of
from eagle_fsd.runtime.openvino.network import Layout, Network, Product, Traceable, trace
from eagle_fsd.runtime.openvino.operators.tile_product import multiply_tiles
from eagle_fsd.runtime.openvino.variants import Variants, read_first
from eagle_fsd.runtime.openvino.weight_formats import (
    BFLOAT16,
    FEW_BITS,
    FORMATS,
    INT8,
    PACKED,
    Blocks,
    Encoder,
    compress,
    multiply_blocks,
    round_to_int8,
)

COPIES = 2**30  # bytes that the copies of a network's weights may take, unless two take more
SHARE = 8  # what part of a machine's memory two copies may take
LARGE = 2**25  # bytes of weights from which compiling takes as long as many steps
DRAFT = ("head", "head_fc", "draft_lm_head")  # the names of networks that only draft


@dataclass
class OpenVINO:
    """Compiles networks for the CPU. weight_format: one of FORMATS.

    packed: finds a file's own blocks, with a format of OWN_BLOCKS. threads: of its own; as many as torch has
    by default.
    """

    weight_format: str
    packed: Encoder | None = None
    threads: int = field(default_factory=torch.get_num_threads)
    name: ClassVar[str] = "openvino"

    def __post_init__(self) -> None:
        require_choice("weight_format", self.weight_format, FORMATS)
        library.require()
        if self.weight_format == BFLOAT16 and min(self.threads, cores() or 1) == 1 and has_amx():
            # OpenVINO 2026.4 divides by zero where it compiles a decoder for that, which ends the process.
            raise ValueError(
                "weight_format is 'bfloat16' with one thread on a processor with AMX: OpenVINO cannot compile"
                " that; use runtime torch (--runtime torch), two threads, or another format"
            )

    @property
    def rounds(self) -> bool:
        """Whether products round their activations."""
        return self.weight_format in FEW_BITS

    @property
    def operators(self) -> str | None:
        """The name of the library whose operators graphs have; None: they have OpenVINO's alone."""
        return operators_of(self.weight_format)

    def layout(
        self,
        inputs: Sequence[Tensor],
        masks: int,
        members: Sequence[tuple[int, int]],
        cache: type[BlockCache] | None = None,
    ) -> Layout:
        """Return a network's layout. cache: by default the best one that serves any mask.

        Where activations are rounded to 8 bits anyway, 16 bits are enough for keys and values.
        """
        if cache is None:
            cache = WrittenCache if self.operators else BlockCache
        halves = cache is WrittenCache and self.rounds
        return Layout(inputs, masks, members, cache, torch.float16 if halves else torch.float32)

    def network(
        self,
        name: str,
        module: nn.Module,
        work: Traceable,
        layout: Layout,
        made_of: object,
        kept: bool = True,
    ) -> Network:
        """Trace and compile a network on blocks; see network.trace.

        name: for people. made_of: what the graph depends on beside the module's weights. kept: on disk, for
        the next process.
        """
        weights = [*module.parameters(), *module.buffers()]
        shapes = [list(one.shape[2:]) for one in layout.inputs]
        parts = [made_of, layout.masks, layout.members, layout.cache.__name__, str(layout.dtype), shapes]
        return self._network(
            *self._graph(name, weights, parts, lambda: trace(module, work, layout), kept), layout
        )

    def read_network(self, folder: str, layout: Layout) -> Network | None:
        """Return a network that is kept in a folder of this name; None if it is not there any more."""
        graph = read(GRAPHS.root() / folder)
        return None if graph is None else self._network(graph, GRAPHS.root() / folder, layout)

    def product(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Compile the product with a weight [out, in]."""
        weights = [weight] if bias is None else [weight, bias]
        made = self._graph(name, weights, None, lambda: product_model(weight, bias))
        return self._product(*made, *weight.shape)

    def read_product(self, folder: str, out: int, into: int) -> Product | None:
        """Return the product with a weight [out, into] that is kept in a folder of this name, as above."""
        graph = read(GRAPHS.root() / folder)
        return None if graph is None else self._product(graph, GRAPHS.root() / folder, out, into)

    def encode(self, weight: np.ndarray, draft: bool = False) -> Blocks | None:
        """Return a weight's blocks in this format; None if it stays as it is.

        draft: whether it is a draft head's, which no file has in blocks and which needs not be exact.
        """
        if self.weight_format == INT8:
            return round_to_int8(weight)
        own = None if self.packed is None else self.packed(weight)
        return round_to_int8(weight) if own is None and draft and self.weight_format == PACKED else own

    def _graph(
        self,
        name: str,
        weights: Sequence[Tensor],
        parts: object,
        make: Callable[[], Any],
        kept: bool = True,
    ) -> tuple[Any, Path | None]:
        """Return a graph in this format, made or read from disk, and its folder on disk."""
        blocks = self.rounds or self.packed is not None
        operators = self.operators

        def make_graph() -> Any:
            graph = make()
            if blocks:
                encode = functools.partial(self.encode, draft=name in DRAFT)
                compress(graph, encode, multiply_tiles if operators and self.rounds else multiply_blocks)
            return graph

        return find_or_make(name, weights, [self.weight_format, blocks, operators, parts], make_graph, kept)

    def _network(self, graph: Any, folder: Path | None, layout: Layout) -> Network:
        variants = self._variants(graph, folder, lambda sizes: layout.shapes(*sizes))
        return Network(variants, layout, constant_bytes(graph))

    def _product(self, graph: Any, folder: Path | None, out: int, into: int) -> Product:
        variants = self._variants(graph, folder, lambda sizes: {0: [*sizes, into]})
        return Product(variants, out, constant_bytes(graph))

    def _variants(
        self, graph: Any, folder: Path | None, shapes: Callable[[tuple[int, ...]], dict[int, list[int]]]
    ) -> Variants:
        """Return a graph's variants. Their number is limited: each keeps a copy of the weights.

        shapes: returns the shape of each input for these sizes.
        """

        def compile_for(sizes: tuple[int, ...] | None) -> Any:
            made = graph
            if sizes is not None:
                made = graph.clone()
                made.reshape(shapes(sizes))
            return self._compile(made, folder, sizes)

        size = constant_bytes(graph)
        return Variants(compile_for, copies_of(size, machine_memory()), folder, size > LARGE)

    def _compile(self, graph: Any, folder: Path | None, sizes: tuple[int, ...] | None) -> Any:
        """Compile a graph. Its compiled form is kept for sizes that the next process begins with.

        Measurements of trees compile for a dozen others, and each form has the weights again.
        """
        precision = "bf16" if self.weight_format == BFLOAT16 else "f32"
        if folder is not None:
            one = Compiling(folder.name, shapes_of(graph), precision, self.rounds, self.threads)
            if (ahead := HEAD_START.take(one)) is not None:
                return ahead
        usual = folder is not None and (sizes is None or sizes == read_first(folder))
        return library.compile_graph(graph, precision, self.rounds, self.threads, folder if usual else None)


def operators_of(weight_format: str) -> str | None:
    """Return the name of the library whose operators graphs in a format have; None for OpenVINO's alone."""
    found = None if weight_format == BFLOAT16 else library.operator()
    return None if found is None else found.parent.name


def has_amx() -> bool:
    """Return whether the processor has units that multiply tiles of bfloat16."""
    asks = getattr(torch.cpu, "_is_amx_tile_supported", None)  # torch has no public name for it
    return asks is not None and bool(asks())


def copies_of(size: int, memory: int | None) -> int:
    """Return how many copies of a graph's weights, of `size` bytes, may serve the sizes that come often.

    memory: of the machine, in bytes; None if unknown. One copy alone would be compiled again and again, for
    the roots and the trees of one text. So there are two or none: reading a large network's weights takes so
    long that a graph of open sizes is nearly as fast (eval/SPEED.md, 2026-11-29).
    """
    most = min(8, COPIES // max(1, size))
    if most < 2:
        return 2 if memory is None or 2 * size <= memory // SHARE else 0
    return most


def product_model(weight: Tensor, bias: Tensor | None) -> Any:
    """Return an openvino.Model of rows [n, in] times a weight [out, in]: [n, out]."""
    openvino = library.openvino()
    ops = openvino.opset13
    rows = ops.parameter([-1, weight.shape[1]], np.float32)
    plain = weight.detach().float().contiguous().numpy()
    made = ops.matmul(rows, openvino.op.Constant(plain, shared_memory=True), False, True)
    if bias is not None:
        made = ops.add(made, openvino.op.Constant(bias.detach().float().contiguous().numpy()))
    return openvino.Model([made], [rows], "product")
