"""The accept phase of a step as one piece of work: what the target says of a tree, and the rule's verdict."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from eagle_fsd.acceptance import AcceptanceRule, Verdict, Verified, accept
from eagle_fsd.config import SamplingConfig
from eagle_fsd.graphs import EAGER, Stepper, Work
from eagle_fsd.sampling import Uniforms
from eagle_fsd.tree import DraftTree


@dataclass(frozen=True)
class Drawn:
    """Random numbers [B, n] that were drawn before, for work that draws none itself."""

    numbers: Tensor

    def uniform(self, n: int) -> Tensor:
        return self.numbers


class Judge:
    """Applies acceptance rules to verified trees; stepper: how."""

    def __init__(self, stepper: Stepper = EAGER) -> None:
        self.stepper = stepper
        self._known: dict[Hashable, Work] = {}

    def __call__(
        self,
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        eos: Tensor,
        tree: DraftTree,
        logits: Tensor,
        random: Uniforms,
        emitted: Tensor,
    ) -> tuple[Verified, Verdict]:
        """logits [B, N, V], eos [E] and emitted [B], tokens so far, as Verified and `accept` take them."""
        numbers = None if sampling.greedy else random.uniform(2 * tree.largest)
        static = (tree.depth, tree.most)
        parts = (tree.tokens, tree.parents, tree.depths, tree.log_q, tree.owners, tree.drafted, tree.columns)
        return self._work(rule, sampling)(None, static, logits, numbers, emitted, eos, *parts)

    def _work(self, rule: AcceptanceRule, sampling: SamplingConfig) -> Work:
        """The work for one rule, always the same one, so that a recording is found again."""
        try:
            hash(rule)
        except TypeError:  # a rule of somebody's own: it may change, so nothing of it can be recorded
            return EAGER.of(partial(judged, rule, sampling))
        if (rule, sampling) not in self._known:
            self._known[rule, sampling] = self.stepper.of(partial(judged, rule, sampling))
        return self._known[rule, sampling]


def judged(
    rule: AcceptanceRule,
    sampling: SamplingConfig,
    static: tuple[int, int],
    logits: Tensor,
    numbers: Tensor | None,
    emitted: Tensor,
    eos: Tensor,
    *parts: Tensor | None,
) -> tuple[Verified, Verdict]:
    """See Judge; static: the tree's depth and most, parts: its tensors."""
    tokens, parents, depths, log_q, owners, drafted, columns = parts
    depth, most = static
    tree = DraftTree(tokens, parents, depths, log_q, owners, depth, drafted, columns, most)
    verified = Verified.of(tree, logits, sampling, eos)
    return verified, accept(rule, verified, Drawn(numbers), emitted)
