"""Which rules a sweep runs: lists of rules, each as `parse_rule` reads it, lossless first."""

from __future__ import annotations

from itertools import product

JS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6)
REVERSE_KL = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 3.0)
MODES = ("hybrid", "paper")
OTHERS = (
    *("typical:0.6:0.6", "typical:0.4:0.3", "typical:0.3:0.09", "typical:0.2:0.05", "typical:0.1:0.02"),
    *("relaxed_topk:2:0.05", "relaxed_topk:2:0.2", "relaxed_topk:3:0.4", "relaxed_topk:5:0.6"),
    "relaxed_topk:10:0.9",
    *("cactus:0.003", "cactus:0.01", "cactus:0.03", "cactus:0.1", "cactus:0.5"),
    *("ensemble:0.95", "ensemble:0.9", "ensemble:0.8", "ensemble:0.6", "ensemble:0.3"),
    *("sglang:1:0.9", "sglang:1:0.7", "sglang:0.5:1", "sglang:0.3:1", "sglang:0.1:1"),
)
AHEAD = tuple(f"js:{t}:min_gain=0.7" for t in (0.15, 0.2, 0.3, 0.45, 0.6))

GRIDS: dict[str, tuple[str, ...]] = {
    # FSD's two thresholds in both modes, and where it looks ahead, against every other rule.
    "frontier": (
        "lossless",
        *(f"js:{t}:{mode}" for mode, t in product(MODES, JS)),
        *(f"reverse_kl:{t}:{mode}" for mode, t in product(MODES, REVERSE_KL)),
        *AHEAD,
        *OTHERS,
    ),
    # Minutes, not hours: a few of each.
    "quick": (
        *("lossless", "js:0.1", "js:0.3", "js:0.6", "js:0.6:paper", "reverse_kl:0.4", "reverse_kl:1.5"),
        *(f"js:{t}:{mode}:target" for mode, t in product(MODES, (0.1, 0.3, 0.6))),
        *("js:0.3:min_gain=0.7", "js:0.6:min_gain=0.7"),
        *("typical:0.3:0.09", "relaxed_topk:3:0.4", "cactus:0.1", "ensemble:0.8"),
    ),
}
