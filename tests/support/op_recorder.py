"""A CUDA graph on any device: record a run's operations, then run them again without Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_fsd.core import devices
from eagle_fsd.runtime.step_recorder import Graphs, NothingRecorded, leaves

ASKS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "cpu"}
# For these operations the host must know the shape or value of the result, so it would wait for the device.
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class NoAnswers(TorchFunctionMode):
    """Refuses to give Python the values of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ASKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class Capturing(TorchDispatchMode):
    """Refuses operations that no stream can capture, since the host waits for them or brings in numbers."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = op._schema.name, tensors((args, kwargs))
        if name in INDEXING:  # a mask is turned into indices, whose number is not known
            refused = any(index.dtype in (torch.bool, torch.uint8) for index in tensors(args[1]))
        elif name == "aten::isin":  # for more elements than this it calls `unique`
            refused = len(given) > 1 and given[1].numel() >= 10 * given[0].numel() ** 0.145
        else:
            refused = name == "aten::lift_fresh" or bool(WAITS & set(op.tags))
        made = None if refused else op(*args, **kwargs)
        if refused or len({tensor.device.type for tensor in (*given, *tensors(made))}) > 1:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return made


class Tape(Capturing):
    """Records operations with the tensors that they read and made, and the memory that they overwrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, dict[int, Tensor]]] = []
        self.before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        for tensor in written(op, args, kwargs):
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        made = super().__torch_dispatch__(op, types, args, kwargs)
        read = {tensor.untyped_storage().data_ptr() for tensor in given}
        # A view shares the memory of its base. An operation in place writes its result by itself.
        new = {
            place: out
            for place, out in enumerate(tensors(made))
            if out.untyped_storage().data_ptr() not in read
        }
        if new or op._schema.is_mutable:
            self.calls.append((op, args, kwargs, new))
        return made

    def made(self) -> set[int]:
        """Return the memory that was allocated while recording."""
        return {out.untyped_storage().data_ptr() for *_, new in self.calls for out in new.values()}

    def put_back(self) -> None:
        for storage, saved in self.before.values():
            storage.copy_(saved)

    def spoil(self, result: object) -> None:
        """Fill the results with NaN, since a capture computes nothing."""
        filled = self.made() | set(self.before)
        for tensor in leaves(result):
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() in filled:
                tensor.fill_(torch.nan)

    def replay(self) -> None:
        for op, args, kwargs, kept in self.calls:
            made = tensors(op(*args, **kwargs))
            for place, old in kept.items():
                old.copy_(made[place])


class OpRecorder:
    """A Recorder that refuses work that no stream can capture. recordings, replays: their numbers."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, work: Callable[[], Any], repeatable: bool) -> tuple[Callable[[], None], Any]:
        if repeatable:
            work()
        with NoAnswers(), Tape() as tape:
            result = work()
        tape.put_back()  # a capture runs nothing
        if not tape.calls:
            raise NothingRecorded("nothing ran")
        if any(tensor.untyped_storage().data_ptr() in tape.made() for tensor in leaves(result)):
            # All captures share it, so a replay of an earlier one may overwrite a later one's results.
            raise AssertionError("results are in memory that the capture allocated")
        tape.spoil(result)
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay, result


def as_on_an_accelerator(patch: pytest.MonkeyPatch, view: int = 16, reads: bool = False) -> None:
    """Choose no way by what a tensor holds, unless the host reads it.

    view: so narrow that it changes within a text.
    """
    reading = [module for name, module in list(sys.modules.items()) if name.startswith("eagle_fsd.")]
    for module in reading:
        if module is not devices and hasattr(module, "host_can_read"):
            patch.setattr(module, "host_can_read", lambda tensor: reads)
    patch.setattr(Graphs, "view", view)


def written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation overwrites."""
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name in overwrites(op)]
    return tensors(given)


@cache
def overwrites(op: Any) -> list[tuple[int, str]]:
    """Return the places and names of the arguments that an operation overwrites."""
    known = [(place, one.name, one.alias_info) for place, one in enumerate(op._schema.arguments)]
    return [(place, name) for place, name, alias in known if alias is not None and alias.is_write]


def tensors(parts: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dicts: torch's own trees take longer than the operations."""
    if isinstance(parts, Tensor):
        return [parts]
    inner = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list | tuple) else ()
    return [leaf for part in inner for leaf in tensors(part)]
