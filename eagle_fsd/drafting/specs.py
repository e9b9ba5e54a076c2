"""From a head to the spec that drafts with it, whatever its kind."""

from __future__ import annotations

import torch

from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.drafting.eagle3.drafter import Eagle3Spec, TappedVerifier
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_drafter import EagleSpec, place_head, require_fit
from eagle_fsd.drafting.eagle_head import DraftHead


def spec_for(
    head: DraftHead | Eagle3Head | DrafterSpec | None, target: TappedVerifier, dtype: torch.dtype
) -> DrafterSpec | None:
    """Return the spec that drafts for a target with a head; a spec, or None, as it is.

    A head is copied if it has another device or dtype. Raises ValueError if it does not fit the target.
    """
    if isinstance(head, DraftHead):
        require_fit(head, target)
        return EagleSpec.for_target(place_head(head, target.device, dtype), target)
    if isinstance(head, Eagle3Head):
        return Eagle3Spec.for_target(place_head(head, target.device, dtype), target)
    return head
