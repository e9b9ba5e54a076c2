"""A KV cache in blocks of slots, so that what is committed is one piece of memory of any length.

A graph reads whole tensors. Of a cache that keeps the slots of each head together, only a copy would be such
a tensor. Here the blocks come first: however many are in use, they lie one behind the other, and a graph
reads them in place. Shapes: M members (a layer's keys are one, its values another), B rows, H key-value
heads, D head size, n new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.core.tree import additive
from eagle_fsd.runtime.kv_cache import KVCache, SavedRow

BLOCK = 256  # slots; also the step in which a view grows, since another shape costs a graph some milliseconds
PAGE = 32  # slots of a page; OpenVINO's attention takes no others on a CPU
WRITTEN_BLOCK = 64  # slots of a block that a graph writes: SLOTS in attention.hpp
FIRST_ADDRESS = 4  # how many numbers there are before the addresses of masks; see WrittenCache.sight
LINE = 64  # bytes of a cache line: registers that are read from two lines take twice as long


class BlockCache(KVCache):
    """Keys and values of all layers, in one buffer [M, blocks, rows, H, block, D] for each size of heads.

    members: (H, D) of every layer's keys, then of its values, layer by layer. dtype: of numbers; only a
    WrittenCache may have another one than float32. Everything else is as in KVCache, but when rows leave the
    others close ranks, since a graph has no use for a part of the rows.
    """

    block = BLOCK  # how many slots lie together
    tables: ClassVar[int | None] = None  # how many tensors `sight` returns; None: one for each kind of mask

    # A graph writes all scores of a layer to memory, so fewer rows at a time are faster: a prompt of 2,000
    # tokens takes 5.1 s in parts of 512 tokens, 3.6 s in parts of 256 or 128.
    widest = 256

    def __init__(
        self,
        batch: int,
        capacity: int,
        members: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(batch, capacity, torch.device("cpu"), step=BLOCK)
        self.members, self.dtype = list(members), dtype
        self._offset = 0  # of the tokens last placed, past the committed ones
        self._touched = 0  # how many blocks may hold something
        self.sizes = list(dict.fromkeys(self.members))  # of heads, in the order in which they occur
        self.stores = {size: self._allocate(size, self.capacity, batch) for size in self.sizes}

    @property
    def nbytes(self) -> int:
        return sum(store.untyped_storage().nbytes() for store in self.stores.values())

    @property
    def tight(self) -> bool:
        return self.nbytes == sum(store.nbytes for store in self.stores.values())

    def blocks(self, count: int) -> list[Tensor]:
        """Return every member's first blocks, [count, rows, H, block, D], in the buffers' own memory."""
        places = dict.fromkeys(self.sizes, 0)
        found = []
        for size in self.members:
            found.append(self.stores[size][places[size], :count])
            places[size] += 1
        return found

    def reserve(self, width: int, offset: int = 0, exact: bool = False) -> None:
        super().reserve(width, offset)  # a view of whole blocks, whether it was to be exact or not
        self.exact = exact
        self._touched = max(self._touched, self.view // self.block)

    def place(self, width: int, offset: int = 0) -> Tensor:
        self._offset = offset
        return super().place(width, offset)

    @property
    def committed_blocks(self) -> int:
        """How many blocks hold slots before those last placed, in any row."""
        return -(-(max(self.row_lengths) + self._offset) // self.block)

    @property
    def shown(self) -> tuple[object, int]:
        """Which buffers, and how much of them, `show` returns."""
        return self.buffers, self.committed_blocks

    def show(self) -> list[Tensor]:
        """Return every member as a graph reads it next, in the buffers' own memory."""
        return self.blocks(self.committed_blocks)

    def sight(self, visible: Sequence[Tensor]) -> list[Tensor]:
        """Return what tells a graph which slots the tokens last placed see.

        visible: for each kind of mask, [B, n, S] bool.
        """
        committed = self.committed_blocks * self.block
        return [split_mask(mask, self.slots, committed) for mask in visible]

    def write(self, news: Sequence[Tensor]) -> None:
        """Write the keys and values of the tokens last placed: [M, B, H, n, D] for each size of heads."""
        start, width = self.row_start(), self.slots.shape[1]
        for size, new in zip(self.sizes, news, strict=True):
            store = self.stores[size]
            if start is None:
                rows = torch.arange(len(self.slots), device=self.device)[:, None]
                block, place = self.slots // self.block, self.slots % self.block
                store[:, block, rows, :, place] = new.permute(1, 3, 0, 2, 4)
                continue
            done = 0
            while done < width:
                block, place = divmod(start + done, self.block)
                count = min(width - done, self.block - place)
                store[:, block, :, :, place : place + count] = new[:, :, :, done : done + count]
                done += count

    def row_start(self) -> int | None:
        """Return the slot of the first token last placed if it is the same in all rows, else None."""
        alike = min(self.row_lengths) == max(self.row_lengths)
        return self.row_lengths[0] + self._offset if alike else None

    def _move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        before, after = ((slots // self.block, slots % self.block) for slots in (source, target))
        for store in self.stores.values():
            # Advanced indexing copies before it writes, so a slot may be both.
            store[:, after[0], rows, :, after[1]] = store[:, before[0], rows, :, before[1]]

    @torch.inference_mode()
    def reset(self, limit: int | None = None) -> None:
        self.row_limits, self.marks = [limit] * self.rows, [[] for _ in range(self.rows)]
        for store in self.stores.values():
            store[:, : self._touched].zero_()  # the others have never been in memory
        self._touched = 0
        self._set_lengths([0] * self.rows)

    def select(self, rows: Sequence[int]) -> None:
        if list(rows) == list(range(self.rows)):
            return
        if all(one < other for one, other in pairwise(rows)):
            self._close_ranks(rows)
        else:
            self._reallocate(self.capacity, rows)
        self.slots = self.slots[list(rows)]

    def replace(self, rows: Sequence[int], other: KVCache) -> None:
        assert isinstance(other, BlockCache)
        used = -(-max(other.row_lengths) // self.block)
        self._take_limits(rows, other)
        self._make_room(used * self.block)
        self._touched = max(self._touched, used)
        for size, store in self.stores.items():
            store[:, :used, list(rows)] = other.stores[size][:, :used, : len(rows)]
            store[:, used : self._touched, list(rows)] = 0  # the text that was there may have left NaN
        self._set_lengths_of(rows, other.row_lengths)

    def save_row(self, row: int, count: int) -> SavedRow:
        used = -(-count // self.block)
        stores = enumerate(self.stores.values())
        return SavedRow(count, {number: (store[:, :used, row].clone(),) for number, store in stores})

    def load_row(self, row: int, saved: SavedRow, count: int) -> None:
        used = -(-count // self.block)
        self._make_room(used * self.block)
        self._touched = max(self._touched, used)
        for number, store in enumerate(self.stores.values()):
            store[:, :used, row] = saved.parts[number][0][:, :used]
            # The saved text's own scratch may be NaN, which no mask hides.
            store[:, used - 1 : used, row, :, count - used * self.block + self.block :] = 0
        self._set_lengths_of([row], [count])

    def grow(self, capacity: int) -> None:
        self._reallocate(self._round_up(capacity), range(len(self.row_lengths)))

    def _close_ranks(self, rows: Sequence[int]) -> None:
        """Keep these rows, in order, in the memory of all: new memory takes longer to get than to fill."""
        used = -(-max(self.row_lengths) // self.block)
        self._begin_to_move()
        for size, store in self.stores.items():
            members, blocks, before, heads, _, width = store.shape
            memory = store.view(members, blocks * before, heads, self.block, width)
            for block, (place, row) in product(range(used), enumerate(rows)):
                target, source = block * len(rows) + place, block * before + row
                if target != source:
                    memory[:, target] = memory[:, source]
            memory[:, used * len(rows) : self._touched * before].zero_()  # as if it had never been used
            self.stores[size] = memory[:, : blocks * len(rows)].unflatten(1, (blocks, len(rows)))
        self._keep(rows)

    def _reallocate(self, capacity: int, rows: Sequence[int]) -> None:
        """Move the blocks of these rows into buffers of another size.

        These are all that may hold something: a prompt's first parts are committed with its last one.
        """
        index = list(rows)
        self._begin_to_move()
        for size, store in self.stores.items():
            new = self._allocate(size, capacity, len(index))
            new[:, : self._touched] = store[:, : self._touched, index]
            self.stores[size] = new
        self.capacity = capacity
        self._keep(index)

    def _keep(self, rows: Sequence[int]) -> None:
        """Let lengths and limits be those of these rows, whose keys and values have moved."""
        self.rows = len(rows)
        self._select_limits(rows)
        self._number_rows(len(rows))
        self._set_lengths([self.row_lengths[row] for row in rows])

    def _allocate(self, size: tuple[int, int], capacity: int, rows: int) -> Tensor:
        heads, width = size
        shape = (self.members.count(size), capacity // self.block, rows, heads, self.block, width)
        # numpy's zeros, unlike torch's, take up no memory until something is written.
        size = math.prod(shape) * self.dtype.itemsize
        room = np.zeros(size + LINE, dtype=np.uint8)
        first = -room.ctypes.data % LINE
        return torch.from_numpy(room[first : first + size]).view(self.dtype).view(shape)


class PagedCache(BlockCache):
    """Blocks that are the pages of OpenVINO's attention: page b * rows + r holds block b of row r.

    A graph gets all pages and tables that say which of them are whose, so it never gets other tensors as a
    text grows. It writes the new keys and values by itself.
    """

    block, tables = PAGE, 7

    _pages: tuple[tuple[int, int, int], Tensor] | None = None  # and what they are for

    @property
    def shown(self) -> tuple[object, int]:
        return self.buffers, self.capacity // PAGE

    def show(self) -> list[Tensor]:
        """Return every member's pages, [blocks * rows, H, PAGE, D]."""
        return [blocks.flatten(0, 1) for blocks in self.blocks(self.capacity // PAGE)]

    def sight(self, visible: Sequence[Tensor]) -> list[Tensor]:
        """Return what the attention has to know of the tokens last placed, as int32, but for the relation.

        visible: of one kind. All slots before the first of the tokens are seen, and of their own those of the
        relation. lengths: [B], the slots before them. starts: [B + 1], where each row's tokens begin among
        all. pages: [B * blocks], each row's. page_starts: [B + 1]. longest: [], the most slots of a row.
        relation: [B * n * n] uint8, which of a row's tokens each of them sees. relation_starts: [B + 1].
        """
        batch, count = self.slots.shape
        blocks = self.view // PAGE
        like = {"dtype": torch.int32, "device": self.device}
        rows = torch.arange(batch + 1, **like)
        key = (batch, blocks, self.rows)
        if self._pages is None or self._pages[0] != key:
            first = torch.arange(batch, **like)[:, None]
            self._pages = key, (first + self.rows * torch.arange(blocks, **like)).flatten()
        longest = torch.tensor(max(self.row_lengths) + self._offset + count, **like)
        relation = visible[0].gather(2, self.slots[:, None, :].expand(-1, count, -1)).flatten().byte()
        lengths = (self.lengths + self._offset).int()
        starts, relation_starts = rows * count, rows * (count * count)
        return [lengths, starts, self._pages[1], rows * blocks, longest, relation, relation_starts]

    def write(self, news: Sequence[Tensor]) -> None:
        """Do nothing: the graph has written them."""


class WrittenCache(BlockCache):
    """Blocks that a graph reads and writes by itself, with TreeAttention, which gets their addresses."""

    block, tables = WRITTEN_BLOCK, 1

    _addresses: tuple[object, list[int]] | None = None  # of the members, and in which buffers
    _seen: Sequence[Tensor] = ()  # what a graph reads at other addresses: it must stay while one runs

    @property
    def shown(self) -> tuple[object, int]:
        return None, 0

    def show(self) -> list[Tensor]:
        """Return nothing: a graph gets addresses."""
        return []

    def sight(self, visible: Sequence[Tensor]) -> list[Tensor]:
        """Return what tells a graph where the cache is, and which slots the tokens last placed see.

        That is one tensor, the bytes of numbers in 64 bits: the slots in view, the cache's rows, how many
        bytes a number in it has, and addresses: of the slots [B, n] int64, of each kind of mask [B, n, S]
        bool, and of each member's blocks [blocks, rows, H, block, D].
        """
        if self._addresses is None or self._addresses[0] is not self.buffers:
            self._addresses = self.buffers, [one.data_ptr() for one in self.blocks(1)]
        # What is read at an address is not checked there.
        assert all(one.dtype == torch.bool and one.shape == (*self.slots.shape, self.view) for one in visible)
        self._seen = [self.slots.contiguous(), *(mask.contiguous() for mask in visible)]
        rows = next(iter(self.stores.values())).shape[2]
        numbers = [self.view, rows, self.dtype.itemsize, *(one.data_ptr() for one in self._seen)]
        made = torch.tensor([*numbers, *self._addresses[1]], dtype=torch.int64, device="cpu")
        return [made.view(torch.uint8)]

    def write(self, news: Sequence[Tensor]) -> None:
        """Do nothing: the graph has written them."""


def split_mask(visible: Tensor, slots: Tensor, committed: int) -> Tensor:
    """Return the additive mask [B, 1, n, committed + n] of visible slots [B, n, S]: of `committed` slots from
    the first on, and of the new tokens.

    slots: [B, n], of the new tokens. Slots from the first of them on are not committed.
    """
    before = torch.arange(committed, device=slots.device) < slots[:, :1]  # [B, committed]
    own = visible.gather(2, slots[:, None, :].expand(-1, visible.shape[1], -1))
    seen = torch.cat((visible[:, :, :committed] & before[:, None], own), dim=2)
    return additive(seen, torch.float32)
