"""The scheduler of a server's texts, alike on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import forward_size
from eagle_fsd.decoding.scheduler import SLICE, Scheduler
from eagle_fsd.serving.choices import Limits

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD


def new_scheduler(model: EagleFSD, tree: TreeConfig, limits: Limits) -> Scheduler:
    """Return what decodes the texts of a server, on any rank."""
    # Rank 0 alone knows the texts' terms, by which a tree may shrink.
    shrinks = model.device.type == "cpu" and not model.target.ranks.several
    return Scheduler(
        model.target,
        model.drafter,
        tree,
        limits.max_rows,
        slice_tokens=forward_size(SLICE, model.target.device),
        cache_tokens=limits.cache_tokens,
        prefix_tokens=limits.prefix_tokens,
        crowded=tree.for_many(limits.max_rows) if shrinks else None,
    )
