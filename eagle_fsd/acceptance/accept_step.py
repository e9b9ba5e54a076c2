"""The accept phase of a step: the rule's verdict on a tree that the target has verified."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Number
from typing import Any

from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified, accept
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.sampling import Uniforms
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.runtime.step_recorder import EAGER, Stepper, copied


@dataclass(frozen=True)
class GivenUniforms:
    """A source of random numbers [B, n] that were drawn before: recorded work cannot draw any itself."""

    numbers: Tensor | None

    def uniform(self, n: int) -> Tensor:
        assert self.numbers is not None, "a greedy step draws nothing"
        return self.numbers


class AcceptStep:
    """Applies acceptance rules to verified trees. stepper: runs the work, recorded or not."""

    def __init__(self, stepper: Stepper = EAGER) -> None:
        self.stepper = stepper
        self._accept_recorded = stepper.wrap(accept_tree)

    def __call__(
        self,
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        eos: Tensor,
        tree: DraftTree,
        logits: Tensor,
        random: Uniforms,
        emitted: Tensor,
        several: bool = False,
    ) -> tuple[Verified, Verdict]:
        """Return the verified tree and the verdict: which path of it is accepted.

        logits: [B, N, V], the target's. eos: [E], the tokens that end a text. random: each row's stream.
        emitted: [B], the number of tokens that each text has so far. several: whether other trees are
        accepted before this verdict is read. It is then copied out of memory that recordings share.
        """
        uniforms = None if sampling.greedy else random.uniform(2 * tree.largest)
        verified = Verified(tree, logits, sampling, eos)
        if self.stepper.records and is_immutable(rule):
            verdict = self._accept_recorded(rule, sampling, eos, tree, logits, uniforms, emitted)
            return verified, copied(verdict) if several else verdict
        return verified, accept(rule, verified, GivenUniforms(uniforms), emitted)


def accept_tree(
    rule: AcceptanceRule,
    sampling: SamplingConfig,
    eos: Tensor,
    tree: DraftTree,
    logits: Tensor,
    uniforms: Tensor | None,
    emitted: Tensor,
) -> Verdict:
    """Apply the rule with uniform random numbers [B, n], drawn before; None if greedy. See AcceptStep.

    What is verified is put together here: what it has computed would be missing from a recording.
    """
    return accept(rule, Verified(tree, logits, sampling, eos), GivenUniforms(uniforms), emitted)


def is_immutable(thing: Any) -> bool:
    """Return whether this cannot change, and everything equal to it behaves alike, as a recording needs.

    True for numbers, strings, None, tuples of such things, and frozen dataclasses that hold only fields of
    such things. Any other object may change between two calls.
    """
    if thing is None or isinstance(thing, (Number, str, bytes)):
        return True
    if type(thing) is tuple:
        return all(map(is_immutable, thing))
    settings = vars(type(thing)).get("__dataclass_params__")  # its own, not those of a class it derives from
    if settings is None or not (settings.frozen and settings.eq):
        return False
    names = {field.name for field in fields(thing) if field.compare}
    held = set(getattr(thing, "__dict__", names)) | {field.name for field in fields(thing)}
    return held == names and all(is_immutable(getattr(thing, name)) for name in names)
