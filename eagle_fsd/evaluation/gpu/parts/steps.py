"""Parts of a GPU check about steps: when the host waits for the device, and flash-attn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.autotune.step_costs import star_tree
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import (
    Bench,
    Findings,
    LeftOut,
    engine_of,
    ids_of,
    prompts_of,
    tiny_model,
    verdict_on,
)
from eagle_fsd.runtime.flash_attention import flash_available
from eagle_fsd.runtime.timing import median_seconds
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
STEPS_BEFORE, WAITS = 6, 8  # steps in which graphs are recorded, and those that are looked at
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
    return verdict_on(cells, bad, f"one wait a step in {len(cells) - len(bad)} of {len(cells)}", "not so")


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
