"""Parts of a GPU check about steps: CUDA graphs and a capture that fails, when the host waits, flash-attn."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any
from unittest import TestCase

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.autotune.step_costs import timed_tree
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu import bench as benches
from eagle_fsd.evaluation.gpu.bench import Bench, Counted, Findings, LeftOut, engine_of, ids_of, tiny_model
from eagle_fsd.runtime.flash_attention import flash_available
from eagle_fsd.runtime.step_recorder import EAGER, Stepper
from eagle_fsd.runtime.timing import median_seconds
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
STEPS_BEFORE, WAITS = 6, 8  # steps in which graphs are recorded, and those that are looked at
FLASH_TOLERANCE = 0.05  # relative, between kernels in bfloat16
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
    sizes = {} if bench.quick else {"vocab_size": 32000, "hidden_size": 256}
    engine = engine_of(tiny_model("llama", bench.device, **sizes), stepper)
    cells = {name: three_times(bench, engine, counted, calls) for name, calls in scenarios.items()}
    grown = [name for name, passes in cells.items() if grows(passes)]
    most = max(one["held"] for passes in cells.values() for one in passes)
    found = benches.verdict_on(
        cells, grown, f"{counted.made} recorded, at most {most} held", "it still grows"
    )
    return found | {"ok": found["ok"] and 0 < most <= MOST_HELD}


def three_times(bench: Bench, engine: EagleFSD, counted: Counted, calls: Sequence[Call]) -> list[Findings]:
    """Run three passes over the calls, and count after each: the second records, the third replays."""
    passes = []
    for _ in range(3):
        for lengths, warm in calls:
            ids, mask = ids_of(lengths)
            engine.generate(ids, mask, max_new_tokens=4 if bench.quick else 8, tree=TREE, **warm)
        gc.collect()
        memory = torch.cuda.memory_reserved(bench.device) if bench.on_gpu else 0
        passes.append({**counted.counts(), "bytes reserved": memory})
    return passes


def grows(passes: Sequence[Mapping[str, int]]) -> bool:
    """Return whether the third pass still adds what the second one should have had."""
    more = {key: passes[2][key] - passes[1][key] for key in ("held", "bytes reserved")}
    return more["held"] > 0 or more["bytes reserved"] > GROWTH


def failed_capture(bench: Bench) -> Findings:
    """Check that a model whose forward waits for the device runs unrecorded.

    There is one warning, the text is the same, and torch works on as if nothing had been.
    """
    model, ids = tiny_model("llama", bench.device), ids_of([9])[0].to(bench.device)
    failing, healthy, wanted = bench.graphs(), bench.graphs(), texts_of(model, EAGER)
    counted = healthy.record
    hook = model.lm_head.register_forward_pre_hook(lambda module, given: bool(given[0].isnan().any()) or None)

    def same_text(stepper: Stepper) -> None:
        if texts_of(model, stepper) != wanted:
            raise ValueError("its text is another one")

    def recovered() -> None:
        hook.remove()
        same_text(healthy)
        assert counted.made, "nothing is recorded any more"

    sampled = {"attention_mask": torch.ones_like(ids), "do_sample": True, "max_new_tokens": 4}
    probes: dict[str, Callable[[], object]] = {
        "the text": lambda: same_text(failing),
        "another engine": recovered,
        "dropout": lambda: F.dropout(torch.ones(64, device=bench.device), training=True).cpu(),
        "Hugging Face samples": lambda: model.generate(ids, **sampled),
        "allocation": lambda: torch.zeros(2**24, device=bench.device).sum().item(),
    }
    if bench.on_gpu:
        probes["empty_cache"] = torch.cuda.empty_cache
    with TestCase().assertLogs("eagle_fsd", logging.WARNING) as log:  # which fails where nothing is said
        after = {name: problem_of(probe) for name, probe in probes.items()}
    noted = [one_line(record.getMessage(), 300) for record in log.records]
    bad = [f"{name} ({error})" for name, error in after.items() if error is not None]
    said = f"no longer works: {'; '.join(bad)}" if bad else "the same text, and all works afterwards"
    said += f", after {len(noted)} warning(s)"
    return {"ok": not bad and len(noted) == 1, "summary": said, "warnings": noted, "after": after}


def texts_of(model: Any, stepper: Stepper) -> list[list[list[int]]]:
    """Write the same short greedy texts three times: a step is run, recorded and replayed."""
    engine, (ids, mask) = engine_of(model, stepper), ids_of([9])
    return [engine.generate(ids, mask, max_new_tokens=16, tree=TREE).new_tokens for _ in range(3)]


def problem_of(work: Callable[[], object]) -> str | None:
    """Return the error that work raises, in one line; None where it raises none."""
    try:
        work()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {one_line(error, 200)}"
    return None


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
    return benches.verdict_on(
        cells, bad, f"one wait a step in {len(cells) - len(bad)} of {len(cells)}", "not so"
    )


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
    prompt = torch.tensor(benches.prompts_of([context], target.vocab_size), device=target.device)
    session = TargetSession(target, 1, context + 64)
    session.prefill(prompt, [context])
    tree = timed_tree(prompt[:, -1], 32, target.vocab_size)
    return session.verify(tree)[0].clone(), 1000 * median_seconds(lambda: session.verify(tree), target.device)
