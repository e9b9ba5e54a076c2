"""The part of a GPU check about sampled texts: they have the target's own distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.evaluation.gpu.bench import Bench, Findings, prompts_of, tiny_model

LEAST_P = 1e-4  # a right program has a smaller p-value once in ten thousand tests


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
