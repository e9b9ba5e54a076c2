"""Raw rows made up from a known truth, as a runner would write them, for reports and their tests.

A sample has a length, a difficulty and a luck of its own. They are the same for every rule on the same sample
and seed, so paired differences are far less noisy than the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SAMPLINGS = {
    0.0: {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
    0.6: {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
    1.0: {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
TREE = {"total_tokens": 16, "depth": 5, "top_k": 8}
STEP_SECONDS = 0.1  # of every step that drafts; plain decoding takes PLAIN_SECONDS
PLAIN_SECONDS = 0.05
MADE = {
    "command": "python eval/sweep.py --output runs/sweep",
    "commit": "0123456789ab",
    "date": "2026-11-21T12:00:00+00:00",
    "eagle_fsd": "0.1.0",
    "python": "3.11.9",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "device": "x86_64",
    "threads": 2,
}


@dataclass(frozen=True)
class Truth:
    """The true values of a rule: tau, the mean log p per token, TV per token, the chance of the score."""

    tau: float = 2.0
    log_p: float = -0.6
    tv: float = 0.0
    score: float = 0.4
    fuzzy_share: float = 0.0
    longer: float = 1.0  # lengths against lossless's


LOSSLESS: dict[str, Any] = {"name": "lossless"}


def fuzzy(threshold: float, **fields: Any) -> dict[str, Any]:
    return {
        "name": "fuzzy",
        "threshold": threshold,
        "divergence": "js",
        "mode": "hybrid",
        "child": "draft",
        "min_p": 0.0,
        "max_overshoot": "inf",
        "max_consecutive": None,
        "exact_eos": True,
        "exact_prefix": 0,
        **fields,
    }


def typical(epsilon: float, delta: float) -> dict[str, Any]:
    guards = {"max_consecutive": None, "exact_eos": True, "exact_prefix": 0}
    return {"name": "typical", "epsilon": epsilon, "delta": delta, "mode": "hybrid", **guards}


def cell_rows(
    rule: Mapping[str, Any],
    truth: Truth,
    samples: int | Sequence[int] = 40,
    *,
    task: str = "ifeval",
    temperature: float = 0.6,
    tree: Mapping[str, int] = TREE,
    seeds: Sequence[int] = (0,),
    noise: float = 0.02,
    limit: int = 256,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Return the rows of one cell. noise: the standard deviation that a rule adds to a sample's own log p."""
    kind = json.dumps([dict(rule), task, temperature, dict(tree)], sort_keys=True)
    key = f"{abs(hash_of(kind)):016x}"[:16]
    rows = []
    for place in range(samples) if isinstance(samples, int) else samples:
        for base in seeds:
            seed = base + place
            shared = np.random.default_rng([hash_of(task), place, seed])  # of all rules alike
            own = np.random.default_rng([hash_of(kind), place, seed])
            length = int(np.clip(shared.lognormal(4.2, 0.5) * truth.longer, 8, limit))
            difficulty, luck = shared.normal(0, 0.25), shared.random()
            steps = max(1, round(length / (truth.tau * np.exp(0.15 * shared.normal() + 0.03 * own.normal()))))
            plain = tree["total_tokens"] == 1
            steps = length if plain else steps
            seconds = steps * (PLAIN_SECONDS if plain else STEP_SECONDS) * np.exp(0.02 * own.normal())
            greedy = temperature == 0 and truth.tv > 0
            passed = float(luck < truth.score)
            rows.append(
                {
                    "key": key,
                    "task": task,
                    "version": 1,
                    "sample": str(1000 + place),
                    "seed": seed,
                    "rule": dict(rule),
                    "sampling": SAMPLINGS[temperature],
                    "tree": dict(tree),
                    "max_new_tokens": limit,
                    "dtype": "float32",
                    "base_model": "SmolLM2-135M-Instruct",
                    "ea_model": "weights/smollm2-135m-instruct",
                    "draft_vocab_size": None,
                    "prompt_tokens": 31,
                    "token_ids": [1] * length,
                    "text": "made up",
                    "finish_reason": "length" if length == limit else "stop",
                    "truncated": False,
                    "steps": steps,
                    "new_tokens": length,
                    "exact_accepts": max(0, length - steps),
                    "fuzzy_accepts": round(truth.fuzzy_share * length),
                    "seconds": float(seconds),
                    "batch_size": 1,
                    "law": {"kl": None if greedy else 1.6 * truth.tv * length, "tv": truth.tv * length},
                    "log_p": truth.log_p + difficulty + noise * own.normal(),
                    "scores": {"strict": passed, "loose": float(luck < truth.score + 0.05)},
                    **MADE,
                    **fields,
                }
            )
    return rows


def hash_of(text: str) -> int:
    """Return a number that is the same for the same text in every process."""
    return int.from_bytes(text.encode(), "little") % (2**61 - 1)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
