"""Why a text can get no further token: the target's logits, or the text's own options."""

from __future__ import annotations

import copyreg
from typing import Any

from eagle_fsd.decoding.request import Text


class NonFiniteLogits(FloatingPointError):
    """The target's logits on an accepted path are NaN, +inf or all -inf, so that no token can be emitted.

    step: counted from 1. row: its place in the request.
    """

    def __init__(self, step: int, row: int, why: str | None = None) -> None:
        usual = (
            "the target's logits are not finite, as where float16 overflows or weights are damaged; load the "
            "model in bfloat16 or float32 (dtype), or check its files"
        )
        super().__init__(f"step {step} of row {row}: {why or usual}")
        self.step, self.row = step, row

    def __reduce__(self) -> tuple[Any, ...]:  # another process may have to raise it again
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class NothingAllowed(NonFiniteLogits):
    """No token can be emitted at a place of a text because of its options; the target's logits are finite."""

    def __init__(self, text: Text) -> None:
        constraint, failure = text.terms.processing.constraint, text.processor.failure
        why, remedy = "the options allow no token here", "take bans and biases away"
        if text.terms.processing.own:
            why = "the options leave no token with a finite logit here"
            remedy = f"let logits_processor return finite logits, or {remedy}"
        if constraint is not None:
            why, remedy = f"{constraint.name} and the other {why[4:]}", f"make the form simpler, or {remedy}"
        if constraint is not None and failure:
            why = f"{constraint.name} cannot be followed any further ({failure})"
        super().__init__(text.stats.steps + 1, text.number, f"{why}; {remedy}")
