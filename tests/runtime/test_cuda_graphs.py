"""How CUDA records, on a stand-in for torch.cuda that keeps its rules and notes what is done to it.

No device is here: what the stand-in says of streams, debug modes and captures is what torch's source does,
its bad manners after a failed capture included.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.op_recorder import as_on_an_accelerator
from support.tiny_models import prompts_of, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.runtime.cuda_graphs import cuda_recorder
from eagle_fsd.runtime.step_recorder import EAGER, VIEW, Graphs, NothingRecorded
from eagle_fsd.target.model import TargetModel

DEVICE = torch.device("cuda", 1)


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.waited = device, []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Generator:
    """torch's default one: in a capture until that ends in order."""

    def __init__(self, capturing: bool = False) -> None:
        self.capturing = capturing

    def clone_state(self) -> Generator:
        return Generator(self.capturing)

    def graphsafe_set_state(self, state: Generator) -> None:
        self.capturing = state.capturing


class Graph:
    """One graph of torch's. What is known of its capture outlives it."""

    def __init__(self) -> None:
        self.capture = SimpleNamespace(launches=[], broken=False, replays=0)

    def replay(self) -> None:
        self.capture.replays += 1


class Cuda:
    """torch.cuda as far as a recorder needs it. Work calls `launch` and, where it waits, `wait`."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.default_generators = [Generator(), Generator()]
        self.mode, self.modes = 0, []
        self.capture: SimpleNamespace | None = None
        self.captures: list[SimpleNamespace] = []
        self.allocating: set[object] = set()
        self.pools: dict[object, list[weakref.ref[Graph]]] = {}  # the graphs of each one with tensors in use
        self.memory = SimpleNamespace(_cuda_endAllocateToPool=self.end_allocating)
        self.lost: Exception | None = None  # says that memory which a capture needs is not there

    # What torch.cuda offers.

    def graph_pool_handle(self) -> object:
        return object()

    Stream = Stream

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        self.modes.append(self.mode)

    CUDAGraph = Graph

    def graph(self, graph: Graph, **options: Any) -> Any:
        known = self.pools.get(options["pool"])
        if known and not any(one() for one in known):
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        graph.capture.itself = weakref.ref(graph)
        return self.capturing(graph.capture, options)

    @contextlib.contextmanager
    def capturing(self, graph: SimpleNamespace, options: dict[str, Any]) -> Iterator[None]:
        generator = self.default_generators[DEVICE.index]
        graph.options = options
        self.captures.append(graph)
        self.capture, self.current, before = graph, options["stream"], self.current
        self.allocating.add(options["pool"])
        generator.capturing = True
        try:
            yield
        finally:
            self.capture = None
            if graph.broken:  # as capture_end does: it raises first, and what it would tidy up stays as it is
                raise RuntimeError("operation failed due to a previous error during capture")
            self.allocating.discard(options["pool"])
            generator.capturing, self.current = False, before
            if not graph.launches:
                warnings.warn(
                    "The CUDA Graph is empty. This usually means that the graph was ...", stacklevel=1
                )

    def end_allocating(self, index: int, pool: object) -> None:
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.discard(pool)

    # What work does.

    def launch(self) -> None:
        if self.capture:
            if self.lost:
                raise type(self.lost)(*self.lost.args)  # itself would keep the frames that it passes
            self.pools.setdefault(self.capture.options["pool"], []).append(self.capture.itself)
            self.capture.launches.append(self.current)

    def wait(self) -> None:
        if self.capture:
            self.capture.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally ...)", stacklevel=1)


def both(cuda: Cuda) -> None:
    cuda.launch()
    cuda.wait()


def test_work_is_tried_and_captured_beside_the_current_stream() -> None:
    cuda, ran = Cuda(), []

    def work() -> int:
        cuda.launch()
        ran.append((cuda.current, cuda.mode, cuda.capture))
        return 5

    record = cuda_recorder(DEVICE, cuda)
    replay, result = record(work, True)
    (graph,) = cuda.captures
    own = graph.options["stream"]
    assert result == 5
    replay()
    assert graph.replays == 1
    assert ran == [(own, 1, None), (own, 0, graph)], "tried where waiting shows, then captured"
    assert own.device == DEVICE and own.waited == [cuda.default] and cuda.default.waited == [own]
    assert graph.options["capture_error_mode"] == "thread_local"
    assert cuda.current is cuda.default and cuda.mode == 0
    kept = record(work, False)
    assert kept and len(ran) == 3 and cuda.captures[1].options["pool"] is graph.options["pool"]


def test_a_replay_waits_for_the_last_one_where_that_is_on_another_stream() -> None:
    """Threads may use one model on streams of their own, and what graphs keep between is in one pool."""
    cuda = Cuda()
    record = cuda_recorder(DEVICE, cuda)
    first, second = (record(cuda.launch, True)[0] for _ in range(2))
    mine, other = Stream(), Stream()
    for stream, replay in ((mine, first), (mine, second), (other, first), (other, first), (mine, second)):
        with cuda.stream(stream):
            replay()
    assert other.waited == [mine] and mine.waited == [other]


def test_two_recorders_have_two_streams() -> None:
    """The one that torch shares in a process lies on the device that captured first."""
    cuda = Cuda()
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        cuda_recorder(device, cuda)(cuda.launch, True)
    first, second = (graph.options for graph in cuda.captures)
    assert (first["stream"].device.index, second["stream"].device.index) == (0, 1)
    assert first["pool"] is not second["pool"]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_work_that_waits_is_found_out_before_a_capture(before: int) -> None:
    cuda = Cuda()
    cuda.mode = before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="waits for the device"):
            cuda_recorder(DEVICE, cuda)(lambda: both(cuda), True)
    assert not cuda.captures and cuda.mode == before and cuda.modes[0] == 1
    assert cuda.current is cuda.default and cuda.default.waited, (
        "what was tried is done before what comes next"
    )


def test_another_threads_waiting_is_its_own() -> None:
    """It neither fails for it nor is it held against this thread's work."""
    cuda, shown = Cuda(), []

    def work() -> None:
        cuda.launch()
        if not cuda.capture:
            other = threading.Thread(target=cuda.wait)
            other.start()
            other.join()

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        cuda_recorder(DEVICE, cuda)(work, True)
    assert len(cuda.captures) == 1 and len(shown) == 1


def test_a_capture_that_breaks_leaves_nothing_behind() -> None:
    """Work that is not tried before: the default generator, the allocator and the stream are as before."""
    cuda = Cuda()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        cuda_recorder(DEVICE, cuda)(lambda: both(cuda), False)
    assert not any(generator.capturing for generator in cuda.default_generators)
    assert not cuda.allocating and cuda.current is cuda.default


def test_an_empty_capture_is_refused_and_says_nothing() -> None:
    cuda = Cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NothingRecorded):
            cuda_recorder(DEVICE, cuda)(lambda: None, True)


# --- through the engine ---


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch, VIEW)


def launching(cuda: Cuda, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def launches(*args: Any) -> Tensor:
        cuda.launch()
        return forward(*args)

    return launches


TREE = TreeConfig(8, 3, 3)


@pytest.mark.usefixtures("accelerator")
def test_a_model_that_waits_gives_the_same_text_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, forward = Cuda(), TargetModel.features

    def waits(self: TargetModel, *args: Any) -> Tensor:
        both(cuda)
        return forward(self, *args)

    wanted = EagleFSD(TargetModel(tiny_model()), tiny_head()).generate(
        prompts_of([5]), max_new_tokens=24, tree=TREE
    )
    monkeypatch.setattr(TargetModel, "features", waits)
    model = EagleFSD(TargetModel(tiny_model(), Graphs(cuda_recorder(DEVICE, cuda))), tiny_head())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = model.generate(prompts_of([5]), max_new_tokens=24, tree=TREE)
            assert found.new_tokens == wanted.new_tokens
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("no CUDA graphs for this model (it waits for the device")
    assert not any(graph.broken for graph in cuda.captures)
    assert not model.target.stepper.records
    assert not any(generator.capturing for generator in cuda.default_generators)


def test_the_stand_in_notices_an_error_mode() -> None:
    cuda = Cuda()
    cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        cuda.wait()
    assert EAGER.wrap(lambda static: static)(3) == 3


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")]
)
def test_out_of_memory_drops_recordings_and_recording_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda()
    graphs = Graphs(cuda_recorder(DEVICE, cuda))

    def work(static: int, tensor: Tensor) -> Tensor:
        cuda.launch()
        return tensor + static

    piece, other = graphs.wrap(work), graphs.wrap(work)
    for _ in range(2):
        piece(1, torch.ones(3)), other(1, torch.ones(3))
    assert len(cuda.captures) == 2
    cuda.lost = error
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(piece(2, torch.ones(3)), torch.full((3,), 3.0)), "run as it comes"
    assert len(cuda.captures) == 3, "what did not fit is not tried again at every step"
    assert "out of memory for a CUDA graph" in caplog.text and len(caplog.records) == 1
    assert (
        not other.known
        and not other.memory
        and not any(generator.capturing for generator in cuda.default_generators)
    )
    cuda.lost = None
    for _ in range(3):
        piece(1, torch.ones(3))
    assert len(cuda.captures) == 4 and graphs.records


def test_work_that_does_nothing_keeps_the_rest_recorded() -> None:
    cuda = Cuda()
    graphs = Graphs(cuda_recorder(DEVICE, cuda))
    nothing, something = graphs.wrap(lambda static: static), graphs.wrap(lambda static: cuda.launch())
    for _ in range(4):
        assert nothing(7) == 7
        something(7)
    assert [bool(graph.launches) for graph in cuda.captures] == [False, True] and graphs.records
