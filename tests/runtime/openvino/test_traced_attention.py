"""The attentions that are traced into graphs, against plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.stubs import generator
from torch import Tensor, nn

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.block_cache import BLOCK, PAGE, WRITTEN_BLOCK, PagedCache, WrittenCache
from eagle_fsd.runtime.openvino.network import Layout, Network
from eagle_fsd.runtime.openvino.operators import compiler
from eagle_fsd.runtime.openvino.traced_attention import TracedAttention, attend_blocks

pytest.importorskip("openvino", reason="the extra openvino is not installed")

HIDDEN = torch.finfo(torch.float32).min  # of an additive mask, where nothing is seen


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention number by number of heads, over keys that lie one behind the other."""
    made = torch.empty(*q.shape[:3], v.shape[-1])
    groups = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = scale * q[row, head] @ k[row, head // groups].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            powers = (scores + mask[row, 0]).exp()
            total = powers.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks[head].exp()
            made[row, head] = powers / total @ v[row, head // groups]
    return made


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("options", ["", "softcap", "sinks", "softcap sinks"])
@pytest.mark.parametrize(("heads", "kv_heads", "value_size"), [(4, 4, 8), (4, 2, 8), (6, 1, 8), (4, 2, 5)])
def test_attention_over_blocks_is_plain_attention(
    heads: int, kv_heads: int, value_size: int, options: str, blocks: int
) -> None:
    draw = torch.Generator().manual_seed(heads + blocks)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    batch, new, size = 2, 5, 8
    slots = blocks * BLOCK
    q, k, v = (
        some(batch, heads, new, size),
        some(batch, kv_heads, new, size),
        some(batch, kv_heads, new, value_size),
    )
    keys = some(blocks, batch, kv_heads, BLOCK, size)
    values = some(blocks, batch, kv_heads, BLOCK, value_size)
    seen = torch.rand(batch, 1, new, slots + new, generator=draw) < 0.3
    seen[..., slots:] |= torch.eye(new, dtype=torch.bool)  # each sees itself
    seen[1, :, :, :slots] = False  # a row without anything committed
    mask = torch.zeros(seen.shape).masked_fill_(~seen, HIDDEN)
    how: dict[str, Any] = {}
    if "softcap" in options:
        how["softcap"] = 2.0
    if "sinks" in options:
        how["sinks"] = some(heads)
    made = attend_blocks(q, k, v, keys, values, mask, 0.4, **how)
    flat_keys, flat_values = (torch.cat((flat(one), own), dim=2) for one, own in ((keys, k), (values, v)))
    torch.testing.assert_close(made, plain_attention(q, flat_keys, flat_values, mask, 0.4, **how))


# -- in place ----------------------------------------

SCALE = 0.4
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 3, 6)},
    "both": {"softcap": 5.0, "sinks": torch.linspace(-1, 3, 6)},
}


@pytest.fixture
def operators() -> None:
    if library.operator() is None:
        pytest.skip(f"no operator can be compiled here (processor: {compiler.level()})")


def flat(blocks: Tensor) -> Tensor:
    """Return the slots [B, H, N * size, D] of blocks [N, B, H, size, D]."""
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)


def split_heads(rows: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return [B, H, n, D] of each (H, D), whose numbers [B, n, H * D] lie side by side."""
    parts = rows.split([heads * size for heads, size in sizes], dim=2)
    return [part.unflatten(2, one).transpose(1, 2) for part, one in zip(parts, sizes, strict=True)]


def network_in_place(
    sizes: Sequence[tuple[int, int]], kinds: int = 1, dtype: torch.dtype = torch.float32, **how: Any
) -> Network:
    """Return a network of queries, keys and values of these (H, D), side by side, whose masks take turns."""

    def work(inputs: Sequence[Tensor], attention: TracedAttention) -> Tensor:
        q, k, v = split_heads(inputs[0], sizes)
        made = [
            attention.attend(layer, q, k, v, attention.masks[layer], SCALE, **how) for layer in range(kinds)
        ]
        return torch.cat(made, dim=1).transpose(1, 2).flatten(2)

    width = sum(heads * size for heads, size in sizes)
    layout = Layout((torch.zeros(1, 3, width),), kinds, sizes[1:] * kinds, WrittenCache, dtype)
    runtime = OpenVINO("float32", threads=2)
    return runtime.network("attention", nn.Module(), work, layout, None, kept=False)


class Texts:
    """Rows of a cache that a network writes, and their plain twins."""

    def __init__(
        self,
        lengths: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        network: Network,
        longest: int = 2 * BLOCK,
    ) -> None:
        self.draw, self.sizes, self.network = generator(len(sizes)), sizes, network
        self.batch, self.longest = len(lengths), longest
        self.cache = network.new_cache(self.batch, self.longest)
        self.twins = [torch.zeros(self.batch, heads, self.longest, size) for heads, size in sizes[1:]]
        for start in range(0, max(lengths), 200):  # prompts are read in parts
            self.run(min(200, max(lengths) - start), start, causal=True)
        self.cache.advance(lengths)

    def stored(self) -> list[Tensor]:
        """Return every member's blocks."""
        return self.cache.blocks(self.cache.capacity // WRITTEN_BLOCK)

    def masks(self, count: int, causal: bool) -> list[Tensor]:
        """Return what the tokens last placed see, by kind: all, or a random part of it, or a window."""
        made = []
        slots = self.cache.slots
        for kind in range(self.network.layout.masks):
            relation = torch.ones(self.batch, count, count, dtype=torch.bool).tril()
            if not causal:
                relation &= torch.rand(relation.shape, generator=self.draw) < 0.5
                relation |= torch.eye(count, dtype=torch.bool)
            numbers = torch.arange(self.cache.view)
            visible = numbers < slots[:, :1, None].expand(-1, count, -1)
            if kind:
                visible = visible & (numbers > slots[:, :, None] - 100)
            if kind > 1:
                visible &= torch.rand(visible.shape, generator=self.draw) < 0.3
            made.append(visible.scatter(2, slots[:, None].expand(-1, count, -1), relation))
        return made

    def run(self, count: int, offset: int = 0, causal: bool = False, **how: Any) -> Tensor:
        """Attend from `count` new tokens a row, and compare; both then keep the same keys and values."""
        width = sum(self.network.layout.inputs[0].shape[2:])
        rows = torch.randn(self.batch, count, width, generator=self.draw)
        self.cache.reserve(count, offset, exact=causal)
        slots = self.cache.place(count, offset)
        masks = self.masks(count, causal)
        before = [flat(one).clone() for one in self.stored()]
        made = self.network([rows], masks, self.cache)
        q, k, v = split_heads(rows, self.sizes)
        wanted = []
        for kind, visible in enumerate(masks):
            stored = self.stored()[2 * kind : 2 * kind + 2]
            for twin, old, kept, new in zip(self.twins, before[2 * kind :], stored, (k, v), strict=False):
                place = slots[:, None, :, None].expand_as(new)
                new = new.to(self.cache.dtype)
                twin.scatter_(2, place, new.float())
                assert torch.equal(flat(kept), old.scatter(2, place, new))  # and nothing else is written
            hidden = ~nn.functional.pad(visible, (0, self.longest - self.cache.view))
            mask = torch.zeros(self.batch, 1, count, self.longest).masked_fill_(hidden[:, None], HIDDEN)
            wanted.append(plain_attention(q, *self.twins, mask, SCALE, **how).transpose(1, 2))
        torch.testing.assert_close(made, torch.cat(wanted, dim=2).flatten(2), rtol=1e-4, atol=1e-5)
        return made


@pytest.mark.covering(1)
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("kv_heads", "size", "value_size", "options"),
    [(6, 8, 8, "softcap"), (3, 64, 64, ""), (2, 12, 20, "sinks"), (1, 80, 72, "both")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_in_place_is_plain_attention(
    kv_heads: int, size: int, value_size: int, options: str, dtype: torch.dtype
) -> None:
    """Rows of any lengths, over one block or several; any new tokens, under any masks; levels of trees."""
    heads = 6
    sizes = [(heads, size), (kv_heads, size), (kv_heads, value_size)]
    how = OPTIONS[options]
    network = network_in_place(sizes, 3, dtype, **how)
    plain = network_in_place(sizes, 3, dtype) if how else network
    lengths = [0, 1, WRITTEN_BLOCK - 1, WRITTEN_BLOCK, 3 * WRITTEN_BLOCK + 7, BLOCK + 45]
    network.variants.expect((len(lengths), 5))  # a graph of its own; the others are that of open sizes
    texts = Texts(lengths, sizes, plain)
    texts.network = network
    for count in (1, 2, 5, 8, 33):
        texts.run(count, **how)
        texts.run(3, offset=count, **how)


@pytest.mark.usefixtures("operators")
def test_long_texts_are_attended_to_in_parts() -> None:
    """Few new tokens' slots are computed in parts that are put together, and those of many are not."""
    sizes = [(6, 16), (2, 16), (2, 16)]
    texts = Texts([7 * BLOCK - 130, 5 * BLOCK + 1], sizes, network_in_place(sizes, kinds=2), 8 * BLOCK)
    for count in (1, 8, 64, 65):
        texts.run(count)


@pytest.mark.usefixtures("operators")
def test_a_token_is_computed_alike_whatever_is_beside_it() -> None:
    """Bit for bit: beside other new tokens, and in whatever order they are."""
    sizes = [(6, 16), (3, 16), (3, 16)]
    network = network_in_place(sizes)
    texts = Texts([300], sizes, network)
    rows = torch.randn(1, 8, 192, generator=texts.draw)

    def run(order: Sequence[int]) -> Tensor:
        """Compute these rows, which see the text and themselves alone."""
        texts.cache.reserve(8)
        slots = texts.cache.place(8)
        visible = torch.arange(texts.cache.view) < slots[:, :1, None].expand(-1, 8, -1)
        visible = visible.scatter(2, slots[:, :, None], True)
        return network([rows[:, list(order)]], [visible], texts.cache)

    whole = run(range(8))
    # Its own key is in another slot, and the last one to be added: so it is where all share their order.
    assert torch.equal(run([0, 7, 2, 3, 4, 5, 6, 1])[:, [0, 2, 3, 4, 5, 6]], whole[:, [0, 2, 3, 4, 5, 6]])
    texts.cache.reserve(1)
    slots = texts.cache.place(1)
    alone = (torch.arange(texts.cache.view) <= slots[:, :1, None]).expand(-1, 1, -1)
    assert torch.equal(network([rows[:, :1]], [alone], texts.cache), whole[:, :1])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_what_is_not_a_number_shows(place: str, dtype: torch.dtype) -> None:
    sizes = [(2, 16), (2, 16), (2, 16)]
    network = network_in_place(sizes, dtype=dtype)
    cache = network.new_cache(1, BLOCK)
    rows = torch.randn(1, 2, 96, generator=generator(1))
    rows[0, 1, {"query": 3, "key": 35, "value": 67}[place]] = torch.nan
    cache.reserve(2)
    cache.place(2)
    visible = torch.zeros(1, 2, cache.view, dtype=torch.bool)
    visible[0, 0, 0] = visible[0, 1, :2] = True
    made = network([rows], [visible], cache)
    assert torch.isnan(made[:, 1]).any()
    if place != "value":  # a value that is not a number shows everywhere, even under a weight of 0
        assert torch.isfinite(made[:, 0]).all()


@pytest.mark.usefixtures("operators")
def test_numbers_that_16_bits_cannot_hold_become_the_largest_that_they_can() -> None:
    sizes = [(1, 20), (1, 20), (1, 20)]
    network = network_in_place(sizes, dtype=torch.float16)
    cache = network.new_cache(1, BLOCK)
    rows = torch.linspace(-2e5, 2e5, 60).view(1, 1, 60)
    rows[:, :, :20] = 0
    cache.reserve(1)
    cache.place(1)
    made = network([rows], [(torch.arange(cache.view) == 0).view(1, 1, -1)], cache)
    keys, values = (one[0, 0, 0, 0] for one in cache.blocks(1))
    wanted = rows[0, 0].clamp(-65504, 65504).half()
    assert torch.equal(keys, wanted[20:40]) and torch.equal(values, wanted[40:])
    assert torch.equal(made[0, 0], wanted[40:].float())


# -- OpenVINO's pages ----------------------------------------


def paged_network(sizes: Sequence[tuple[int, int]]) -> Network:
    """Return a network of queries, keys and values of these (H, D), side by side."""

    def work(inputs: Sequence[Tensor], attention: TracedAttention) -> Tensor:
        q, k, v = split_heads(inputs[0], sizes)
        return attention.attend(0, q, k, v, attention.masks[0], SCALE).transpose(1, 2).flatten(2)

    width = sum(heads * size for heads, size in sizes)
    layout = Layout((torch.zeros(1, 3, width),), 1, sizes[1:], PagedCache)
    runtime = OpenVINO("float32", threads=1)
    return runtime.network("pages", nn.Module(), work, layout, None, kept=False)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 8), (6, 3, 16), (4, 2, 12), (2, 1, 80), (9, 3, 64)]
)
def test_attention_over_pages_is_plain_attention(heads: int, kv_heads: int, size: int) -> None:
    """Rows of any lengths, over one page or several; all numbers of new tokens; levels behind each other."""
    draw = generator(heads)
    sizes = [(heads, size), (kv_heads, size), (kv_heads, size)]
    network, members = paged_network(sizes), sizes[1:]
    lengths = [0, 1, PAGE - 1, PAGE, 3 * PAGE + 7, BLOCK + 5]
    batch, longest = len(lengths), 2 * BLOCK
    cache = PagedCache(batch, longest, members)
    network.variants.expect((batch, 5))  # a graph of its own; the others are computed by that of open sizes
    twins = [torch.zeros(batch, count, longest, width) for count, width in members]

    def stored() -> list[Tensor]:
        return [flat(one) for one in cache.blocks(cache.capacity // PAGE)]

    def run(count: int, offset: int = 0, causal: bool = False) -> None:
        """Attend from `count` new tokens a row, and compare; both then keep the same keys and values."""
        rows = torch.randn(batch, count, sum(network.layout.inputs[0].shape[2:]), generator=draw)
        cache.reserve(count, offset, exact=causal)
        slots = cache.place(count, offset)
        relation = torch.ones(batch, count, count, dtype=torch.bool).tril()
        if not causal:
            relation &= torch.rand(batch, count, count, generator=draw) < 0.5
            relation |= torch.eye(count, dtype=torch.bool)
        visible = torch.arange(cache.view) < slots[:, :1, None].expand(-1, count, -1)
        visible = visible.scatter(2, slots[:, None].expand(-1, count, -1), relation)
        before = [one.clone() for one in stored()]
        made = network([rows], [visible], cache)
        q, k, v = split_heads(rows, sizes)
        for twin, old, kept, new in zip(twins, before, stored(), (k, v), strict=True):
            place = slots[:, None, :, None].expand_as(new)
            twin.scatter_(2, place, new)
            # The graph wrote the new tokens to their slots, exactly, and nothing before them. Behind them it
            # clears the rest of the page.
            expected = old.scatter(2, place, new)
            for row, last in enumerate(slots[:, -1].tolist()):
                assert torch.equal(kept[row, :, : last + 1], expected[row, :, : last + 1])
        hidden = ~nn.functional.pad(visible, (0, longest - cache.view))
        mask = torch.zeros(batch, 1, count, longest).masked_fill_(hidden[:, None], HIDDEN)
        wanted = plain_attention(q, *twins, mask, SCALE)
        torch.testing.assert_close(made, wanted.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)

    for start in range(0, max(lengths), 100):
        run(min(100, max(lengths) - start), start, causal=True)
    cache.advance(lengths)
    for count in (1, 2, 5, 8, 33):
        run(count)
        run(3, offset=count)
