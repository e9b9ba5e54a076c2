"""Where a batch is decoded: its session on the target, its drafter and its judge, with what they recorded.

Memory follows the texts: caches begin with room for the prompts and AHEAD more tokens, and double as they
fill. Growth drops recordings, which costs little: it happens where a wider view is recorded anew anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eagle_fsd.acceptance.accept_step import Judge
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.drafting.drafter import Drafter, NoDrafter
from eagle_fsd.drafting.eagle_drafter import EagleDrafter
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

AHEAD = 512  # new tokens that there is room for at first
LEAST = 1024  # slots of a workspace that is used again: most texts fit, and none loses its recordings


@dataclass(frozen=True)
class Workspace:
    """One batch at a time. batch: the rows it was made for."""

    session: TargetSession
    drafter: Drafter
    judge: Judge
    batch: int

    @property
    def caches(self) -> Iterator[KVCache]:
        """The target's, and the head's if it has one."""
        yield self.session.cache
        if isinstance(self.drafter, EagleDrafter):
            yield self.drafter.cache

    @property
    def whole(self) -> bool:
        """Whether all its rows still have memory: a cache that grows keeps only the rows that go on."""
        return all(cache.rows == self.batch for cache in self.caches)

    def fits(self, batch: int, drafts: bool) -> bool:
        """Whether so many texts can be decoded here; drafts: with a drafter or without."""
        return self.batch == batch and isinstance(self.drafter, EagleDrafter) == drafts

    def reset(self, *limits: int) -> None:
        """Forget the texts. limits: the slots of a row that the next ones need at most, by cache."""
        for cache, limit in zip(self.caches, limits, strict=False):
            cache.reset(limit)


class Workspaces:
    """Workspaces on one target. Where steps are recorded, the last one is kept for a batch that it fits."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.spare: Workspace | None = None
        self._lock = threading.Lock()  # two threads never get the same one

    def take(
        self,
        batch: int,
        prompt: int,
        longest: int,
        tree: TreeConfig,
        make_drafter: Callable[[int, int], Drafter],
    ) -> Workspace:
        """The spare one if it fits, else a new one, for texts that are `prompt` tokens long at most, and may
        come to `longest`.

        make_drafter: of so many texts, with room for so many pairs and beam nodes each at first.
        """
        drafts = tree.total_tokens > 1
        nodes = tree.total_tokens
        beams = nodes + tree.top_k * (tree.reach - 1) if drafts else 0
        workspace = self._swapped(None)
        if workspace is None or not workspace.fits(batch, drafts):
            first = min(longest, prompt + AHEAD)
            least = LEAST if self.target.stepper.view else 0
            session = TargetSession(self.target, batch, max(first + nodes, least))
            drafter = NoDrafter(self.target.vocab_size)
            if drafts:
                drafter = make_drafter(batch, max(first + beams, least))
            workspace = Workspace(session, drafter, Judge(self.target.stepper), batch)
        workspace.reset(longest + nodes, longest + beams)
        return workspace

    def give_back(self, workspace: Workspace) -> None:
        """Keep it, where another batch has any good of it."""
        if self.target.stepper.view and workspace.whole:
            self._swapped(workspace)

    def clear(self) -> None:
        """Drop the spare one and free its caches and recordings."""
        self._swapped(None)

    def _swapped(self, workspace: Workspace | None) -> Workspace | None:
        """Put another one, or none, in the place of the spare one, and return that."""
        with self._lock:
            spare, self.spare = self.spare, workspace
        return spare
