"""Provenance of results: the command line, commit, versions and machine, written beside every number.

The record is private: it holds the whole command line. `public_command` removes what others should not see.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_fsd.version import __version__

if TYPE_CHECKING:
    import torch

SECRET_OPTION = re.compile(r"(^|[-_])(token|key|secret|password|credentials?|auth)$", re.IGNORECASE)
SECRET_VALUE = re.compile(r"\b(hf|sk|ghp|gho|github_pat|glpat|xox[bp])[-_][\w-]{8,}|://\S*[@?]")
HUB_OPTIONS = (
    "--base-model",
    "--base-model-path",
    "--ea-model",
    "--ea-model-path",
    "--draft-model",
    "--init-head",
    "--dataset",
)
SIZED_OPTIONS = ("--tree", "--sampling", "--methods")
SIZES = re.compile(r"(\w[\w.:+=-]*@)?\d[\d.]*(/\d[\d.]*)+")  # 16/5/8, 0.6/50/0.9, lossless@8/6/4/0.1
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?", re.ASCII)


def provenance(device: torch.device | None = None) -> dict[str, object]:
    """Return a JSON-ready record of this run. device: where it computes; None: CUDA if there is a GPU."""
    import torch  # `cores` is asked for before torch is there

    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "command": command_line(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "eagle_fsd": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name(device) if cuda else processor(),
        "threads": torch.get_num_threads(),
    }


def command_line() -> str:
    """Return this process's command line: of a script with `python` before it, of `eagle-fsd` as it is."""
    program, *arguments = sys.argv
    words = program.split() if program.startswith("eagle-fsd ") else ["python", program]
    return shlex.join([*words, *arguments])


def public_command(command: str) -> str:
    """Return a recorded command line without what is private: directories and secrets.

    A path is cut to its base name; the project's own scripts keep their folder (train/train_head.py). Trees
    and samplings stay, and Hub ids that follow an option which names a model or a data set. Anything that
    looks like a secret becomes `...`.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # unbalanced quotes: someone cut the command line
        words = command.split()
    made: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if name:
            option = name
            word = name + equals + (public_value(option, value) if equals else "")
        elif word.startswith("-") and "/" not in word:
            option = word
        else:
            word = public_value(option, word)
        made.append(word)
    return shlex.join(made)


def public_value(option: str, value: str) -> str:
    """Return an option's value without directories and secrets; option: "" before the first one."""
    if SECRET_OPTION.search(option) or SECRET_VALUE.search(value):
        return "..."
    if option in SIZED_OPTIONS and SIZES.fullmatch(value):
        return value
    if option in HUB_OPTIONS and HUB_ID.fullmatch(value) and not Path(value).exists():
        return value
    parts = re.split(r"[/\\]+", value.rstrip("/\\"))
    script = parts[-1].endswith(".py") and parts[-2:-1] in (["train"], ["eval"])
    return "/".join(parts[-2:]) if script else parts[-1]


def processor() -> str:
    """Return the processor's name if the system tells it (Linux does), else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.machine())


def processor_flags() -> frozenset[str]:
    """Return what this processor can do, by the names of Linux; nothing where that is not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def cores() -> int | None:
    """Return how many processor cores this process may use.

    The cores and the processor's name identify a machine. The host name does not: a container gets a new one
    at each start.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def machine_memory() -> int | None:
    """Return the bytes of memory that the processes of this machine or container share; None if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows has no such call
        return None
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def commit() -> str | None:
    """Return the checkout's commit, with `-dirty` if tracked files differ; None outside a checkout."""
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    # This fails where the package is installed inside another project's checkout.
    known = [*git, "ls-files", "--error-unmatch", file.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        subprocess.run(known, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
