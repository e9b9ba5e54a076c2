"""The preallocated KV cache: per-row lengths, writes at offsets, keeps an accepted path, grows, drops rows.

A stand-in for transformers' Cache wherever a model calls `update` and `get_seq_length`. It keeps every slot,
also in layers with a sliding window, because a tree mask needs them. Committed token t of a row is in slot t.
Slots past a row's length are scratch: the next write overwrites them and the masks hide them. Shapes: B rows,
H key-value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.core.devices import forward_size, host_can_read
from eagle_fsd.core.padding import on_device

WIDEST = 512  # tokens of a row in a forward on a CPU, which bounds the mask to WIDEST x context


@dataclass(frozen=True)
class SavedRow:
    """The first slots of one row of a cache, in memory of their own.

    parts: by layer or by size of heads. states: of recurrent layers, if there are any. marks: see KVCache.
    """

    slots: int
    parts: Mapping[int, tuple[Tensor, ...]]
    states: Mapping[tuple[Any, ...], Tensor] = field(default_factory=dict)
    marks: Sequence[tuple[int, int]] = ()

    @property
    def slots_of_states(self) -> int:
        """How many slots take as much memory as the states; 0 if there is no slot to compare with."""
        taken = sum(part.nbytes for parts in self.parts.values() for part in parts)
        states = sum(state.nbytes for state in self.states.values())
        return -(-states * self.slots // taken) if taken else 0

    @property
    def whole(self) -> bool:
        """Whether a text can go on only behind all of these slots: states cannot be taken back."""
        return bool(self.states)


class KVCache:
    """Keys and values of every layer, [B, H, S, D] each, allocated when a layer first writes.

    lengths: the committed tokens of each row, on the host (`row_lengths`) and on the device (`lengths` [B]
    int64, at the same address as long as `buffers` is the same object). rows: how many texts the buffers
    have room for; the rows still running are always the first ones. row_limits: how many slots the text of
    each row needs at most; None: unknown. Capacity does not double beyond the most of them. step: views are
    multiples of it and writes go by index, so that a recorded forward serves other lengths too; 0: views end
    where the tokens end. marks: by row, slots from which on positions are so far beyond slots, in order; most
    texts have none. shifts: [B] int64, how far they are beyond them at each row's length.
    """

    whole = False  # whether what is saved of a row can only be loaded whole

    def __init__(self, batch: int, capacity: int, device: torch.device, step: int = 0) -> None:
        self.step = step
        self.capacity = self._round_up(capacity)
        self.device = device
        self.rows = batch
        self.row_limits: list[int | None] = [None] * batch
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.buffers = object()  # a token for the buffers' identity: replaced when they are reallocated
        self.view, self.exact = 0, True
        self.slots = torch.empty(batch, 0, dtype=torch.int64, device=device)
        self.span: slice | None = None  # the slots as one slice if all rows have the same ones
        self.marks: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
        self._number_rows(batch)
        self._set_lengths([0] * batch)

    @property
    def nbytes(self) -> int:
        """The bytes that keys and values have been given, used or not."""
        return sum(buffer.nbytes for layer in self.layers.values() for buffer in layer)

    @property
    def tight(self) -> bool:
        """Whether no memory is held for rows that have left and cannot come back."""
        return True

    @property
    def widest(self) -> int:
        """How many tokens of each row a forward over prompts had best read at most."""
        return forward_size(WIDEST, self.device, len(self.row_lengths))

    @property
    def limit(self) -> int | None:
        """How many slots a text needs at most; None: unknown."""
        known = [limit for limit in self.row_limits if limit is not None]
        return max(known) if len(known) == len(self.row_limits) else None

    @torch.inference_mode()
    def reset(self, limit: int | None = None) -> None:
        """Forget the texts and make all rows ready for new ones, which need at most `limit` slots each."""
        self.row_limits, self.marks = [limit] * self.rows, [[] for _ in range(self.rows)]
        for buffers in self.layers.values():
            for buffer in buffers:
                buffer.zero_()  # a text with NaN logits may have left NaN here; see `update`
        self._set_lengths([0] * self.rows)

    def reserve(self, width: int, offset: int = 0, exact: bool = False) -> None:
        """Make room for `width` tokens per row, `offset` past its length; the cache grows if needed.

        This sets `view`, the number of slots that attention sees. exact: the view ends where the tokens end,
        for a forward that is never recorded.
        """
        self.exact = exact or not self.step
        end = max(self.row_lengths) + offset + width
        self.view = end if self.exact else self._round_up(end)
        self._make_room(self.view)

    def place(self, width: int, offset: int = 0) -> Tensor:
        """Choose where the next forward writes: `width` reserved slots per row, `offset` past its length.

        Returns the slots [B, width].
        """
        self.slots = self.lengths[:, None] + torch.arange(offset, offset + width, device=self.device)
        start = max(self.row_lengths) + offset
        # A slice is written faster than an index, but a recording would fix it to these lengths.
        alike = self.exact and min(self.row_lengths) == max(self.row_lengths)
        self.span = slice(start, start + width) if alike else None
        return self.slots

    def expect_prompt(self, lengths: Sequence[int], start: int, width: int) -> None:
        """Note that the next forward reads `width` tokens of each row's new ones, from number `start` on.

        lengths: how many new tokens each row has. What is past them is padding.
        """

    def expect_level(self, parents: Tensor | None) -> None:
        """Note that the next forward is over one more level [B, K] of growing trees.

        parents: each token's place in the level before; None: that is the last committed token.
        """

    def expect_tree(self, parents: Tensor, depths: Tensor) -> None:
        """Note that the next forward is over trees; see DraftTree."""

    def shift_at(self, row: int, slot: int) -> int:
        """Return how far the position of a token of text in a slot is beyond the slot."""
        return next((shift for start, shift in reversed(self.marks[row]) if start <= slot), 0)

    def note_shift(self, row: int, slot: int, shift: int) -> None:
        """Note how far the positions of a row's tokens are beyond their slots, from this slot on."""
        self.marks[row] = [*(mark for mark in self.marks[row] if mark[0] < slot), (slot, shift)]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, width, D] at the placed slots and return the layer's view [B, H, view, D]."""
        stored_keys, stored_values = (x[: keys.shape[0]] for x in self._layer(layer_idx, (keys, values)))
        if self.span is not None:
            stored_keys[:, :, self.span] = keys
            stored_values[:, :, self.span] = values
        else:
            slots = self.slots.to(keys.device)
            rows = torch.arange(len(slots), device=keys.device)[:, None]
            stored_keys[rows, :, slots] = keys.transpose(1, 2)
            stored_values[rows, :, slots] = values.transpose(1, 2)
        return stored_keys[:, :, : self.view], stored_values[:, :, : self.view]

    def compact(self, path: Tensor, slots: Tensor) -> None:
        """Move the tokens of a path, in order, right behind the committed ones, for `advance` to commit.

        slots: [B, n] of the tokens last placed; path: [B, P] indices among them, -1 padded, beginning with
        that of the first token.
        """
        path = path[:, 1 : slots.shape[1]]  # the first token is in place; no path is longer than the tree
        target = self.lengths[:, None] + torch.arange(1, 1 + path.shape[1], device=self.device)
        # Padding stays where it is.
        source = torch.where(path >= 0, slots.gather(1, path.clamp(min=0)), target)
        rows = torch.arange(len(path), device=self.device)[:, None].expand_as(target)
        if host_can_read(path):  # most tokens of most paths are in place
            moved = source != target
            rows, source, target = rows[moved], source[moved], target[moved]
        if target.numel():
            self._move(rows, source, target)

    def _move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy each row's slot to another one; a slot may be both. The three have one shape."""
        places: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        for buffers in self.layers.values():
            for buffer in buffers:
                heads, slots_per_head = buffer.shape[1:3]
                kind = (heads, slots_per_head, buffer.device)  # a device_map may spread the layers
                if kind not in places:
                    head = rows.flatten()[:, None] * heads + torch.arange(heads, device=rows.device)
                    places[kind] = tuple(
                        (head * slots_per_head + at.flatten()[:, None]).flatten().to(buffer.device)
                        for at in (source, target)
                    )
                # One number a vector is faster than one for each dimension. What moves is copied before it is
                # written, so source and target slots may overlap.
                vectors = buffer.view(-1, buffer.shape[3])
                vectors.index_copy_(0, places[kind][1], vectors.index_select(0, places[kind][0]))

    def advance(self, counts: Sequence[int]) -> None:
        """Commit counts[row] more tokens: the first of those last placed at offset 0, or of a path."""
        self._set_lengths([length + count for length, count in zip(self.row_lengths, counts, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order; a row may be named more than once.

        They move to the front of the buffers, so that recordings stay valid. The buffers are reallocated
        only if there are more rows than they have room for.
        """
        lengths = [self.row_lengths[row] for row in rows]
        count, used, index = len(lengths), max(lengths), on_device(rows, self.device)
        self._select_limits(rows)
        for layer, buffers in self.layers.items():
            index = index.to(buffers[0].device)
            if count > self.rows:
                self.layers[layer] = tuple(buffer[index] for buffer in buffers)
            else:
                for buffer in buffers:  # indexing copies first, so no row is overwritten before it is read
                    buffer[:count, :, :used] = buffer[index, :, :used]
                    buffer[:count, :, used:] = 0  # another text was there; see `replace`
        self.slots = self.slots[on_device(rows, self.slots.device)]
        if count > self.rows:
            self.rows, self.buffers = count, object()
            self._number_rows(count)
        self._set_lengths(lengths)

    def replace(self, rows: Sequence[int], other: KVCache) -> None:
        """Put the texts of another cache, one for each, in the place of these rows, with their limits."""
        self._take_limits(rows, other)
        used, index = max(other.row_lengths), on_device(rows, self.device)
        self._make_room(used)
        # Layers are new in either cache if all its prompts were single tokens, which no forward has read.
        for layer, news in {**self.layers, **other.layers}.items():
            index = index.to(news[0].device)
            for buffer, new in zip(self._layer(layer, news), other.layers.get(layer, news), strict=True):
                buffer[index, :, :used] = new[: len(rows), :, :used]
                buffer[index, :, used:] = 0  # the text that was there may have left NaN; see `reset`
        self._set_lengths_of(rows, other.row_lengths)

    def save_row(self, row: int, count: int) -> SavedRow:
        """Return a copy of the first `count` slots of a row."""
        parts = {
            layer: tuple(buffer[row, :, :count].clone() for buffer in buffers)
            for layer, buffers in self.layers.items()
        }
        return SavedRow(count, parts, marks=self.marks[row])

    def load_row(self, row: int, saved: SavedRow, count: int) -> None:
        """Let a row hold the first `count` of a saved row's slots, and nothing else."""
        self._make_room(count)
        for layer, news in saved.parts.items():
            for buffer, new in zip(self._layer(layer, news), news, strict=True):
                buffer[row, :, :count] = new[:, :count]
        self.marks[row] = [mark for mark in saved.marks if mark[0] <= count]
        self._set_lengths_of([row], [count])

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots in the rows still running; what they store stays."""
        capacity, rows = self._round_up(capacity), len(self.row_lengths)
        self._begin_to_move()
        for layer, buffers in self.layers.items():
            self.layers[layer] = tuple(
                torch.cat((b[:rows], b.new_zeros(rows, b.shape[1], capacity - self.capacity, b.shape[3])), 2)
                for b in buffers
            )
        self.rows, self.capacity = rows, capacity

    def _begin_to_move(self) -> None:
        """Let no recording go on, nor any text begin here: if memory ends now, some layers have moved."""
        self.rows, self.buffers = 0, object()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the longest row's length. transformers asks for it, but positions are always given to it."""
        return max(self.row_lengths)

    def _layer(self, layer: int, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a layer's buffers, allocated now if they are new. like: [..., H, n, D], what comes in."""
        if layer not in self.layers:
            # Zeros, not empty: attention multiplies hidden slots by 0, and 0 * NaN would be NaN.
            self.layers[layer] = tuple(
                x.new_zeros(self.rows, x.shape[-3], self.capacity, x.shape[-1]) for x in like
            )
        return self.layers[layer]

    def _set_lengths_of(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the lengths of these rows; the others keep theirs."""
        new = dict(zip(rows, lengths, strict=True))
        self._set_lengths([new.get(row, old) for row, old in enumerate(self.row_lengths)])

    def _number_rows(self, rows: int) -> None:
        """Make room for the lengths and shifts of so many rows; `_set_lengths` must follow."""
        self._all_lengths, self._all_shifts = torch.zeros(2, rows, dtype=torch.int64, device=self.device)
        self.row_shifts = []

    def _set_lengths(self, lengths: list[int]) -> None:
        # In place: a recorded forward reads the address that it was recorded with.
        self.lengths = self._all_lengths[: len(lengths)].copy_(on_device(lengths, self.device))
        self.row_lengths = lengths
        shifts = [self.shift_at(row, length) for row, length in enumerate(lengths)]
        if shifts != self.row_shifts:
            self.shifts = self._all_shifts[: len(lengths)].copy_(on_device(shifts, self.device))
            self.row_shifts = shifts

    def _make_room(self, end: int) -> None:
        """Grow if there are fewer than `end` slots: to twice the capacity, but not beyond the limit."""
        if end > self.capacity:
            double = 2 * self.capacity  # doubling keeps the number of reallocations small
            self.grow(max(end, double if self.limit is None else min(double, self.limit)))

    def _select_limits(self, rows: Sequence[int]) -> None:
        """Keep the limits and marks of these rows, in this order."""
        self.row_limits = [self.row_limits[row] for row in rows]
        self.marks = [self.marks[row] for row in rows]

    def _take_limits(self, rows: Sequence[int], other: KVCache) -> None:
        """Let these rows have the limits and marks of another cache's rows, one for each."""
        for row, limit, marks in zip(rows, other.row_limits, other.marks, strict=True):
            self.row_limits[row], self.marks[row] = limit, marks

    def _round_up(self, slots: int) -> int:
        return slots if not self.step else -(-slots // self.step) * self.step


def commit_in_chunks(
    cache: KVCache,
    read: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    counts: Sequence[int],
    first: bool,
) -> Tensor:
    """Read pairs [B, P] in chunks, commit counts[row] of them and return the outputs [B, d] at the last ones.

    inputs: the tensors [B, P, ...] that the pairs are made of. read: takes chunks of them and their offset
    past the committed slots, and returns outputs [B, q, d].
    """
    outputs, total = [], inputs[0].shape[1]
    for start in range(0, total, cache.widest):
        end = min(total, start + cache.widest)
        cache.reserve(end - start, offset=start, exact=first)
        output = read(*(one[:, start:end] for one in inputs), start)
        outputs.append(output.clone() if total > cache.widest else output)  # the next may overwrite it
    # A row that is done commits nothing; its output is read at place 0 and never used.
    last = on_device([max(count, 1) for count in counts], cache.device)[:, None, None] - 1
    output = torch.cat(outputs, dim=1)
    cache.advance(counts)
    return output.gather(1, last.expand(-1, -1, output.shape[-1]))[:, 0]
