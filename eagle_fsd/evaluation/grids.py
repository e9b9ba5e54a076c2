"""Which rules a sweep runs: lists of rules, each as `parse_rule` reads it, lossless first."""

from __future__ import annotations

from itertools import product

from eagle_fsd.core.config import CHILDREN

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
DIVERGENT = (
    *("forward_kl:0.2", "forward_kl:0.7", "tv:0.2", "tv:0.4", "ag:0.1", "ag:0.3"),
    *("js_top10:0.2", "reverse_kl_top10:0.4", "forward_kl_top10:0.4", "tv_top10:0.3", "ag_top10:0.2"),
)
GUARDS = (
    *("min_p=0.1", "min_p=0.3", "max_overshoot=1.5", "max_overshoot=3", "min_gain=0.5", "min_gain=1"),
    *("max_consecutive=1", "exact_prefix=16"),
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
    # What else FSD may be asked: every divergence, every child, every guard, around one strictness. Some of
    # the divergences need a draft over all tokens (--full-vocabulary).
    "variants": (
        "lossless",
        *DIVERGENT,
        *(f"js:{t}:{mode}:{c}" for t, mode, c in product((0.2, 0.45), MODES, CHILDREN[1:])),
        *(f"js:0.45:{mode}:{guard}" for mode, guard in product(MODES, GUARDS)),
    ),
    # Minutes, not hours: a few of each.
    "quick": (
        *("lossless", "js:0.1", "js:0.3", "js:0.6", "js:0.6:paper", "reverse_kl:0.4", "reverse_kl:1.5"),
        *(f"js:{t}:{mode}:target" for mode, t in product(MODES, (0.1, 0.3, 0.6))),
        *("js:0.3:min_gain=0.7", "js:0.6:min_gain=0.7"),
        *("typical:0.3:0.09", "relaxed_topk:3:0.4", "cactus:0.1", "ensemble:0.8"),
    ),
}
