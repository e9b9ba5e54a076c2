"""The parts of the GPU check, in their order, and the record of the machine that they ran on."""

from __future__ import annotations

import importlib.util
import subprocess
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
    Part(
        "equality",
        "Greedy float32 texts of random models of six families equal Hugging Face's.",
        60,
        texts.equality,
    ),
    Part(
        "equality of the target",
        "So do those of the real target with its head.",
        60,
        texts.equality_of_target,
    ),
    Part(
        "distribution",
        "Sampled tokens and pairs have the target's own distribution.",
        30,
        sampled.distribution,
    ),
    Part("host waits", "A step waits for the device once.", 20, waits.host_waits),
    Part(
        "half precision",
        "With graphs bfloat16 texts are those without, but for near ties.",
        30,
        texts.half_precision,
    ),
    Part("recordings", "Recordings and their memory are bounded.", 60, recordings.recordings),
    Part("overflow", "Logits that are not finite end in an error.", 20, failures.overflow),
    Part(
        "costs, bfloat16",
        "Times of the real target and its head in bfloat16.",
        60,
        costs.costs_of_target(torch.bfloat16),
    ),
    Part(
        "costs, Llama-8B's shape",
        "Times of a random target of Llama-3-8B's shape, bfloat16.",
        90,
        costs.costs_of_llama_8b,
    ),
    Part(
        "costs, float32",
        "Times of the real target and its head in float32.",
        60,
        costs.costs_of_target(torch.float32),
    ),
    Part("flash-attn", "A tree's logits are those without flash-attn.", 20, costs.flash_attention),
    Part("threads", "Engines in threads, two of one model, write what each writes alone.", 30, texts.threads),
    Part("failed capture", "A model that cannot be recorded runs as it is.", 20, failures.failed_capture),
    Part("out of memory", "Memory that runs out in a recording is survived.", 20, failures.out_of_memory),
    Part(
        "host waits, profiled",
        "The profiler too sees one wait and one copy to the host in a step.",
        40,
        waits.host_waits_profiled,
    ),
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
    packages = ("flash_attn", "gguf", "accelerate", "scipy")
    made["packages"] = [name for name in packages if importlib.util.find_spec(name)]
    if bench.on_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        made |= {
            "gpus": torch.cuda.device_count(),
            "memory": properties.total_memory,
            "free_memory": torch.cuda.mem_get_info(bench.device)[0],
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": driver(),
        }
    return made


def driver() -> str | None:
    """Return the version of NVIDIA's driver, None where nvidia-smi does not tell it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(told.split()), None)


def broken(bench: Bench) -> str | None:
    """Return why the device no longer computes, None where it does."""
    try:
        if float(torch.ones(8, device=bench.device).sum()) != 8.0:
            return "a sum on the device is wrong"
        bench.wait()
    except RuntimeError as error:
        return f"the device no longer answers ({one_line(error, 200)})"
    return None
