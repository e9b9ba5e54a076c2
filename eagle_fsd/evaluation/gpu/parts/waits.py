"""Parts of a GPU check about when the host waits for the device: once in a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import Bench, ids_of
from eagle_fsd.evaluation.gpu.runner import Findings, LeftOut

TREE = TreeConfig(8, 3, 3)
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
STEPS_BEFORE, STEPS = 6, 8  # not watched: graphs are recorded in them; watched
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # the profiler itself synchronizes the device
TO_HOST = "Memcpy DtoH"


def host_waits(bench: Bench) -> Findings:
    """Count how often a step of the loop waits for the device, by torch's debug mode."""
    cells = watched_steps(bench, warned)
    bad = [name for name, counts in cells.items() if counts["warnings"] != STEPS]
    return waits_found(cells, bad)


def host_waits_profiled(bench: Bench) -> Findings:
    """Count waits and copies to the host by the profiler's record of what the CUDA runtime was asked."""
    cells = watched_steps(bench, profiled)
    if not any(counts["events"] for counts in cells.values()):
        raise LeftOut("the profiler shows no calls of the CUDA runtime on this machine")
    return waits_found(
        cells,
        [name for name, counts in cells.items() if (counts["waits"], counts["to_host"]) != (STEPS, STEPS)],
    )


def waits_found(cells: Mapping[str, Mapping[str, int]], bad: list[str]) -> Findings:
    said = f"one wait a step in {len(cells) - len(bad)} of {len(cells)} settings"
    said += f"; not so: {', '.join(bad)}" if bad else ""
    return {"ok": not bad, "summary": said, "steps": STEPS, "cells": cells}


def watched_steps(
    bench: Bench, watch: Callable[[Callable[[], object]], dict[str, int]]
) -> dict[str, dict[str, int]]:
    """Watch STEPS steps by stepper, batch, rule and sampling."""
    if not bench.on_gpu:
        raise LeftOut("a CPU has no queue to wait for")
    rules: dict[str, tuple[AcceptanceRule, dict[str, float]]] = {
        "lossless, greedy": (Lossless(), {}),
        "lossless, sampled": (Lossless(), SAMPLED),
        "fuzzy, sampled": (Fuzzy(0.5), SAMPLED),
    }
    cells = {}
    for mode in bench.modes():
        for lengths in ([9], [5, 12, 3]):
            for name, (rule, warm) in rules.items():
                engine = bench.tiny_engine(bench.modes()[mode])
                cells[f"{mode}, {len(lengths)} rows, {name}"] = counted_steps(
                    engine, lengths, rule, warm, watch
                )
    return cells


def counted_steps(
    engine: EagleFSD,
    lengths: list[int],
    rule: AcceptanceRule,
    warm: Mapping[str, float],
    watch: Callable[[Callable[[], object]], dict[str, int]],
) -> dict[str, int]:
    """Watch STEPS steps of one batch, whose texts do not end in them."""
    ids, mask = ids_of(lengths)
    most = (STEPS_BEFORE + STEPS + 2) * (TREE.depth + 1)
    options = {"rule": rule, "tree": TREE, "eos_token_id": (), "max_new_tokens": most, **warm}
    steps = iter(engine.stream_batch(ids, mask, **options).steps)
    for _ in range(STEPS_BEFORE):
        next(steps)
    counts = watch(lambda: [next(steps) for _ in range(STEPS)])
    steps.close()
    return counts


def warned(work: Callable[[], object]) -> dict[str, int]:
    """Count the waits that torch warns of while work runs."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"warnings": sum("synchronizing CUDA operation" in str(one.message) for one in noted)}


def profiled(work: Callable[[], object]) -> dict[str, int]:
    """Count the waits and the copies to the host that the profiler sees while work runs."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    return count_events((event.key, event.count) for event in profiler.key_averages())


def count_events(events: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Count a profile's events by name: all that concerns the device, waits, copies to the host."""
    counts = {"events": 0, "waits": 0, "to_host": 0}
    for name, count in events:
        counts["events"] += count if name.startswith(("cuda", "Memcpy")) else 0
        counts["waits"] += count if name in WAITS else 0
        counts["to_host"] += count if name.startswith(TO_HOST) else 0
    return counts
