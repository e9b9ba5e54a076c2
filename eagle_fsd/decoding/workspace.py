"""Workspaces: the session, drafter and accept step of a batch, with their caches and recordings.

Memory follows the texts: caches begin with memory for the prompts and AHEAD more tokens, and double when they
are full. Growth drops recordings. That costs little, since a wider view has to be recorded anew anyway.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass

from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import autocast_dtype
from eagle_fsd.core.randomness.streams import RowRandom, Seed, fresh_seed
from eagle_fsd.core.stats import Stopwatch
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.loop import decode
from eagle_fsd.decoding.outputs import BatchStream
from eagle_fsd.decoding.request import Request, Text, interrupt
from eagle_fsd.drafting.drafter import Drafter, DrafterSpec, NoDrafter
from eagle_fsd.files.fingerprints import weights_of
from eagle_fsd.runtime.ranks import Ranks
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

AHEAD = 512  # new tokens that fit at first
LEAST = 1024  # slots of a workspace that may be reused: most texts fit, so that recordings are seldom dropped


@dataclass(frozen=True)
class Workspace:
    """The memory of one batch at a time.

    batch: its number of rows at first. spec: made its drafter. ways: see `ways_to_compute`.
    """

    session: TargetSession
    drafter: Drafter
    accept_step: AcceptStep
    batch: int
    spec: DrafterSpec
    ways: Hashable

    @property
    def complete(self) -> bool:
        """Whether just its rows have memory: a cache that grows keeps only the remaining ones."""
        cache = self.session.cache
        return cache.rows == self.drafter.rows == self.batch and cache.tight

    def reset(self, longest: int, tree: TreeConfig) -> None:
        """Forget the texts. longest: the most tokens that one of the next texts may have."""
        self.session.cache.reset(longest + tree.total_tokens)
        self.drafter.reset(longest, tree)


def make_workspace(
    target: TargetModel,
    spec: DrafterSpec,
    batch: int,
    prompt: int,
    longest: int,
    tree: TreeConfig,
    accept_step: AcceptStep | None = None,
    least: int = 0,
) -> Workspace:
    """Return a workspace for `batch` texts of up to `longest` tokens, prompts of up to `prompt` included.

    accept_step: one to share; None: its own. least: the fewest slots that it has.
    """
    first = max(min(longest, prompt + AHEAD), least - tree.total_tokens)
    made = spec.make(batch, first, tree)
    session = TargetSession(target, batch, first + tree.total_tokens, made.needs.taps)
    parts = (session, made, accept_step or AcceptStep(target.stepper))
    workspace = Workspace(*parts, batch, spec, ways_to_compute(target, spec))
    workspace.reset(longest, tree)
    return workspace


def ways_to_compute(target: TargetModel, spec: DrafterSpec) -> Hashable:
    """Return what recorded steps hold fast of how texts are computed: autocast, and where the weights are.

    Weights that change in place need no other recordings. None where nothing is recorded.
    """
    if not target.stepper.view:
        return None
    weights = weights_of((target.held, spec.network))
    return autocast_dtype(target.device), *(weight.data_ptr() for weight in weights)


def settle_seed(seed: Seed | None, greedy: bool, ranks: Ranks) -> Seed:
    """Return the seed, or a fresh one for None. Greedy decoding leaves torch's generator alone."""
    if seed is not None:
        return seed
    return 0 if greedy else ranks.lead(fresh_seed())


class Workspaces:
    """Workspaces on one target. If steps are recorded, the last one is kept for the next batch that fits.

    least: the fewest slots that a kept one has; None: LEAST. accept_step: shared by all; None: each has its
    own.
    """

    def __init__(
        self, target: TargetModel, least: int | None = None, accept_step: AcceptStep | None = None
    ) -> None:
        self.target, self.least, self.accept_step = target, least, accept_step
        self.plain = NoDrafter(target.vocab_size)
        self.spare: Workspace | None = None
        self.cache_bytes = 0  # that keys and values of the last batch took, the drafter's not among them
        # Two threads must never get the same workspace; a stream that is collected as garbage takes it too.
        self._lock = threading.RLock()

    def start(self, request: Request, seed: Seed | None, drafter: DrafterSpec | None) -> BatchStream:
        """Return a batch, which takes memory and reads its prompts at the first step.

        seed: None draws one. drafter: drafts the trees, unless they have one node.
        """
        greedy = request.sampling.greedy
        seed = settle_seed(seed, greedy, self.target.ranks)
        batch, tree = len(request.prompts), request.tree
        random = RowRandom(seed, batch, self.target.device)  # first: it checks the seed
        spec = self.spec_for(tree, drafter)
        self.target.expect(batch, tree.total_tokens)
        if spec.rests:
            self.target.expect(batch, 1)
        texts, watch, ended = request.texts(), Stopwatch(), threading.Event()
        for text in texts:
            text.see(self.target.media)
        steps = self.decode(request, spec, texts, random, watch, ended)
        return BatchStream(steps, texts, watch, tree, request.rule, None if greedy else seed, ended)

    def take(
        self, batch: int, prompt: int, longest: int, tree: TreeConfig, drafter: DrafterSpec | None
    ) -> Workspace:
        """Return the spare workspace if it fits, else a new one.

        prompt: the most tokens of a prompt. longest: the most tokens that a text may have. drafter: drafts
        the trees, unless they have one node.
        """
        spec = self.spec_for(tree, drafter)
        spare = self._swap_spare(None)
        ways = ways_to_compute(self.target, spec)
        if spare is not None and (spare.batch, spare.spec, spare.ways) == (batch, spec, ways):
            spare.reset(longest, tree)
            return spare
        del spare  # frees its memory before more is taken
        least = (LEAST if self.least is None else self.least) if self.target.stepper.view else 0
        sizes = (batch, prompt, longest, tree)
        return make_workspace(self.target, spec, *sizes, self.accept_step, least)

    def spec_for(self, tree: TreeConfig, drafter: DrafterSpec | None) -> DrafterSpec:
        """Return what drafts these trees: nothing, if they have one node or `drafter` is None."""
        return self.plain if tree.total_tokens == 1 or drafter is None else drafter

    def decode(
        self,
        request: Request,
        spec: DrafterSpec,
        texts: Sequence[Text],
        random: RowRandom,
        watch: Stopwatch,
        ended: threading.Event,
    ) -> Generator[list[list[int]]]:
        """Take a workspace, yield the steps of a batch in it until `ended` is set, and give it back."""
        prompt = max(map(len, request.prompts))
        workspace = self.take(len(texts), prompt, request.longest_text, request.tree, spec)
        try:
            prefixes = None
            if request.prompt_cache is not None and len(texts) == 1:
                prefixes = request.prompt_cache.texts_of(self.target, spec)
            parts = (workspace.session, workspace.drafter, random, request.tree, watch, workspace.accept_step)
            with contextlib.closing(decode(Batch(*parts, request.observer), texts, prefixes)) as steps:
                for step in steps:
                    yield step
                    if ended.is_set():
                        interrupt(texts)
                        break
        finally:
            self.cache_bytes = workspace.session.cache_bytes
            self.give_back(workspace)

    def give_back(self, workspace: Workspace) -> None:
        """Keep the workspace for reuse if its recordings can serve another batch."""
        if self.target.stepper.view and workspace.complete:
            self._swap_spare(workspace)

    def clear(self) -> None:
        """Drop the spare workspace and free its caches and recordings."""
        self._swap_spare(None)

    def _swap_spare(self, workspace: Workspace | None) -> Workspace | None:
        """Replace the spare workspace and return the old one; None stands for no workspace."""
        with self._lock:
            spare, self.spare = self.spare, workspace
        return spare
