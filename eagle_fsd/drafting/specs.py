"""From a head to the spec that drafts with it, whatever its kind."""

from __future__ import annotations

from dataclasses import replace

import torch

from eagle_fsd.core.checks import format_value
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.drafting.eagle3.drafter import Eagle3Spec, TappedVerifier
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_drafter import EagleSpec, place_head, require_fit
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import MergedSpec


def spec_for(
    head: DraftHead | Eagle3Head | DrafterSpec | None, target: TappedVerifier, dtype: torch.dtype
) -> DrafterSpec | None:
    """Return the spec that drafts for a target with a head; a spec, or None, as it is.

    A head is copied if it has another device or dtype. Raises ValueError if it does not fit the target, or is
    no head.
    """
    if isinstance(head, DraftHead):
        require_fit(head, target)
        return EagleSpec.for_target(place_head(head, target.device, dtype), target)
    if isinstance(head, Eagle3Head):
        return Eagle3Spec.for_target(place_head(head, target.device, dtype), target)
    if head is not None and (isinstance(head, type) or not hasattr(head, "make")):
        raise ValueError(
            f"head is {format_value(head)}: it must be a DraftHead, an Eagle3Head, another DrafterSpec, or "
            "None; EagleFSD.from_pretrained loads one by name"
        )
    return head


def with_head(spec: DrafterSpec | None, head: DraftHead, target: TappedVerifier) -> DrafterSpec:
    """Return the spec of an EAGLE-1/2 head, merged with lookup or not, with other weights of that head.

    Raises ValueError if the spec has no such head.
    """
    if isinstance(spec, MergedSpec):
        return replace(spec, head=with_head(spec.head, head, target))
    if not isinstance(spec, EagleSpec):
        name = "none" if spec is None else spec.name
        raise ValueError(f"the drafter is {name}: only the weights of an EAGLE-1/2 head can be replaced")
    return spec.with_head(head, target)


def with_lookup(spec: DrafterSpec | None, target: TappedVerifier) -> DrafterSpec:
    """Return the spec that also looks drafts up, in one tree with the given one's. None: all are."""
    return LookupSpec.for_target(target) if spec is None else MergedSpec.for_target(spec, target)
