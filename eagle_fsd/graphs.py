"""Work on tensors of fixed shapes that is recorded once and then replayed without Python: CUDA graphs.

A step of a small target is hundreds of small launches, and launching them takes longer than running them.
What is recorded must not wait for the device, and depends on its tensors and on what it is told is static
alone. Its results live in fixed memory that the next replay overwrites: whoever keeps them copies them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.messages import one_line

logger = logging.getLogger(__name__)

VIEW = 256  # slots of a cache come into view by so many at a time, so that few shapes occur


def may_ask(tensor: Tensor) -> bool:
    """Whether to choose a way by what a tensor holds: free on a CPU, elsewhere the host would wait."""
    return tensor.device.type == "cpu"


Work = Callable[..., Any]
# Records work, which it may try before if that is repeatable, and runs nothing for good: what replays it, and
# the results that every replay fills anew.
Recorder = Callable[[Callable[[], Any], bool], tuple[Callable[[], None], Any]]


class Stepper(Protocol):
    """How the parts of a step are run.

    view: a cache's view is a multiple of it, and writes go by index; 0: as narrow as can be.
    """

    @property
    def view(self) -> int: ...

    def of(self, work: Work, repeatable: bool = True) -> Work:
        """A stand-in for work(static, *tensors), called as stand_in(state, static, *tensors).

        static: whatever else than tensors the work depends on, hashable. state: what must be the same object
        for old recordings to be good, such as a cache's buffers. Tensors may be None. repeatable: whether a
        second run in a row changes nothing, so that it may be tried before it is recorded.
        """


class Eager:
    """Runs everything as it comes."""

    view = 0

    def of(self, work: Work, repeatable: bool = True) -> Work:
        return lambda _state, static, *tensors: work(static, *tensors)


EAGER = Eager()


@dataclass
class Recording:
    inputs: list[Tensor | None]
    replay: Callable[[], None]
    result: Any


class Graphs:
    """Records what comes a second time in the same shapes and replays it from then on.

    Once a recording fails everything runs as it comes, with a warning: some models wait for the device within
    a forward.
    """

    view = VIEW

    def __init__(self, record: Recorder) -> None:
        self.record: Recorder | None = record

    def of(self, work: Work, repeatable: bool = True) -> Work:
        return Replayed(self, work, repeatable)


@dataclass
class Replayed:
    """One piece of work; see Stepper.of."""

    graphs: Graphs
    work: Work
    repeatable: bool = True
    state: object = None
    known: dict[Hashable, Recording | None] = field(default_factory=dict)  # None: came once

    def __call__(self, state: object, static: Hashable, *tensors: Tensor | None) -> Any:
        if state is not self.state:
            self.known.clear()
            self.state = state
        key = (static, *(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors))
        if key not in self.known or self.graphs.record is None:
            self.known[key] = None
            return self.work(static, *tensors)
        recording = self.known[key]
        if recording is None:
            recording = self._recorded(self.graphs.record, static, tensors)
            if recording is None:
                return self.work(static, *tensors)
            self.known[key] = recording
        for mine, given in zip(recording.inputs, tensors, strict=True):
            if mine is not None:
                mine.copy_(given)
        recording.replay()
        return recording.result

    def _recorded(
        self, record: Recorder, static: Hashable, tensors: tuple[Tensor | None, ...]
    ) -> Recording | None:
        inputs = [None if tensor is None else tensor.clone() for tensor in tensors]
        try:
            return Recording(inputs, *record(lambda: self.work(static, *inputs), self.repeatable))
        except RuntimeError as error:
            self.graphs.record = None
            logger.warning(
                "no CUDA graphs for this model (%s): steps run launch by launch; that is slower, the text is "
                "the same",
                one_line(error, 200),
            )
            return None


def cuda_recorder(device: torch.device) -> Recorder:
    """Records CUDA graphs, all in one pool of memory: they are replayed one after the other."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], Any], repeatable: bool) -> tuple[Callable[[], None], Any]:
        with torch.cuda.device(device):
            if repeatable:  # libraries must have set themselves up before a capture begins
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    work()
                torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = work()
        return graph.replay, result

    return record
