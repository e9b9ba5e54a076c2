"""Parts of a GPU check about time: forwards by width, drafts by level, whole steps, and flash-attn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from eagle_fsd.autotune.step_costs import measure_forwards, star_tree
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import Bench, head_like, prompts_of, tiny_model
from eagle_fsd.evaluation.gpu.runner import Findings, LeftOut
from eagle_fsd.runtime.flash_attention import flash_available
from eagle_fsd.runtime.step_recorder import Stepper
from eagle_fsd.runtime.timing import median_seconds
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

CONTEXTS = (256, 4096)
BEAM = 10  # the paper's
TREES = (TreeConfig(1), TreeConfig(16, 5, 8), TreeConfig(32, 6, 8), TreeConfig(60, 6, 10))
FLASH_TOLERANCE = 0.05  # relative, between kernels in bfloat16
STEPS_BEFORE, STEPS = 4, 16
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
ROOM = 256  # positions behind a context for what is drafted and emitted there
NEEDED_8B = 24 * 10**9  # bytes: 16 of weights, the rest for its head, caches, prompts and recordings


def costs_in_bfloat16(bench: Bench) -> Findings:
    """Time the real target and its head in bfloat16."""
    return costs(bench, lambda stepper: bench.real_engine(torch.bfloat16, stepper))


def costs_in_float32(bench: Bench) -> Findings:
    """Time the real target and its head in float32."""
    return costs(bench, lambda stepper: bench.real_engine(torch.float32, stepper))


def costs_of_llama_8b(bench: Bench) -> Findings:
    """Time a random target of Llama-3-8B's shape in bfloat16 with a random head of its shape."""
    if not bench.on_gpu:
        raise LeftOut("a target of eight billion weights is for a GPU")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(bench.device)
    if free < NEEDED_8B:
        raise LeftOut(f"it needs {NEEDED_8B / 1e9:.0f} GB of free memory and there are {free / 1e9:.0f}")
    model = random_llama(LLAMA_8B, bench.device, torch.bfloat16)
    return costs(bench, lambda stepper: random_engine(model, stepper))


def random_llama(
    sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Return a Llama of these sizes whose weights are drawn on the device, in its dtype and nowhere else."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model("llama", **sizes, **ends)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


def random_engine(model: transformers.PreTrainedModel, stepper: Stepper) -> EagleFSD:
    """Return a model with a random head of its shape and dtype, which drafts nothing that is accepted."""
    target = TargetModel(model, stepper)
    head = head_like(target.config, target.device, target.dtype)
    return EagleFSD(target, head, None, "random", "random, of the target's shape")


def costs(bench: Bench, make_engine: Callable[[Stepper], EagleFSD]) -> Findings:
    """Time an engine with graphs off and on: milliseconds, by context."""
    modes: dict[str, Any] = {}
    rows: list[list[str]] = []
    titles: list[str] = []
    for mode, stepper in bench.modes().items():
        record = getattr(stepper, "record", None)  # asked now: a stepper that gives up forgets it
        engine = make_engine(stepper)
        before = torch.cuda.memory_allocated(bench.device) if bench.on_gpu else 0
        longest = engine.target.max_positions - ROOM
        contexts = [context for context in ((32,) if bench.quick else CONTEXTS) if context <= longest]
        if not contexts:
            raise LeftOut(
                f"the target has {engine.target.max_positions} positions, too few for {CONTEXTS[0]}"
            )
        modes[mode] = {}
        for context in contexts:
            cell = {**parts_of_a_step(engine, context), "step": whole_steps(bench, engine, context)}
            modes[mode][str(context)] = cell
            times = {f"{kind} {size}": value for kind in cell for size, value in cell[kind].items()}
            titles = ["", "context", *times]
            rows.append([mode, str(context), *(f"{value:.2f}" for value in times.values())])
        if record is not None:
            modes[mode]["recorded"] = record.counts()
        if bench.on_gpu:
            modes[mode]["bytes_more"] = torch.cuda.memory_allocated(bench.device) - before
    recorded = all(mode["recorded"]["replays"] for mode in modes.values() if "recorded" in mode)
    said = "; ".join(
        f"{mode}: {', '.join(f'{tree} {value:.2f}' for tree, value in one[str(contexts[0])]['step'].items())}"
        for mode, one in modes.items()
    )
    said = f"milliseconds of a step with {contexts[0]} tokens behind it, {said}"
    return {
        "ok": recorded,
        "summary": said + ("" if recorded else "; nothing was replayed"),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "head": engine.ea_model,
        "drafted": engine.drafter.tokens,
        "modes": modes,
        "table": {"titles": titles, "rows": rows},
        "label": "milliseconds, medians: verify forwards by width, drafts by levels, whole steps by tree",
    }


def parts_of_a_step(engine: EagleFSD, context: int) -> dict[str, dict[str, float]]:
    """Time a verify forward by width and a draft by its levels, in milliseconds, behind `context` tokens."""
    beam = min(BEAM, engine.drafter.tokens)
    found, _ = measure_forwards(engine.target, engine.drafter, [beam], 1, context)
    first, further = found.draft[beam]
    return {
        "verify": {str(width): round(1000 * seconds, 4) for width, seconds in found.verify.items()},
        "draft": {"first level": round(1000 * first, 4), "further levels": round(1000 * further, 4)},
    }


def whole_steps(bench: Bench, engine: EagleFSD, context: int) -> dict[str, float]:
    """Time a step of the loop by tree, in milliseconds: draft, verify, accept, keep and Python between."""
    trees = TREES[:2] if bench.quick else TREES
    return {str(tree): step_milliseconds(engine, context, tree) for tree in trees}


def step_milliseconds(engine: EagleFSD, context: int, tree: TreeConfig) -> float:
    """Time one tree's steps. A step ends when its tokens have come to the host, which waits for them."""
    ids = torch.tensor(prompts_of([context], min(engine.target.vocab_size, 1000)))
    most = (STEPS_BEFORE + STEPS) * (tree.depth + 1)
    steps = iter(engine.stream_batch(ids, max_new_tokens=most, tree=tree, eos_token_id=()).steps)
    for _ in range(STEPS_BEFORE):
        next(steps)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        if next(steps, None) is None:
            break
        seconds.append(time.perf_counter() - start)
    steps.close()
    return round(1000 * statistics.median(seconds), 4)


def flash_attention(bench: Bench) -> Findings:
    """Compare a tree behind a prefix with flash-attn and without: the same logits, and what each costs."""
    dtype = torch.bfloat16
    if not flash_available(bench.device, dtype):
        raise LeftOut("flash-attn is not installed, or does not run on this device")
    sizes = {"vocab_size": 8192, "hidden_size": 512, "layers": 4, "positions": 2**15}
    target = TargetModel(tiny_model("llama", bench.device, dtype, **sizes))
    if not target.flash:
        return {"ok": False, "summary": "it is installed, and a tiny Llama was not admitted with it"}
    logits, times = {}, {}
    for flash in (False, True):
        target.flash = flash
        logits[flash], times["with" if flash else "without"] = behind(target, 16384)
    difference = float((logits[True] - logits[False]).norm() / logits[False].norm())
    said = f"relative difference {difference:.2g}"
    return {"ok": difference < FLASH_TOLERANCE, "summary": said, "milliseconds": times}


@torch.inference_mode()
def behind(target: TargetModel, context: int) -> tuple[Tensor, float]:
    """Return the logits of a tree of 32 nodes behind a prompt, and the milliseconds of its forward."""
    prompt = torch.tensor(prompts_of([context], target.vocab_size), device=target.device)
    session = TargetSession(target, 1, context + 64)
    session.prefill(prompt, [context])
    tree = star_tree(prompt[:, -1], 32, target.vocab_size)
    return session.verify(tree)[0].clone(), 1000 * median_seconds(lambda: session.verify(tree), target.device)
