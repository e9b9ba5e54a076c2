"""How many bytes this process takes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def memory(device: torch.device) -> dict[str, int]:
    """Return the bytes that are taken now, "resident", and the most so far, "peak": of torch on a GPU.

    Else they are the process's own on Linux. What `getrusage` calls its peak begins with that of its parent.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return dict(zip(("resident", "peak"), allocated, strict=True))
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return dict.fromkeys(("resident", "peak"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    told = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
    resident, peak = (1024 * int(told[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return {"resident": resident, "peak": max(resident, peak)}
