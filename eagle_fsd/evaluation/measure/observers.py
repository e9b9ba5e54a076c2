"""How far a rule's next-token distribution is from the target's, and how likely the target finds a text."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.output_distribution import output_distribution
from eagle_fsd.core.padding import pad_right
from eagle_fsd.decoding.prompts.prefill import read_prompts
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession


class Meter(ABC):
    """An observer of one batch that has something to say of each row: fields of its JSON object.

    seconds: what observing took, which is not the decoding's.
    """

    seconds = 0.0

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        start = time.perf_counter()
        self.see(verified, verdict, emitted)
        self.seconds += time.perf_counter() - start

    @abstractmethod
    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        """Look at a step. emitted: by row, how many tokens the step gave it."""

    @abstractmethod
    def row(self, row: int) -> dict[str, Any]:
        """Return what a row's JSON object says."""


class DistanceMeter(Meter):
    """A meter of KL(r || p) and TV(r, p), summed over every context that got a token.

    r is the rule's next-token distribution, p the target's after the user's warpers. kl, tv: by row.
    fuzzy_at: by row, the places of the tokens that were fuzzy accepts.
    """

    def __init__(self, mode: str, rows: int) -> None:
        self.mode = mode
        self.kl = [0.0] * rows
        self.tv = [0.0] * rows
        self.fuzzy_at: list[list[int]] = [[] for _ in range(rows)]
        self._tokens = [0] * rows

    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        for row, nodes in zip(emitted, verdict.fuzzy.tolist(), strict=True):
            start, count = self._tokens[row], emitted[row]
            # A node's token is emitted in its parent's context, so that the root has no part in it.
            self.fuzzy_at[row] += [start + place for place, fuzzy in enumerate(nodes[1 : count + 1]) if fuzzy]
            self._tokens[row] += count
        if verdict.chances is None:
            return
        r = output_distribution(verified, verdict.chances, verdict.weak, self.mode)
        path = verdict.path.clamp(min=0)  # [B, D]
        counts = torch.tensor(list(emitted.values()), device=path.device)
        moved = (torch.arange(path.shape[1], device=path.device) < counts[:, None]) & verdict.asked
        kl, tv = (torch.where(moved, each.gather(1, path), 0.0).sum(1).tolist() for each in (r.kl, r.tv))
        for row, its_kl, its_tv in zip(emitted, kl, tv, strict=True):
            self.kl[row] += its_kl
            self.tv[row] += its_tv

    def row(self, row: int) -> dict[str, Any]:
        """Return the sums of a row as JSON can hold them: an infinite KL is null."""
        kl = self.kl[row] if math.isfinite(self.kl[row]) else None
        return {"law": {"kl": kl, "tv": self.tv[row]}, "fuzzy_at": self.fuzzy_at[row]}


@torch.inference_mode()
def likelihoods(
    target: TargetModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float | None]:
    """Return the mean log-probability of every answer's tokens, by the target at temperature 1, in nats.

    None for an answer without tokens.
    """
    found: list[float | None] = []
    for answer, features in zip(answers, answer_features(target, prompts, answers), strict=True):
        log_p = target.logits(features).log_softmax(-1)  # of one answer at a time: they are large
        mine = log_p.gather(1, torch.tensor(answer, dtype=torch.int64, device=target.device)[:, None])
        found.append(float(mine.mean()) if answer else None)
    return found


@torch.inference_mode()
def answer_features(
    target: TargetModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return the features [n, d] before each of an answer's n tokens, which are read as parts of prompts."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    counts = [len(text) - 1 for text in texts]
    session = TargetSession(target, len(texts), max(counts))
    features = read_prompts(pad_right(texts, 0)[:, :-1].to(target.device), counts, session)
    return [
        mine[len(prompt) - 1 : count] for mine, prompt, count in zip(features, prompts, counts, strict=True)
    ]
