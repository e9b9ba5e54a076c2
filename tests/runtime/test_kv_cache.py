"""cache.py against a plain twin: a list of committed tokens per row, each token one number."""

from __future__ import annotations

import pytest
import torch
from support.stubs import generator
from torch import Tensor

from eagle_fsd.runtime.kv_cache import KVCache

CPU = torch.device("cpu")
HEADS, SIZE = 2, 3


def stored(ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, n, D] that say which token (ids [B, n]), layer, head and component they are."""
    batch, width = ids.shape
    where = torch.arange(HEADS).view(1, HEADS, 1, 1) * 0.1 + torch.arange(SIZE) * 0.01
    keys = ids.view(batch, 1, width, 1).float() * 10 + layer + where
    return keys, -keys


class Twin:
    """What the cache should hold: per row the committed ids and the ids placed last."""

    def __init__(self, batch: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.placed: list[list[int]] = [[] for _ in range(batch)]

    def keep(self, path: list[list[int]], counts: list[int]) -> None:
        for row, placed, nodes, count in zip(self.rows, self.placed, path, counts, strict=True):
            row.extend([placed[node] for node in nodes[:count]])

    def advance(self, counts: list[int]) -> None:
        self.keep([list(range(count)) for count in counts], counts)

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.placed = [self.placed[row] for row in rows]


def write(cache: KVCache, ids: Tensor, layers: int, offset: int = 0) -> None:
    """Place and write ids [B, n] in every layer; checks what attention gets to see of them."""
    cache.reserve(ids.shape[1], offset)
    slots = cache.place(ids.shape[1], offset)
    expected = torch.tensor(cache.row_lengths)[:, None] + offset + torch.arange(ids.shape[1])
    assert torch.equal(slots, expected)
    assert cache.view == max(cache.row_lengths) + offset + ids.shape[1] <= cache.capacity
    for layer in range(layers):
        keys, values = stored(ids, layer)
        for view, new in zip(cache.update(keys, values, layer), (keys, values), strict=True):
            assert view.shape == (len(ids), HEADS, cache.view, SIZE)
            index = slots[:, None, :, None].expand(-1, HEADS, -1, SIZE)
            assert torch.equal(view.gather(2, index), new)


def check(cache: KVCache, twin: Twin, layers: int) -> None:
    assert cache.row_lengths == cache.lengths.tolist() == [len(row) for row in twin.rows]
    assert cache.get_seq_length() == max(map(len, twin.rows))
    for layer in range(layers):
        for row, ids in enumerate(twin.rows):
            keys, values = stored(torch.tensor([ids], dtype=torch.int64), layer)
            for buffer, expected in zip(cache.layers[layer], (keys, values), strict=True):
                assert buffer.shape[2] == cache.capacity
                assert torch.equal(buffer[row, :, : len(ids)], expected[0])


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_equal_the_twin(seed: int) -> None:
    """Prefill in chunks, then rounds of place, write, keep (any ascending path, ragged counts), growth and
    row selection, as decoding does them."""
    draw = generator(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    batch, layers = number(1, 4), number(1, 3)
    cache, twin = KVCache(batch, number(1, 12), CPU), Twin(batch)
    lengths = [number(0, 7) for _ in range(batch)]
    width = max(*lengths, 1)
    ids = torch.arange(batch * width).view(batch, width)
    names = batch * width
    for start in range(0, width, 3):
        write(cache, ids[:, start : start + 3], layers, offset=start)
    twin.placed = ids.tolist()
    cache.advance(lengths)
    twin.advance(lengths)
    check(cache, twin, layers)
    for _ in range(12):
        width = number(1, 8)
        ids = names + torch.arange(batch * width).view(batch, width)
        names += batch * width
        write(cache, ids, layers)
        twin.placed = ids.tolist()
        padding = number(1, width + 2)  # a path may be padded beyond the number of nodes
        path = torch.full((batch, padding), -1)
        counts = [number(1, min(width, padding)) for _ in range(batch)]
        for row, count in enumerate(counts):
            rest = torch.randperm(width - 1, generator=draw)[: count - 1].sort().values + 1
            path[row, :count] = torch.cat((torch.zeros(1, dtype=torch.int64), rest))
        cache.compact(path, cache.slots)
        cache.advance(counts)
        twin.keep(path.tolist(), counts)
        check(cache, twin, layers)
        if number(0, 5) == 0:
            capacity = cache.capacity + number(0, 9)
            cache.grow(capacity)
            assert cache.capacity == capacity
            check(cache, twin, layers)
        if batch > 1 and number(0, 4) == 0:
            rows = torch.randperm(batch, generator=draw)[: number(1, batch)].sort().values.tolist()
            cache.select(rows)
            twin.select(rows)
            batch = len(rows)
            check(cache, twin, layers)


@pytest.mark.parametrize(
    "path",
    [
        [0, 1, 2, 3, 4],
        [0, 2, 3, 4, -1],
        [0, 3, 4, -1, -1],
        [0, 4, -1, -1, -1],
        [0, 4, 3, 2, 1],
        [0, 2, 1, 4, 3],
    ],
)
def test_keep_where_source_and_target_slots_overlap(path: list[int]) -> None:
    """[0, 2, 3, 4]: slot 2 is moved to 1 and overwritten by 3 at once. A copy through aliasing views loses
    it; the reversed path shows it in the other direction."""
    cache, twin = KVCache(2, 9, CPU), Twin(2)
    write(cache, torch.tensor([[1, 2], [3, 4]]), layers=2)
    twin.placed = [[1, 2], [3, 4]]
    cache.advance([2, 1])
    twin.advance([2, 1])
    ids = torch.arange(10, 20).view(2, 5)
    write(cache, ids, layers=2)
    twin.placed = ids.tolist()
    counts = [sum(node >= 0 for node in path), 2]
    cache.compact(torch.tensor([path, path]), cache.slots)
    cache.advance(counts)
    twin.keep([path, path], counts)
    check(cache, twin, layers=2)


def test_tokens_in_place_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path 0, 1, 2 of any length is where it belongs already, and so is what is padded."""
    cache, twin = KVCache(3, 9, CPU), Twin(3)
    ids = torch.arange(12).view(3, 4)
    write(cache, ids, layers=2)
    twin.placed = ids.tolist()
    path = [[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]]

    def moved(*_: object) -> None:
        raise AssertionError("nothing is to be moved")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_copy_", moved)
        cache.compact(torch.tensor(path), cache.slots)
    cache.advance([4, 2, 1])
    twin.keep(path, [4, 2, 1])
    check(cache, twin, layers=2)


def test_growth_beyond_the_first_calls_length() -> None:
    """A cache made for two tokens holds two hundred."""
    cache, twin = KVCache(1, 2, CPU), Twin(1)
    for step in range(100):
        ids = torch.tensor([[2 * step, 2 * step + 1]])
        write(cache, ids, layers=1)
        twin.placed = ids.tolist()
        cache.advance([2])
        twin.advance([2])
    check(cache, twin, layers=1)
    assert cache.capacity >= 200


def test_growth_between_layers_of_one_forward() -> None:
    """A layer that first writes after the cache grew gets the new capacity; those before it grew with it."""
    cache = KVCache(1, 2, CPU)
    write(cache, torch.tensor([[1, 2]]), layers=1)
    cache.advance([2])
    write(cache, torch.tensor([[3, 4]]), layers=2)
    assert {buffer.shape[2] for buffers in cache.layers.values() for buffer in buffers} == {cache.capacity}


def test_scratch_memory_is_never_nan() -> None:
    """Masked slots are multiplied by 0 in attention: what was never written must be finite."""
    cache = KVCache(2, 4, CPU)
    write(cache, torch.tensor([[1], [2]]), layers=1)
    cache.grow(64)
    for buffer in cache.layers[0]:
        assert buffer.isfinite().all()
        assert not buffer[:, :, 1:].any()


def test_rows_out_of_order() -> None:
    cache, twin = KVCache(3, 4, CPU), Twin(3)
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    write(cache, ids, layers=1)
    twin.placed = ids.tolist()
    cache.advance([1, 2, 0])
    twin.advance([1, 2, 0])
    cache.select([2, 0])
    twin.select([2, 0])
    check(cache, twin, layers=1)


@pytest.mark.parametrize("capacity", [6, 40])
def test_replace_puts_other_texts_in_the_rows(capacity: int) -> None:
    """Longer and shorter ones than were there; the rows between stay as they are, and all can go on."""
    draw, layers = generator(5), 2
    cache, twin = KVCache(4, capacity, CPU), Twin(4)
    other, new = KVCache(2, 20, CPU), Twin(2)
    for part, made, counts in ((cache, twin, [5, 3, 6, 1]), (other, new, [9, 2])):
        ids = torch.randint(1, 50, (len(counts), max(counts)), generator=draw)
        write(part, ids, layers)
        made.placed = ids.tolist()
        part.advance(counts)
        made.advance(counts)
    cache.replace([2, 0], other)
    twin.rows[2], twin.rows[0] = new.rows
    check(cache, twin, layers)
    ids = torch.randint(1, 50, (4, 3), generator=draw)
    write(cache, ids, layers)
    twin.placed = ids.tolist()
    cache.advance([3, 0, 1, 2])
    twin.advance([3, 0, 1, 2])
    check(cache, twin, layers)
    cache.replace([1], KVCache(1, 8, CPU))  # a text of which nothing is read yet
    twin.rows[1] = []
    check(cache, twin, layers)


@pytest.mark.parametrize("capacity", [4, 40])
def test_a_saved_row_is_loaded_as_far_as_it_is_wanted(capacity: int) -> None:
    layers, ids = 2, torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    source = KVCache(2, 8, CPU)
    write(source, ids, layers)
    source.advance([3, 5])
    saved = source.save_row(1, 5)
    for buffers in source.layers.values():
        for buffer in buffers:
            buffer.zero_()  # what is saved has memory of its own
    cache, twin = KVCache(2, capacity, CPU), Twin(2)
    cache.load_row(1, saved, 4)
    twin.rows[1] = [6, 7, 8, 9]
    check(cache, twin, layers)
    more = torch.tensor([[11, 12], [13, 14]])
    write(cache, more, layers)
    twin.placed = more.tolist()
    cache.advance([1, 2])
    twin.advance([1, 2])
    check(cache, twin, layers)


# --- memory ---


def filled(cache: KVCache, tokens: int, width: int = 3) -> list[int]:
    """Write and commit tokens, `width` at a time; return the capacities on the way."""
    capacities = []
    for start in range(0, tokens, width):
        cache.reserve(width)
        cache.place(width)
        new = stored(torch.arange(start, start + width).expand(len(cache.row_lengths), -1), 0)
        cache.update(*new, 0)
        cache.advance([width] * len(cache.row_lengths))
        capacities.append(cache.capacity)
    return capacities


@pytest.mark.parametrize("step", [0, 16])
def test_growth_doubles_up_to_the_limit_and_passes_it_only_where_it_must(step: int) -> None:
    cache = KVCache(2, 16, CPU, step)
    cache.reset(limit=100)
    capacities = filled(cache, 99)
    assert sorted(set(capacities)) == [16, 32, 64, 112 if step else 100]
    assert filled(cache, 30)[-1] <= 144
    free = KVCache(2, 16, CPU, step)
    assert sorted(set(filled(free, 99))) == [16, 32, 64, 128]


def test_rows_that_are_left_move_within_their_memory() -> None:
    """Recordings of any number of rows know it. A cache that grows has memory for the rows that go on."""
    cache = KVCache(4, 32, CPU, 16)
    filled(cache, 6)
    buffers, memory = cache.buffers, [x.data_ptr() for x in cache.layers[0]]
    lengths = cache.lengths.data_ptr()
    cache.select([1, 3])
    filled(cache, 3)
    cache.select([1])
    filled(cache, 3)
    assert cache.row_lengths == cache.lengths.tolist() == [12]
    assert cache.buffers is buffers and [x.data_ptr() for x in cache.layers[0]] == memory
    assert cache.lengths.data_ptr() == lengths and cache.rows == 4
    cache.reset()
    assert cache.row_lengths == cache.lengths.tolist() == [0] * 4 and cache.buffers is buffers
    filled(cache, 6)
    cache.select([0, 2])
    filled(cache, 36)
    assert cache.buffers is not buffers and cache.rows == 2
    assert [x.shape[0] for x in cache.layers[0]] == [2, 2]


def test_a_text_that_went_wrong_leaves_nothing_to_the_next() -> None:
    """NaN behind a mask would pass through attention's multiplication by 0."""
    cache = KVCache(2, 16, CPU)
    filled(cache, 6)
    for buffer in cache.layers[0]:
        buffer[1, :, 2:5] = torch.nan
    cache.replace([1], KVCache(1, 16, CPU))  # a prompt of one token, which no forward has read
    assert all(buffer.isfinite().all() for buffer in cache.layers[0])
    for buffer in cache.layers[0]:
        buffer[1, :, 2:5] = torch.nan
    cache.reset()
    assert all(buffer.isfinite().all() for buffer in cache.layers[0])


@pytest.mark.parametrize("step", [0, 16])
def test_the_limit_follows_the_texts_that_join_and_leave(step: int) -> None:
    """A longer text that joins may double the capacity; once it left, the others' limit counts again."""
    cache, longer = KVCache(2, 16, CPU, step), KVCache(1, 16, CPU, step)
    cache.reset(limit=16)
    longer.reset(limit=200)
    filled(cache, 9)
    filled(longer, 9)
    cache.replace([1], longer)
    assert cache.limit == 200
    assert sorted(set(filled(cache, 150))) == [16, 32, 64, 128, 208 if step else 200]
    cache.select([0])
    assert cache.limit == 16
    unknown = KVCache(1, 16, CPU, step)
    cache.replace([0], unknown)
    assert cache.limit is None
