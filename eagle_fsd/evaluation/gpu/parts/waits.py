"""The part of a GPU check about when the host waits for the device: once in a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import Bench, ids_of
from eagle_fsd.evaluation.gpu.runner import Findings, LeftOut

TREE = TreeConfig(8, 3, 3)
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
STEPS_BEFORE, STEPS = 6, 8  # not watched: graphs are recorded in them; watched


def host_waits(bench: Bench) -> Findings:
    """Check by torch's debug mode that a step waits for the device once, whatever the batch and the rule."""
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
                waits = waits_of_steps(engine, lengths, rule, warm)
                cells[f"{mode}, {len(lengths)} rows, {name}"] = waits
    bad = [name for name, waits in cells.items() if waits != STEPS]
    said = f"one wait a step in {len(cells) - len(bad)} of {len(cells)} settings"
    said += f"; not so: {', '.join(bad)}" if bad else ""
    return {"ok": not bad, "summary": said, "steps": STEPS, "cells": cells}


def waits_of_steps(
    engine: EagleFSD, lengths: list[int], rule: AcceptanceRule, warm: Mapping[str, float]
) -> int:
    """Count the waits in STEPS steps of one batch, whose texts do not end in them."""
    ids, mask = ids_of(lengths)
    most = (STEPS_BEFORE + STEPS + 2) * (TREE.depth + 1)
    options = {"rule": rule, "tree": TREE, "eos_token_id": (), "max_new_tokens": most, **warm}
    steps = iter(engine.stream_batch(ids, mask, **options).steps)
    for _ in range(STEPS_BEFORE):
        next(steps)
    found = waits_in(lambda: [next(steps) for _ in range(STEPS)])
    steps.close()
    return found


def waits_in(work: Callable[[], object]) -> int:
    """Count the waits that torch warns of while work runs."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in noted)
