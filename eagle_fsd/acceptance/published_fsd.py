"""Fuzzy Speculative Decoding as it was published (Holsman et al., arXiv 2502.20704), for comparison.

`Fuzzy` has guards, trees and a mode that keeps the target's own draws. The published algorithm has none of
them: one chain of greedy drafts is accepted up to the first token where the distributions are too far apart,
and the target draws that one. With a draft model, a chain of five and the sampling of the paper's
experiments, this rule is that algorithm; see GenerationOptions.fsd_paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eagle_fsd.acceptance.accept import Verified, likeliest_chances
from eagle_fsd.acceptance.divergence import get_divergence
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.checks import require_number
from eagle_fsd.core.config import FIRST_FAILURE


@dataclass(frozen=True)
class PublishedFSD:
    """Follow the likeliest child while divergence(p, q) <= threshold, and end the step where it is larger.

    threshold: in nats of `divergence`, on raw distributions at temperature 1; 0 is lossless, as it is for
    Fuzzy. The token where the step ends is the target's draw, and a child that equals it is not followed any
    further. There are no guards: a drafted token may end the text, and it may be one that the user's top-k or
    top-p rule out. In a tree, only the likeliest path is followed.
    """

    mode: ClassVar[str] = FIRST_FAILURE
    max_consecutive: ClassVar[int | None] = None
    exact_prefix: ClassVar[int] = 0

    threshold: float = 0.3
    divergence: str = "js"

    def __post_init__(self) -> None:
        require_number(
            "threshold", self.threshold, 0.0, math.inf, "0 is lossless, inf always follows the draft"
        )
        get_divergence(self.divergence)

    def chances(self, verified: Verified) -> Tensor | None:
        tree = verified.tree
        if self.threshold == 0 or not tree.owners.shape[1]:
            return None
        close = Fuzzy(self.threshold, self.divergence).is_close(verified)
        eligible = verified.at_parent(close) & (tree.parents >= 0)
        return likeliest_chances(tree, eligible, tree.node_log_q())
