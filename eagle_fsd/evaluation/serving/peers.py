"""Servers of OpenAI's API that race on the same .gguf file: this package's own, llama.cpp's, transformers'.

Each takes all cores and answers greedily. llama.cpp's is the one of llama-cpp-python, told to let a request
finish when the next one comes; transformers' needs the file's weights as a folder in float32, since it
cannot serve a file that is no repository's. Ours keeps no texts, since every prompt comes again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.provenance import cores
from eagle_fsd.hub.target_loader import load_target

OURS, LLAMA, TRANSFORMERS, CONTINUOUS = "eagle_fsd", "llama.cpp", "transformers", "transformers-continuous"
CONTEXT = 4096  # tokens that llama.cpp's server has room for


@dataclass(frozen=True)
class Peer:
    """How a server is started and asked.

    command: of a port. ready: a path that is there once it answers. needs: modules of its Python. remedy: how
    to install them. fields: that its requests have beside those of all.
    """

    command: Callable[[int], list[str]]
    ready: str
    needs: Sequence[str] = ()
    remedy: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


def peers(
    file: Path, stock_model: Path, ours: Sequence[str], llama_python: str | None, stock_python: str | None
) -> dict[str, Peer]:
    """Return all servers by name.

    file: a .gguf file; stock_model: its weights as a folder, which `unpack` makes. ours: flags of this
    package's own server. *_python: interpreters of the others.
    """
    threads = str(cores() or os.cpu_count() or 1)
    llama, stock = llama_python or sys.executable, stock_python or sys.executable
    model = str(stock_model)

    def own(port: int) -> list[str]:
        words = ["--port", str(port), "--base-model", str(file), "--prefix-tokens", "0"]
        return [sys.executable, "-m", "eagle_fsd.serve", *words, *ours]

    def llama_cpp(port: int) -> list[str]:
        flags = (
            f"--n_ctx {CONTEXT} --n_threads {threads} --n_threads_batch {threads} --interrupt_requests false"
        )
        words = f"{flags} --host 127.0.0.1 --port {port}".split()
        return [llama, "-m", "llama_cpp.server", "--model", str(file), *words]

    def transformers(*more: str) -> Callable[[int], list[str]]:
        where = ("--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32")
        program = [stock, "-m", "transformers.cli.transformers", "serve", model, *where, *more]
        return lambda port: [*program, "--port", str(port)]

    serving = (["transformers", "fastapi", "uvicorn", "openai"], 'pip install "transformers[serving]"')
    stock_fields = {"model": model}
    return {
        OURS: Peer(own, "/health", ["fastapi"], 'pip install "eagle-fsd[serve]"'),
        LLAMA: Peer(
            llama_cpp,
            "/v1/models",
            ["llama_cpp", "starlette_context"],
            'pip install "llama-cpp-python[server]", which compiles it in ten minutes; with --llama-python '
            "PATH it may be another environment's",
        ),
        TRANSFORMERS: Peer(transformers(), "/health", *serving, stock_fields),
        CONTINUOUS: Peer(transformers("--continuous-batching"), "/health", *serving, stock_fields),
    }


def stock_folder(output: Path, file: Path) -> Path:
    """Return the folder of a .gguf file's weights for transformers: another file has another one."""
    stat = file.stat()
    made_of = digest_json(str(file.resolve()), stat.st_size, stat.st_mtime_ns)
    return output / f"transformers-{file.stem}-{made_of[:8]}"


def unpack(file: Path, folder: Path) -> None:
    """Write a .gguf file's weights and tokenizer as a folder for transformers, if it is not there."""
    if folder.exists():
        return
    model, tokenizer = load_target(str(file), torch.float32, "cpu")
    with TemporaryDirectory(dir=folder.parent) as partial:
        made = Path(partial) / folder.name
        model.save_pretrained(made)
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        made.rename(folder)  # so that a folder that is there is whole


def require_peer(name: str, peer: Peer) -> None:
    """Raise ValueError that says how to install a server whose Python lacks it."""
    python = peer.command(0)[0]
    look = (
        "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))"
    )
    try:
        missing = subprocess.run([python, "-c", look, *peer.needs], check=False, timeout=60).returncode != 0
    except OSError as error:
        raise ValueError(f"{python} cannot be run ({error.strerror}): name an interpreter") from error
    if missing:
        raise ValueError(
            f"the server {name} needs what {python} does not have: {peer.remedy}; or leave it out of "
            "--servers"
        )
