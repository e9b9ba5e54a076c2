"""What programs ask of torch.cuda, answered for the pretended GPU: who is there, its memory, its clock.

`pretended_cuda` is `pretended_gpu` for whole programs: models are moved there, gradients flow, threads that
start inside see the GPU too, autocast is that of the CPU, and a recorded step does its work again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_fsd.runtime import cuda_graphs
from support.pretended_gpu import GPU, Again, Calls, PretendedGPU, There, is_there, pretended_gpu

NAME, CAPABILITY, MEMORY = "Pretended GPU", (8, 0), 16 * 2**30


class ThereGenerator(torch.Generator):
    """A generator of the pretended GPU. Its numbers are those of a CPU's."""

    device = property(lambda self: GPU)


class Beside(TorchDispatchMode):
    """The pretended GPU in another thread."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.__torch_dispatch__(op, types, args, kwargs)


class Event:
    """A mark in the work of the GPU, which is done when the host comes to it."""

    def __init__(self, gpu: PretendedGPU) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.gpu.wait("Event.synchronize")

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


@contextmanager
def pretended_cuda() -> Iterator[PretendedGPU]:
    """Let torch have a GPU inside the block, for whatever programs do with one."""
    with one_accelerator(), pytest.MonkeyPatch.context() as patch, pretended_gpu(patch) as gpu:
        answers = {
            **{"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0},
            **{"get_device_name": NAME, "get_device_capability": CAPABILITY, "is_bf16_supported": True},
            **{"memory_allocated": 3, "max_memory_allocated": 5, "memory_reserved": 7},
            **{"mem_get_info": (MEMORY // 2, MEMORY), "reset_peak_memory_stats": None, "empty_cache": None},
            **{"set_device": None, "manual_seed_all": None},
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        for place in (torch.cuda, torch.accelerator):
            patch.setattr(place, "synchronize", lambda *_: gpu.wait("synchronize"))
        patch.setattr(torch.cuda, "Event", lambda **_: Event(gpu))
        patch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
        patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
        patch.setattr(clip_grad, "_group_tensors_by_device_and_dtype", grouped)
        patch.setattr(torch, "Generator", GeneratorSomewhere)
        patch.setattr(torch, "autocast", Autocast)
        patch.setattr(torch, "is_autocast_enabled", on_the_cpu(torch.is_autocast_enabled))
        patch.setattr(torch, "get_autocast_dtype", on_the_cpu(torch.get_autocast_dtype))
        patch.setattr(Tensor, "pin_memory", pinned)
        patch.setattr(nn.Module, "_apply", applied(nn.Module._apply))
        patch.setattr(threading.Thread, "_bootstrap_inner", with_gpu(threading.Thread._bootstrap_inner, gpu))
        patch.setattr(cuda_graphs, "cuda_recorder", lambda device, *_: Again(gpu))
        yield gpu


@contextmanager
def one_accelerator() -> Iterator[None]:
    """Let accelerate look for devices anew, inside the block and after it."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    try:
        yield
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


class SomeGenerator(type):
    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return ThereGenerator() if is_there(device) else REAL_GENERATOR(device)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, REAL_GENERATOR)


REAL_GENERATOR, REAL_AUTOCAST = torch.Generator, torch.autocast


class GeneratorSomewhere(metaclass=SomeGenerator):
    """torch.Generator, also of the pretended GPU."""


class Autocast(REAL_AUTOCAST):
    """torch.autocast, with that of the CPU for the pretended GPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def on_the_cpu(asked: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device_type=None: asked("cpu")


def grouped(parts: list[list[Tensor | None]], *_: Any) -> dict[Any, Any]:
    """Group lists of tensors by their first tensor's device and dtype, as torch does."""
    found: dict[Any, Any] = {}
    for place, first in enumerate(parts[0]):
        lists, places = found.setdefault((first.device, first.dtype), ([[] for _ in parts], []))
        places.append(place)
        for one, part in zip(lists, parts, strict=True):
            one.append(part[place])
    return found


def pinned(tensor: Tensor, *_: Any) -> Tensor:
    if isinstance(tensor, There):
        raise RuntimeError("cannot pin a tensor of a GPU: only dense CPU tensors can be pinned")
    return tensor


def with_gpu(run: Callable[..., None], gpu: PretendedGPU) -> Callable[..., None]:
    def run_there(thread: threading.Thread) -> None:
        with Beside(gpu), Calls(gpu):
            run(thread)

    return run_there


def applied(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Move the weights of modules to the pretended GPU or from it, each staying the object that it is."""

    def on_any_device(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        own = [one for one in module._parameters.values() if one is not None]
        with torch.no_grad():
            moved = [fn(one) for one in own]
        if not any(isinstance(one, There) for one in (*own, *moved)):
            return apply(module, fn, recurse=False)
        for one, new in zip(own, moved, strict=True):
            if new is not one:
                one.grad = None
                torch.utils.swap_tensors(one, nn.Parameter(new.detach(), requires_grad=one.requires_grad))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    return on_any_device
