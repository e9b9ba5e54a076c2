"""Let transformers unpack a large .gguf file on disk: in memory it would take the float32 weights whole.

transformers unpacks one tensor after the other and keeps a copy of each. Here the copy is a part of a file
that has no name and goes with the last tensor. It is mapped into memory, which the system takes back where it
is short.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.files.atomic import cache_folder
from eagle_fsd.files.provenance import machine_memory

logger = logging.getLogger(__name__)

SHARE = 4  # what part of a machine's memory the unpacked weights may take
UNPACKED = 8  # how many bytes come of one of a file: blocks of 4 bits, with their scales, become 32
SMALL = 2**16  # bytes of a tensor that stays in memory


def unpacking(gguf: Path, may_write: bool) -> contextlib.AbstractContextManager[None]:
    """Return what a .gguf file is unpacked in: on disk if it would take much memory, and there is room.

    may_write: whether anything may be kept in the cache's folder.
    """
    memory, size = machine_memory(), UNPACKED * gguf.stat().st_size
    if not may_write or memory is None or size <= memory // SHARE:
        return contextlib.nullcontext()
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        return (
            unpacked_on_disk(folder) if size <= shutil.disk_usage(folder).free else contextlib.nullcontext()
        )
    except OSError as error:
        logger.info("%s is unpacked in memory: %s", gguf.name, error)
        return contextlib.nullcontext()


class DiskArrays:
    """Copies of arrays, each a part of one file. folder: of the file."""

    def __init__(self, folder: Path) -> None:
        # Without a buffer, which would keep what a full disk did not take. Maps of the file outlive it.
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".unpacked-", buffering=0)  # noqa: SIM115
        self._end = 0

    def copy(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a copy that may be written to, which changes no file. Raises OSError if the disk is full."""
        plain = np.ascontiguousarray(array).view(np.ndarray)
        self._file.seek(self._end)
        left = memoryview(plain).cast("B")
        while left:
            left = left[self._file.write(left) :]
        mapped = mmap.mmap(self._file.fileno(), plain.nbytes, access=mmap.ACCESS_COPY, offset=self._end)
        self._end += -(-plain.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return np.frombuffer(mapped, plain.dtype).reshape(plain.shape)


@contextlib.contextmanager
def unpacked_on_disk(folder: Path) -> Iterator[None]:
    """Let the copies that transformers keeps of unpacked tensors lie in a file of this folder."""
    import gguf

    arrays, plain = DiskArrays(folder), gguf.dequantize

    class Unpacked(np.ndarray[Any, Any]):
        """An array that numpy.copy, by which transformers keeps it, copies to disk."""

        def __array_function__(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            if func is np.copy and not kwargs and len(args) == 1 and args[0].nbytes > SMALL:
                try:
                    return arrays.copy(args[0])
                except OSError as error:  # of a full disk
                    logger.info("a tensor is unpacked in memory: %s", error)
            return super().__array_function__(func, types, args, kwargs)

    def dequantize(*given: Any, **options: Any) -> Any:
        return plain(*given, **options).view(Unpacked)

    gguf.dequantize = dequantize
    try:
        yield
    finally:
        gguf.dequantize = plain
