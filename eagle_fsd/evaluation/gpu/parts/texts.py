"""Parts of a GPU check about texts: against Hugging Face's, in half precision, and in threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.commands.greedy import Difference, compare, reference
from eagle_fsd.evaluation.gpu.bench import (
    FAMILIES,
    Bench,
    Findings,
    engine_of,
    prompts_of,
    tiny_model,
    verdict_on,
)
from eagle_fsd.evaluation.gpu.parts.recordings import TREE
from eagle_fsd.evaluation.prompt_sets import answer
from eagle_fsd.runtime.step_recorder import EAGER

RAGGED = [5, 12, 3, 9]
TREES = (TREE, TreeConfig(16, 5, 4), TreeConfig(1))  # the first one for every family
FLOAT_TIE = 1e-3  # between logits that kernels of float32 for one row and for several may order otherwise
HALF_TIE = 0.25  # between logits of 16 to 32, where two numbers of bfloat16 are 0.125 apart
Texts = Sequence[Sequence[int]]


def equality(bench: Bench) -> Findings:
    """Compare float32 greedy texts of random models of six families with Hugging Face's `generate`."""
    cells: dict[str, Findings] = {}
    prompts, tokens = prompts_of(RAGGED), 8 if bench.quick else 24
    for family in list(FAMILIES)[: 2 if bench.quick else None]:
        trees, model = TREES[: None if family == "llama" else 1], tiny_model(family, bench.device)
        expected = reference(engine_of(model, EAGER), prompts, tokens)
        for mode, engine in bench.engines_of(model).items():
            cells[f"{family}, {mode}"] = compared(engine, prompts, expected, trees, (1, 4), tokens)
    return summed_up(cells)


def half_precision(bench: Bench) -> Findings:
    """Compare bfloat16 texts with and without graphs: equal, or parted where two logits nearly tie."""
    model, tree, tokens = tiny_model("llama", bench.device, torch.bfloat16), TreeConfig(16, 5, 8), 48
    without, recorded, prompts = engine_of(model, EAGER), engine_of(model, bench.graphs()), prompts_of(RAGGED)
    wanted = answer(without, prompts, max_new_tokens=tokens, tree=tree).new_tokens
    # The second time from the recordings of the first.
    cell = compared(recorded, prompts, wanted, (tree, tree), (len(prompts),), tokens, HALF_TIE)
    return summed_up({"bfloat16": cell})


def compared(
    engine: EagleFSD,
    prompts: Texts,
    expected: Texts,
    trees: Sequence[TreeConfig],
    batches: Sequence[int],
    tokens: int,
    tie: float = FLOAT_TIE,
) -> Findings:
    """Count equal texts over trees and batch sizes, and tau by tree.

    A text that parts where two logits tie is not equal, and not wrong. In half precision more than two may.
    """
    cell: Findings = {"texts": 0, "equal": 0, "wrong": 0, "gaps": [], "tau": {}}
    for tree, batch in product(trees, batches):
        parted, stats = compare(engine, prompts, expected, tree, batch, tokens)
        cell["texts"] += len(prompts)
        cell["equal"] += len(prompts) - len(parted)
        cell["wrong"] += sum(not tied(difference, tie) for difference in parted)
        cell["gaps"] += [difference.gap for difference in parted]
        cell["tau"][str(tree)] = round(stats.tau, 3)
    return cell


def tied(difference: Difference, tie: float) -> bool:
    return difference.excused(tie) if tie < HALF_TIE else difference.gap <= tie


def summed_up(cells: dict[str, Findings]) -> Findings:
    """Sum up cells of texts, of which some may be wrong."""
    texts, equal = (sum(cell[name] for cell in cells.values()) for name in ("texts", "equal"))
    bad = sorted(name for name, cell in cells.items() if cell["wrong"])
    return verdict_on(cells, bad, f"{equal} of {texts} texts equal", "wrong")


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

    wanted = [text(engine_of(one, EAGER)) for one in (llama, llama, qwen3)]
    right = {}
    for mode in bench.modes():
        engines = [engine_of(one, bench.modes()[mode]) for one in (llama, llama, qwen3)]
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(texts, engines))
        right[mode] = [mine.count(one) for mine, one in zip(made, wanted, strict=True)]
    ok = all(set(counts) == {runs} for counts in right.values())
    return {"ok": ok, "summary": f"right texts of {runs} by thread: {right}", "right": right}
