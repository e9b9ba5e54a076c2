"""Parts of a GPU check about texts: against Hugging Face's, in half precision, in threads, and not finite."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch

from eagle_fsd.autotune.settle import encode_example_prompts
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.commands.greedy import compare, first_difference, reference
from eagle_fsd.evaluation.gpu.bench import (
    FAMILIES,
    Bench,
    Findings,
    engine_of,
    ids_of,
    prompts_of,
    tiny_model,
)
from eagle_fsd.evaluation.gpu.parts.recordings import TREE, problem_of
from eagle_fsd.evaluation.prompt_sets import answer
from eagle_fsd.runtime.step_recorder import EAGER

RAGGED = [5, 12, 3, 9]
TINY_TREES = (TREE, TreeConfig(16, 5, 4), TreeConfig(1))  # the first one for every family
REAL_TREES = (TreeConfig(16, 5, 8), TreeConfig(60, 6, 10))
FLOAT_TIE = 1e-3  # between logits that kernels of float32 for one row and for several may order otherwise
HALF_TIE = 0.25  # between logits of 16 to 32, where two numbers of bfloat16 are 0.125 apart


def equality(bench: Bench) -> Findings:
    """Compare float32 greedy texts of random models of six families with Hugging Face's `generate`."""
    cells: dict[str, Any] = {}
    for family in list(FAMILIES)[: 2 if bench.quick else None]:
        model = tiny_model(family, bench.device)
        engines = {mode: engine_of(model, stepper) for mode, stepper in bench.modes().items()}
        found = compared(engines, TINY_TREES[: None if family == "llama" else 1], 8 if bench.quick else 24)
        cells |= {f"{family}, {mode}": cell for mode, cell in found.items()}
    return summed_up(cells)


def equality_of_target(bench: Bench) -> Findings:
    """Compare the real target's float32 greedy texts with Hugging Face's `generate`."""
    engines = {mode: bench.real_engine(torch.float32, stepper) for mode, stepper in bench.modes().items()}
    cells = compared(engines, REAL_TREES[: 1 if bench.quick else None], 8 if bench.quick else 48)
    return {**summed_up(cells), "head": next(iter(engines.values())).ea_model}


def prompts_for(engine: EagleFSD) -> list[list[int]]:
    return encode_example_prompts(engine.tokenizer) or prompts_of(RAGGED, engine.target.vocab_size)


def compared(engines: dict[str, EagleFSD], trees: Sequence[TreeConfig], tokens: int) -> dict[str, Findings]:
    """Count equal texts by mode over trees and batch sizes, and tau by tree.

    A text that parts where two logits tie is not equal, and not wrong.
    """
    cells, expected = {}, None
    for mode, engine in engines.items():
        prompts = prompts_for(engine)
        expected = expected or reference(engine, prompts, tokens)
        cells[mode] = cell = {"texts": 0, "equal": 0, "wrong": 0, "tau": {}}
        for tree, batch in product(trees, (1, 4)):
            differences, stats = compare(engine, prompts, expected, tree, batch, tokens)
            cell["texts"] += len(prompts)
            cell["equal"] += len(prompts) - len(differences)
            cell["wrong"] += sum(not difference.excused(FLOAT_TIE) for difference in differences)
            cell["tau"][str(tree)] = round(stats.tau, 3)
    return cells


def summed_up(cells: dict[str, Any]) -> Findings:
    """Sum up cells of texts, of which some may be wrong."""
    texts, equal = (sum(cell[name] for cell in cells.values()) for name in ("texts", "equal"))
    bad = sorted(name for name, cell in cells.items() if cell["wrong"])
    said = f"{equal} of {texts} texts equal" + (f"; wrong: {', '.join(bad)}" if bad else "")
    return {"ok": not bad, "summary": said, "cells": cells}


def half_precision(bench: Bench) -> Findings:
    """Compare bfloat16 texts with and without graphs: equal, or parted where two logits nearly tie."""
    model = tiny_model("llama", bench.device, torch.bfloat16)
    return parted(engine_of(model, EAGER), engine_of(model, bench.graphs()), 8 if bench.quick else 48)


def half_precision_of_target(bench: Bench) -> Findings:
    """Compare the real target's bfloat16 texts with and without graphs."""
    engines = (bench.real_engine(torch.bfloat16, stepper) for stepper in (EAGER, bench.graphs()))
    return parted(*engines, 8 if bench.quick else 48)


def parted(without: EagleFSD, with_graphs: EagleFSD, tokens: int) -> Findings:
    """Compare the texts of two engines of one model, and the gaps of the logits where they part."""
    prompts = prompts_for(without)
    options: dict[str, Any] = {"max_new_tokens": tokens, "tree": TreeConfig(16, 5, 8)}
    wanted = answer(without, prompts, **options).new_tokens
    for _ in range(2):  # the second time from the recordings of the first
        made = answer(with_graphs, prompts, **options).new_tokens
    pairs = zip(prompts, wanted, made, strict=True)
    gaps = [first_difference(without, 0, *pair).gap for pair in pairs if pair[1] != pair[2]]
    wrong = sum(gap > HALF_TIE for gap in gaps)
    cell = {"texts": len(prompts), "equal": len(prompts) - len(gaps), "wrong": wrong, "gaps": gaps}
    return summed_up({"bfloat16": cell})


def threads(bench: Bench) -> Findings:
    """Run three engines at once in threads of this process: two of one model, and one of another."""
    tokens, runs = (8, 2) if bench.quick else (32, 6)
    llama, qwen3 = (tiny_model(family, bench.device) for family in ("llama", "qwen3"))
    together = threading.Barrier(3)

    def text(engine: EagleFSD) -> list[list[int]]:
        return answer(engine, prompts_of(RAGGED), max_new_tokens=tokens, tree=TREE).new_tokens

    def texts(engine: EagleFSD) -> list[list[list[int]]]:
        together.wait(timeout=60)
        return [text(engine) for _ in range(runs)]

    right = {}
    for mode in bench.modes():
        alone, engines = (
            [engine_of(one, bench.modes()[mode]) for one in (llama, llama, qwen3)] for _ in "12"
        )
        wanted = list(map(text, alone))
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(texts, engines))
        right[mode] = [mine.count(one) for mine, one in zip(made, wanted, strict=True)]
    ok = all(set(counts) == {runs} for counts in right.values())
    return {"ok": ok, "summary": f"right texts of {runs} by thread: {right}", "right": right}


def overflow(bench: Bench) -> Findings:
    """Check that logits that overflow in half precision end in an error of one line, and not in a text."""
    ids, mask = ids_of([5, 9])
    cells: dict[str, list[str | None]] = {}
    for dtype, (mode, stepper) in product((torch.bfloat16, torch.float16), bench.modes().items()):
        if bench.quick and dtype == torch.float16:
            continue
        engine = engine_of(tiny_model("llama", bench.device, dtype), stepper)
        with torch.no_grad():  # after the model was admitted: a NaN would not have been
            engine.target.lm_head.weight.mul_(torch.finfo(dtype).max)
        for temperature in (0.0, 1.0):
            options = {"max_new_tokens": 8, "temperature": temperature, "tree": TREE}
            write = functools.partial(engine.generate, ids, mask, **options)
            name = f"{str(dtype).removeprefix('torch.')}, {mode}, temperature {temperature:g}"
            # With graphs a step is run, recorded and replayed.
            cells[name] = [problem_of(write) for _ in range(3)]
    silent = [name for name, said in cells.items() if not all(one and "finite" in one for one in said)]
    said = f"an error in {len(cells) - len(silent)} of {len(cells)} settings"
    said += f"; a text or another error: {', '.join(silent)}" if silent else ""
    return {"ok": not silent, "summary": said, "cells": cells}
