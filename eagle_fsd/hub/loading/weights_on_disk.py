"""Let transformers make the float32 weights of a large target on disk: in memory they would take too much.

They are made from the blocks of a .gguf file or from a checkpoint in 16 bits, one tensor after the other.
Here each tensor is a part of a file that has no name and disappears with the last of them. The file is mapped
into memory, which the system takes back where it is short.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eagle_fsd.files.atomic import cache_folder
from eagle_fsd.files.kept_folders import format_gigabytes, is_enabled
from eagle_fsd.files.provenance import machine_memory

logger = logging.getLogger(__name__)

SHARE = 3  # what part of a machine's memory such weights may take
UNPACKED = 8  # how many bytes come of one of a .gguf file: blocks of 4 bits, with their scales, become 32
WIDENED = 2  # and of one in 16 bits
ALONE = "HF_DEACTIVATE_ASYNC_LOAD"  # lets transformers read in the thread that asked for it
SMALL = 2**16  # bytes of a tensor that stays in memory


def unpacking(gguf: Path, may_write: bool) -> contextlib.AbstractContextManager[None]:
    """Return where the weights of a .gguf file are made: on disk if they would take much memory.

    may_write: whether anything may be kept in the cache's folder.
    """
    return place_for(UNPACKED * gguf.stat().st_size, may_write, unpacked_on_disk)


def widening(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return where the float32 weights of a checkpoint in 16 bits are made; see `unpacking`."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return place_for(WIDENED * size, is_enabled(), widened_on_disk)


def place_for(
    size: int, may_write: bool, on_disk: Callable[[DiskArrays], contextlib.AbstractContextManager[None]]
) -> contextlib.AbstractContextManager[None]:
    """Return `on_disk` of a new file for bytes that would fill much of the memory, if the disk has room."""
    memory = machine_memory()
    if may_write and memory is not None and size > memory // SHARE:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            if size <= shutil.disk_usage(folder).free:
                return on_disk(DiskArrays(folder))
        except (OSError, RuntimeError) as error:  # nobody may write there, or there is no home folder
            logger.info("weights of %s are made in memory: %s", format_gigabytes(size), error)
    return contextlib.nullcontext()


class DiskArrays:
    """Copies of arrays, each a part of one file; small ones, and those that it has no room for, in memory.

    folder: of the file.
    """

    def __init__(self, folder: Path) -> None:
        # Without a buffer, which would keep what a full disk did not take. Maps of the file outlive it.
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".unpacked-", buffering=0)  # noqa: SIM115
        self._end = 0

    def copy(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a copy that may be written to, which changes no file."""
        plain = np.ascontiguousarray(array).view(np.ndarray)
        if plain.nbytes > SMALL:
            try:
                return self.write(plain)
            except OSError as error:  # of a full disk
                logger.info("a tensor is made in memory: %s", error)
        return plain.copy()

    def write(self, plain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the part of the file that is written with an array. Raises OSError if the disk is full."""
        self._file.seek(self._end)
        left = memoryview(plain).cast("B")
        while left:
            left = left[self._file.write(left) :]
        mapped = mmap.mmap(self._file.fileno(), plain.nbytes, access=mmap.ACCESS_COPY, offset=self._end)
        self._end += -(-plain.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return np.frombuffer(mapped, plain.dtype).reshape(plain.shape)


@contextlib.contextmanager
def unpacked_on_disk(arrays: DiskArrays) -> Iterator[None]:
    """Let the copies that transformers keeps of a .gguf file's tensors be such arrays."""
    import gguf

    plain = gguf.dequantize

    class Unpacked(np.ndarray[Any, Any]):
        """An array that numpy.copy, by which transformers keeps it, copies to disk."""

        def __array_function__(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            if func is np.copy and not kwargs and len(args) == 1:
                return arrays.copy(args[0])
            return super().__array_function__(func, types, args, kwargs)

    def dequantize(*given: Any, **options: Any) -> Any:
        return plain(*given, **options).view(Unpacked)

    gguf.dequantize = dequantize
    try:
        yield
    finally:
        gguf.dequantize = plain


@contextlib.contextmanager
def widened_on_disk(arrays: DiskArrays) -> Iterator[None]:
    """Let what transformers makes float32 of 16 bits be such arrays."""
    before = os.environ.get(ALONE)

    class Widen(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            widened = func is Tensor.to and made.dtype == torch.float32 and args[0].itemsize == 2
            if not widened or made.device.type != "cpu":
                return made
            return torch.from_numpy(arrays.copy(made.numpy()))

    os.environ[ALONE] = "1"
    try:
        with Widen():
            yield
    finally:
        if before is None:
            del os.environ[ALONE]
        else:
            os.environ[ALONE] = before
