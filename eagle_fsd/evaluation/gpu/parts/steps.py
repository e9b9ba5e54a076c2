"""Parts of a GPU check about steps: when the host waits for the device, and what they cost."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, product
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.autotune.step_costs import measure_forwards, star_tree
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import Bench, Findings, LeftOut, engine_of, ids_of, prompts_of, tiny_model
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.runtime.flash_attention import flash_available
from eagle_fsd.runtime.timing import median_seconds
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
CONTEXTS = (256, 4096)
BEAM = 10  # the paper's
TREES = (TreeConfig(1), TreeConfig(16, 5, 8), TreeConfig(32, 6, 8), TreeConfig(60, 6, 10))
STEPS_BEFORE, WAITS, TIMED = 6, 8, 16  # steps in which graphs are recorded, and those that are looked at
FLASH_TOLERANCE = 0.05  # relative, between kernels in bfloat16


def steps_of(engine: EagleFSD, lengths: list[int], count: int, **options: Any) -> Iterator[list[list[int]]]:
    """Yield `count` steps of one batch, whose texts do not end in them, after those that record graphs."""
    ids, mask = ids_of(lengths, min(engine.target.vocab_size, 1000))
    most = (STEPS_BEFORE + count + 2) * (options["tree"].depth + 1)
    with engine.stream_batch(ids, mask, eos_token_id=(), max_new_tokens=most, **options) as stream:
        yield from islice(stream.steps, STEPS_BEFORE, STEPS_BEFORE + count)


def host_waits(bench: Bench) -> Findings:
    """Check by torch's debug mode that a step waits for the device once, whatever the batch and the rule."""
    if not bench.on_gpu:
        raise LeftOut("a CPU has no queue to wait for")
    rules: dict[str, dict[str, Any]] = {
        "lossless, greedy": {"rule": Lossless()},
        "lossless, sampled": {"rule": Lossless(), **SAMPLED},
        "fuzzy, sampled": {"rule": Fuzzy(0.5), **SAMPLED},
    }
    cells = {}
    for mode, lengths, name in product(bench.modes(), ([9], [5, 12, 3]), rules):
        engine = engine_of(tiny_model("llama", bench.device), bench.modes()[mode])
        steps = steps_of(engine, lengths, 1 + WAITS, tree=TREE, **rules[name])
        next(steps)  # those before it are not watched
        cells[f"{mode}, {len(lengths)} rows, {name}"] = waits_in(
            lambda steps=steps: list(islice(steps, WAITS))
        )
    bad = [name for name, waits in cells.items() if waits != WAITS]
    said = f"one wait a step in {len(cells) - len(bad)} of {len(cells)} settings"
    said += f"; not so: {', '.join(bad)}" if bad else ""
    return {"ok": not bad, "summary": said, "steps": WAITS, "cells": cells}


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


def costs(bench: Bench, dtype: torch.dtype) -> Findings:
    """Time the real target and its head in this dtype with graphs off and on, in milliseconds by context."""
    cells: dict[str, dict[str, float]] = {}
    recorded = True
    for mode, stepper in bench.modes().items():
        record = getattr(stepper, "record", None)  # asked now: a stepper that gives up forgets it
        engine = bench.real_engine(dtype, stepper)
        for context in (32,) if bench.quick else CONTEXTS:
            if context + 256 <= engine.target.max_positions:  # room for what is drafted and emitted
                cells[f"{mode}, context {context}"] = times(bench, engine, context)
        recorded &= record is None or record.counts()["replays"] > 0
    if not cells:
        raise LeftOut(f"the target has {engine.target.max_positions} positions, too few for {CONTEXTS[0]}")
    first = next(iter(cells.values()))
    rows = [[name, *(f"{value:.2f}" for value in cell.values())] for name, cell in cells.items()]
    said = "medians in milliseconds" if recorded else "nothing was replayed"
    made = {"head": engine.ea_model, "drafted": engine.drafter.tokens, "cells": cells}
    return {"ok": recorded, "summary": said, **made, "table": markdown_table(["", *first], rows)}


def times(bench: Bench, engine: EagleFSD, context: int) -> dict[str, float]:
    """Time verify forwards by width, a draft by levels, and whole steps by tree, behind `context` tokens."""
    beam = min(BEAM, engine.drafter.tokens)
    found, _ = measure_forwards(engine.target, engine.drafter, [beam], 1, context)
    made = {f"verify {width}": seconds for width, seconds in found.verify.items()}
    made |= dict(zip(("draft, first level", "draft, further levels"), found.draft[beam], strict=True))
    made |= {f"step {tree}": step_seconds(engine, context, tree) for tree in TREES[: 2 if bench.quick else 4]}
    return {name: round(1000 * seconds, 4) for name, seconds in made.items()}


def step_seconds(engine: EagleFSD, context: int, tree: TreeConfig) -> float:
    """Time one tree's steps. A step ends when its tokens have come to the host, which waits for them."""
    ends = [time.perf_counter() for _ in steps_of(engine, [context], 1 + TIMED, tree=tree)]
    return statistics.median(end - start for start, end in pairwise(ends))


def flash_attention(bench: Bench) -> Findings:
    """Compare a tree behind a prefix with flash-attn and without: the same logits, and what each costs."""
    dtype = torch.bfloat16
    if not flash_available(bench.device, dtype):
        raise LeftOut("flash-attn is not installed, or does not run on this device")
    sizes = {"vocab_size": 8192, "hidden_size": 512, "layers": 4, "positions": 2**15}
    target = TargetModel(tiny_model("llama", bench.device, dtype, **sizes))
    if not target.flash:
        return {"ok": False, "summary": "it is installed, and a tiny Llama was not admitted with it"}
    logits, spent = {}, {}
    for flash in (False, True):
        target.flash = flash
        logits[flash], spent["with" if flash else "without"] = behind(target, 16384)
    difference = float((logits[True] - logits[False]).norm() / logits[False].norm())
    said = f"relative difference {difference:.2g}"
    return {"ok": difference < FLASH_TOLERANCE, "summary": said, "milliseconds": spent}


@torch.inference_mode()
def behind(target: TargetModel, context: int) -> tuple[Tensor, float]:
    """Return the logits of a tree of 32 nodes behind a prompt, and the milliseconds of its forward."""
    prompt = torch.tensor(prompts_of([context], target.vocab_size), device=target.device)
    session = TargetSession(target, 1, context + 64)
    session.prefill(prompt, [context])
    tree = star_tree(prompt[:, -1], 32, target.vocab_size)
    return session.verify(tree)[0].clone(), 1000 * median_seconds(lambda: session.verify(tree), target.device)
