"""Record work on tensors of fixed shapes once, then replay it without Python: CUDA graphs.

A step of a small target is hundreds of small launches, and launching them takes longer than running them.
Recorded work must not wait for the device, and must depend only on its arguments and its cache. Its results
are in fixed memory that the next replay overwrites: copy what you keep.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, auto
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.devices import ran_out_of_memory

logger = logging.getLogger(__name__)

VIEW = 256  # a cache's view grows by this many slots at a time, so that few shapes occur
MOST = 32  # recordings of one piece of work: enough for a text of 8,192 tokens
SHAPES = 8  # result shapes of one piece of work, each with memory of its own


Work = Callable[..., Any]
# Takes work, and whether it is repeatable, so that it may be tried first. Returns a function that replays the
# work, and the results, which every replay fills anew; recording itself has no lasting effect. Raises
# NothingRecorded for work that does nothing on the device, torch.OutOfMemoryError, or RuntimeError for work
# that cannot be recorded.
Recorder = Callable[[Callable[[], Any], bool], tuple[Callable[[], None], Any]]


class NothingRecorded(RuntimeError):
    """A recording holds no operation, so that a replay would do nothing."""


class Recordable(Protocol):
    """Memory that recorded work reads and writes: a KVCache.

    buffers: becomes another object when the memory moves, which ends all recordings. view: how much of the
    memory the work sees; a recording works for one view only.
    """

    buffers: object
    view: int


class Stepper(Protocol):
    """Runs the parts of a step, with recordings or without.

    view: a cache's view is a multiple of it, and writes go by index; 0 keeps the view as narrow as possible.
    records: whether work of a new shape costs a recording, so that a few recurring shapes are better than the
    smallest ones.
    """

    @property
    def view(self) -> int: ...

    @property
    def records(self) -> bool: ...

    def running(self, rows: int) -> AbstractContextManager[None]:
        """Return the context that a step on a batch of this size runs in."""

    def wrap(
        self, work: Work, cache: Recordable | None = None, repeatable: bool = True, by_view: bool = True
    ) -> Work:
        """Return a stand-in for `work` that is called as `work` is.

        Arguments are tensors, None, tuples and dataclasses of them, and hashable values, on which the work
        may depend as well. cache: the memory that the work reads and writes beside its arguments. repeatable:
        whether a second run in a row changes nothing, so that the work may be tried before it is recorded;
        other work returns no tensors. by_view: whether the work depends on how much of the cache it sees. The
        stand-in for a method does not keep the method's object alive, since that object usually holds the
        stand-in.
        """


class Eager:
    """A stepper that records nothing and runs all work directly."""

    view, records = 0, False

    def running(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext()

    def wrap(
        self, work: Work, cache: Recordable | None = None, repeatable: bool = True, by_view: bool = True
    ) -> Work:
        return hold_weakly(work)


EAGER = Eager()


class Graphs:
    """A stepper that records work when it comes again in the same shapes, and replays it from then on.

    Each piece of work keeps the MOST recordings that were used last. If memory runs out, all recordings are
    dropped, and recording goes on. If a recording fails for another reason, all work runs directly from then
    on, with a warning: some models wait for the device within a forward.
    """

    view = VIEW

    def __init__(self, record: Recorder) -> None:
        self.record: Recorder | None = record
        # By id: the tensors that recordings fill. Other recordings read them in place, without a copy.
        self.results: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._pieces: weakref.WeakSet[RecordedWork] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def records(self) -> bool:
        return self.record is not None

    def running(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext()

    def wrap(
        self, work: Work, cache: Recordable | None = None, repeatable: bool = True, by_view: bool = True
    ) -> Work:
        piece = RecordedWork(self, hold_weakly(work), cache, repeatable, by_view)
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
        """Run all work directly from now on."""
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
    inputs: list[Tensor]
    replay: Callable[[], None]
    result: Any


class Mark(Enum):
    """The state of work that has no recording."""

    NEW = auto()
    ONCE = auto()  # it came once; the next time it is recorded
    EAGER = auto()  # there is nothing to record, or no memory for it


class RecordedWork:
    """One piece of work with its recordings; see Stepper.wrap.

    known: recordings by the arguments' values and shapes and the cache's view, the most recently used last.
    memory: result tensors by their shapes.
    """

    def __init__(
        self, graphs: Graphs, work: Work, cache: Recordable | None, repeatable: bool, by_view: bool
    ) -> None:
        self.graphs, self.work, self.cache = graphs, work, cache
        self.repeatable, self.by_view = repeatable, by_view
        self.buffers: object = None
        self.known: dict[Hashable, Recording | Mark] = {}
        self.memory: dict[Hashable, list[Tensor]] = {}

    def __call__(self, *arguments: Any) -> Any:
        if self.graphs.record is None:
            return self.work(*arguments)
        if self.cache is not None and self.cache.buffers is not self.buffers:
            self.known.clear()
            self.buffers = self.cache.buffers
        view = self.cache.view if self.cache is not None and self.by_view else None
        key = (view, recording_key(arguments))
        known = self.known.pop(key, Mark.NEW)
        if known is Mark.NEW:
            known = Mark.ONCE
        elif known is Mark.ONCE:
            known = self._record(self.graphs.record, arguments)
        self.known[key] = known
        if len(self.known) > MOST:
            self.known.pop(next(iter(self.known), None), None)
        if isinstance(known, Mark):
            return self.work(*arguments)
        for mine, given in zip(known.inputs, leaves(arguments), strict=True):
            if mine is not given:
                mine.copy_(given)
        known.replay()
        return known.result

    def _record(self, record: Recorder, arguments: tuple[Any, ...]) -> Recording | Mark:
        try:
            inputs = [self._input(tensor) for tensor in leaves(arguments)]
            fixed, chosen = with_leaves(arguments, iter(inputs)), list[Tensor]()
            run = lambda: self._copy_to_results(self.work(*fixed), chosen)  # noqa: E731
            recording = Recording(inputs, *record(run, self.repeatable))
        except NothingRecorded:
            return Mark.EAGER
        except RuntimeError as error:
            if ran_out_of_memory(error):
                logger.warning("out of memory for a CUDA graph: all are dropped, and this step runs without")
                self.graphs.drop()
            else:
                self.graphs.give_up(error)
            return Mark.EAGER
        made = leaves(recording.result)
        self.graphs.results.update({id(tensor): tensor for tensor in made})
        self.memory.pop(list_shapes(made), None)
        self.memory[list_shapes(made)] = made  # the last one recorded
        if len(self.memory) > SHAPES:
            self.memory.pop(next(iter(self.memory), None), None)
        return recording

    def _input(self, tensor: Tensor) -> Tensor:
        """Return the tensor from which a recording reads an input: another recording's result, or a copy."""
        return tensor if self.graphs.results.get(id(tensor)) is tensor else tensor.clone()

    def _copy_to_results(self, made: Any, chosen: list[Tensor]) -> Any:
        """Copy results into memory of an earlier recording with results of these shapes, or into new memory.

        So work that reads the results of many recordings finds them in one place. chosen: that memory; it is
        empty when the work is tried, before the capture. What a capture allocates is shared by all, and the
        replay of an earlier recording may overwrite it at any time.
        """
        new = leaves(made)
        if not chosen:
            chosen += self.memory.get(list_shapes(new)) or [torch.empty_like(one) for one in new]
        for mine, given in zip(chosen, new, strict=True):
            mine.copy_(given)
        return with_leaves(made, iter(chosen))


def hold_weakly(work: Work) -> Work:
    """Wrap a method so that it does not keep its object alive; return anything else as it is."""
    if not isinstance(work, MethodType):
        return work
    method = weakref.WeakMethod(work)
    return lambda *args: method()(*args)


def list_shapes(tensors: Iterable[Tensor]) -> Hashable:
    """Return the shape and dtype of each tensor, as a key."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def leaves(value: Any) -> list[Tensor]:
    """List the tensors in arguments or results, which may nest tuples and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in split_parts(value) or () for leaf in leaves(part)]


def with_leaves(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value with its tensors, in the order of `leaves`, replaced by others."""
    if isinstance(value, Tensor):
        return next(tensors)
    if not leaves(value):
        return value
    parts = tuple(with_leaves(part, tensors) for part in split_parts(value))
    if isinstance(value, tuple):
        return parts
    return replace(value, **{field.name: part for field, part in zip(fields(value), parts, strict=True)})


def copied(value: Any) -> Any:
    """Return results in memory of their own, which no replay overwrites."""
    return with_leaves(value, iter([tensor.clone() for tensor in leaves(value)]))


def moved(value: Any, device: torch.device) -> Any:
    """Return arguments or results on another device."""
    return with_leaves(value, iter([tensor.to(device) for tensor in leaves(value)]))


def recording_key(value: Any) -> Hashable:
    """Return the key of a recording: a tensor's shape and dtype, and anything else itself."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if not leaves(value):
        return value
    return type(value), *map(recording_key, split_parts(value))


def split_parts(value: Any) -> tuple[Any, ...] | None:
    """Return the parts of a tuple or a dataclass, None for anything else."""
    if isinstance(value, tuple):
        return value
    if is_dataclass(value):
        return tuple(getattr(value, field.name) for field in fields(value))
    return None
