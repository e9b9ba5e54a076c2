"""The attentions that are traced into graphs, against plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.stubs import generator
from torch import Tensor, nn

from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.block_cache import BLOCK, PAGE, PagedCache
from eagle_fsd.runtime.openvino.network import Layout, Network
from eagle_fsd.runtime.openvino.traced_attention import attend_blocks, attend_pages

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


# -- pages ----------------------------------------

SCALE = 0.4


def flat(blocks: Tensor) -> Tensor:
    """Return the slots [B, H, N * size, D] of blocks [N, B, H, size, D]."""
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)


def split_heads(rows: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return [B, H, n, D] of each (H, D), whose numbers [B, n, H * D] lie side by side."""
    parts = rows.split([heads * size for heads, size in sizes], dim=2)
    return [part.unflatten(2, one).transpose(1, 2) for part, one in zip(parts, sizes, strict=True)]


def paged_network(sizes: Sequence[tuple[int, int]]) -> Network:
    """Return a network of queries, keys and values of these (H, D), side by side."""

    def work(
        inputs: Sequence[Tensor], tables: Sequence[Tensor], members: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        q, k, v = split_heads(inputs[0], sizes)
        return attend_pages(q, k, v, *members[0], tables, SCALE).transpose(1, 2).flatten(2), []

    width = sum(heads * size for heads, size in sizes)
    layout = Layout((torch.zeros(1, 3, width),), 1, sizes[1:], paged=True)
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
