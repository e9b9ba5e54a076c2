"""Where a batch is decoded: its session on the target, its drafter and its accept step, with what they
recorded.

Memory follows the texts: caches begin with room for the prompts and AHEAD more tokens, and double as they
fill. Growth drops recordings, which costs little: it happens where a wider view is recorded anew anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.sampling import RowRandom
from eagle_fsd.core.stats import GenerationStats, Stopwatch
from eagle_fsd.decoding.loop import decode
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.drafter import Drafter, DrafterSpec, NoDrafter
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

AHEAD = 512  # new tokens that there is room for at first
LEAST = 1024  # slots of a workspace that is used again: most texts fit, and none loses its recordings


@dataclass(frozen=True)
class Workspace:
    """One batch at a time. batch: the rows it was made for. spec: what made its drafter."""

    session: TargetSession
    drafter: Drafter
    accept_step: AcceptStep
    batch: int
    spec: DrafterSpec

    @property
    def complete(self) -> bool:
        """Whether all its rows still have memory: a cache that grows keeps only the rows that go on."""
        return self.session.cache.rows == self.drafter.rows == self.batch

    def reset(self, longest: int, tree: TreeConfig) -> None:
        """Forget the texts. longest: the most tokens that one of the next texts may come to."""
        self.session.cache.reset(longest + tree.total_tokens)
        self.drafter.reset(longest, tree)


class Workspaces:
    """Workspaces on one target. Where steps are recorded, the last one is kept for a batch that it fits."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.plain = NoDrafter(target.vocab_size)
        self.spare: Workspace | None = None
        self._lock = threading.Lock()  # two threads never get the same one

    def take(
        self, batch: int, prompt: int, longest: int, tree: TreeConfig, drafter: DrafterSpec | None
    ) -> Workspace:
        """Return the spare workspace if it fits, else a new one.

        It is for texts whose prompts have at most `prompt` tokens, and which may come to `longest` tokens.
        drafter: who drafts; nobody does for a tree of one node.
        """
        spec = self.plain if tree.total_tokens == 1 or drafter is None else drafter
        workspace = self._swap_spare(None)
        if workspace is None or workspace.batch != batch or workspace.spec != spec:
            first = min(longest, prompt + AHEAD)
            if self.target.stepper.view:
                first = max(first, LEAST - tree.total_tokens)
            session = TargetSession(self.target, batch, first + tree.total_tokens)
            step = AcceptStep(self.target.stepper)
            workspace = Workspace(session, spec.make(batch, first, tree), step, batch, spec)
        workspace.reset(longest, tree)
        return workspace

    def decode(
        self,
        workspace: Workspace,
        request: Request,
        random: RowRandom,
        stats: Sequence[GenerationStats],
        watch: Stopwatch,
    ) -> Iterator[list[list[int]]]:
        """Yield the steps of the decoding loop, then take the workspace back."""
        try:
            parts = (workspace.session, workspace.drafter, random, stats, watch, workspace.accept_step)
            yield from decode(request, *parts)
        finally:
            self.give_back(workspace)

    def give_back(self, workspace: Workspace) -> None:
        """Keep the workspace for reuse if its recordings can serve another batch."""
        if self.target.stepper.view and workspace.complete:
            self._swap_spare(workspace)

    def clear(self) -> None:
        """Drop the spare one and free its caches and recordings."""
        self._swap_spare(None)

    def _swap_spare(self, workspace: Workspace | None) -> Workspace | None:
        """Put another one, or none, in the place of the spare one, and return that."""
        with self._lock:
            spare, self.spare = self.spare, workspace
        return spare
