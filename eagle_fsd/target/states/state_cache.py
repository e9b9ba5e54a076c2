"""A cache that holds the states of recurrent layers beside the keys and values of attention.

A recurrent layer has one state for each text, which every token changes: it cannot be rolled back to an
accepted path, and siblings of a tree must not share it. Many layers run a whole tree at once, without states
of its nodes; see whole_tree.py. Others run it level by level, each node from a copy of its parent's state.
The states behind the accepted path's last node are those to go on from. Shapes: B rows of the batch, N nodes,
M texts or nodes of one call, n tokens of each, d the width of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eagle_fsd.core.padding import on_device
from eagle_fsd.runtime.kv_cache import KVCache, SavedRow
from eagle_fsd.target.states.tree_plan import TreePlan
from eagle_fsd.target.states.whole_tree import TreeStates

Held = dict[tuple[str, int], Tensor]  # states by kind, "conv" or "recurrent", and number
Key = tuple[Any, ...]  # a layer's number, and the state's kind and number


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
    """One forward of a recurrent layer, in parts; see mixers.Mixer.

    whole_tree: whether it runs a tree at once.
    """

    whole_tree: bool

    def texts(self, part: Tensor, states: CallStates) -> Tensor: ...

    def tree(self, states: TreeStates) -> Tensor: ...

    def goes_on(self, part: Tensor, states: CallStates) -> bool: ...

    def level(self, places: tuple[Tensor, Tensor], states: CallStates) -> Tensor: ...

    def finish(self, made: Tensor) -> Tensor: ...


class StateCache(KVCache):
    """A KVCache with the states of recurrent layers.

    states: by key, [rows, ...] each, behind the committed tokens of each row; 0 before the first one. levels:
    by layer, the states [M, ...] behind the M nodes of each level of the tree that is being verified, by kind
    and number; or those behind the last level of a growing tree. trees: by layer that runs a tree at once,
    what its states behind the nodes are made of.
    """

    whole = True

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        super().__init__(batch, capacity, device)
        self.states: dict[Key, Tensor] = {}
        self.levels: dict[int, list[Held]] = {}
        self.trees: dict[int, TreeStates] = {}
        self._expected: tuple[Callable[..., Tensor], object] = (StateCache._run_prompt, [])
        self._tree: TreePlan | None = None
        self._path: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(state.nbytes for state in self.states.values())

    def expect_prompt(self, lengths: Sequence[int], start: int, width: int) -> None:
        counts = [min(max(length - start, 0), width) for length in lengths]
        self._expected, self._path = (StateCache._run_prompt, counts), None

    def expect_level(self, parents: Tensor | None) -> None:
        self._expected = (StateCache._run_level, parents)

    def expect_tree(self, parents: Tensor, depths: Tensor) -> None:
        self._tree = TreePlan(parents, depths)
        self._expected = (StateCache._run_tree, self._tree)
        self._path, self.levels, self.trees = None, {}, {}

    def run(self, number: int, hidden: Tensor, layer: Layer) -> Tensor:
        """Run a recurrent layer on hidden states [B, n, d] of the tokens that are expected.

        number: of the layer among the recurrent ones.
        """
        run, tokens = self._expected
        return run(self, tokens, number, hidden, layer)

    def _run_prompt(self, counts: Sequence[int], number: int, hidden: Tensor, layer: Layer) -> Tensor:
        """Run the first tokens of each row, as many as it has, with one call for all rows of as many.

        A layer that does not go on from states with several tokens reads them one by one.
        """
        output: Tensor | None = None
        for count in sorted(set(counts) - {0}):
            rows = on_device([row for row, own in enumerate(counts) if own == count], hidden.device)
            states = self._states_of(number, rows)
            tokens = hidden[rows, :count]
            at_once = count == 1 or not states.held or layer.goes_on(tokens, states)
            parts = [tokens] if at_once else tokens.split(1, dim=1)
            made = torch.cat([layer.texts(part, states) for part in parts], dim=1)
            if output is None:
                output = made.new_zeros(*hidden.shape[:2], made.shape[-1])
            output[rows, :count] = made
            self._put_states(number, rows, states.held)
        return torch.zeros_like(hidden) if output is None else output

    def _run_level(self, parents: Tensor | None, number: int, hidden: Tensor, layer: Layer) -> Tensor:
        """Run a level together, each token from its parent's state."""
        batch, width = hidden.shape[:2]
        rows = torch.arange(batch, device=hidden.device)[:, None]
        if parents is None:
            states = self._states_of(number, rows.expand(-1, width).flatten())
        else:
            above = (rows * width + parents.to(rows.device)).flatten()
            states = CallStates({key: state[above] for key, state in self.levels[number][-1].items()})
        made = layer.texts(hidden.flatten(0, 1)[:, None], states)
        self.levels[number] = [states.held]
        return made.view(batch, width, -1)

    def _run_tree(self, plan: TreePlan, number: int, hidden: Tensor, layer: Layer) -> Tensor:
        """Run a tree at once, or the nodes of each level together, each from its parent's state."""
        before = {key: state[: len(hidden)] for key, state in self._of_layer(number).items()}
        if layer.whole_tree:
            self.trees[number] = TreeStates(before, plan)
            return layer.tree(self.trees[number])
        behind = self.levels[number] = list[Held]()
        output: Tensor | None = None
        for level in (one.to(hidden.device) for one in plan.levels):
            kept, places = (behind[-1], level.parents) if behind else (before, level.rows)
            states = CallStates({key: state[places] for key, state in kept.items()})
            made = layer.level((level.rows, level.nodes), states)
            if output is None:
                output = made.new_zeros(*hidden.shape[:2], made.shape[-1])
            output[level.rows, level.nodes] = made
            behind.append(states.held)
        assert output is not None, "a tree has a root"
        return layer.finish(output)

    def _of_layer(self, number: int) -> Held:
        """Return a layer's states of all rows."""
        return {key[1:]: state for key, state in self.states.items() if key[0] == number}

    def _states_of(self, number: int, rows: Tensor) -> CallStates:
        """Return copies of a layer's states at some rows."""
        return CallStates({key: state[rows] for key, state in self._of_layer(number).items()})

    def _state(self, key: Key, like: Tensor) -> Tensor:
        """Return a state of all rows, allocated now if it is new. like: [M, ...], what comes in."""
        if key not in self.states:
            self.states[key] = like.new_zeros(self.rows, *like.shape[1:])
        return self.states[key]

    def compact(self, path: Tensor, slots: Tensor) -> None:
        super().compact(path, slots)
        self._path = path

    def advance(self, counts: Sequence[int]) -> None:
        if self._path is not None:  # else a prompt was read, whose states are in place
            self._commit(self._path, counts)
        super().advance(counts)

    def _commit(self, path: Tensor, counts: Sequence[int]) -> None:
        """Let each row have the states of the last of counts[row] nodes of its path [B, P]."""
        assert self._tree is not None, "a path is one of a tree"
        rows = [row for row, count in enumerate(counts) if count]
        index = on_device(rows, path.device)
        nodes = path[index, on_device([counts[row] - 1 for row in rows], path.device)]
        for number, tree in self.trees.items():
            self._put_states(number, index, tree.behind(index, nodes))
        # A path's last node is as deep as it has nodes before it, which the host knows.
        for count in {counts[row] for row in rows} if self.levels else ():
            its = on_device([row for row in rows if counts[row] == count], path.device)
            chosen = self._tree.places[its, path[its, count - 1]]
            for number, behind in self.levels.items():
                found = {key: state[chosen.to(state.device)] for key, state in behind[count - 1].items()}
                self._put_states(number, its, found)
        self.levels, self.trees, self._path = {}, {}, None

    def _put_states(self, number: int, rows: Tensor, states: Held) -> None:
        """Let rows have these states [n, ...] of a layer."""
        for key, state in states.items():
            self._state((number, *key), state)[rows.to(state.device)] = state

    @torch.inference_mode()
    def reset(self, limit: int | None = None) -> None:
        super().reset(limit)
        self.states, self.levels, self.trees = {}, {}, {}

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
            self._state(key, state[None])
        for key, states in self.states.items():
            states[row] = new.get(key, 0)
