"""A GPU on any machine: tensors that say that they are there, and a note of where the host waits for them.

Each holds a tensor on the CPU, on which operations run. As on a GPU, tensors of both devices do not mix, and
the host waits where it reads a value, or copies without saying that it need not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_fsd.core.randomness import streams
from support.op_recorder import INDEXING, WAITS, tensors, written

GPU = torch.device("cuda", 0)
MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
# Operations of which no tag says that they wait.
HIDDEN = {
    f"aten::{name}" for name in ("allclose", "argwhere", "equal", "is_nonzero", "nonzero_numpy", "where")
}
MAKES = {torch.tensor, torch.as_tensor}  # copy a list to a device, and wait for it


# Operations that a CPU lacks, or lacks for these types.
ONLY_THERE: dict[str, Callable[..., Tensor]] = {
    "aten::histc": lambda x, *rest, **more: torch.histc(x.float(), *rest, **more).to(x.dtype),
    "aten::mm.dtype": lambda x, y, dtype: torch.mm(x.to(dtype), y.to(dtype)),
}


class There(Tensor):
    """A tensor on the pretended GPU. held: what it holds, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        with torch._C._InferenceMode(False):  # what is held has the rights and duties of its mode
            made = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype)
        made.held = held
        return made

    device = property(lambda self: GPU)  # torch itself must not look for one
    is_cuda = property(lambda self: True)

    def __repr__(self) -> str:
        return f"There({self.held!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:  # a file says where a tensor was, and is read to the CPU
        return self.held.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{op} runs outside the pretended GPU")


def held(value: Any) -> Any:
    return value.held if isinstance(value, There) else value


def wrapped(value: Any) -> Any:
    return There(value) if isinstance(value, Tensor) else value


def mapped(change: Callable[[Any], Any], parts: Any) -> Any:
    """Change what is in lists, tuples and dicts."""
    if isinstance(parts, tuple):
        return tuple([mapped(change, part) for part in parts])
    if isinstance(parts, list):
        return [mapped(change, part) for part in parts]
    return (
        {name: mapped(change, part) for name, part in parts.items()} if type(parts) is dict else change(parts)
    )


def is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def waits(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host waits for the result of an operation, other than an index, on a GPU."""
    name, always = name_and_waits(op)
    if name == "aten::repeat_interleave.self_Tensor":
        return kwargs.get("output_size") is None
    if name == "aten::one_hot":  # what a CPU looks at besides, a GPU does not
        return [*args, *kwargs.values(), -1][1] == -1
    if name == "aten::isin.Tensor_Tensor":  # for more elements than this it calls `unique`
        return bool(args[1].numel() >= 10 * args[0].numel() ** 0.145)
    return always


@cache
def name_and_waits(op: Any) -> tuple[str, bool]:
    """Return the name of an operation with its overload, and whether any call of it waits."""
    return op.name(), bool(WAITS & set(op.tags)) or op.name() in HIDDEN


def caller() -> str:
    """Return the file and name of the package's innermost function that runs, other than `fetch`."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        _, package, file = frame.f_code.co_filename.rpartition("/eagle_fsd/")
        if package and frame.f_code.co_name != "fetch":
            return f"{file}:{frame.f_code.co_name}"
    return "a test"


class PretendedGPU(TorchDispatchMode):
    """Runs operations on tensors that are There. waits: by whom the host was made to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.recording = False

    def wait(self, name: str) -> None:
        place = caller()
        if self.recording:
            raise RuntimeError(f"{place} waits for the device within a recording ({name})")
        self.waits.append(f"{place} ({name})")

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), op._schema.name
        given = tensors((args, kwargs))
        here = [one for one in given if not isinstance(one, There)]
        there = len(here) < len(given)
        asked = kwargs.get("device")
        if there and asked is not None and torch._C._current_graph_task_id() >= 0:
            asked = None  # a gradient's, whose options name what torch itself takes the device to be
        goes = is_there(asked) or (there and asked is None)
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            goes = isinstance(args[0], There) if name == "aten::copy_" else goes
            asks_to_wait = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if goes != isinstance(source, There) and (asks_to_wait or not goes):
                self.wait(f"copies {tuple(source.shape)}")
        elif there:
            index = tensors(args[1]) if name in INDEXING else []
            if any(one.ndim and all(one is not other for other in index) for one in here):
                raise RuntimeError(f"{name}: tensors are on both devices")
            # A list among indices becomes a tensor on the CPU, and a mask a list of places.
            masked = any(one.dtype == torch.bool or not isinstance(one, There) for one in index)
            if masked or (name not in INDEXING and waits(op, args, kwargs)):
                self.wait(name)
        if is_there(asked):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        run = ONLY_THERE.get(name_and_waits(op)[0], op) if there else op
        made = run(*mapped(held, args), **mapped(held, kwargs))
        if not (goes or any(is_there(one.device) for one in written(op, args, kwargs))):
            return made
        known = {id(one.held): one for one in given if isinstance(one, There)}
        return mapped(lambda one: known[id(one)] if id(one) in known else wrapped(one), made)


class Again:
    """A Recorder that does the work again instead of a replay, and refuses work that waits for the device."""

    def __init__(self, gpu: PretendedGPU) -> None:
        self.gpu = gpu

    def __call__(self, work: Callable[[], Any], repeatable: bool) -> tuple[Callable[[], None], Any]:
        def run() -> Any:
            self.gpu.recording = True
            try:
                return work()
            finally:
                self.gpu.recording = False

        return run, run() if repeatable else None


class Calls(TorchFunctionMode):
    """What torch does with a GPU before any operation: reads lists, and chooses an attention."""

    def __init__(self, gpu: PretendedGPU) -> None:
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (draws := kwargs.get("generator")) is not None:
            goes = is_there(kwargs.get("device")) or any(isinstance(one, There) for one in tensors(args))
            if is_there(draws.device) != goes:
                raise RuntimeError(f"{func.__name__}: the generator is of {draws.device}")
        if func in MAKES and is_there(kwargs.get("device")):
            del kwargs["device"]
            self.gpu.wait(func.__name__)
            return There(func(*mapped(held, args), **kwargs))
        if func in MOVES:
            return self.moved(func, args, kwargs)
        if func in (Tensor.data_ptr, Tensor.untyped_storage) and isinstance(args[0], There):
            return func(args[0].held)
        if func is Tensor.tolist and isinstance(args[0], There):
            self.gpu.wait("tolist")
            return args[0].held.tolist()
        if func is Tensor.numpy and isinstance(args[0], There):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is F.scaled_dot_product_attention and isinstance(args[0], There):
            given = [one for one in tensors((args, kwargs)) if not isinstance(one, There)]
            assert not given, "attention has tensors on both devices"
            return There(func(*map(held, args), **{name: held(one) for name, one in kwargs.items()}))
        return func(*args, **kwargs)

    def moved(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Return what `to` and the like return; torch itself must not see the device."""
        tensor, *rest = args
        wanted = [*rest, *kwargs.values()]
        devices = [one.device if isinstance(one, Tensor) else one for one in wanted]
        devices = [one for one in devices if isinstance(one, str | torch.device)]
        dtypes = [one.dtype if isinstance(one, Tensor) else one for one in wanted]
        dtype = next((one for one in dtypes if isinstance(one, torch.dtype)), tensor.dtype)
        there = isinstance(tensor, There)
        goes = is_there(devices[0]) if devices else there if func is Tensor.to else func is Tensor.cuda
        if goes == there:
            return tensor.to(dtype, copy=kwargs.get("copy", False))
        if there or not kwargs.get("non_blocking"):
            self.gpu.wait(f"copies {tuple(tensor.shape)}")
        return There(tensor.to(dtype, copy=True)) if goes else tensor.held.to(dtype, copy=True)


@contextmanager
def pretended_gpu(patch: pytest.MonkeyPatch, gpu: PretendedGPU | None = None) -> Iterator[PretendedGPU]:
    """Let torch have a GPU inside the block. gpu: one that it had before; None: a new one."""
    gpu, noise_on = gpu or PretendedGPU(), streams.noise_on
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "a pretended GPU")
    patch.setattr(torch.accelerator, "synchronize", lambda *_: gpu.wait("synchronize"))
    # The CPU has no generator of a GPU.
    patch.setattr(streams, "noise_on", lambda device, *rest: There(noise_on(torch.device("cpu"), *rest)))
    with gpu, Calls(gpu):
        yield gpu


def moved_there(module: nn.Module) -> nn.Module:
    """Move a module's weights to the pretended GPU."""
    known: dict[int, Any] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                new = known.setdefault(id(weight), nn.Parameter(There(weight.data), requires_grad=False))
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = There(buffer)
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                vars(part)[name] = There(value)
    return module
