"""What a CUDA graph does, on any device: record a run's operations, then run them again without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# What no stream can capture: the host would wait for an answer, or bring numbers of its own.
NEVER = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::lift_fresh"}
ASKS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "cpu"}


class NoAnswers(TorchFunctionMode):
    """Refuses to tell Python what a tensor holds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ASKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Notes operations with the very tensors that they read and made, and what they wrote over."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, dict[int, Tensor]]] = []
        self.before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op._schema.name in NEVER:
            raise RuntimeError(f"operation not permitted when stream is capturing: {op._schema.name}")
        given = tensors((args, kwargs))
        for tensor in given if op._schema.is_mutable else ():
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        made = op(*args, **kwargs)
        read = {tensor.untyped_storage().data_ptr() for tensor in given}
        # A view shares the memory of what it was made of, and to write in place is the operation itself.
        new = {
            place: out
            for place, out in enumerate(tensors(made))
            if out.untyped_storage().data_ptr() not in read
        }
        if new or op._schema.is_mutable:
            self.calls.append((op, args, kwargs, new))
        return made

    def put_back(self) -> None:
        for storage, saved in self.before.values():
            storage.copy_(saved)

    def replay(self) -> None:
        for op, args, kwargs, kept in self.calls:
            made = tensors(op(*args, **kwargs))
            for place, old in kept.items():
                old.copy_(made[place])


class OpRecorder:
    """A Recorder that captures nothing that a stream could not. recordings, replays: how many there were."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, work: Callable[[], Any], repeatable: bool) -> tuple[Callable[[], None], Any]:
        if repeatable:
            work()
        with NoAnswers(), Tape() as tape:
            result = work()
        tape.put_back()  # a capture runs nothing
        for tensor in tensors(vars(result) if hasattr(result, "__dict__") else result):
            assert not tensor.is_floating_point() or tensor.fill_(torch.nan) is tensor
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay, result


def tensors(parts: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(parts)[0] if isinstance(leaf, Tensor)]
