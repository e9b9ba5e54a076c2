"""Where a batch is decoded: its session on the target, its drafter and its judge, with what they recorded."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_fsd.draft import Drafter, EagleDrafter
from eagle_fsd.judge import Judge
from eagle_fsd.target import TargetSession

LEAST = 1024  # slots of a workspace that is used again: most texts fit then


@dataclass(frozen=True)
class Workspace:
    """One batch at a time. batch: the rows it was made for."""

    session: TargetSession
    drafter: Drafter
    judge: Judge
    batch: int

    @property
    def whole(self) -> bool:
        """Whether it still has all its rows: the buffers of fewer are others, with nothing recorded."""
        return len(self.session.cache.row_lengths) == self.batch

    def fits(self, batch: int, capacity: int, draft_capacity: int) -> bool:
        """Whether so many texts of so many slots have room here; draft_capacity: 0 for no drafter."""
        drafter = self.drafter.cache.capacity if isinstance(self.drafter, EagleDrafter) else 0
        return (
            self.batch == batch
            and self.session.cache.capacity >= capacity
            and (drafter >= draft_capacity if draft_capacity else not drafter)
        )

    def reset(self) -> None:
        """Forget the texts."""
        self.session.cache.reset()
        if isinstance(self.drafter, EagleDrafter):
            self.drafter.cache.reset()
