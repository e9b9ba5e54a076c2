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

from eagle_fsd.runtime.openvino.block_cache import BLOCK, BlockCache, PagedCache
from eagle_fsd.runtime.openvino.library import convert, openvino
from eagle_fsd.runtime.openvino.traced_attention import EXTENSIONS, TracedAttention, attention_in_place
from eagle_fsd.runtime.openvino.variants import Variants
from eagle_fsd.runtime.packed_linear import plain_linears

COPIED = 2**16  # numbers of a product that are copied sooner than they are given memory of their own
# Gets the inputs and the attention of all layers, and returns the output.
Traceable = Callable[[Sequence[Tensor], TracedAttention], Tensor]


@dataclass(frozen=True)
class Layout:
    """What a network takes.

    inputs: an example of each, [B, n, ...]. masks: how many kinds. members: of the cache; see BlockCache.
    cache, dtype: the class of the caches that it reads, and of their numbers.
    """

    inputs: Sequence[Tensor]
    masks: int
    members: Sequence[tuple[int, int]]
    cache: type[BlockCache] = BlockCache
    dtype: torch.dtype = torch.float32

    @property
    def in_place(self) -> bool:
        """Whether the graph writes to the cache by itself."""
        return self.cache is not BlockCache

    @property
    def first_member(self) -> int:
        """The place among a graph's inputs of the first of the cache's members."""
        return len(self.inputs) + (self.cache.tables or self.masks)

    @property
    def outputs(self) -> int:
        """How many a graph has: what it computes, and where it does not write them new keys and values."""
        return 1 if self.in_place else 1 + len(set(self.members))

    def new_cache(self, batch: int, capacity: int) -> BlockCache:
        """Return a cache that the network reads."""
        return self.cache(batch, capacity, self.members, self.dtype)

    def examples(self) -> list[Tensor]:
        """Return an example of every input of the graph."""
        batch, new = self.inputs[0].shape[:2]
        if self.in_place:
            cache = self.new_cache(batch, BLOCK)
            cache.reserve(new)
            cache.place(new)
            visible = torch.ones(batch, new, BLOCK, dtype=torch.bool, device="cpu")
            return [*self.inputs, *cache.sight([visible] * self.masks), *cache.show()]
        like = {"dtype": torch.float32, "device": "cpu"}
        masks = [torch.zeros(batch, 1, new, 2 * BLOCK + new, **like)] * self.masks
        blocks = [torch.zeros(2, batch, heads, BLOCK, width, **like) for heads, width in self.members]
        return [*self.inputs, *masks, *blocks]

    def shapes(self, batch: int = -1, new: int = -1) -> dict[int, list[int]]:
        """Return the shape of every input by its place, for these numbers of rows and new tokens; -1: any.

        The cache's size stays open.
        """
        found = {}
        for place, example in enumerate(self.examples()):
            shape = found[place] = list(example.shape)
            if place < len(self.inputs):
                shape[:2] = batch, new
            elif self.cache is PagedCache:
                shape[:1] = [-1] if shape else []
            elif self.in_place:
                continue  # the addresses of the cache
            elif place >= self.first_member:
                shape[:2] = -1, batch
            else:
                shape[:] = batch, 1, new, -1
        return found


class Traced(nn.Module):
    """The module that is traced: plain tensors in, plain tensors out."""

    def __init__(self, network: nn.Module, work: Traceable, layout: Layout) -> None:
        super().__init__()
        self.network = network  # so that its weights are found
        self.work = work
        self.layout = layout

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count, first = len(self.layout.inputs), self.layout.first_member
        inputs, seen, members = tensors[:count], tensors[count:first], tensors[first:]
        pairs = list(zip(members[::2], members[1::2], strict=True))
        if self.layout.in_place:
            batch, new = inputs[0].shape[:2]
            like = {"dtype": torch.float32, "device": "cpu"}
            masks = [torch.zeros(batch, 1, new, new, **like) for _ in range(self.layout.masks)]
            return (self.work(inputs, attention_in_place(self.layout.cache, masks, pairs, seen)),)
        attention = TracedAttention(seen, pairs)
        output = self.work(inputs, attention)
        members = [tensor for layer in range(len(pairs)) for tensor in attention.new[layer]]
        sizes = list(dict.fromkeys(self.layout.members))
        stacks = [
            torch.stack([one for one, its in zip(members, self.layout.members, strict=True) if its == size])
            for size in sizes
        ]
        return (output, *stacks)


@torch.inference_mode()
def trace(network: nn.Module, work: Traceable, layout: Layout) -> Any:
    """Return an openvino.Model of a network. Sizes of batches, of new tokens and of the cache stay open."""
    # Tracing needs plain tensors: those of inference mode cannot be traced.
    # A model may be packed for torch meanwhile, whose products cannot be traced.
    with torch.inference_mode(False), torch.no_grad(), plain_linears(network):
        examples = [example.clone() for example in layout.examples()]
        extensions = [EXTENSIONS[layout.cache]()] if layout.in_place else []
        model = convert(Traced(network, work, layout), tuple(examples), extensions)
    for port, shape in zip(model.inputs, layout.shapes().values(), strict=True):
        port.get_node().set_partial_shape(openvino().PartialShape(shape))
    model.validate_nodes_and_infer_types()
    return model


class Request:
    """One caller's use of a compiled graph, with memory for its inputs."""

    def __init__(self, compiled: Any) -> None:
        self.infer = compiled.create_infer_request()
        self.bound: tuple[object, int] | None = None  # what of a cache it reads now; see BlockCache.shown
        self._given: dict[int, Tensor] = {}

    def give(self, place: int, value: Tensor) -> None:
        """Copy a value to an input. Only a value of another shape than the last one gets new memory."""
        memory = self._given.get(place)
        if memory is None or memory.shape != value.shape:
            memory = self._given[place] = value.new_empty(value.shape)
            self.infer.set_input_tensor(place, shared(memory))
        memory.copy_(value)

    def output(self, place: int) -> Tensor:
        """Return an output in the request's own memory, which its next run overwrites."""
        return torch.from_numpy(self.infer.get_output_tensor(place).data)

    def bind(self, first: int, cache: BlockCache) -> None:
        """Let the inputs from `first` on be what the cache shows of its members, in its own memory."""
        if self.bound != cache.shown:
            for place, member in enumerate(cache.show()):
                self.infer.set_input_tensor(first + place, shared(member))
            self.bound = cache.shown


def request_for(compiled: Any, requests: weakref.WeakKeyDictionary[Any, Request]) -> Request:
    """Return the request of a compiled graph among a caller's, made if there is none."""
    request = requests.get(compiled)
    if request is None:
        request = requests[compiled] = Request(compiled)
    return request


class Network:
    """A compiled network on blocks. Several threads may call it, each with caches of its own.

    variants: its graphs by (rows, new tokens). weight_bytes: of its weights, once.
    """

    def __init__(self, variants: Variants, layout: Layout, weight_bytes: int) -> None:
        self.variants, self.layout, self.weight_bytes = variants, layout, weight_bytes
        self._requests: weakref.WeakKeyDictionary[BlockCache, Any] = weakref.WeakKeyDictionary()

    def new_cache(self, batch: int, capacity: int) -> BlockCache:
        """Return a cache that this network reads."""
        return self.layout.new_cache(batch, capacity)

    def __call__(self, inputs: Sequence[Tensor], visible: Sequence[Tensor], cache: BlockCache) -> Tensor:
        """Run the network on new tokens, whose keys and values go to the slots that were placed.

        visible: for each kind of mask, [B, n, S] bool, the slots in view that each new token sees, its own
        slot and those of other new tokens among them. Returns the output [B, n, ...].
        """
        # Prompts have any length, so they never come often enough.
        graph = self.variants.open if cache.exact else self.variants.choose(tuple(inputs[0].shape[:2]))
        request = request_for(graph, self._requests.setdefault(cache, weakref.WeakKeyDictionary()))
        for place, value in enumerate([*inputs, *cache.sight(visible)]):
            request.give(place, value)
        request.bind(self.layout.first_member, cache)
        request.infer.infer()
        output, *news = map(request.output, range(self.layout.outputs))
        cache.write(news)
        return output.clone()  # the next call overwrites it


class Product:
    """A compiled product with one weight: rows [..., in] -> [..., width] float32, for many threads."""

    def __init__(self, variants: Variants, width: int, weight_bytes: int) -> None:
        self.variants, self.width, self.weight_bytes = variants, width, weight_bytes
        self._mine = threading.local()

    def __call__(self, rows: Tensor) -> Tensor:
        flat = rows.detach().flatten(0, -2)
        compiled = self.variants.choose((len(flat),))
        requests = self._mine.__dict__.setdefault("requests", weakref.WeakKeyDictionary())
        request = request_for(compiled, requests)
        request.give(0, flat)
        # A graph of open sizes may have been given memory that another result lies in.
        if len(flat) * self.width <= COPIED and compiled is not self.variants.open:
            request.infer.infer()
            return request.output(0).clone().unflatten(0, rows.shape[:-1])
        made = rows.new_empty(*rows.shape[:-1], self.width, dtype=torch.float32)
        request.infer.set_output_tensor(0, shared(made.flatten(0, -2)))
        request.infer.infer()
        return made


def shared(tensor: Tensor) -> Any:
    """Return an openvino.Tensor on a contiguous tensor's own memory."""
    return openvino().Tensor(tensor.numpy(), shared_memory=True)
