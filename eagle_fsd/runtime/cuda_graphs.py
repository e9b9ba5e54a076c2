"""The recorder of CUDA graphs. Work that cannot be captured does no harm: it is detected before a capture, or
the failed capture is cleaned up.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from eagle_fsd.runtime.step_recorder import EAGER, Graphs, NothingRecorded, Recorder, Stepper

_one_at_a_time = threading.Lock()  # a process has one set of warning filters


def usual_stepper(device: torch.device) -> Stepper:
    """Return what runs the parts of a step on a device: CUDA graphs on a GPU."""
    return Graphs(cuda_recorder(device)) if device.type == "cuda" else EAGER


def cuda_recorder(device: torch.device, cuda: Any = torch.cuda) -> Recorder:
    """Return a recorder of CUDA graphs with a stream of its own.

    Graphs that live together share one memory pool, because they are replayed one after the other: a replay
    on another stream than the last one waits for it. cuda: torch.cuda, or a stand-in for it.
    """
    # torch's own capture stream is shared by the process and belongs to the device that captured first.
    stream, pool = cuda.Stream(device), None
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()
    last, turn = None, threading.Lock()  # the stream of the last replay

    def replay(graph: Any) -> None:
        nonlocal last
        current = cuda.current_stream(device)
        with turn:
            if last is not None and current != last:
                current.wait_stream(last)
            last = current
            graph.replay()

    def record(work: Callable[[], Any], repeatable: bool) -> tuple[Callable[[], None], Any]:
        nonlocal pool
        with _one_at_a_time, cuda.device(device), on_stream(cuda, stream, device):
            if repeatable:  # a first run lets libraries set themselves up before the capture begins
                with refuse_waiting(cuda):
                    work()
            graph = cuda.CUDAGraph()
            if not graphs:  # torch refuses a pool whose graphs are gone while any of its memory is in use
                pool = cuda.graph_pool_handle()
            # thread_local: other threads may allocate memory meanwhile without breaking the capture.
            capture = cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with collect_warnings() as given, clean_after_failure(cuda, device, pool), capture:
                result = work()
            graphs.add(graph)
        if any("Graph is empty" in text for text in given):
            raise NothingRecorded("the CUDA graph is empty")
        return partial(replay, graph), result

    return record


@contextlib.contextmanager
def on_stream(cuda: Any, stream: Any, device: torch.device) -> Iterator[None]:
    """Run the block on a stream, after all queued work of the current stream and before its later work.

    The current stream is restored even if a capture fails, which torch.cuda.graph alone does not do.
    """
    current = cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@contextlib.contextmanager
def refuse_waiting(cuda: Any) -> Iterator[None]:
    """Raise RuntimeError after the block if this thread waited for the device in it.

    Waiting breaks a capture and leaves torch's allocator and default generator in a bad state, so it must be
    detected before. The debug mode applies to the whole process: "error" would fail other threads, which may
    wait.
    """
    before = cuda.get_sync_debug_mode()
    with collect_warnings() as given:
        cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            cuda.set_sync_debug_mode(before)
    if any("synchronizing CUDA operation" in text for text in given):
        raise RuntimeError("it waits for the device within a step")


@contextlib.contextmanager
def clean_after_failure(cuda: Any, device: torch.device, pool: Any) -> Iterator[None]:
    """Restore the default generator and the allocator after a capture that torch could not end."""
    index = cuda.current_device() if device.index is None else device.index
    generator = cuda.default_generators[index]
    state = generator.clone_state()
    try:
        yield
    except torch.OutOfMemoryError:  # torch has ended this capture properly
        raise
    except RuntimeError:
        generator.graphsafe_set_state(state)
        with contextlib.suppress(AttributeError, RuntimeError):  # raised if there is nothing to end
            cuda.memory._cuda_endAllocateToPool(index, pool)
        raise


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings of this thread instead of showing them; those of other threads are shown."""
    mine, given = threading.get_ident(), []
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def note(message: Warning | str, *details: Any, **more: Any) -> None:
            if threading.get_ident() == mine:
                given.append(str(message))
            else:
                usual(message, *details, **more)

        warnings.simplefilter("always")
        warnings.showwarning = note
        yield given
