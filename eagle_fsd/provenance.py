"""What made a number: argv, commit, versions and machine, to be written beside every result."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from eagle_fsd import __version__


def provenance() -> dict[str, object]:
    """A JSON-ready record of this run."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "eagle_fsd": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": device,
        "threads": torch.get_num_threads(),
    }


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
