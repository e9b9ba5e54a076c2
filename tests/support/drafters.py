"""Drafters for tests: an EAGLE drafter built from its parts, and a base for stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.drafting.drafter import Drafter, Needs
from eagle_fsd.drafting.eagle_drafter import EaglePredictor, Vocabulary
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.step_recorder import EAGER, Stepper

CPU = torch.device("cpu")


def eagle_drafter(
    head: DraftHead,
    vocabulary: Vocabulary,
    batch: int,
    capacity: int,
    device: torch.device = CPU,
    stepper: Stepper = EAGER,
) -> BeamDrafter:
    """Make a drafter with an EAGLE head whose cache has this capacity at first."""
    cache = KVCache(batch, capacity, device, stepper.view)
    return BeamDrafter(EaglePredictor(head, vocabulary, cache, stepper), stepper)


def feed(drafter: BeamDrafter, features: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
    """Show a drafter pairs: features [B, P, d] and the tokens [B, P] that follow them."""
    first = not any(drafter.cache.row_lengths)
    drafter.root_states = drafter.predictor.commit_pairs(features, tokens, counts, first)


class StandIn:
    """The common part of most drafters in tests: they need features, and no text joins later."""

    needs = Needs(features=True)
    rows = 0

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        raise NotImplementedError

    def reset(self, longest: int, tree: TreeConfig) -> None:
        pass


@dataclass(frozen=True, eq=False)
class StandInSpec:
    """A spec whose drafters are made by a function of batch, tokens and tree."""

    maker: Callable[[int, int, TreeConfig], Drafter]
    tokens: int
    name: str = "stand-in"
    longest: int | None = None
    network: None = None
    identity: str | None = "stand-in"
    sparse: bool = False
    rests: bool = False

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> Drafter:
        return self.maker(batch, tokens, tree)
