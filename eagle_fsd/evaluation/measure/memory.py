"""How many bytes this process takes."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import torch


def memory(device: torch.device) -> dict[str, int]:
    """Return the bytes that are taken now, "resident", and the most so far, "peak": of torch on a GPU.

    Else they are the process's own. What `getrusage` calls its peak begins with that of its parent, which
    counts where there is nothing else.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return dict(zip(("resident", "peak"), allocated, strict=True))
    held, status = psutil.Process().memory_info(), Path("/proc/self/status")
    if status.exists():
        told = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        peak = 1024 * int(told["VmHWM"].split()[0])
    elif hasattr(held, "peak_wset"):  # Windows
        peak = held.peak_wset
    else:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"resident": held.rss, "peak": max(held.rss, peak)}
