"""What rules would have done with the trees of lossless texts, in closed form: one text serves all rules.

At a verified tree the target's p is known at every node, and a rule's chances follow from it. So the expected
number of tokens that the step would emit under the rule, and the expected TV and KL of their distributions,
need no draw: with g(c) the probability that the walk goes from a node to its child c,

    reach(root) = 1,  reach(c) = reach(parent) g(c),  tokens = sum of reach(n),  TV = sum of reach(n) TV(n).

Rules are compared on the same trees, so that the luck of their own draws and texts does not tell them apart.
What a rule's text would do to later trees is left out: compare few rules by texts of their own as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified, choices_of
from eagle_fsd.acceptance.output_distribution import output_distribution
from eagle_fsd.acceptance.rule_names import describe
from eagle_fsd.core.config import FIRST_FAILURE
from eagle_fsd.evaluation.measure.observers import Meter


class Expected(NamedTuple):
    """What a step is expected to emit: tokens, and their sums of TV(r, p) and KL(r || p): [B] each."""

    tokens: Tensor
    tv: Tensor
    kl: Tensor


def expected_step(rule: AcceptanceRule, verified: Verified) -> Expected:
    """Return what this rule does with a tree, on average over the target's draws and its own.

    max_consecutive and exact_prefix are not known here; see `StepMeter`.
    """
    tree = verified.tree
    chances, weak = choices_of(rule, verified)
    r = output_distribution(verified, chances, weak, rule.mode)
    goes = r.token  # from the parent to the node; not of the root
    if rule.mode == FIRST_FAILURE and chances is not None:  # without any, the walk follows the draws
        goes = chances.double()
    reach = start = torch.zeros_like(goes)
    start[:, 0] = 1.0  # fillers have no parent either, and are never reached
    for _ in range(tree.depth):  # each round carries reaches one level down
        reach = torch.where(tree.parents < 0, start, verified.at_parent(reach) * goes)
    return Expected(reach.sum(-1), (reach * r.tv).sum(-1), torch.where(reach > 0, reach * r.kl, 0.0).sum(-1))


class StepMeter(Meter):
    """A meter of a lossless batch: what each rule is expected to do in its steps, by row.

    Raises ValueError for a rule whose guards depend on the text so far.
    """

    def __init__(self, rules: Sequence[AcceptanceRule], rows: int) -> None:
        for rule in rules:
            if rule.max_consecutive is not None or rule.exact_prefix:
                raise ValueError(
                    f"rule is {describe(rule)}: max_consecutive and exact_prefix depend on what was accepted "
                    "before, which lossless texts do not say; leave them out, or sweep without --same-trees"
                )
        self.rules = rules
        self.sums = torch.zeros(rows, len(rules), 3, dtype=torch.float64)

    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        columns = [torch.stack(expected_step(rule, verified), dim=-1) for rule in self.rules]
        self.sums[list(emitted)] += torch.stack(columns, dim=1).cpu()

    def row(self, row: int) -> dict[str, Any]:
        """Return every rule's expected tokens and distances as JSON can hold them: an infinite KL is null."""
        found = []
        for rule, (tokens, tv, kl) in zip(self.rules, self.sums[row].tolist(), strict=True):
            law = {"tv": tv, "kl": kl if math.isfinite(kl) else None}
            found.append({"rule": describe(rule), "new_tokens": tokens, "law": law})
        return {"expected": found}
