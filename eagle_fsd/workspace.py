"""Where a batch is decoded: its session on the target, its drafter and its judge, with what they recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eagle_fsd.config import TreeConfig
from eagle_fsd.draft import Drafter, EagleDrafter, NoDrafter
from eagle_fsd.judge import Judge
from eagle_fsd.target import TargetModel, TargetSession

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


class Workspaces:
    """Workspaces on one target. Where steps are recorded, the last one is kept for a batch that it fits."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.spare: Workspace | None = None

    def take(
        self, batch: int, capacity: int, tree: TreeConfig, make_drafter: Callable[[int, int], Drafter]
    ) -> Workspace:
        """The spare one if it fits, else a new one, for so many texts of at most `capacity` tokens each.

        make_drafter: of so many texts, of at most so many pairs and beam nodes each.
        """
        capacity += tree.total_tokens
        drafted = 0 if tree.total_tokens == 1 else capacity + tree.top_k * (tree.reach - 1)
        spare, self.spare = self.spare, None
        if spare is not None and spare.fits(batch, capacity, drafted):
            spare.reset()
            return spare
        if self.target.stepper.view:
            capacity, drafted = max(capacity, LEAST), max(drafted, LEAST) if drafted else 0
        session = TargetSession(self.target, batch, capacity)
        drafter = make_drafter(batch, drafted) if drafted else NoDrafter(self.target.vocab_size)
        return Workspace(session, drafter, Judge(self.target.stepper), batch)

    def give_back(self, workspace: Workspace) -> None:
        """Keep it, where another batch has any good of it."""
        if self.target.stepper.view and workspace.whole:
            self.spare = workspace
