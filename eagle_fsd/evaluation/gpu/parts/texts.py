"""Parts of a GPU check about greedy texts: against Hugging Face's, in half precision, and in two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from eagle_fsd.autotune.settle import encode_example_prompts
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import FAMILIES, Bench, engine_of, ids_of, prompts_of, tiny_model
from eagle_fsd.evaluation.gpu.runner import Findings, LeftOut
from eagle_fsd.evaluation.measure.greedy_equality import compare, first_difference, reference
from eagle_fsd.runtime.step_recorder import EAGER

RAGGED = [5, 12, 3, 9]
TINY_TREES = (TreeConfig(8, 3, 3), TreeConfig(16, 5, 4), TreeConfig(1))  # the first one for every family
REAL_TREES = (TreeConfig(16, 5, 8), TreeConfig(60, 6, 10))
FLOAT_TIE = 1e-3  # between logits that kernels of float32 for one row and for several may order otherwise
HALF_TIE = 0.25  # between logits of 16 to 32, where two numbers of bfloat16 are 0.125 apart


def equality(bench: Bench) -> Findings:
    """Compare float32 greedy texts of random models of six families with Hugging Face's `generate`."""
    tokens = 8 if bench.quick else 24
    families = list(FAMILIES)[:2] if bench.quick else list(FAMILIES)
    cells: dict[str, Any] = {}
    for family in families:
        model = tiny_model(family, bench.device)
        trees = TINY_TREES if family == families[0] else TINY_TREES[:1]
        expected = None
        for mode, stepper in bench.modes().items():
            engine = engine_of(model, stepper)
            prompts = prompts_of(RAGGED)
            expected = expected or reference(engine, prompts, tokens)
            cells[f"{family}, {mode}"] = compared(engine, prompts, expected, trees, tokens)
    return counted(cells)


def equality_of_target(bench: Bench) -> Findings:
    """Compare the real target's float32 greedy texts with Hugging Face's `generate`."""
    tokens = 8 if bench.quick else 48
    trees = REAL_TREES[:1] if bench.quick else REAL_TREES
    cells: dict[str, Any] = {}
    expected = None
    for mode, stepper in bench.modes().items():
        engine = bench.real_engine(torch.float32, stepper)
        prompts = encode_example_prompts(engine.tokenizer) or prompts_of(RAGGED, engine.target.vocab_size)
        expected = expected or reference(engine, prompts, tokens)
        cells[mode] = compared(engine, prompts, expected, trees, tokens)
    return {**counted(cells), "head": engine.ea_model, "tau": cells[mode]["tau"]}


def counted(cells: dict[str, Any]) -> Findings:
    """Sum up cells of texts, of which some may be wrong."""
    texts, equal = (sum(cell[name] for cell in cells.values()) for name in ("texts", "equal"))
    bad = sorted(name for name, cell in cells.items() if cell["wrong"])
    said = f"{equal} of {texts} texts equal" + (f"; wrong: {', '.join(bad)}" if bad else "")
    return {"ok": not bad, "summary": said, "cells": cells}


def compared(
    engine: EagleFSD,
    prompts: list[list[int]],
    expected: list[list[int]],
    trees: tuple[TreeConfig, ...],
    tokens: int,
) -> Findings:
    """Count equal texts over trees and batch sizes, and tau by tree.

    A text that parts where two logits tie is not equal, and not wrong.
    """
    texts = equal = wrong = 0
    tau, parted = {}, []
    for tree in trees:
        for batch in (1, 4):
            differences, stats = compare(engine, prompts, expected, tree, batch, tokens)
            texts += len(prompts)
            equal += len(prompts) - len(differences)
            wrong += sum(not difference.excused_by(FLOAT_TIE) for difference in differences)
            parted += [{"tree": str(tree), "batch": batch, **vars(one)} for one in differences]
            tau[str(tree)] = round(stats.tau, 3)
    return {"texts": texts, "equal": equal, "wrong": wrong, "tau": tau, "differences": parted[:4]}


def half_precision(bench: Bench) -> Findings:
    """Compare bfloat16 texts with and without graphs: equal, or parted where two logits nearly tie."""
    tokens = 8 if bench.quick else 48
    cells, missing = {}, []
    model = tiny_model("llama", bench.device, torch.bfloat16)
    pairs = {"tiny llama": tuple(engine_of(model, stepper) for stepper in (EAGER, bench.graphs()))}
    try:
        pairs["the real target"] = tuple(
            bench.real_engine(torch.bfloat16, stepper) for stepper in (EAGER, bench.graphs())
        )
    except LeftOut as reason:
        missing.append(str(reason))
    for name, (without, with_graphs) in pairs.items():
        prompts = encode_example_prompts(without.tokenizer) or prompts_of(RAGGED)
        ids, mask = pad_left(prompts, without.pad_token_id)
        options = {"max_new_tokens": tokens, "tree": TreeConfig(16, 5, 8)}
        wanted = without.generate(ids, mask, **options).new_tokens
        for _ in range(2):  # the second time from the recordings of the first
            made = with_graphs.generate(ids, mask, **options).new_tokens
        gaps = [
            first_difference(without, row, prompts[row], one, other).gap
            for row, (one, other) in enumerate(zip(wanted, made, strict=True))
            if one != other
        ]
        cells[name] = {"texts": len(prompts), "equal": len(prompts) - len(gaps), "gaps": gaps}
        cells[name]["wrong"] = max(gaps, default=0.0) > HALF_TIE
    return {**counted(cells), "left_out": missing}


def threads(bench: Bench) -> Findings:
    """Run three engines at once in threads of this process: two of one model, and one of another."""
    tokens, runs = (8, 2) if bench.quick else (32, 6)
    ids, mask = ids_of(RAGGED)

    def text(engine: EagleFSD) -> list[list[int]]:
        return engine.generate(ids, mask, max_new_tokens=tokens, tree=TreeConfig(8, 3, 3)).new_tokens

    cells: dict[str, Any] = {}
    for mode in bench.modes():
        llama, qwen3 = (tiny_model(family, bench.device) for family in ("llama", "qwen3"))
        models = [llama, llama, qwen3]
        wanted = [text(engine_of(model, bench.modes()[mode])) for model in models]
        engines = [engine_of(model, bench.modes()[mode]) for model in models]
        made, errors = at_once([lambda one=one: text(one) for one in engines], runs)
        right = [texts.count(one) for one, texts in zip(wanted, made, strict=True)]
        named = [model.config._attn_implementation for model in models]
        cells[mode] = {
            "ok": set(right) == {runs} and set(named) == {"sdpa"},
            "right": right,
            "of": runs,
            "errors": errors,
            "attention_after": named,
        }
    said = [f"{name}: {'right' if cell['ok'] else 'wrong'}" for name, cell in cells.items()]
    said += [error for cell in cells.values() for error in cell.get("errors", ())][:1]
    return {
        "ok": all(cell["ok"] for cell in cells.values()),
        "summary": "; ".join(said),
        "cells": cells,
    }


def at_once(works: Sequence[Callable[[], Any]], runs: int) -> tuple[list[list[Any]], list[str]]:
    """Run every work `runs` times in a thread of its own; returns what they return, and their errors."""
    together = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> list[Any]:
        together.wait(timeout=60)
        return [work() for _ in range(runs)]

    with ThreadPoolExecutor(len(works)) as pool:
        made = [pool.submit(run, work) for work in works]
    errors = [f"{type(error).__name__}: {one_line(error, 200)}" for one in made if (error := one.exception())]
    return [[] if one.exception() else one.result() for one in made], errors
