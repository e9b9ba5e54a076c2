"""Devices and dtypes by the names that users give, checked before anything is loaded."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from eagle_fsd.core.checks import one_line

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,  # slow; it rounds too little to decide any token, which checks make use of
}


# What torch, its libraries, drivers, C++ and systems say when memory ends. "Not allocated" is another error.
NO_ROOM = ("out of memory", "t allocate ", "to allocate", "enough memory", "bad_alloc", "ALLOC_FAILED")


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ended.

    torch raises a plain RuntimeError on a CPU, and on a GPU where its libraries or the driver had no room.
    """
    no_room = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return no_room or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_ROOM))


def refuse_lack_of_memory(what: str, error: BaseException) -> None:
    """Raise ValueError if an error says that memory ended. what: the model that was tried."""
    if ran_out_of_memory(error):
        raise ValueError(
            f"{what} has no memory left for a short text ({one_line(error, 120)}): the device must have some "
            "beside its weights; free some there, or use a smaller dtype"
        ) from error


def forward_size(tokens: int, device: torch.device, rows: int = 1) -> int:
    """Return how many tokens of each row one of several forwards over long texts reads.

    tokens: how many a CPU reads. A GPU reads up to eight times as many, all rows together: a forward over few
    tokens takes it as long.
    """
    return tokens if device.type == "cpu" else max(tokens, 8 * tokens // rows)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device of this name after trying it once.

    None and "auto" mean CUDA if there is a GPU, else the CPU.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise ValueError("it holds no data")
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError, ImportError) as error:
        count = torch.cuda.device_count()
        there = " or ".join(("cpu", *(f"cuda:{number}" for number in range(count))))
        raise ValueError(
            f"device {str(device)!r} is not there ({one_line(error, 80)}): torch must see it; use {there}"
        ) from error
    return found


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype of this name.

    None and "auto" mean float32 on a CPU, and bfloat16 on a GPU, or float16 if it only emulates bfloat16.
    """
    if dtype is None or dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float16 if emulates_bfloat16(device) else torch.bfloat16
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        names = "float32, bfloat16, float16 or float64"
        raise ValueError(f"dtype {str(dtype)!r} is not there: it must be {names}; use one of them")
    return found


def emulates_bfloat16(device: torch.device) -> bool:
    """Return whether this is a GPU older than NVIDIA's Ampere, which computes bfloat16 only slowly."""
    # torch.cuda.is_bf16_supported says yes there too, and asks about the current device alone.
    here = device.type == "cuda" and torch.cuda.is_available()
    return here and torch.cuda.get_device_capability(device) < (8, 0)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether products in bfloat16 are fast here.

    Where they are not, they are emulated and take many times as long as in float32: on GPUs older than
    NVIDIA's Ampere and on processors without AVX-512, as in most laptops.
    """
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not emulates_bfloat16(device)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products under autocast, which is that of what caches hold; None: it is off."""
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def host_can_read(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor's values without waiting for a device: only on a CPU.

    Code that has a faster path for some values asks this before it looks at them.
    """
    return tensor.device.type == "cpu"


def fetch(*parts: Tensor) -> list[Tensor]:
    """Return small tensors of one device on the host, which waits once for all of them."""
    if all(map(host_can_read, parts)):
        return list(parts)
    flat = torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts]).cpu()
    pieces = flat.split([part.nbytes for part in parts])
    # A copy begins where any type may begin.
    return [one.clone().view(part.dtype).view(part.shape) for one, part in zip(pieces, parts, strict=True)]


def release_freed_memory() -> None:
    """Return freed memory to the system, if the C library can.

    Batches of many shapes leave holes in glibc's heap, which it keeps: without this the memory of a training
    run, or of a server, grows for a long time (figures in train/EXPERIMENTS.md).
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
