"""Compile in threads what the last start compiled, while Python imports torch and transformers.

These imports take seconds of one core, and compiling the same graphs as last time takes more. `begin` does
the second during the first, a graph on each core. Which graphs these may be was noted in the user's cache, by
the programs' arguments. It is a guess, and does no harm when it is wrong: a graph's folder is named by a
digest of all that it depends on (see graph_store), and only who asks for that very folder gets the graph. No
torch is needed here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.files.atomic import read_records, write_atomically
from eagle_fsd.files.kept_folders import is_enabled
from eagle_fsd.files.provenance import cores
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.kept.graph_store import GRAPH, GRAPHS
from eagle_fsd.runtime.openvino.variants import read_first

MOST = 12  # graphs of a note


@dataclass(frozen=True)
class Compiling:
    """How one graph is compiled. folder: its name. shapes: of its inputs. The rest: see compile_graph."""

    folder: str
    shapes: tuple[str, ...]
    precision: str
    rounded: bool
    threads: int


class HeadStart:
    """One program's head start. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._note: Path | None = None  # where this program notes what it compiles; None: nowhere
        self._asked: dict[Compiling, None] = {}  # in order
        self._ahead: dict[Compiling, Future[Any]] = {}
        self._lock = threading.Lock()

    def begin(self, arguments: object) -> None:
        """Start to compile what was noted for these arguments. `end` must follow.

        arguments: whatever tells which models are loaded, and how; it must have a JSON form.
        """
        if not is_enabled() or not library.is_installed():
            return
        with contextlib.suppress(OSError, RuntimeError):  # there is no home folder
            name = hashlib.sha256(json.dumps(arguments, default=str).encode()).hexdigest()[:24]
            self._note = GRAPHS.root() / f"start-{name}.json"
            known = read_note(self._note)
            self._ahead = {one: Future() for one in known}
            waiting = iter(list(self._ahead.items()))
            for _ in range(min(len(known), cores() or 1)):
                # No daemons: the interpreter must not end while a graph is compiled.
                threading.Thread(target=self._work, args=(waiting,), name="head start").start()

    def take(self, one: Compiling) -> Any | None:
        """Return this graph if it is compiled or about to be. None: the caller has to compile it."""
        with self._lock:
            if self._note is not None:
                self._asked[one] = None
            found = self._ahead.pop(one, None)
            if found is None or found.cancel():  # it was not begun
                return None
        return found.result()

    def end(self, complete: bool = False) -> None:
        """Note what was asked for, for the next start, and drop what nobody took.

        complete: whether the program has done what it was started for. If it asked for nothing then, as where
        torch turned out to be faster, the next start has no head start. A program that ended before, as by a
        mistake in its flags, may have asked for too little: it adds to the note and takes nothing away.
        """
        with self._lock:
            asked, note = [one for one in self._asked if is_usual(one)], self._note
            for one in self._ahead.values():
                one.cancel()
            self._ahead, self._asked, self._note = {}, {}, None
        if note is not None and len(asked) <= MOST:
            with contextlib.suppress(OSError):
                known = read_note(note)
                if not (complete or set(asked) > set(known)):
                    return
                if not asked:
                    note.unlink(missing_ok=True)
                elif asked != known:
                    write_atomically(note, json.dumps({"graphs": [asdict(one) for one in asked]}) + "\n")

    def _work(self, waiting: Iterator[tuple[Compiling, Future[Any]]]) -> None:
        """Compile what is waiting, beside other threads that do so, too."""
        while True:
            with self._lock:
                one, graph = next(waiting, (None, None))
            if one is None or graph is None:
                return
            if not graph.set_running_or_notify_cancel():
                continue
            try:
                graph.set_result(compile_kept(one))
            except Exception:  # noqa: BLE001  # whoever asks for it compiles it, and sees the error
                graph.set_result(None)


def compile_kept(one: Compiling) -> Any:
    """Compile a graph that is kept on disk. Raises RuntimeError if it is not there."""
    folder = GRAPHS.root() / one.folder
    model = library.core().read_model(folder / GRAPH)
    if shapes_of(model) != one.shapes:
        shapes = (library.openvino().PartialShape(shape) for shape in one.shapes)
        model.reshape(dict(enumerate(shapes)))
    return library.compile_graph(model, one.precision, one.rounded, one.threads, folder)


def is_usual(one: Compiling) -> bool:
    """Return whether a graph has open sizes, or those that are expected first: not those of a measurement."""
    sizes = read_first(GRAPHS.root() / one.folder)
    expected = () if sizes is None else (f"[{','.join(map(str, sizes))},",)
    return one.shapes[0].startswith(("[?", *expected))


def shapes_of(model: Any) -> tuple[str, ...]:
    """Return the shapes of a model's inputs, as openvino.PartialShape writes and reads them."""
    return tuple(str(port.get_partial_shape()) for port in model.inputs)


def read_note(path: Path) -> list[Compiling]:
    """Return what a note names; nothing if it is not there or broken."""
    with contextlib.suppress(OSError, TypeError, KeyError):
        noted = read_records(path).get("graphs", [])
        graphs = [Compiling(**{**one, "shapes": tuple(one["shapes"])}) for one in noted]
        if all(isinstance(one.folder, str) and Path(one.folder).name == one.folder for one in graphs):
            return graphs[:MOST]
    return []


HEAD_START = HeadStart()  # this process's
