"""What made a number: argv, commit, versions and machine, to be written beside every result."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from eagle_fsd import __version__


def provenance(device: torch.device | None = None) -> dict[str, object]:
    """A JSON-ready record of this run. device: what it computes on; None: CUDA where there is any."""
    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "eagle_fsd": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name(device) if cuda else processor(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """The processor's name where the system tells it (Linux), else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.machine())


def cores() -> int | None:
    """How many processor cores this process may use.

    That and the processor's name tell a machine from another. Its host name does not: a container has a new
    one at each start.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def commit() -> str | None:
    """The checkout's commit, with `-dirty` where tracked files differ from it; None outside a checkout."""
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    known = [
        *git,
        "ls-files",
        "--error-unmatch",
        file.name,
    ]  # not where it is installed in another's checkout
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        subprocess.run(known, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
