"""How likely a looked-up token is to be accepted, learned while decoding.

Counts alone are no confidence: a context seen once would say 1. So candidates are sorted into cells by their
evidence, and the confidence of a cell is the share of its candidates that turned out right in this text, next
to a prior of WEIGHT candidates. The prior was fitted to greedy answers of SmolLM2-135M-Instruct to prompts of
four kinds: for copied tokens it is a logistic function of the evidence, for others the rate of their class.
Each text learns on its own, so that its trees, and with them its sampled tokens, do not depend on the texts
before and beside it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

WEIGHT = 8.0  # candidates that the prior counts for

# Cells: by match length (0: not copied), contested or not, and what the target's list says of the token.
LENGTHS = (1, 2, 3, 4, 6, 10)  # the least length of every class but the first
PROBS = (0.05, 0.2, 0.5, 0.8)  # the least probability of every class but the first
NO_LIST, NOT_LISTED = 0, 1  # then the classes of PROBS in a list of order 1, then in one of order 2
LISTED = {1: 2, 2: 3 + len(PROBS)}
LIST_CLASSES = 4 + 2 * len(PROBS)

# The prior. Of a token that is only in a list: its rate, by list class.
ALONE = (0.5, 0.5, 0.021, 0.057, 0.12, 0.157, 0.296, 0.008, 0.054, 0.217, 0.577, 0.833)
# Of a copied token: the log-odds are the sum of one number for each part of the evidence.
OF_LENGTH = (0.0, -1.0, -0.27, 0.23, 0.74, 1.44, 2.53)
OF_CONTESTED = -1.8
OF_LIST = (0.15, -0.71, 0.79, 0.76, 0.45, 0.51, 0.85, -0.58, -0.02, 0.15, 0.33, 1.0)

CELLS = 2 * (len(LENGTHS) + 1) * LIST_CLASSES


def cell_of(length: int, contested: bool, listed: int) -> int:
    """Return the cell of a candidate. length: of its match, 0 if not copied. listed: its list's class."""
    return (2 * bisect_right(LENGTHS, length) + contested) * LIST_CLASSES + listed


def list_classes(probs: Mapping[int, float], order: int) -> dict[int, int]:
    """Return the classes of the tokens of a list of this order, given their probabilities.

    The class of a token is also its cell if it is not copied.
    """
    first = LISTED[order]
    return {token: first + bisect_right(PROBS, prob) for token, prob in probs.items()}


def prior(cell: int) -> float:
    """Return the probability that a candidate of a cell is right, before anything was seen of a text."""
    evidence, listed = divmod(cell, LIST_CLASSES)
    length, contested = divmod(evidence, 2)
    if not length:
        return ALONE[listed]
    return 1 / (1 + math.exp(-(OF_LENGTH[length] + OF_CONTESTED * contested + OF_LIST[listed])))


PRIORS = tuple(prior(cell) for cell in range(CELLS))


class Confidences:
    """The confidences of one text: `rates` by cell, each in (0, 1). priors: the rates at first."""

    def __init__(self, priors: Sequence[float] = PRIORS) -> None:
        self.priors = priors
        self.rates = list(priors)
        self.right = [0] * len(priors)
        self.seen = [0] * len(priors)

    def learn(self, cell: int, right: bool) -> None:
        """Count a candidate whose place in the text has been decided."""
        self.right[cell] += right
        self.seen[cell] += 1
        self.rates[cell] = (WEIGHT * self.priors[cell] + self.right[cell]) / (WEIGHT + self.seen[cell])

    def copy(self) -> Confidences:
        """Return the same counts, to be continued on their own."""
        other = Confidences(self.priors)
        other.rates, other.right, other.seen = list(self.rates), list(self.right), list(self.seen)
        return other
