"""Which rules a sweep runs: lists of rules, each as `parse_rule` reads it, lossless first."""

from __future__ import annotations

from itertools import product

JS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6)
REVERSE_KL = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 3.0)
OTHERS = (
    *(f"typical:{epsilon}:{delta}" for epsilon, delta in ((0.6, 0.6), (0.4, 0.3), (0.3, 0.09), (0.2, 0.05), (0.1, 0.02))),
    *(f"relaxed_topk:{n}:{margin}" for n, margin in ((2, 0.05), (2, 0.2), (3, 0.4), (5, 0.6), (10, 0.9))),
    *(f"cactus:{delta}" for delta in (0.003, 0.01, 0.03, 0.1, 0.5)),
    *(f"ensemble:{weight}" for weight in (0.95, 0.9, 0.8, 0.6, 0.3)),
    *(f"sglang:{single}:{acc}" for single, acc in ((1, 0.9), (1, 0.7), (0.5, 1), (0.3, 1), (0.1, 1))),
)

GRIDS: dict[str, tuple[str, ...]] = {
    # The frontier: FSD's two thresholds in both modes against every other rule.
    "frontier": (
        "lossless",
        *(f"js:{t}:{mode}" for mode, t in product(("hybrid", "paper"), JS)),
        *(f"reverse_kl:{t}:{mode}" for mode, t in product(("hybrid", "paper"), REVERSE_KL)),
        *OTHERS,
    ),
    # What else FSD may be asked: every divergence, every child, every guard, around one strictness.
    "variants": (
        "lossless",
        *(f"{name}:{t}" for name, ts in {"forward_kl": (0.2, 0.7), "tv": (0.2, 0.4), "ag": (0.1, 0.3)}.items() for t in ts),
        *(f"{name}_top10:{t}" for name, t in (("js", 0.2), ("reverse_kl", 0.4), ("forward_kl", 0.4), ("tv", 0.3), ("ag", 0.2))),
        *(f"js:{t}:{mode}:{child}" for t, mode, child in product((0.2, 0.45), ("hybrid", "paper"), ("likeliest", "target"))),
        *(f"js:0.45:{mode}:draft:{guard}" for mode, guard in product(("hybrid", "paper"), ("min_p=0.1", "min_p=0.3", "max_overshoot=1.5", "max_overshoot=3", "max_consecutive=1", "exact_prefix=16"))),
    ),
    # Minutes, not hours: a few of each.
    "quick": (
        "lossless", "js:0.1", "js:0.3", "js:0.6", "js:0.3:paper", "reverse_kl:0.4", "reverse_kl:1.5", "typical:0.3:0.09",
        "relaxed_topk:3:0.4", "cactus:0.1", "ensemble:0.8",
    ),
}  # fmt: skip
