"""Converted graphs on disk, in the user's cache in `graphs/`: one folder each, named by its origin.

The name is a digest of the network's weights, its shape, the weight format and the releases that took part. A
folder appears whole or not at all. Compiled forms for this processor are beside the graph; OpenVINO checks
what they are of. Without a usable folder a graph is made again, which is no error for the user; it takes room
among temporary files for a moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import hidden_beside
from eagle_fsd.files.kept_folders import (
    KeptFolders,
    folder_size,
    format_gigabytes,
    is_enabled,
    mark_used,
    remove,
)
from eagle_fsd.runtime.openvino import library

if TYPE_CHECKING:  # a head start needs this module before torch is there
    from torch import Tensor

logger = logging.getLogger(__name__)

VERSION = 1  # of the traced code
MOST = 8 * 2**30  # bytes of all folders together; the least recently used go first
GRAPH = "graph.xml"
GRAPHS = KeptFolders("graphs", GRAPH)
_in_use: set[Path] = set()  # folders that this process has read or written


class NoRoom(OSError):
    """The disk of temporary files cannot take a graph."""


def find_or_make(
    name: str, tensors: Iterable[Tensor], parts: object, make: Callable[[], Any], kept: bool = True
) -> tuple[Any, Path | None]:
    """Return a graph, read from disk if it is kept there, and the folder for its compiled form.

    name: for people. tensors: the network's weights. parts: what else the graph depends on. make: makes it.
    kept: False makes it anew and leaves nothing on disk.
    """
    import torch

    if not kept or not is_enabled():
        return read_back(make()), None
    key = digest(tensors, [name, parts, VERSION, library.version(), torch.__version__])
    folder = GRAPHS.root() / f"{name}-{key}"
    found = read(folder)
    if found is not None:
        return found, folder
    made = make()
    try:
        keep(made, folder)
        return library.core().read_model(folder / GRAPH), folder
    except (OSError, RuntimeError) as error:
        logger.info("the graph %s is not kept: %s", folder.name, one_line(error, 200))
        return read_back(made), None


def read(folder: Path) -> Any:
    """Return the graph in a folder, now the one used last; None if there is none that can be read."""
    with contextlib.suppress(OSError, RuntimeError):
        if (folder / GRAPH).is_file():
            mark_used(folder)
            _in_use.add(folder)
            return library.core().read_model(folder / GRAPH)
    return None


def keep(graph: Any, folder: Path) -> None:
    """Save a graph in a folder that appears whole or not at all."""
    # The graphs of one model must not push each other out, at every start anew.
    others = [one for one in tuple(_in_use) if one.parent == folder.parent and one != folder]
    size = constant_bytes(graph) + sum(map(folder_size, others))
    if others and size > MOST:
        raise OSError(f"{format_gigabytes(size)} are more than the limit of {format_gigabytes(MOST)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    GRAPHS.remove_leftovers()
    partial = hidden_beside(folder)
    try:
        partial.mkdir()
        library.openvino().save_model(graph, partial / GRAPH, compress_to_fp16=False)
        try:
            partial.rename(folder)
        except OSError:
            if read(folder) is not None:  # another process has kept the same graph a moment ago
                return
            remove(folder)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _in_use.add(folder)
    GRAPHS.shrink(set(_in_use), MOST)


def log_sizes() -> None:
    """Log where the graphs that this process uses are kept, and how large they are once compiled."""
    if not logger.isEnabledFor(logging.INFO):  # all files are looked at for it
        return
    root = GRAPHS.root()
    if mine := [one for one in tuple(_in_use) if one.parent == root]:
        sizes = [sum(map(folder_size, some)) / 1e6 for some in (mine, GRAPHS.whole())]
        logger.info("compiled graphs are in %s: %.1f MB of this process, %.1f MB in all", root, *sizes)


def constant_bytes(graph: Any) -> int:
    """Return the bytes of a graph's weights."""
    nodes = graph.get_ordered_ops()
    return sum(node.get_byte_size() for node in nodes if node.get_type_name() == "Constant")


def read_back(graph: Any) -> Any:
    """Write a graph and read it again: only then are its constants folded, and more of it is fused.

    Raises NoRoom if the disk of temporary files is full.
    """
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        try:
            library.openvino().save_model(graph, Path(folder) / GRAPH, compress_to_fp16=False)
        except RuntimeError as error:  # OpenVINO's own, which does not say of what
            raise NoRoom(
                f"{tempfile.gettempdir()} cannot take the {format_gigabytes(constant_bytes(graph))} of a "
                f"graph ({one_line(error, 80)}): free some space, or name another folder in TMPDIR"
            ) from error
        weights = (Path(folder) / GRAPH).with_suffix(".bin").read_bytes()
        text = (Path(folder) / GRAPH).read_text(encoding="utf-8")
        tensor = library.openvino().Tensor(np.frombuffer(weights, dtype=np.uint8).copy())
        return library.core().read_model(text, tensor)


def digest(tensors: Iterable[Tensor], parts: object) -> str:
    """Return a digest of all values of the tensors and of the parts."""
    import torch

    def of_one(tensor: Tensor) -> bytes:
        found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))
        return found.digest()

    whole = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # hashing large values frees Python
        for one in pool.map(of_one, tensors):
            whole.update(one)
    return whole.hexdigest()[:24]
