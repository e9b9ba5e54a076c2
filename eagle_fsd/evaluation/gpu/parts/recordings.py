"""The part of a GPU check about what is recorded as CUDA graphs, and the memory that it takes."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import Bench, Counted, ids_of
from eagle_fsd.evaluation.gpu.runner import Findings

TREE = TreeConfig(8, 3, 3)
Call = tuple[list[int], dict[str, float]]  # the prompts' lengths, and how to sample
MOST_HELD = 64  # recordings of one engine, whatever is asked of it
GROWTH = 16 * 2**20  # bytes that a repetition may add: the allocator's rounding


def recordings(bench: Bench) -> Findings:
    """Count what one engine records over prompt lengths, temperatures and batch sizes, three times."""
    lengths, warms, batches = (2, 2, (1, 2)) if bench.quick else (40, 20, (1, 2, 4, 8))
    scenarios: dict[str, list[Call]] = {
        f"{lengths} prompt lengths": [([3 + number], {}) for number in range(lengths)],
        f"{warms} temperatures": [([9], {"temperature": 0.5 + number / 40}) for number in range(warms)],
        f"a batch of {batches[-1]}": [([9] * batches[-1], {})],
        f"batches of {', '.join(map(str, batches))}": [([9] * batch, {}) for batch in batches],
    }
    stepper = bench.graphs()
    counted = stepper.record
    engine = bench.tiny_engine(stepper, **({} if bench.quick else {"vocab_size": 32000, "hidden_size": 256}))
    cells = {name: three_times(bench, engine, counted, calls) for name, calls in scenarios.items()}
    grown = [name for name, passes in cells.items() if grows(passes)]
    anew = {name: passes[2]["made"] - passes[1]["made"] for name, passes in cells.items()}
    most = max(one["held"] for passes in cells.values() for one in passes)
    said = f"{counted.made} recorded, at most {most} held; a third pass records "
    said += ", ".join(f"{count} anew for {name}" for name, count in anew.items() if count) or "nothing"
    said += f"; it still grows: {', '.join(grown)}" if grown else ""
    titles = ["what", "pass", "recorded", "held", "replays", "MiB allocated", "MiB reserved"]
    rows = [
        [name, str(number)]
        + [str(one[key]) for key in ("made", "held", "replays")]
        + [f"{one[key] / 2**20:.0f}" for key in ("allocated", "reserved")]
        for name, passes in cells.items()
        for number, one in enumerate(passes, 1)
    ]
    return {
        "ok": not grown and 0 < most <= MOST_HELD,
        "summary": said,
        "cells": cells,
        "most_held_allowed": MOST_HELD,
        "table": {"titles": titles, "rows": rows},
    }


def three_times(bench: Bench, engine: EagleFSD, counted: Counted, calls: Sequence[Call]) -> list[Findings]:
    """Run three passes over the calls, and count after each: the second records, the third replays."""
    passes = []
    for _ in range(3):
        for lengths, warm in calls:
            ids, mask = ids_of(lengths)
            engine.generate(ids, mask, max_new_tokens=4 if bench.quick else 8, tree=TREE, **warm)
        passes.append(standing(bench, counted))
    return passes


def grows(passes: Sequence[Mapping[str, int]]) -> bool:
    """Return whether the third pass still adds what the second one should have had."""
    more = {key: passes[2][key] - passes[1][key] for key in ("held", "reserved")}
    return more["held"] > 0 or more["reserved"] > GROWTH


def standing(bench: Bench, counted: Counted) -> Findings:
    """Return what a recorder has made and memory has come to."""
    gc.collect()
    memory = {"allocated": 0, "reserved": 0}
    if bench.on_gpu:
        bench.wait()
        memory["allocated"] = torch.cuda.memory_allocated(bench.device)
        memory["reserved"] = torch.cuda.memory_reserved(bench.device)
    return {**counted.counts(), **memory}
