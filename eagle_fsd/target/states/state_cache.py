"""A cache that holds the states of recurrent layers beside the keys and values of attention.

A recurrent layer has one state for each text, which every token changes: it cannot be rolled back to an
accepted path, and siblings of a tree must not share it. So a tree is run level by level, each node from a
copy of its parent's state, and the accepted path's last node has the state to go on from. Shapes: B rows of
the batch, N nodes, M texts or nodes of one call, n tokens of each, d the width of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eagle_fsd.core.padding import on_device
from eagle_fsd.runtime.kv_cache import KVCache, SavedRow

Key = tuple[Any, ...]  # a state's layer, kind ("conv" or "recurrent") and number


class CallStates:
    """What one call of a recurrent layer sees of the cache: transformers' methods, for the texts of the call.

    held: the states of the texts by kind and number, with M rows each; empty before their first token.
    """

    def __init__(self, held: Mapping[tuple[str, int], Tensor]) -> None:
        self.held = dict(held)

    def has_previous_state(self, *_args: object, **_kwargs: object) -> bool:
        """Return whether the texts have begun."""
        return bool(self.held)

    def is_recording_past(self, _layer_idx: int) -> bool:
        """Return False: each call replaces the states."""
        return False

    def get_conv_state(self, _layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs [M, channels, kernel] of a convolution. The layer may write into them."""
        return self.held.get(("conv", state_idx))

    def get_recurrent_state(self, _layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a state [M, ...]."""
        return self.held.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        _layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: object,
    ) -> Tensor:
        """Append inputs [M, channels, n] of a convolution; return them behind those that it still sees."""
        before = self.held.get(("conv", state_idx))
        if before is None:
            kernel = conv_kernel_size or conv_states.shape[-1]
            seen = nn.functional.pad(conv_states, (max(kernel - conv_states.shape[-1], 0), 0))
        else:
            kernel = before.shape[-1]
            seen = torch.cat((before, conv_states), dim=-1)
        self.held["conv", state_idx] = seen[..., -kernel:]
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> Tensor:
        """Replace a state [M, ...]."""
        self.held["recurrent", state_idx] = recurrent_states
        return recurrent_states


class Layer(Protocol):
    """One forward of a recurrent layer, in parts; see mixers.Mixer."""

    def texts(self, part: Tensor, states: CallStates) -> Tensor: ...

    def level(self, places: tuple[Tensor, Tensor], states: CallStates) -> Tensor: ...

    def finish(self, made: Tensor) -> Tensor: ...


class StateCache(KVCache):
    """A KVCache with the states of recurrent layers.

    states: by key, [rows, ...] each, behind the committed tokens of each row; 0 before the first one. nodes:
    by key, [B, N, ...] each, behind the nodes of the tree that is being verified, or [B, K, ...] behind those
    of the last level of a tree that is growing. in_parts: whether layers can read several tokens behind
    others; if not, they read these one by one.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, in_parts: bool = True) -> None:
        super().__init__(batch, capacity, device)
        self.in_parts = in_parts
        self.states: dict[Key, Tensor] = {}
        self.nodes: dict[Key, Tensor] = {}
        self._expected: tuple[Callable[..., Tensor], object] = (StateCache._run_prompt, [])
        self._path: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(state.nbytes for state in self.states.values())

    def expect_prompt(self, counts: Sequence[int]) -> None:
        self._expected, self._path = (StateCache._run_prompt, counts), None

    def expect_level(self, parents: Tensor | None) -> None:
        self._expected = (StateCache._run_level, parents)

    def expect_tree(self, parents: Tensor, depths: Tensor) -> None:
        levels = []
        for level in range(int(depths.max()) + 1):
            rows, nodes = (depths == level).nonzero(as_tuple=True)
            levels.append((rows, nodes, parents[rows, nodes]))
        self._expected, self._path, self.nodes = (StateCache._run_tree, levels), None, {}

    def run(self, number: int, hidden: Tensor, layer: Layer) -> Tensor:
        """Run a recurrent layer on hidden states [B, n, d] of the tokens that are expected.

        number: of the layer among the recurrent ones.
        """
        run, tokens = self._expected
        return run(self, tokens, number, hidden, layer)

    def _run_prompt(self, counts: Sequence[int], number: int, hidden: Tensor, layer: Layer) -> Tensor:
        """Run the first tokens of each row, as many as it has, with one call for all rows of as many."""
        output: Tensor | None = None
        for count in sorted(set(counts) - {0}):
            rows = on_device([row for row, own in enumerate(counts) if own == count], hidden.device)
            states = CallStates(self._states_of(number, self.states, (rows,)))
            width = count if self.in_parts or not states.held else 1
            parts = hidden[rows, :count].split(width, dim=1)
            made = torch.cat([layer.texts(part, states) for part in parts], dim=1)
            if output is None:
                output = made.new_zeros(*hidden.shape[:2], made.shape[-1])
            output[rows, :count] = made
            self._store(number, self.states, (self.rows,), (rows,), states)
        return torch.zeros_like(hidden) if output is None else output

    def _run_level(self, parents: Tensor | None, number: int, hidden: Tensor, layer: Layer) -> Tensor:
        """Run a level together, each token from its parent's state."""
        batch, width = hidden.shape[:2]
        rows = torch.arange(batch, device=hidden.device).repeat_interleave(width)
        if parents is None:
            states = CallStates(self._states_of(number, self.states, (rows,)))
        else:
            places = (rows, parents.flatten().to(rows.device))
            states = CallStates(self._states_of(number, self.nodes, places))
        made = layer.texts(hidden.flatten(0, 1)[:, None], states)
        for key, state in states.held.items():
            self.nodes[(number, *key)] = state.unflatten(0, (batch, width))
        return made.view(batch, width, -1)

    def _run_tree(
        self, levels: Sequence[tuple[Tensor, ...]], number: int, hidden: Tensor, layer: Layer
    ) -> Tensor:
        """Run the nodes of each level together, each from its parent's state, the roots from their rows'."""
        sizes = tuple(hidden.shape[:2])
        output: Tensor | None = None
        for level in levels:
            rows, nodes, parents = (places.to(hidden.device) for places in level)
            if output is None:
                states = CallStates(self._states_of(number, self.states, (rows,)))
            else:
                states = CallStates(self._states_of(number, self.nodes, (rows, parents)))
            made = layer.level((rows, nodes), states)
            if output is None:
                output = made.new_zeros(*sizes, made.shape[-1])
            output[rows, nodes] = made
            self._store(number, self.nodes, sizes, (rows, nodes), states)
        assert output is not None, "a tree has a root"
        return layer.finish(output)

    def _states_of(
        self, number: int, kept: Mapping[Key, Tensor], places: tuple[Tensor, ...]
    ) -> dict[tuple[str, int], Tensor]:
        """Return copies of a layer's states at some places."""
        return {key[1:]: state[places] for key, state in kept.items() if key[0] == number}

    def _store(
        self,
        number: int,
        kept: dict[Key, Tensor],
        sizes: tuple[int, ...],
        places: tuple[Tensor, ...],
        made: CallStates,
    ) -> None:
        """Store the states that a call of a layer made, at their places among those of these sizes."""
        for key, state in made.held.items():
            whole = (number, *key)
            if whole not in kept:
                kept[whole] = state.new_zeros(*sizes, *state.shape[1:])
            kept[whole][places] = state

    def compact(self, path: Tensor, slots: Tensor) -> None:
        super().compact(path, slots)
        self._path = path

    def advance(self, counts: Sequence[int]) -> None:
        if self._path is not None:  # else a prompt was read, whose states are in place
            self._commit(self._path, counts)
        super().advance(counts)

    def _commit(self, path: Tensor, counts: Sequence[int]) -> None:
        """Let each row have the states of the last of counts[row] nodes of its path [B, P]."""
        rows = [row for row, count in enumerate(counts) if count]
        index = on_device(rows, path.device)
        last = on_device([counts[row] - 1 for row in rows], path.device)
        nodes = path[index, last]
        for key, states in self.nodes.items():
            places = (index.to(states.device), nodes.to(states.device))
            if key not in self.states:
                self.states[key] = states.new_zeros(self.rows, *states.shape[2:])
            self.states[key][places[0]] = states[places]
        self.nodes, self._path = {}, None

    @torch.inference_mode()
    def reset(self, limit: int | None = None) -> None:
        super().reset(limit)
        self.states, self.nodes = {}, {}

    def select(self, rows: Sequence[int]) -> None:
        for key, state in self.states.items():
            chosen = state[on_device(rows, state.device)]
            if len(rows) > len(state):
                self.states[key] = chosen
            else:
                state[: len(rows)] = chosen
        super().select(rows)

    def replace(self, rows: Sequence[int], other: KVCache) -> None:
        super().replace(rows, other)
        assert isinstance(other, StateCache)
        for row, new in enumerate(rows):
            self._put(new, {key: state[row] for key, state in other.states.items()})

    def save_row(self, row: int, count: int) -> SavedRow:
        if count != self.row_lengths[row]:
            raise ValueError(f"count is {count}: a text with recurrent states is saved whole")
        states = {key: state[row].clone() for key, state in self.states.items()}
        return replace(super().save_row(row, count), states=states)

    def load_row(self, row: int, saved: SavedRow, count: int) -> None:
        if count != saved.slots:
            raise ValueError(f"count is {count}: a text with recurrent states goes on from its end")
        super().load_row(row, saved, count)
        self._put(row, saved.states)

    def _put(self, row: int, new: Mapping[Key, Tensor]) -> None:
        """Let a row have these states; those that are missing are new texts'."""
        for key, state in new.items():
            if key not in self.states:
                self.states[key] = state.new_zeros(self.rows, *state.shape)
        for key, states in self.states.items():
            states[row] = new.get(key, 0)
