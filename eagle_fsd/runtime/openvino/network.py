"""A torch network as a compiled graph that reads a BlockCache in place: traced, compiled and run.

Shapes: B rows, n new tokens, S slots in view.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.runtime.openvino.block_cache import BLOCK, BlockCache
from eagle_fsd.runtime.openvino.library import convert
from eagle_fsd.runtime.openvino.variants import Variants

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


class Request:
    """One caller's use of a compiled graph, with memory for its inputs."""

    def __init__(self, compiled: Any) -> None:
        self.infer = compiled.create_infer_request()
        self.bound: tuple[object, int] | None = None  # the cache's buffers and the blocks that it reads now
        self._given: dict[int, Tensor] = {}

    def give(self, place: int, value: Tensor) -> None:
        """Copy a value to an input. Only a value of another shape than the last one gets new memory."""
        memory = self._given.get(place)
        if memory is None or memory.shape != value.shape:
            memory = self._given[place] = torch.empty(value.shape, dtype=value.dtype)
            self.infer.set_input_tensor(place, shared(memory))
        memory.copy_(value)

    def bind(self, first: int, cache: BlockCache) -> None:
        """Let the inputs from `first` on be the committed blocks of a cache, in its own memory."""
        state = (cache.buffers, cache.committed_blocks)
        if self.bound != state:
            for place, blocks in enumerate(cache.blocks(cache.committed_blocks)):
                self.infer.set_input_tensor(first + place, shared(blocks))
            self.bound = state


def request_for(compiled: Any, requests: weakref.WeakKeyDictionary[Any, Request]) -> Request:
    """Return the request of a compiled graph among a caller's, made if there is none."""
    request = requests.get(compiled)
    if request is None:
        request = requests[compiled] = Request(compiled)
    return request


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
        request = request_for(graph, self._requests.setdefault(cache, weakref.WeakKeyDictionary()))
        slots, committed = cache.slots, cache.committed_blocks * BLOCK
        for place, value in enumerate(inputs):
            request.give(place, value)
        for place, mask in enumerate(visible, start=len(inputs)):
            request.give(place, split_mask(mask, slots, committed))
        request.bind(len(inputs) + len(visible), cache)
        request.infer.infer()
        outputs = [
            torch.from_numpy(request.infer.get_output_tensor(place).data)
            for place in range(1 + len(cache.sizes))
        ]
        cache.write(outputs[1:])
        return outputs[0].clone()  # the next call overwrites it


class Product:
    """A compiled product with one weight: rows [..., in] -> [..., width] float32, for many threads."""

    def __init__(self, variants: Variants, width: int) -> None:
        self.variants, self.width = variants, width
        self._mine = threading.local()

    def __call__(self, rows: Tensor) -> Tensor:
        flat = rows.detach().flatten(0, -2)
        compiled = self.variants.choose((len(flat),))
        requests = self._mine.__dict__.setdefault("requests", weakref.WeakKeyDictionary())
        request = request_for(compiled, requests)
        request.give(0, flat)
        made = torch.empty(*rows.shape[:-1], self.width)
        request.infer.set_output_tensor(0, shared(made.flatten(0, -2)))
        request.infer.infer()
        return made


def split_mask(visible: Tensor, slots: Tensor, committed: int) -> Tensor:
    """Return the additive mask [B, 1, n, committed + n] of visible slots [B, n, S]: of `committed` slots from
    the first on, and of the new tokens.

    slots: [B, n], of the new tokens. Slots from the first of them on are not committed.
    """
    before = torch.arange(committed) < slots[:, :1]  # [B, committed]
    own = visible.gather(2, slots[:, None, :].expand(-1, visible.shape[1], -1))
    seen = torch.cat((visible[:, :, :committed] & before[:, None], own), dim=2)
    return torch.where(seen, 0.0, HIDDEN)[:, None]


def shared(tensor: Tensor) -> Any:
    """Return an openvino.Tensor on a contiguous tensor's own memory."""
    import openvino

    return openvino.Tensor(tensor.numpy(), shared_memory=True)
