"""How transformers reads a .gguf file here: its header once, and its weights as plain floats.

By itself it reads the header for the config, for the weights and for the tokenizer, a string at a time, and
makes the table of all tensor names once for each module of the model. That is most of the time that a
conversion takes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import transformers

_lock = threading.Lock()
_inside = 0  # how many blocks are entered
_undo = contextlib.ExitStack()


@contextlib.contextmanager
def gguf_read_once() -> Iterator[None]:
    """Keep what the package gguf has read of a file until the block ends, in all threads.

    What is kept may take hundreds of megabytes where the vocabulary is large: do no more than load inside.
    """
    global _inside
    try:
        import gguf
    except ImportError:  # transformers tells of it
        yield
        return
    with _lock:
        if not _inside:
            keep_results(gguf)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _undo.close()


def keep_results(gguf: Any) -> None:
    """Replace what transformers imports from gguf inside its functions, until `_undo` is closed."""
    for name, keep in (("GGUFReader", of_unchanged_file), ("get_tensor_name_map", functools.cache)):
        plain = getattr(gguf, name)
        _undo.callback(setattr, gguf, name, plain)
        setattr(gguf, name, keep(plain))


def of_unchanged_file(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return `read(path, ...)` that reads a file again only if it has changed."""

    @functools.cache
    def once(path: str | os.PathLike[str], _stamp: tuple[int, ...], *given: Any, **options: Any) -> Any:
        return read(path, *given, **options)

    def reader(path: str | os.PathLike[str], *given: Any, **options: Any) -> Any:
        stat = os.stat(path)
        return once(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns), *given, **options)

    return reader


def dequantize_options() -> dict[str, Any]:
    """Return the options that unpack GGUF weights to plain floats.

    If certain kernels are installed, transformers keeps the weights packed, with an attention that takes no
    masks.
    """
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def forget_quantization(model: transformers.PreTrainedModel) -> None:
    """Remove the quantization marks from a model whose GGUF weights are now plain floats.

    save_pretrained refuses a model with these marks.
    """
    marks = ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method"))
    for holder, name in marks:
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False
