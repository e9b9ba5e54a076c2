"""The parts of the GPU check, in their order, and the record of the machine that they ran on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eagle_fsd import hub
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.devices import resolve_device
from eagle_fsd.evaluation.gpu.bench import Bench
from eagle_fsd.evaluation.gpu.parts import costs, failures, recordings, sampled, texts, waits
from eagle_fsd.evaluation.gpu.runner import Part
from eagle_fsd.files.provenance import provenance
from eagle_fsd.runtime.cuda_graphs import cuda_recorder

# What may spoil the device for the parts behind it comes last.
PARTS = (
    Part("equality", 60, texts.equality),
    Part("equality of the target", 60, texts.equality_of_target),
    Part("distribution", 30, sampled.distribution),
    Part("host waits", 20, waits.host_waits),
    Part("half precision", 30, texts.half_precision),
    Part("recordings", 60, recordings.recordings),
    Part("overflow", 20, failures.overflow),
    Part("costs, bfloat16", 60, costs.costs_in_bfloat16),
    Part("costs, Llama-8B's shape", 90, costs.costs_of_llama_8b),
    Part("costs, float32", 60, costs.costs_in_float32),
    Part("flash-attn", 20, costs.flash_attention),
    Part("threads", 30, texts.threads),
    Part("failed capture", 20, failures.failed_capture),
    Part("out of memory", 20, failures.out_of_memory),
)


def chosen(names: Sequence[str] | None) -> list[Part]:
    """Return the parts of these names, all for None. Raises ValueError for a name that no part has."""
    known = {part.name: part for part in PARTS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"part {name!r} is not there: it must be one of {', '.join(map(repr, known))}")
    return [part for part in PARTS if names is None or part.name in names]


def make_bench(device: str, target: str | None, head: str | None, quick: bool) -> Bench:
    """Return where the check runs. Raises ValueError for a device, target or head that is not there.

    The device becomes torch's current one, and float32 is multiplied in float32 alone.
    """
    place = resolve_device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: the check knows cuda and cpu; use one of them")
    if target is not None:
        hub.resolve_target(target)
    if head is not None:
        hub.resolve_head(head, target or hub.DEFAULT_TARGET)
    if place.type == "cuda":
        place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
        torch.cuda.set_device(place)
        torch.set_float32_matmul_precision("highest")  # some images turn TF32 on
    return Bench(
        device=place,
        quick=quick,
        target=target or hub.DEFAULT_TARGET,
        head=head,
        given=target is not None,
        record=cuda_recorder if place.type == "cuda" else None,
    )


def machine(bench: Bench) -> dict[str, Any]:
    """Record where and by what the check runs, ready for JSON."""
    made = provenance(bench.device)
    if bench.on_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        made |= {
            "gpus": torch.cuda.device_count(),
            "memory": properties.total_memory,
            "free_memory": torch.cuda.mem_get_info(bench.device)[0],
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return made


def broken(bench: Bench) -> str | None:
    """Return why the device no longer computes, None where it does."""
    try:
        if float(torch.ones(8, device=bench.device).sum()) != 8.0:
            return "a sum on the device is wrong"
        bench.wait()
    except RuntimeError as error:
        return f"the device no longer answers ({one_line(error, 200)})"
    return None
