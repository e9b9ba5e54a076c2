"""Parts of a GPU check about texts: against Hugging Face's, in half precision, in threads, and sampled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.commands.greedy import compare, reference
from eagle_fsd.evaluation.gpu.bench import (
    FAMILIES,
    Bench,
    Findings,
    engine_of,
    ids_of,
    prompts_of,
    tiny_model,
    verdict_on,
)
from eagle_fsd.evaluation.gpu.steps import TREE
from eagle_fsd.evaluation.prompt_sets import answer
from eagle_fsd.runtime.step_recorder import EAGER

RAGGED = [5, 12, 3, 9]
TREES = (TREE, TreeConfig(16, 5, 4), TreeConfig(1))  # the first one for every family
FLOAT_TIE = 1e-3  # between logits that kernels of float32 for one row and for several may order otherwise
HALF_TIE = 0.25  # between logits of 16 to 32, where two numbers of bfloat16 are 0.125 apart
LEAST_P = 1e-4  # a right program has a smaller p-value once in ten thousand tests
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
    half_tie: float = -1.0,
) -> Findings:
    """Count equal texts over trees and batch sizes, and tau by tree.

    A text that parts where the two best logits tie is not equal, and not wrong. half_tie: nor is one where
    they are as near as this, whatever it took.
    """
    cell: Findings = {"texts": 0, "equal": 0, "wrong": 0, "gaps": [], "tau": {}}
    for tree, batch in product(trees, batches):
        parted, stats = compare(engine, prompts, expected, tree, batch, tokens)
        cell["texts"] += len(prompts)
        cell["equal"] += len(prompts) - len(parted)
        cell["wrong"] += sum(not (one.excused(FLOAT_TIE) or one.gap <= half_tie) for one in parted)
        cell["gaps"] += [one.gap for one in parted]
        cell["tau"][str(tree)] = round(stats.tau, 3)
    return cell


def summed_up(cells: dict[str, Findings]) -> Findings:
    """Sum up cells of texts, of which some may be wrong."""
    texts, equal = (sum(cell[name] for cell in cells.values()) for name in ("texts", "equal"))
    bad = sorted(name for name, cell in cells.items() if cell["wrong"])
    return verdict_on(cells, bad, f"{equal} of {texts} texts equal", "wrong")


def rules_in_turn(bench: Bench) -> Findings:
    """Let one engine write with rules, trees and temperatures in turn, as a server does, and then once more.

    Its texts must be those of an engine without graphs: what was recorded first must not spoil what is
    recorded later.
    """
    model, (ids, mask) = tiny_model("llama", bench.device), ids_of(RAGGED[:2])
    without, recorded = engine_of(model, EAGER), engine_of(model, bench.graphs())
    rules = ("lossless", "js:0.5", "js:0.5:paper:max_consecutive=1", "typical:0.3")
    trees, rules = (TREES[:1], rules[:2]) if bench.quick else (TREES, rules)
    cells: dict[str, Findings] = {}
    for _ in range(2):
        for tree, rule, heat in product(trees, rules, (0.0, 0.8)):
            name = f"{tree}, {rule}, {heat}"
            how = {"rule": parse_rule(rule), "tree": tree, "temperature": heat, "seed": 1}
            wanted, found = (
                one.generate(ids, mask, max_new_tokens=8 if bench.quick else 24, **how).new_tokens
                for one in (without, recorded)
            )
            cell = cells.setdefault(name, {"texts": 0, "equal": 0, "wrong": 0})
            cell["texts"] += len(wanted)
            cell["equal"] += sum(mine == its for mine, its in zip(found, wanted, strict=True))
            cell["wrong"] = cell["texts"] - cell["equal"]
    return summed_up(cells)


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


def distribution(bench: Bench) -> Findings:
    """Test sampled tokens and pairs of a tiny model against its softmax, warped by Hugging Face's warpers."""
    rows, rounds, vocab = (64, 8, 24) if bench.quick else (256, 24, 24)
    model = tiny_model("llama", bench.device, vocab_size=vocab)
    prompt = prompts_of([6], vocab)[0]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)])
    p_first, p_pair = distribution_of(model, prompt, warpers)
    other, _ = distribution_of(model, prompt, LogitsProcessorList())
    cells: dict[str, Any] = {}
    for mode, engine in bench.engines_of(model).items():
        ids = torch.tensor([prompt]).expand(rows, -1)
        counts, accepts = torch.zeros(vocab, vocab, dtype=torch.float64), 0
        for number in range(rounds):
            how = {"temperature": 0.8, "top_p": 0.9, "tree": TreeConfig(13, 2, 4), "seed": number * rows}
            made = engine.generate(ids, max_new_tokens=2, **how)
            for first, second in made.new_tokens:
                counts[first, second] += 1
            accepts += sum(stats.exact_accepts for stats in made.stats)
        cells[mode] = {
            "texts": rows * rounds,
            "accepted_drafts": accepts,
            "p_first": goodness_of_fit(counts.sum(1), p_first),
            "p_pair": goodness_of_fit(counts.flatten(), p_pair.flatten()),
            "p_first_of_another_distribution": goodness_of_fit(counts.sum(1), other),
        }
    least = min(min(cell["p_first"], cell["p_pair"]) for cell in cells.values())
    told = max(cell["p_first_of_another_distribution"] for cell in cells.values())
    drafts = all(cell["accepted_drafts"] for cell in cells.values())
    return {
        "ok": least >= LEAST_P and told < LEAST_P and drafts,
        "summary": f"smallest p-value {least:.3g} (of the unwarped distribution {told:.1g})"
        + ("" if drafts else "; no draft was ever accepted, which shows nothing"),
        "cells": cells,
    }


@torch.inference_mode()
def distribution_of(model: Any, prompt: list[int], warpers: LogitsProcessorList) -> tuple[Tensor, Tensor]:
    """Return the distributions of the next token [V] and of the next two [V, V], by plain forwards."""
    device = model.device
    first = model(input_ids=torch.tensor([prompt], device=device)).logits[:, -1].float()
    vocab = first.shape[-1]
    longer = torch.tensor([[*prompt, token] for token in range(vocab)], device=device)
    second = model(input_ids=longer).logits[:, -1].float()  # [V, V]
    p_first, p_second = (warpers(None, logits).double().softmax(-1).cpu() for logits in (first, second))
    return p_first[0], p_first[0][:, None] * p_second


def goodness_of_fit(counts: Tensor, wanted: Tensor) -> float:
    """Return the p-value of Pearson's chi-square test of counts [n] against probabilities [n].

    Cells that expect fewer than five are one cell together; a count where the probability is 0 gives 0.
    """
    if bool((counts[wanted == 0] > 0).any()):
        return 0.0
    expected = wanted * counts.sum() / wanted.sum()
    place = torch.where(expected >= 5, torch.arange(len(counts)), len(counts))  # the last cell is the rest
    observed, predicted = (place.bincount(each, len(counts) + 1) for each in (counts, expected))
    observed, predicted = observed[predicted > 0], predicted[predicted > 0]
    if len(predicted) < 2:
        return 1.0
    statistic = ((observed - predicted).square() / predicted).sum()
    half = torch.tensor((len(predicted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))
