"""Work on tensors of fixed shapes that is recorded once and then replayed without Python: CUDA graphs.

A step of a small target is hundreds of small launches, and launching them takes longer than running them.
What is recorded must not wait for the device, and depends on its tensors and on what it is told is static
alone. Its results live in fixed memory that the next replay overwrites: whoever keeps them copies them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, auto
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.core.checks import one_line

logger = logging.getLogger(__name__)

VIEW = 256  # slots of a cache come into view by so many at a time, so that few shapes occur
MOST = 32  # recordings of one piece of work: those of a text of 8,192 tokens
SHAPES = 8  # shapes of results of one piece of work, each in memory of its own


Work = Callable[..., Any]
# Records work, which it may try before if that is repeatable, and runs nothing for good: what replays it, and
# the results that every replay fills anew. Raises NothingRecorded for work that does nothing on the device,
# torch.OutOfMemoryError, or RuntimeError for work that cannot be recorded.
Recorder = Callable[[Callable[[], Any], bool], tuple[Callable[[], None], Any]]


class NothingRecorded(RuntimeError):
    """A recording holds no operation, so that a replay would do nothing."""


class Stepper(Protocol):
    """How the parts of a step are run.

    view: a cache's view is a multiple of it, and writes go by index; 0: as narrow as can be. records: whether
    work of a new shape costs a recording, so that a few shapes that recur are better than the smallest ones.
    """

    @property
    def view(self) -> int: ...

    @property
    def records(self) -> bool: ...

    def of(self, work: Work, repeatable: bool = True) -> Work:
        """A stand-in for work(static, *tensors), called as stand_in(state, static, *tensors).

        static: whatever else than tensors the work depends on, hashable. state: what must be the same object
        for old recordings to be good, such as a cache's buffers. Tensors may be None. repeatable: whether a
        second run in a row changes nothing, so that it may be tried before it is recorded. The stand-in of a
        method does not keep the method's object alive, which usually holds the stand-in.
        """


class Eager:
    """Runs everything as it comes."""

    view, records = 0, False

    def of(self, work: Work, repeatable: bool = True) -> Work:
        work = loose(work)
        return lambda _state, static, *tensors: work(static, *tensors)


EAGER = Eager()


class Graphs:
    """Records what comes a second time in the same shapes and replays it from then on.

    Each piece of work keeps the MOST recordings that were used last. All recordings are dropped where memory
    runs out, and recording goes on. If one fails for another reason, everything runs as it comes from then
    on, with a warning: some models wait for the device within a forward.
    """

    view = VIEW

    def __init__(self, record: Recorder) -> None:
        self.record: Recorder | None = record
        # By id: the tensors that recordings fill. Other recordings read them in place, without a copy.
        self.results: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._pieces: weakref.WeakSet[Replayed] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def records(self) -> bool:
        return self.record is not None

    def of(self, work: Work, repeatable: bool = True) -> Work:
        piece = Replayed(self, loose(work), repeatable)
        with self._lock:
            self._pieces.add(piece)
        return piece

    def drop(self) -> None:
        """Drop all recordings and free their memory."""
        with self._lock:
            for piece in self._pieces:
                piece.known.clear()
                piece.memory.clear()

    def give_up(self, error: RuntimeError) -> None:
        """Run everything as it comes from now on."""
        if self.record is not None:
            logger.warning(
                "no CUDA graphs for this model (%s): steps run launch by launch; that is slower, the text is "
                "the same",
                one_line(error, 200),
            )
        self.record = None
        self.drop()


@dataclass
class Recording:
    inputs: list[Tensor | None]
    replay: Callable[[], None]
    result: Any


class Mark(Enum):
    """What is known of work that has no recording."""

    NEW = auto()
    ONCE = auto()  # it came once
    EAGER = auto()  # there is nothing to record, or no memory for it


class Replayed:
    """One piece of work; see Stepper.of.

    known: recordings by static and shapes, the one used last at the end. memory: result tensors by shapes.
    """

    def __init__(self, graphs: Graphs, work: Work, repeatable: bool = True) -> None:
        self.graphs, self.work, self.repeatable = graphs, work, repeatable
        self.state: object = None
        self.known: dict[Hashable, Recording | Mark] = {}
        self.memory: dict[Hashable, list[Tensor]] = {}

    def __call__(self, state: object, static: Hashable, *tensors: Tensor | None) -> Any:
        if self.graphs.record is None:
            return self.work(static, *tensors)
        if state is not self.state:
            self.known.clear()
            self.state = state
        key = (static, *(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors))
        known = self.known.pop(key, Mark.NEW)
        if known is Mark.NEW:
            known = Mark.ONCE
        elif known is Mark.ONCE:
            known = self._recorded(self.graphs.record, static, tensors)
        self.known[key] = known
        if len(self.known) > MOST:
            self.known.pop(next(iter(self.known), None), None)
        if isinstance(known, Mark):
            return self.work(static, *tensors)
        for mine, given in zip(known.inputs, tensors, strict=True):
            if mine is not None and mine is not given:
                mine.copy_(given)
        known.replay()
        return known.result

    def _recorded(
        self, record: Recorder, static: Hashable, tensors: tuple[Tensor | None, ...]
    ) -> Recording | Mark:
        try:
            inputs = [self._input(tensor) for tensor in tensors]
            recording = Recording(
                inputs, *record(lambda: self._in_place(self.work(static, *inputs)), self.repeatable)
            )
        except NothingRecorded:
            return Mark.EAGER
        except torch.OutOfMemoryError:
            logger.warning("out of memory for a CUDA graph: all are dropped, and this step runs without")
            self.graphs.drop()
            return Mark.EAGER
        except RuntimeError as error:
            self.graphs.give_up(error)
            return Mark.EAGER
        made = leaves(recording.result)
        self.graphs.results.update({id(tensor): tensor for tensor in made})
        self.memory[shapes_of(made)] = made
        if len(self.memory) > SHAPES:
            self.memory.pop(next(iter(self.memory), None), None)
        return recording

    def _input(self, tensor: Tensor | None) -> Tensor | None:
        """Choose where a recording reads an input: in another recording's result, or in a copy."""
        shared = tensor is None or self.graphs.results.get(id(tensor)) is tensor
        return tensor if shared else tensor.clone()

    def _in_place(self, made: Any) -> Any:
        """Put results into the memory of an earlier recording's results of the same shapes.

        Recordings for views of many widths then share one set of results, and whatever reads these always
        finds them in the same place.
        """
        new = leaves(made)
        old = self.memory.get(shapes_of(new), new)
        for mine, given in zip(old, new, strict=True):
            if mine is not given:
                mine.copy_(given)
        return with_leaves(made, iter(old))


def loose(work: Work) -> Work:
    """Wrap a method so that it does not keep its object alive; return anything else as it is."""
    if not isinstance(work, MethodType):
        return work
    method = weakref.WeakMethod(work)
    return lambda *args: method()(*args)


def shapes_of(tensors: Iterable[Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def leaves(result: Any) -> list[Tensor]:
    """List the tensors in a result, which may nest tuples and dataclasses."""
    if isinstance(result, Tensor):
        return [result]
    if is_dataclass(result):
        result = tuple(getattr(result, field.name) for field in fields(result))
    return [leaf for part in result for leaf in leaves(part)] if isinstance(result, tuple) else []


def with_leaves(result: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the result with its tensors, in the order of `leaves`, replaced by others."""
    if isinstance(result, Tensor):
        return next(tensors)
    if isinstance(result, tuple):
        return tuple(with_leaves(part, tensors) for part in result)
    if is_dataclass(result):
        parts = {field.name: with_leaves(getattr(result, field.name), tensors) for field in fields(result)}
        return replace(result, **parts)
    return result
