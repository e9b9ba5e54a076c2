"""What each rank holds of a target and of what drafts for it, in bytes."""

from __future__ import annotations

from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.runtime.ranks import held_bytes
from eagle_fsd.target.model import TargetModel


def held_memory(target: TargetModel, drafter: DrafterSpec | None, cache_bytes: int) -> list[dict[str, int]]:
    """Return the bytes that each rank holds of a target, of its head beside that, and of caches.

    A target on a runtime holds its graphs' weights and its embeddings, which stay in torch. The model that
    the graphs were made of does not count: it is there only if they were made now. All ranks must call this.
    """
    network = None if drafter is None else drafter.network
    weights = held_bytes(target.held)
    if (graphs := target.graphs) is not None:
        weights = graphs.weight_bytes + held_bytes(graphs.embeddings)
    held = {"weight_bytes": weights, "head_bytes": held_bytes(network, besides=target.held)}
    return target.ranks.gather({"rank": target.ranks.rank, **held, "cache_bytes": cache_bytes})
