"""A rule of every kind, with guards, costs and modes."""

from __future__ import annotations

from eagle_fsd import Fuzzy, Lossless, Typical
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, PublishedFSD, RelaxedTopK, SGLang
from eagle_fsd.core.config import COSTS

RULES = [
    Lossless(),
    Fuzzy(0.4, "js_top10", min_p=0.05, max_overshoot=3.0, min_gain=0.2),
    Fuzzy(0.9, "reverse_kl", mode="paper", child="target", max_consecutive=1, exact_prefix=2),
    Fuzzy(float("inf"), "tv", child="likeliest"),
    *(Fuzzy(0.5, price=1.5, cost=cost, mode=mode) for cost in COSTS for mode in ("hybrid", "paper")),
    *(Fuzzy(0.5, price=1.5, cost=cost, mode="swap") for cost in ("tokens", "divergence")),
    *(Typical(), RelaxedTopK(), SGLang(), Cactus(0.5), Ensemble(0.3), FLy(0.0, 1), PublishedFSD(0.4)),
]
