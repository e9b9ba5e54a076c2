"""A text that can get no further token: whether its options or the target's logits are to blame."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.core.processing import UNPROCESSED, Processing
from eagle_fsd.decoding.request import FAILED, Terms, Text
from eagle_fsd.decoding.steps.emission import Step, emit_or_fail
from eagle_fsd.decoding.steps.failures import NonFiniteLogits, NothingAllowed

BANS = Processing(suppress_tokens=(2,))
INF, NAN = math.inf, math.nan


def stopped(at_fault: list[float], processing: Processing, alone: bool = True) -> tuple[Text, list[int]]:
    """Emit three tokens of which two are sound, where the third's node has these logits of the target.

    It is the text in the second row, and node 4 is the third on its path.
    """
    text = Text(1, 9, Terms((), processing=processing))
    logits = torch.zeros(2, 5, 3)
    logits[1, 4] = torch.tensor(at_fault)
    path = torch.tensor([[0, -1, -1], [0, 2, 4]])
    nothing: Tensor = torch.empty(2, 0)
    verdict = Verdict(path, nothing, nothing, nothing, nothing, nothing, nothing)
    step = Step(3, [7, 8, -1], [False, False], 2, [0, 0])
    return text, emit_or_fail(text, 1, step, logits, verdict, alone)


@pytest.mark.parametrize("logits", [[0.0, 1.0, 2.0], [-INF, -INF, 0.5]])
def test_options_are_to_blame_where_the_target_has_a_finite_logit(logits: list[float]) -> None:
    """Its other logits may be -inf, as where a vocabulary is padded."""
    text, emitted = stopped(logits, BANS)
    assert emitted == text.new_tokens == [7, 8]
    assert text.stats.finish_reason == FAILED and isinstance(text.failure, NothingAllowed)
    with pytest.raises(NothingAllowed):
        stopped(logits, BANS, alone=False)


@pytest.mark.parametrize("logits", [[-INF] * 3, [0.0, NAN, 0.0], [0.0, INF, 0.0]])
@pytest.mark.parametrize("processing", [BANS, UNPROCESSED], ids=["bans", "plain"])
def test_logits_that_are_no_distribution_end_the_step(logits: list[float], processing: Processing) -> None:
    with pytest.raises(
        NonFiniteLogits, match=r"^step 1 of row 1: the target's logits are not finite"
    ) as found:
        stopped(logits, processing)
    assert not isinstance(found.value, NothingAllowed)


def test_another_process_can_raise_a_failure_again() -> None:
    """A pool of processes would break over an exception that cannot be unpickled."""
    for failure in (NonFiniteLogits(3, 1), stopped([0.0, 1.0, 2.0], BANS)[0].failure):
        assert isinstance(failure, NonFiniteLogits)
        again = pickle.loads(pickle.dumps(failure))
        assert type(again) is type(failure) and str(again) == str(failure)
        assert (again.step, again.row) == (failure.step, failure.row)


def test_without_options_the_logits_are_to_blame() -> None:
    with pytest.raises(NonFiniteLogits, match=r"^step 1 of row 1: the target's logits are not finite"):
        stopped([0.0, 1.0, 2.0], UNPROCESSED)
