"""The accept phase of a step as one piece of work: what the target says of a tree, and the rule's verdict."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Number

from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified, accept
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.sampling import Uniforms
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.runtime.step_recorder import EAGER, Stepper

Static = tuple[AcceptanceRule, SamplingConfig, int, int]


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
        self._judged, self._judged_anew = stepper.of(judged), EAGER.of(judged)

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
        static = (rule, sampling, tree.depth, tree.most)
        parts = (tree.tokens, tree.parents, tree.depths, tree.log_q, tree.owners, tree.drafted, tree.columns)
        step = self._judged if self.stepper.records and never_changes(rule) else self._judged_anew
        return step(None, static, logits, numbers, emitted, eos, *parts)


def never_changes(thing: object) -> bool:
    """Whether everything that equals this behaves as it does, for ever: what a recorded rule needs.

    True for numbers, texts, None, tuples of such things, and frozen dataclasses whose fields are such things
    and which hold nothing else. Any other object may change between two calls.
    """
    if thing is None or isinstance(thing, (Number, str, bytes)):
        return True
    if type(thing) is tuple:
        return all(map(never_changes, thing))
    settings = vars(type(thing)).get("__dataclass_params__")  # its own, not those of a class it derives from
    if settings is None or not (settings.frozen and settings.eq):
        return False
    names = {field.name for field in fields(thing) if field.compare}
    held = set(getattr(thing, "__dict__", names)) | {field.name for field in fields(thing)}
    return held == names and all(never_changes(getattr(thing, name)) for name in names)


def judged(
    static: Static,
    logits: Tensor,
    numbers: Tensor | None,
    emitted: Tensor,
    eos: Tensor,
    *parts: Tensor | None,
) -> tuple[Verified, Verdict]:
    """See Judge; static: rule, sampling, and the tree's depth and most; parts: the tree's tensors."""
    rule, sampling, depth, most = static
    tokens, parents, depths, log_q, owners, drafted, columns = parts
    tree = DraftTree(tokens, parents, depths, log_q, owners, depth, drafted, columns, most)
    verified = Verified.from_logits(tree, logits, sampling, eos)
    return verified, accept(rule, verified, Drawn(numbers), emitted)
