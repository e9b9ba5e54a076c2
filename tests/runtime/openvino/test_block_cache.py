"""The caches in blocks, read or written by graphs, against the plain KV cache: the same random lives."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from support.stubs import generator
from torch import Tensor

from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.openvino.block_cache import BLOCK, BlockCache, PagedCache, WrittenCache

CPU = torch.device("cpu")
# (heads, head size) of each layer's keys and values: some layers alike, some not, and values unlike keys.
LAYOUTS = {
    "alike": [(2, 3)] * 4,
    "mixed": [(2, 3), (2, 3), (1, 5), (1, 5), (2, 3), (1, 5)],
    "values of another size": [(2, 4), (2, 3)] * 2,
}


class Pair:
    """A cache in blocks and its plain twin, which get the same calls and the same numbers."""

    def __init__(
        self,
        batch: int,
        capacity: int,
        members: Sequence[tuple[int, int]],
        draw: torch.Generator,
        kind: type[BlockCache] = BlockCache,
        limit: int | None = None,
    ):
        self.members, self.draw = list(members), draw
        self.blocks = kind(batch, capacity, members)
        self.plain = KVCache(batch, capacity, CPU)
        for cache in self.both:
            cache.reset(limit)

    @property
    def both(self) -> tuple[KVCache, KVCache]:
        return self.blocks, self.plain

    @property
    def lengths(self) -> list[int]:
        return self.plain.row_lengths

    def write(self, width: int, offset: int = 0, exact: bool = False) -> Tensor:
        """Reserve, place and write random numbers in all layers; return the slots."""
        batch = len(self.lengths)
        for cache in self.both:
            cache.reserve(width, offset, exact)
        assert self.blocks.view % BLOCK == 0 and self.plain.view <= self.blocks.view <= self.blocks.capacity
        slots = self.plain.place(width, offset)
        assert torch.equal(self.blocks.place(width, offset), slots)
        news = [torch.randn(batch, heads, width, size, generator=self.draw) for heads, size in self.members]
        for layer, (keys, values) in enumerate(zip(news[::2], news[1::2], strict=True)):
            self.plain.update(keys, values, layer)
        stacks = [
            torch.stack([new for new, size in zip(news, self.members, strict=True) if size == wanted])
            for wanted in self.blocks.sizes
        ]
        BlockCache.write(self.blocks, stacks)  # into pages a graph writes by itself
        self._see(slots, news)
        return slots

    def _see(self, slots: Tensor, news: Sequence[Tensor]) -> None:
        """Check that what was just written can be seen."""
        for flat, new in zip(flattened(self.blocks), news, strict=True):
            index = slots[:, None, :, None].expand_as(new)
            assert torch.equal(flat.gather(2, index), new)

    def check(self) -> None:
        """Check that both keep the same committed numbers, and know the same of their rows."""
        assert self.blocks.row_limits == self.plain.row_limits
        assert torch.equal(self.blocks.slots, self.plain.slots)
        assert self.blocks.row_lengths == self.plain.row_lengths == self.blocks.lengths.tolist()
        if not self.plain.layers:  # nothing was written yet
            return
        self.blocks.view = self.blocks.capacity
        wanted = [buffer for layer in range(len(self.members) // 2) for buffer in self.plain.layers[layer]]
        for kept, expected in zip(flattened(self.blocks), wanted, strict=True):
            for row, length in enumerate(self.lengths):
                assert torch.equal(kept[row, :, :length], expected[row, :, :length])


def flattened(cache: BlockCache) -> list[Tensor]:
    """Return the slots in view of every member, [rows, H, view, D], as a copy."""
    return [blocks.permute(1, 2, 0, 3, 4).flatten(2, 3) for blocks in cache.blocks(cache.view // cache.block)]


def random_path(draw: torch.Generator, width: int, count: int) -> list[int]:
    """Return an ascending path of `count` nodes among `width`, which begins with the first."""
    others = torch.randperm(width - 1, generator=draw)[: count - 1] + 1
    return [0, *sorted(others.tolist())]


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", [BlockCache, PagedCache, WrittenCache])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_equal_the_plain_cache(layout: str, seed: int, kind: type[BlockCache]) -> None:
    draw = generator(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    pair = Pair(number(1, 4), number(1, 300), LAYOUTS[layout], draw, kind)
    # Long prompts end just before, at and after the border of a block.
    prompt = BLOCK * number(1, 2) + number(-12, 2)
    pair.write(prompt, exact=True)
    counts = [prompt - number(0, 20)] * len(pair.lengths)
    if number(0, 1):
        counts = [number(1, prompt) for _ in counts]
    for cache in pair.both:
        cache.advance(counts)
    pair.check()
    for turn in range(14):
        batch = len(pair.lengths)
        match number(0, 7):
            case 0:  # a draft: levels of scratch behind each other, and a commit of pairs
                pair.write(number(1, 4))
                pair.write(number(1, 9), offset=number(1, 6))
            case 1:
                rows = [row for row in range(batch) if number(0, 2)] or [number(0, batch - 1)]
                for cache in pair.both:
                    cache.select(rows)
            case 2:
                rows = torch.randperm(batch, generator=draw)[: number(1, batch)].tolist()
                joining = Pair(len(rows), number(1, 20), LAYOUTS[layout], draw, kind, 1000 + turn)
                width = number(1, 2 * BLOCK + 9)
                joining.write(width, exact=True)
                counts = [number(0, width) for _ in rows]
                for cache, new in zip(pair.both, joining.both, strict=True):
                    new.advance(counts)
                    cache.replace(rows, new)
            case 7:  # a part of a row is saved, and loaded by another row or another cache
                row, place = number(0, batch - 1), number(0, batch - 1)
                count = number(0, pair.lengths[row])
                less = number(0, count)
                for cache in pair.both:
                    saved = cache.save_row(row, count)
                    assert saved.slots == count
                    cache.load_row(place, saved, less)
                    fresh = type(cache)(1, number(1, 9), *([CPU] if cache is pair.plain else [pair.members]))
                    fresh.load_row(0, saved, count)
                    cache.replace([row], fresh)
            case 3:
                for cache in pair.both:
                    cache.grow(cache.capacity + number(1, 300))
            case _:  # a tree, of which a path is kept
                width = number(1, 40)
                slots = pair.write(width)
                counts = [number(1, width) for _ in range(batch)]
                longest = max(counts) + number(0, 2)
                paths = [random_path(draw, width, count) for count in counts]
                path = torch.tensor([nodes + [-1] * (longest - len(nodes)) for nodes in paths])
                for cache in pair.both:
                    cache.compact(path, slots)
                    cache.advance(counts)
        pair.check()


@pytest.mark.parametrize("kind", [BlockCache, PagedCache, WrittenCache])
def test_growth_keeps_the_parts_of_a_prompt_that_is_being_read(kind: type[BlockCache]) -> None:
    """They are committed together, after the last part, for which a cache may have to grow."""
    pair = Pair(2, 8, LAYOUTS["mixed"], generator(0), kind)
    for start in range(0, 4 * BLOCK, BLOCK):
        pair.write(BLOCK, offset=start, exact=True)
    for cache in pair.both:
        cache.advance([4 * BLOCK, 3 * BLOCK + 5])
    pair.check()


def test_a_text_finds_nothing_of_the_one_in_whose_place_it_comes() -> None:
    """That one may have left NaN, which no mask hides: 0 times it is NaN."""
    pair, joining = (Pair(rows, 8, LAYOUTS["mixed"], generator(rows)) for rows in (2, 1))
    pair.write(3 * BLOCK)
    joining.write(5)
    for cache, new in zip(pair.both, joining.both, strict=True):
        cache.advance([3 * BLOCK, 2 * BLOCK])
        new.advance([5])
        cache.replace([1], new)
    pair.check()
    plain = [buffer for layer in pair.plain.layers.values() for buffer in layer]
    assert all(buffer[0].any() and not buffer[1, :, 5:].any() for buffer in plain)
    assert not any(flat[1, :, BLOCK:].any() for flat in flattened(pair.blocks))
    pair.plain.select([1])
    assert not any(buffer[0, :, 5:].any() for layer in pair.plain.layers.values() for buffer in layer)


def test_a_saved_row_brings_no_scratch_along() -> None:
    """What another text left behind in its last block may be NaN, which no mask hides: 0 * NaN is NaN."""
    pair = Pair(1, 8, LAYOUTS["mixed"], generator(0))
    pair.write(20)
    for store in pair.blocks.stores.values():
        store[..., 12:20, :] = torch.nan
    pair.blocks.advance([12])
    saved, fresh = pair.blocks.save_row(0, 12), BlockCache(1, 8, pair.members)
    fresh.load_row(0, saved, 9)
    for size, store in fresh.stores.items():
        assert torch.equal(store[..., :9, :], pair.blocks.stores[size][:, :1, ..., :9, :])
        assert not store[..., 9:, :].any()


def test_rows_may_come_twice_and_in_any_order() -> None:
    pair = Pair(2, 8, LAYOUTS["mixed"], generator(0))
    pair.write(BLOCK + 3)
    for cache in pair.both:
        cache.advance([BLOCK + 3, 5])
        cache.select([1, 0, 1])
    pair.check()
    assert pair.lengths == [5, BLOCK + 3, 5]
    pair.write(4)
    for cache in pair.both:
        cache.advance([4, 2, 1])
    pair.check()
    for cache in pair.both:
        cache.select([0, 0, 1])
    pair.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_stay_close_ranks_in_the_same_memory(layout: str) -> None:
    """Nothing of the rows that left, and no scratch, stays behind the rows that stay."""
    pair = Pair(4, 4 * BLOCK, LAYOUTS[layout], generator(0))
    pair.write(3 * BLOCK)  # scratch in the last block
    for cache in pair.both:
        cache.advance([BLOCK + 3, 2 * BLOCK - 1, 5, BLOCK + 9])
    memory = {size: store.untyped_storage() for size, store in pair.blocks.stores.items()}
    for rows in ([0, 2, 3], [1, 2], [1]):
        for cache in pair.both:
            cache.select(rows)
        pair.check()
        pair.write(4)
        for cache in pair.both:
            cache.advance([2] * len(rows))
        pair.check()
        assert all(one.is_contiguous() for one in pair.blocks.blocks(2))
        assert not any(store[:, 2:].any() for store in pair.blocks.stores.values())
    for size, store in pair.blocks.stores.items():
        assert store.untyped_storage().data_ptr() == memory[size].data_ptr()
    assert pair.blocks.nbytes == sum(len(one) for one in memory.values())


def test_a_write_that_crosses_the_border_of_a_block() -> None:
    """All rows alike go by slices, rows of other lengths by index."""
    for lengths in ([BLOCK - 2] * 2, [BLOCK - 2, BLOCK - 5]):
        pair = Pair(2, BLOCK, LAYOUTS["mixed"], generator(0))
        pair.write(BLOCK - 2)
        for cache in pair.both:
            cache.advance(lengths)
        pair.write(2 * BLOCK + 5)
        assert (pair.blocks.row_start() is None) == (lengths[0] != lengths[1])
        for cache in pair.both:
            cache.advance([2 * BLOCK + 5] * 2)
        pair.check()


def test_blocks_are_the_memory_of_the_buffers() -> None:
    cache = BlockCache(3, 2 * BLOCK, LAYOUTS["mixed"])
    cache.reserve(BLOCK + 1)
    blocks = cache.blocks(cache.view // BLOCK)
    assert [tuple(one.shape) for one in blocks] == [
        (2, 3, heads, BLOCK, size) for heads, size in LAYOUTS["mixed"]
    ]
    for one, size in zip(blocks, LAYOUTS["mixed"], strict=True):
        assert one.is_contiguous()  # so that a graph can read it in place
        assert one.untyped_storage().data_ptr() == cache.stores[size].untyped_storage().data_ptr()
    assert len({one.data_ptr() for one in blocks}) == len(blocks)
    for number, one in enumerate(blocks, start=1):
        one.fill_(number)
    assert cache.stores[2, 3].amax((1, 2, 3, 4, 5)).tolist() == [1, 2, 5]
    assert cache.stores[1, 5].amax((1, 2, 3, 4, 5)).tolist() == [3, 4, 6]
    assert cache.nbytes == sum(2 * 3 * heads * BLOCK * size * 4 for heads, size in LAYOUTS["mixed"])


@pytest.mark.parametrize("kind", [BlockCache, PagedCache, WrittenCache])
def test_a_graph_is_told_which_slots_the_new_tokens_see(kind: type[BlockCache]) -> None:
    """Also of a draft, whose levels lie behind each other, and as a text grows into more blocks."""
    cache, size, draw = kind(2, 4, LAYOUTS["alike"]), kind.block, generator(0)
    cache.reserve(size + 9)
    cache.place(size + 9)
    cache.advance([size + 9, 7])
    for width, offset in ((3, 0), (4, 3), (size, 0), (2, size - 9), (5, BLOCK)):
        cache.reserve(width, offset)
        slots, before = cache.place(width, offset), [size + 9 + offset, 7 + offset]
        visible = torch.rand(2, width, cache.view, generator=draw) < 0.5
        own = visible.gather(2, slots[:, None].expand(-1, width, -1))
        shown, found = cache.show(), cache.sight([visible])
        if kind is BlockCache:
            hidden = torch.arange(len(shown[0]) * size) >= torch.tensor(before)[:, None]
            assert len(shown[0]) == cache.shown[1] == -(-before[0] // size)
            (mask,) = found
            committed, rest = mask[:, 0].split([hidden.shape[1], width], dim=2)
            seen = visible[:, :, : hidden.shape[1]] & ~hidden[:, None]
            assert torch.equal(committed == 0, seen) and torch.equal(rest == 0, own)
            continue
        if kind is PagedCache:
            lengths, starts, pages, page_starts, longest, relation, relation_starts = found
            assert len(shown[0]) == 2 * cache.shown[1] and lengths.tolist() == before
            assert starts.tolist() == [0, width, 2 * width] and int(longest) == before[0] + width
            assert torch.equal(relation.view(2, width, width).bool(), own)
            assert relation_starts.tolist() == [0, width**2, 2 * width**2]
            assert page_starts.tolist() == [0, cache.view // size, 2 * cache.view // size]
            for row, mine in enumerate(pages.view(2, cache.view // size).tolist()):
                for block, page in enumerate(mine):
                    assert shown[-1][page].data_ptr() == cache.blocks(len(mine))[-1][block, row].data_ptr()
            continue
        assert shown == []
        (made,) = found
        view, rows, number_bytes, *addresses = made.view(torch.int64).tolist()
        assert (view, rows, number_bytes) == (cache.view, 2, 4)
        members = [one.data_ptr() for one in cache.blocks(1)]
        assert addresses[2:] == members and all(one % 64 == 0 for one in members)
        assert torch.equal(read_at(addresses[0], 8 * slots.numel()).view(torch.int64), slots.flatten())
        assert torch.equal(read_at(addresses[1], visible.numel()), visible.flatten().byte())


def read_at(address: int, count: int) -> torch.Tensor:
    """Return the bytes at an address."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, count)), dtype=torch.uint8)


def test_buffers_are_named_anew_when_they_move() -> None:
    """What is bound to a graph is found by this name."""
    cache = BlockCache(2, BLOCK, LAYOUTS["alike"])
    cache.reserve(10)
    cache.place(10)
    cache.advance([10, 3])
    names = [cache.buffers]
    cache.select([0, 1])
    assert cache.buffers is names[0]
    cache.grow(2 * BLOCK)
    names.append(cache.buffers)
    cache.select([1])
    names.append(cache.buffers)
    assert len(set(map(id, names))) == 3
    assert cache.rows == 1 and cache.row_lengths == [3]
    assert all(store.shape[2] == 1 for store in cache.stores.values())


def test_reset_forgets_the_texts() -> None:
    pair = Pair(2, 8, LAYOUTS["mixed"], generator(0))
    pair.write(2 * BLOCK + 1)
    for cache in pair.both:
        cache.advance([2 * BLOCK + 1, 7])
        cache.reset(limit=4 * BLOCK)
    pair.check()
    assert pair.lengths == [0, 0] and pair.blocks.limit == 4 * BLOCK
    assert all(not store.any() for store in pair.blocks.stores.values())
    pair.write(4)
    for cache in pair.both:
        cache.advance([4, 2])
    pair.check()


def test_reset_forgets_a_long_text_that_a_short_one_replaced() -> None:
    """What is not a number must not stay behind: a hidden slot's weight is 0, and 0 times it is no number."""
    pair, joining = (Pair(1, 8, LAYOUTS["alike"], generator(seed)) for seed in (0, 1))
    pair.write(4 * BLOCK)
    joining.write(3)
    for cache, new in zip(pair.both, joining.both, strict=True):
        cache.advance([4 * BLOCK])
        new.advance([3])
        cache.replace([0], new)
        cache.reset()
    assert all(not buffer.any() for layer in pair.plain.layers.values() for buffer in layer)
    assert all(not store.any() for store in pair.blocks.stores.values())


def test_reset_forgets_a_long_text_that_came_from_another_cache() -> None:
    pair, long = (Pair(1, 8, LAYOUTS["alike"], generator(seed)) for seed in (0, 1))
    pair.write(3)
    long.write(3 * BLOCK)
    for cache in long.both:
        cache.advance([3 * BLOCK])
    for come in ("replace", "load"):
        for cache, other in zip(pair.both, long.both, strict=True):
            if come == "replace":
                cache.replace([0], other)
            else:
                cache.load_row(0, other.save_row(0, 3 * BLOCK), 3 * BLOCK)
        pair.check()
        for cache in pair.both:
            cache.reset()
        assert all(not store.any() for store in pair.blocks.stores.values())


def test_reset_forgets_scratch_beyond_the_texts() -> None:
    pair = Pair(1, 8, LAYOUTS["alike"], generator(0))
    pair.write(2 * BLOCK)  # never committed, as when a prefill is stopped
    pair.write(3)
    for cache in pair.both:
        cache.reset()
    assert all(not buffer.any() for layer in pair.plain.layers.values() for buffer in layer)
    assert all(not store.any() for store in pair.blocks.stores.values())


def test_reset_after_growth_within_inference_mode() -> None:
    """Decoding grows a cache in inference mode, and the next batch resets it outside."""
    pair = Pair(1, 8, LAYOUTS["alike"], generator(0))
    with torch.inference_mode():
        pair.write(2 * BLOCK)
    for cache in reversed(pair.both):
        cache.reset()


def test_memory_that_ends_while_blocks_move_leaves_nothing_to_go_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values of one size have moved by then, those of another have not."""
    cache = BlockCache(2, BLOCK, LAYOUTS["mixed"])
    buffers, allocate, left = cache.buffers, BlockCache._allocate, iter([True])

    def allocate_once(self: BlockCache, size: tuple[int, int], capacity: int, rows: int) -> Tensor:
        if not next(left, False):
            raise MemoryError
        return allocate(self, size, capacity, rows)

    monkeypatch.setattr(BlockCache, "_allocate", allocate_once)
    with pytest.raises(MemoryError):
        cache.grow(4 * BLOCK)
    assert cache.rows == 0 and cache.buffers is not buffers  # a workspace of two rows is not used again


def test_an_interrupt_while_rows_close_ranks_leaves_nothing_to_go_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above: blocks of one size have fewer rows by then than those of another."""
    cache = BlockCache(2, BLOCK, LAYOUTS["mixed"])
    buffers, unflatten, left = cache.buffers, Tensor.unflatten, iter([True])

    def unflatten_once(self: Tensor, *sizes: object) -> Tensor:
        if not next(left, False):
            raise KeyboardInterrupt
        return unflatten(self, *sizes)

    monkeypatch.setattr(Tensor, "unflatten", unflatten_once)
    with pytest.raises(KeyboardInterrupt):
        cache.select([1])
    assert cache.rows == 0 and cache.buffers is not buffers
