"""Compiles the operators for this processor and this OpenVINO, once, into `operators/` of the cache.

That takes some seconds and a C++ compiler, on Linux and x86-64. Where there is none, OpenVINO's own operators
do their work. The processor's kind is a part of the folder's name, since a home folder may serve several
machines.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import hidden_beside
from eagle_fsd.files.kept_folders import KeptFolders, mark_used
from eagle_fsd.files.provenance import processor_flags

logger = logging.getLogger(__name__)

CODE = ("tile_product.cpp", "tree_attention.cpp")  # compiled side by side
SOURCES = (*CODE, "attention.hpp", "registers.hpp", "tiles.hpp", "weights.hpp")
LIBRARY = "operators.so"
OPERATORS = KeptFolders("operators", LIBRARY)
OFF = "EAGLE_FSD_NO_OPERATORS"  # any value but "" and "0" leaves all work to OpenVINO
COMPILERS = ("c++", "g++", "clang++")
PATIENCE = 300  # seconds that a compiler may take
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-w")
AVX2 = ("avx2", "fma", "f16c")
# What a processor must have, and what the compiler may then use; the first that fits is taken.
LEVELS = {
    "avx512": (*AVX2, "avx512f", "avx512bw", "avx512_vnni"),
    "avxvnni": (*AVX2, "avx_vnni"),
    "avx2": AVX2,
}
MOST = 2**24  # bytes of all folders together
_compiling = threading.Lock()


def level(flags: frozenset[str] | None = None) -> str | None:
    """Return which of LEVELS a processor with these flags is of; this machine's by default."""
    found = processor_flags() if flags is None else flags
    return next((name for name, needed in LEVELS.items() if found.issuperset(needed)), None)


def may_compile() -> bool:
    """Return whether there may be an operator: on Linux, unless EAGLE_FSD_NO_OPERATORS turns it off."""
    return os.environ.get(OFF, "0") in ("", "0") and sys.platform.startswith("linux")


def compiled_operator() -> Path | None:
    """Return the compiled operators, after compiling them if need be; None if that is not possible."""
    folder = operator_folder()
    if folder is None:
        return None
    with _compiling:
        if (folder / LIBRARY).is_file():
            return folder / LIBRARY
        try:
            compile_into(folder)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            logger.info("all operators are left to OpenVINO: %s", one_line(error, 300))
            return None
    return folder / LIBRARY


def known_operator() -> Path | None:
    """Return the compiled operators if they were compiled before."""
    folder = operator_folder()
    return folder / LIBRARY if folder is not None and (folder / LIBRARY).is_file() else None


def operator_folder() -> Path | None:
    """Return where this processor's operators are, or would be; None if there can be none."""
    if not may_compile() or platform.machine() != "x86_64" or (mine := level()) is None:
        return None
    if (package := openvino_folder()) is None:
        return None
    release = importlib.metadata.version("openvino")
    code = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in SOURCES)
    parts = (*code, " ".join(FLAGS), str(package), release)
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    try:
        return OPERATORS.root() / f"{mine}-{key}"
    except RuntimeError:  # there is no home folder
        return None


def compile_into(folder: Path) -> None:
    """Compile the operators into a folder that appears whole or not at all.

    Raises ValueError if there is no compiler or if it fails, and OSError if the folder cannot be written.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ValueError("there is no C++ compiler (g++ or clang++) to compile faster ones with")
    package = openvino_folder()
    assert package is not None
    headers, libraries = package / "include", package / "libs"
    linked = [next(libraries.glob(f"{name}.so*"), None) for name in ("libopenvino", "libtbb")]
    if None in linked or not headers.is_dir():
        raise ValueError(f"{package} has no headers and libraries to compile with")
    OPERATORS.root().mkdir(parents=True, exist_ok=True)
    OPERATORS.remove_leftovers()
    partial = hidden_beside(folder)
    try:
        partial.mkdir()
        command = [*compiler.split(), *FLAGS, *level_flags(folder.name.partition("-")[0])]
        command += [f"-I{headers}", f"-I{headers / 'tbb'}"]
        logger.info("operators are compiled for this processor, once: that takes some seconds")
        objects = [partial / f"{name}.o" for name in CODE]
        sources = [Path(__file__).with_name(name) for name in CODE]
        with ThreadPoolExecutor() as pool:  # a compiler uses one core
            parts = zip(sources, objects, strict=True)
            list(pool.map(run, [[*command, "-c", str(source), "-o", str(made)] for source, made in parts]))
        shared = ["-shared", *map(str, objects), *map(str, linked), f"-Wl,-rpath,{libraries}"]
        run([*compiler.split(), *shared, "-o", str(partial / LIBRARY)])
        for made in objects:
            made.unlink()
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / LIBRARY).is_file():  # another process has compiled it a moment ago
                raise
        mark_used(folder)
        OPERATORS.shrink({folder}, MOST)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run(command: Sequence[str]) -> None:
    """Run a compiler. Raises ValueError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise ValueError(f"{command[0]} failed ({one_line(done.stderr or done.returncode, 200)})")


def level_flags(name: str) -> list[str]:
    """Return a compiler's flags for one of LEVELS."""
    return [f"-m{flag.replace('_', '')}" for flag in LEVELS[name]]


def openvino_folder() -> Path | None:
    """Return the folder of the package openvino, without importing it."""
    found = importlib.util.find_spec("openvino")
    return None if found is None or found.origin is None else Path(found.origin).parent
