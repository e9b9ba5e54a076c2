"""OpenVINO itself: whether it is installed, how graphs are compiled, and how they share the processor."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import locale
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import hold_lock
from eagle_fsd.runtime.openvino.operators.compiler import (
    compiled_operator,
    known_operator,
    may_compile,
)

if TYPE_CHECKING:  # a head start needs this module before torch is there
    from torch import Tensor

logger = logging.getLogger(__name__)

EXTRA = "openvino"
# Activations are rounded to 8 bits in groups of this many, as llama.cpp does, where weights have few bits.
ACTIVATION_GROUP = 32
WEIGHTS = "graph.bin"  # beside a kept graph
MOST_COMPILED = 2**30  # bytes of weights, beyond which compiled forms, which have them again, are not kept
IMPORTING = threading.Lock()  # held while OpenVINO is imported
MAKING = threading.Lock()  # and while its one Core is made


def is_installed() -> bool:
    """Return whether OpenVINO can be imported, without importing it: it is there, and so is a home folder."""
    return importlib.util.find_spec("openvino") is not None and has_home()


def has_home() -> bool:
    """Return whether the user has a home folder, where OpenVINO looks for its settings."""
    try:
        Path.home()
    except RuntimeError:
        return False
    return True


def require() -> None:
    """Raise ValueError unless OpenVINO can be imported."""
    if is_installed():
        return
    need = 'must be installed; run pip install "eagle-fsd[openvino]"'
    if not has_home():
        need = "needs a home folder, and this user has none; set HOME"
    raise ValueError(f"runtime is 'openvino': OpenVINO {need}, or use runtime torch")


@functools.cache
def openvino() -> Any:
    """Return OpenVINO's module. This package imports it only here, without its telemetry.

    OpenVINO tells its makers of each import and each conversion, unless a file of the user's forbids that. It
    keeps a number for the user in the home folder, and forks the whole process to send an event.
    """
    with IMPORTING, hidden("openvino_telemetry"):  # without it OpenVINO takes a stand-in that sends nothing
        return importlib.import_module("openvino")


@contextlib.contextmanager
def hidden(module: str) -> Iterator[None]:
    """Let imports of a module fail as if it were not installed, unless it has been imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # this is how Python marks one
    try:
        yield
    finally:
        del sys.modules[module]


def core() -> Any:
    """Return the process's one openvino.Core, which knows the operators that its CPU plugin adds."""
    with MAKING:
        return make_core()


@functools.cache
def make_core() -> Any:
    """Make what `core` returns."""
    made = openvino().Core()
    made.get_versions("CPU")
    if (known := known_operator()) is not None:  # graphs that are kept may have it
        add_operator(made, known)
    return made


def operator() -> Path | None:
    """Return the library of our operators, which the core knows from now on; None if there is none."""
    return load_operator() if may_compile() else None


@functools.cache
def load_operator() -> Path | None:
    """Compile and load what `operator` returns."""
    path = compiled_operator()
    return path if path is not None and add_operator(core(), path) else None


@functools.cache
def node_factory() -> Any:
    """Return what makes nodes of our operators, which must be there."""
    openvino()  # quietly
    from openvino.utils.node_factory import NodeFactory

    made = NodeFactory()
    made.add_extension(str(operator()))
    return made


def add_operator(to: Any, path: Path) -> bool:
    """Let a Core know our compiled operators, and return whether it does."""
    try:
        to.add_extension(str(path))
    except RuntimeError as error:  # such as of another release
        logger.info("all operators are left to OpenVINO: %s", one_line(error, 200))
        return False
    return True


def version() -> str:
    return str(openvino().__version__)


def silence_telemetry() -> None:
    """Let the converter send nothing about a user's models, even if the caller had imported OpenVINO."""
    with contextlib.suppress(ImportError):  # another release may have other modules
        from openvino.tools.ovc import convert_impl, telemetry_stub, telemetry_utils, utils

        for module in (convert_impl, telemetry_utils, utils):
            module.tm = telemetry_stub


def convert(network: Any, examples: tuple[Tensor, ...], extensions: Sequence[Any] = ()) -> Any:
    """Trace a network into an openvino.Model.

    extensions: of the converter, for operators that it does not know. The converter silences the root logger,
    and a failed conversion does not undo that. It is undone here.

    The converter lets torch trace a network several times by default, and compare. That takes most of the
    time, and torch keeps every trace until the process ends: 50 MB each of SmolLM2-135M's decoder. So it is
    traced once; what a target computes is compared when its graph is compiled (see target.admission).
    """
    ov = openvino()
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    silence_telemetry()
    root = logging.getLogger()
    level, filters, handlers = root.level, root.filters[:], root.handlers[:]
    try:
        once = {"check_trace": False}
        with warnings.catch_warnings():
            # Users cannot change how the converter traces, which torch 2.14 says is out of date.
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.jit")
            decoder = TorchScriptPythonDecoder(network, example_input=examples, trace_kwargs=once)
            return ov.convert_model(decoder, extension=list(extensions) or None)
    finally:
        root.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers


def compile_graph(
    model: Any, precision: str, rounded_activations: bool, threads: int, folder: Path | None = None
) -> Any:
    """Compile an openvino.Model for this processor, or read its compiled form from a folder that has it.

    precision: "f32" or "bf16", of products and activations. rounded_activations: let products with weights of
    few bits round their other factor to 8 bits. A folder is ignored if it cannot be used, if another process
    keeps it locked for long, or if its weights are larger than MOST_COMPILED. A graph with attention over
    pages is always compiled: OpenVINO writes its compiled form and cannot read it.
    """
    config = settings(precision, rounded_activations, threads)
    paged = describe_pages(model)
    with LOCALE:
        if folder is not None and may_keep(folder) and not paged:
            try:
                with hold_lock(folder / "compiled"):
                    return core().compile_model(model, "CPU", config | {"CACHE_DIR": str(folder)})
            except (OSError, RuntimeError) as error:
                logger.info("the compiled form of %s is not kept: %s", folder.name, one_line(error, 200))
        return core().compile_model(model, "CPU", config)


def may_keep(folder: Path) -> bool:
    """Return whether compiled forms of the graph in a folder may be kept there."""
    with contextlib.suppress(OSError):
        return folder.is_dir() and (folder / WEIGHTS).stat().st_size <= MOST_COMPILED
    return False


def describe_pages(model: Any) -> bool:
    """Note heads and their sizes at the operators of an openvino.Model, which a file does not keep.

    Returns whether the model has such operators, which attend over pages.
    """
    found = [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    for node in found:
        for place, name in ((3, "k"), (4, "v")):
            _, heads, _, size = node.get_input_partial_shape(place)
            node.get_rt_info()[f"num_{name}_heads"] = heads.get_length()
            node.get_rt_info()[f"{name}_head_size"] = size.get_length()
    return bool(found)


class LocaleKeeper:
    """Leaves the process's locale as it was when calls of several threads overlap.

    OpenVINO sets the locale "C" while it writes a compiled graph to disk, and then sets what it found. Of two
    that overlap, the second may find "C" and leave it, and Python would read text as ASCII from then on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._found = 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._found = locale.setlocale(locale.LC_ALL)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and locale.setlocale(locale.LC_ALL) != self._found:
                locale.setlocale(locale.LC_ALL, self._found)


LOCALE = LocaleKeeper()


def settings(precision: str, rounded_activations: bool, threads: int) -> dict[str, Any]:
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(ACTIVATION_GROUP if rounded_activations else 0),
        "KV_CACHE_PRECISION": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        # The system may move threads away from a core that another program uses.
        "ENABLE_CPU_PINNING": False,
    }
