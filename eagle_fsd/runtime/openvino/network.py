"""A torch network as a compiled graph that reads a BlockCache in place: traced, compiled and run.

Shapes: B rows, n new tokens, S slots in view.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eagle_fsd.runtime.openvino.block_cache import BLOCK, BlockCache
from eagle_fsd.runtime.openvino.library import convert

AGAIN, OFTEN = 3, 50  # how often sizes come before they get a graph of their own; see Variants
HIDDEN = torch.finfo(torch.float32).min  # the additive mask where nothing is seen

# Gets the inputs, the masks by kind, and each layer's (keys, values) blocks; returns the output and each
# layer's new (keys, values) [B, H, n, D].
Traceable = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[tuple[Tensor, Tensor]]],
    tuple[Tensor, Sequence[tuple[Tensor, Tensor]]],
]


@dataclass(frozen=True)
class Layout:
    """What a network takes.

    inputs: an example of each, [B, n, ...]. masks: how many kinds. members: of the cache; see BlockCache.
    """

    inputs: Sequence[Tensor]
    masks: int
    members: Sequence[tuple[int, int]]


class Traced(nn.Module):
    """The module that is traced: plain tensors in, plain tensors out."""

    def __init__(self, network: nn.Module, work: Traceable, layout: Layout) -> None:
        super().__init__()
        self.network = network  # so that its weights are found
        self.work = work
        self.layout = layout

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count, masks = len(self.layout.inputs), self.layout.masks
        blocks = tensors[count + masks :]
        pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
        output, new = self.work(tensors[:count], tensors[count : count + masks], pairs)
        members = [tensor for pair in new for tensor in pair]
        sizes = list(dict.fromkeys(self.layout.members))
        stacks = [
            torch.stack([one for one, its in zip(members, self.layout.members, strict=True) if its == size])
            for size in sizes
        ]
        return (output, *stacks)


@torch.inference_mode()
def trace(network: nn.Module, work: Traceable, layout: Layout) -> Any:
    """Return an openvino.Model of a network. Sizes of batches, of new tokens and of the cache stay open."""
    import openvino

    batch, new = layout.inputs[0].shape[:2]
    examples = [
        *layout.inputs,
        *(torch.zeros(batch, 1, new, 2 * BLOCK + new) for _ in range(layout.masks)),
        *(torch.zeros(2, batch, heads, BLOCK, width) for heads, width in layout.members),
    ]
    # Tracing needs plain tensors: those of inference mode cannot be traced.
    with torch.inference_mode(False), torch.no_grad():
        examples = [example.clone() for example in examples]
        model = convert(Traced(network, work, layout), tuple(examples))
    for place, (port, example) in enumerate(zip(model.inputs, examples, strict=True)):
        shape = list(example.shape)
        if place < len(layout.inputs):
            shape[:2] = -1, -1
        elif place < len(layout.inputs) + layout.masks:
            shape = [-1, 1, -1, -1]
        else:
            shape[:2] = -1, -1
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    model.validate_nodes_and_infer_types()
    return model


def with_sizes(model: Any, layout: Layout, sizes: tuple[int, ...] | None) -> Any:
    """Return a traced model for one number of rows and of new tokens; the cache's size stays open."""
    if sizes is None:
        return model
    batch, new = sizes
    shapes = {}
    for place, port in enumerate(model.inputs):
        shape = port.get_partial_shape()
        if place < len(layout.inputs) + layout.masks:
            shape[0] = batch
            shape[1 if place < len(layout.inputs) else 2] = new
        else:
            shape[1] = batch
        shapes[place] = shape
    made = model.clone()
    made.reshape(shapes)
    return made


@dataclass
class Request:
    """One caller's use of a compiled network. bound: the buffers and the view that it reads now."""

    infer: Any
    bound: tuple[object, int] | None = None
    keep: list[Any] = field(default_factory=list)


class Variants:
    """A graph compiled for open sizes, and for the sizes that come often.

    A graph whose sizes are open takes half as long again as one of known sizes. So sizes that come AGAIN get
    a graph of their own while there are fewer than `most`; later they must come OFTEN, and the one that was
    not used for longest goes. compile_for: compiles for some sizes, or for all if it is given None.
    """

    def __init__(self, compile_for: Callable[[tuple[int, ...] | None], Any], most: int) -> None:
        self.compile_for, self.most = compile_for, most
        self.open = compile_for(None)
        self.compiled: dict[tuple[int, ...], Any] = {}
        self._seen: dict[tuple[int, ...], int] = {}
        self._used: dict[tuple[int, ...], float] = {}
        self._lock = threading.Lock()

    def choose(self, sizes: tuple[int, ...]) -> Any:
        """Return the compiled graph for these sizes, after compiling it if they came often enough."""
        self._used[sizes] = time.monotonic()
        found = self.compiled.get(sizes)
        if found is not None:
            return found
        with self._lock:
            self._seen[sizes] = self._seen.get(sizes, 0) + 1
            if self._seen[sizes] < (AGAIN if len(self.compiled) < self.most else OFTEN):
                return self.open
            if sizes not in self.compiled:
                if len(self.compiled) >= self.most:
                    oldest = min(self.compiled, key=self._used.__getitem__)
                    del self.compiled[oldest], self._seen[oldest]
                self.compiled[sizes] = self.compile_for(sizes)
            return self.compiled[sizes]


class Network:
    """A compiled network on blocks. Several threads may call it, each with caches of its own.

    variants: its graphs by (rows, new tokens).
    """

    def __init__(self, variants: Variants, layout: Layout) -> None:
        self.variants, self.layout = variants, layout
        self._requests: weakref.WeakKeyDictionary[BlockCache, Any] = weakref.WeakKeyDictionary()

    def __call__(self, inputs: Sequence[Tensor], visible: Sequence[Tensor], cache: BlockCache) -> Tensor:
        """Run the network on new tokens, whose keys and values go to the slots that were placed.

        visible: for each kind of mask, [B, n, S] bool, the slots in view that each new token sees, its own
        slot and those of other new tokens among them. Returns the output [B, n, ...].
        """
        # Prompts have any length, so they never come often enough.
        graph = self.variants.open if cache.exact else self.variants.choose(tuple(inputs[0].shape[:2]))
        request = self._request(cache, graph)
        masks = [split_mask(mask, cache.slots) for mask in visible]
        request.keep = [np.ascontiguousarray(tensor.detach().numpy()) for tensor in (*inputs, *masks)]
        for place, array in enumerate(request.keep):
            request.infer.set_input_tensor(place, shared(array))
        request.infer.infer()
        news = [
            torch.from_numpy(request.infer.get_output_tensor(1 + place).data)
            for place in range(len(cache.sizes))
        ]
        cache.write(news)
        return torch.from_numpy(request.infer.get_output_tensor(0).data).clone()

    def _request(self, cache: BlockCache, compiled: Any) -> Request:
        requests = self._requests.setdefault(cache, weakref.WeakKeyDictionary())
        request = requests.get(compiled)
        if request is None:
            request = requests[compiled] = Request(compiled.create_infer_request())
        if request.bound != (cache.buffers, cache.view):
            first = len(self.layout.inputs) + self.layout.masks
            for place, blocks in enumerate(cache.blocks()):
                request.infer.set_input_tensor(first + place, shared(blocks.numpy()))
            request.bound = (cache.buffers, cache.view)
        return request


class Product:
    """A compiled product with one weight: rows [..., in] -> [..., out] float32, for many threads."""

    def __init__(self, variants: Variants) -> None:
        self.variants = variants
        self._mine = threading.local()

    def __call__(self, rows: Tensor) -> Tensor:
        flat = np.ascontiguousarray(rows.detach().flatten(0, -2).numpy())
        compiled = self.variants.choose((len(flat),))
        requests = self._mine.__dict__.setdefault("requests", weakref.WeakKeyDictionary())
        infer = requests.get(compiled)
        if infer is None:
            infer = requests[compiled] = compiled.create_infer_request()
        infer.set_input_tensor(0, shared(flat))
        infer.infer()
        made = torch.from_numpy(infer.get_output_tensor(0).data).clone()  # the next call overwrites it
        return made.unflatten(0, rows.shape[:-1])


def split_mask(visible: Tensor, slots: Tensor) -> Tensor:
    """Return the additive mask [B, 1, n, S + n] of visible slots [B, n, S]: committed ones, then new tokens.

    slots: [B, n], of the new tokens. Slots from the first of them on are not committed.
    """
    committed = torch.arange(visible.shape[-1]) < slots[:, :1]  # [B, S]
    own = visible.gather(2, slots[:, None, :].expand(-1, visible.shape[1], -1))
    seen = torch.cat((visible & committed[:, None], own), dim=2)
    return torch.zeros(seen.shape).masked_fill_(~seen, HIDDEN)[:, None]


def shared(array: np.ndarray) -> Any:
    """Return an openvino.Tensor on an array's own memory."""
    import openvino

    return openvino.Tensor(array, shared_memory=True)
