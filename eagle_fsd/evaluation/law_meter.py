"""How far a rule's own law is from the target's, summed over the tokens of texts while they are made."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from eagle_fsd.acceptance import Verdict, Verified
from eagle_fsd.law import distances, path_laws


class LawMeter:
    """An observer of one batch: sums of KL(law || p) and TV(law, p) in every context that got a token.

    p is the target's law after the user's warpers. kl, tv: by row. seconds: what looking took, which is not
    the decoding's.
    """

    def __init__(self, mode: str, rows: int) -> None:
        self.mode = mode
        self.kl = [0.0] * rows
        self.tv = [0.0] * rows
        self.seconds = 0.0

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        if verdict.chances is None:
            return
        start = time.perf_counter()
        counts = torch.tensor(list(emitted.values()), device=verdict.path.device)
        inside = torch.arange(verdict.path.shape[1], device=counts.device) < counts[:, None]  # [B, D]
        kl, tv = (
            torch.where(inside, each, 0.0).sum(1).tolist()
            for each in distances(*path_laws(verified, verdict, self.mode))
        )
        for row, its_kl, its_tv in zip(emitted, kl, tv, strict=True):
            self.kl[row] += its_kl
            self.tv[row] += its_tv
        self.seconds += time.perf_counter() - start

    def row(self, row: int) -> dict[str, Any]:
        """The sums of a row as JSON can hold them: an infinite KL is null."""
        kl = self.kl[row] if math.isfinite(self.kl[row]) else None
        return {"law": {"kl": kl, "tv": self.tv[row]}}
