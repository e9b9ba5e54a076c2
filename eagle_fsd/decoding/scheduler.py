"""Continuous batching: texts join and leave while others are decoded.

A text is admitted and waits for a place. Its prompt is read, in slices between the steps of others; then it
joins the batch, and it leaves when it is done. While a long prompt is read, prompts that fit into a slice may
overtake it. A text's tokens depend only on its prompt, its terms and its stream of random numbers, up to the
rounding of kernels that see other rows beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import forward_size
from eagle_fsd.core.stats import Stopwatch
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.loop import step
from eagle_fsd.decoding.prompts.cache_budget import CacheBudget, longest
from eagle_fsd.decoding.prompts.prefix_cache import PrefixCache
from eagle_fsd.decoding.prompts.prompt_cache import PromptCache
from eagle_fsd.decoding.prompts.reading import Reading, unique_prompts
from eagle_fsd.decoding.request import Observer, Text
from eagle_fsd.decoding.steps.trees import StepTrees
from eagle_fsd.decoding.workspace import Workspace, Workspaces
from eagle_fsd.drafting.drafter import Drafter, DrafterSpec
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

CANCELLED = "cancelled"  # the finish reason of a retired text
SLICE = 256  # prompt tokens between two steps
LOOKED_AT = 8  # waiting texts that may overtake; a long prompt is compared with all kept texts


class Scheduler:
    """Decodes texts as they come, at most `rows` at a time; `step` is its heartbeat.

    drafter: None for plain decoding. tree: the tree of every text. rows: the most texts in the batch. group:
    waiting texts join when this many places are free, since reading several prompts together takes fewer
    forwards. slice_tokens: the most prompt tokens that are read between two steps; None: whole prompts.
    cache_tokens: the most slots of the caches that all texts may take together, each with room for one
    token's keys and values in target and drafter; None: no limit. prefix_tokens: how many of these slots
    texts that have ended may keep, for prompts that begin like them; 0: none. A PromptCache keeps them beyond
    this scheduler. observer: is shown every step; it may be set and taken away between steps. crowded: trees
    for steps of many texts, see StepTrees.

    Raises ValueError for numbers out of range.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterSpec | None,
        tree: TreeConfig,
        rows: int,
        group: int = 1,
        watch: Stopwatch | None = None,
        slice_tokens: int | None = SLICE,
        cache_tokens: int | None = None,
        prefix_tokens: int | PromptCache = 0,
        observer: Observer | None = None,
        crowded: Mapping[int, TreeConfig] | None = None,
    ) -> None:
        require_integer("rows", rows, 1, "64 suits a CPU")
        if slice_tokens is not None:
            require_integer("slice_tokens", slice_tokens, 1, f"{SLICE} suits a CPU, None reads whole prompts")
        self.target, self.tree, self.rows, self.group = target, tree, rows, min(group, rows)
        self.slice_tokens = 2**31 if slice_tokens is None else slice_tokens
        self._workspaces = Workspaces(target, 0, AcceptStep(target.stepper))
        self.drafter = self._workspaces.spec_for(tree, drafter)
        self.watch, self.observer = watch or Stopwatch(), observer
        self.trees = StepTrees(tree, crowded)
        self.waiting: deque[Text] = deque()
        self.reading: Reading | None = None
        self._overtaken = False  # whether a prompt overtook the one being read in the last step
        self.batch: Batch | None = None
        self._workspace: Workspace | None = None  # the batch's
        # An empty cache tells how many slots are allocated together.
        block = target.new_cache(1, 1).capacity
        self.budget = CacheBudget(cache_tokens, block, tree, target.slots_of_states)
        if isinstance(prefix_tokens, PromptCache):
            self.prefixes = prefix_tokens.texts_of(target, self.drafter)
        else:
            self.prefixes = PrefixCache(prefix_tokens)
        self._unkept: set[Text] = set()  # texts in the batch that have not been offered to the prefix cache

    @classmethod
    def for_many(
        cls, target: TargetModel, drafter: DrafterSpec | None, tree: TreeConfig, rows: int, **keywords: Any
    ) -> Scheduler:
        """Return a scheduler of many texts that nobody waits for one by one.

        Their prompts are read in small groups, so that the batch stays full and few forwards read prompts.
        """
        slice_tokens = forward_size(SLICE, target.device)
        return cls(target, drafter, tree, rows, max(1, rows // 8), slice_tokens=slice_tokens, **keywords)

    def admit(self, text: Text) -> None:
        """Add a text to those that wait for a place.

        Raises ValueError if its prompt is empty, leaves no position or has images that are not kept, or if it
        could never have the slots that it needs.
        """
        length, positions = len(text.prompt), self.target.max_positions
        if not 0 < length < positions:
            raise ValueError(
                f"prompt {text.number} has {length} tokens: it must have at least one, and fewer than the "
                f"target's {positions} positions; leave it out"
            )
        text.limit = min(text.limit, positions - length)
        text.see(self.target.media)
        self.budget.require(text)
        self.waiting.append(text)

    @torch.inference_mode()
    def retire(self, text: Text) -> None:
        """End a text early: it gets no more tokens, and its place becomes free."""
        if text in self.waiting:
            self.waiting.remove(text)
        if not text.done:
            text.stats.finish_reason = CANCELLED
        if self.reading is not None and not self.reading.wanted:
            stopped, self.reading = self.reading, None
            read = stopped.prompts[0][: stopped.shown]
            self._keep(read, stopped.workspace.session, stopped.workspace.drafter, 0)
        self._release()

    def abandon(self) -> None:
        """Drop all texts as they are, also after a step that raised, and keep nothing of them."""
        self.waiting.clear()
        self._unkept.clear()
        self.reading = self.batch = self._workspace = None

    @property
    def decoding(self) -> list[Text]:
        """The texts in the batch that are not done."""
        return [] if self.batch is None else self.batch.active

    @property
    def _being_read(self) -> list[Text]:
        """The texts whose prompt is being read in slices."""
        return [] if self.reading is None else self.reading.texts

    @property
    def _free(self) -> int:
        """How many texts may still be taken up."""
        return self.rows - len(self.decoding) - len(self._being_read)

    @property
    def _running(self) -> Batch | None:
        """The batch, if any of its texts is not done."""
        return self.batch if self.decoding else None

    @property
    def busy(self) -> bool:
        """Whether any text is waiting, being read or being decoded."""
        return bool(self.waiting or self.reading or self.decoding)

    @torch.inference_mode()
    def step(self) -> dict[Text, list[int]]:
        """Read a slice of the prompts, run one step and return the tokens that each text emitted.

        No text emits any before its prompt has been read. A text whose options leave it no token ends
        with the finish reason FAILED, see Text. Raises whatever target and drafter raise, NonFiniteLogits
        included. The scheduler cannot be used after that: admit its unfinished texts to a new one.
        """
        self._release()
        if self.waiting or self.reading:
            with self.watch("prefill"):
                self._read_prompts()
        if self.batch is None:
            return {}
        tree = self.trees.of(self.batch.texts, self.batch.active)
        self.batch.observer, self.batch.tree = self.observer, tree
        emitted = step(self.batch, keep_done=True)
        self._release()
        return emitted

    def run(self) -> Iterator[tuple[Text, list[int]]]:
        """Run steps until all texts are done, and yield the tokens that each text emits."""
        while self.busy:
            yield from self.step().items()

    def _read_prompts(self) -> None:
        """Read at most `slice_tokens` tokens of prompts, and let the texts that are read join the batch.

        Prompts that fit into a slice overtake a longer one at every second step at most: it stays in motion.
        """
        left = self.slice_tokens
        may_overtake, self._overtaken = not self._overtaken, False
        # What little is left of a slice is not worth a forward, which reads all weights.
        while 2 * left > self.slice_tokens:
            reading = self.reading or self._next_reading(left, list(islice(self.waiting, self.rows)))
            if self.reading and may_overtake and (short := self._next_reading(left, self._short(left))):
                reading, self._overtaken = short, True
            if reading is None:
                return
            left -= max(reading.advance(left), 1)
            if reading.roots is None:
                self.reading = reading
                if reading.at_branch:
                    read, workspace = reading.prompts[0][: reading.branch], reading.workspace
                    self._keep(read, workspace.session, workspace.drafter, 0)
            else:
                self.reading = None if reading is self.reading else self.reading
                self._join(reading.finish(self.tree, self.watch), reading.workspace)

    def _short(self, most: int) -> list[Text]:
        """Return those of the next texts that have at most this many tokens to read."""

        def short(text: Text) -> bool:
            found = None if len(text.prompt) <= most else self.prefixes.find(text.prompt)
            return len(text.prompt) - (0 if found is None else found[1]) <= most

        return [text for text in islice(self.waiting, LOOKED_AT) if short(text)] if self._free else []

    def _next_reading(self, most: int, waiting: Sequence[Text]) -> Reading | None:
        """Return the next texts to read: several whose prompts are at most `most` tokens together, or one.

        waiting: those to choose from, the next one first. None: there is none, or it has to wait for a place.
        """
        free = self._free
        if not waiting or free < (self.group if free < self.rows else 1):
            return None
        if not self._fits(waiting[:1]):
            if self.batch is not None and self.reading is None:
                self.batch.drop_done_rows()  # it may wait for long, and takes nobody's place till then
            return None
        found = self.prefixes.find(waiting[0].prompt)
        if found is not None:
            self.prefixes.use(found[0])  # now: it may yet be dropped to make room for more texts
        alone = found is not None or self._branch(waiting[0]) > 0
        count, prompts = 1, {tuple(waiting[0].prompt)}
        while count < min(len(waiting), free):
            more = waiting[: count + 1]
            prompts.add(tuple(more[-1].prompt))
            if len(prompts) > 1:
                whole = len(prompts) * max(map(len, prompts))
                if whole > most or alone or self.prefixes.find(more[-1].prompt) or self._branch(more[-1]):
                    break  # it is read for itself
            if not self._fits(more):
                break
            count += 1
        texts, reused = waiting[:count], 0 if found is None else found[1]
        for text in texts:
            self.waiting.remove(text)
            text.stats.reused_tokens = reused
        tokens, rows = max(len(text.prompt) for text in texts), len(unique_prompts(texts))
        workspace = self._make_workspace(texts, rows, tokens)
        branch = self._branch(texts[0], reused, islice(self.waiting, self.rows)) if rows == 1 else 0
        self.target.ranks.check("reading prompts", (count, reused, branch))  # one may lack a kept text
        return Reading(texts, workspace, None if found is None else found[0], reused, branch)

    def _branch(self, text: Text, start: int = 0, waiting: Iterable[Text] = ()) -> int:
        """Return how many tokens of a text are kept when they are read; see PrefixCache.

        Nothing is kept of a text that overtakes another: it is read in one part.
        """
        if self.reading is not None:
            return 0
        return self.prefixes.branch(text.prompt, start, (one.prompt for one in (*self.decoding, *waiting)))

    def _make_workspace(self, texts: Sequence[Text], rows: int, tokens: int) -> Workspace:
        """Return a workspace of `rows` rows with memory for `tokens` tokens each; it can grow later."""
        most = max(map(longest, texts))
        made = self._workspaces.take(rows, tokens, most, self.tree, self.drafter)
        self.prefixes.expect(made.session, made.drafter)
        return made

    def _join(self, joining: Batch, workspace: Workspace) -> None:
        """Let texts whose prompts are read join the batch. workspace: theirs so far."""
        self._unkept |= set(joining.texts)
        if self.batch is None:
            self.batch, self._workspace = joining, workspace
        else:
            self.batch.join(joining)
        next_prompts = [text.prompt for text in islice(self.waiting, self.rows)]
        for text in joining.texts:
            if self.prefixes.saves_reading(text.prompt, next_prompts):
                row = self.batch.texts.index(text)
                self._keep(text.prompt, self.batch.target, self.batch.drafter, row)

    def _tighten(self) -> None:
        """Move the unfinished texts into a new, smaller workspace, which frees what finished ones took."""
        assert self.batch is not None
        batch = self.batch
        batch.select([row for row, text in enumerate(batch.texts) if not text.done])
        rows, tokens = range(len(batch.texts)), max(text.length for text in batch.texts)
        workspace = self._make_workspace(batch.texts, len(rows), tokens)
        workspace.session.replace(rows, batch.target)
        workspace.drafter.replace(rows, batch.drafter)
        batch.target, batch.drafter, self._workspace = workspace.session, workspace.drafter, workspace

    def _release(self) -> None:
        """Keep the texts of the batch that have ended, and free their places unless others will take them."""
        if self.batch is None:
            return
        for row, text in enumerate(self.batch.texts):
            if text.done and text in self._unkept:
                self._unkept.remove(text)
                self._keep(self.batch.shown_tokens(row), self.batch.target, self.batch.drafter, row)
        if not self.batch.active:
            if self.budget.limit is None and self._workspace is not None:
                # A lone text's memory is for the next one, with what was recorded.
                self._workspaces.give_back(replace(self._workspace, batch=1))
            self.batch = self._workspace = None  # frees its memory otherwise
        elif not (self.waiting or self.reading):
            # A graph is compiled for each number of rows, and others are about to take these places.
            self.batch.drop_done_rows(few_sizes=self.target.graphs is not None)

    # --- memory ---

    def _fits(self, texts: Sequence[Text]) -> bool:
        """Return whether there are slots for more texts, once kept texts have made room for them.

        Nothing makes room for texts that would overtake another one: they can wait for it.
        """
        if self.budget.limit is None:
            return True
        limit = self.budget.limit
        if self._being_read:
            overtaking = self.budget.of_overtaking(self._running, texts, self._being_read)
            return overtaking + self.prefixes.slots <= limit
        needed = self.budget.of_batches(self.decoding, texts)
        if needed > limit:
            return False
        now = self.budget.of_batches_now(self._running, texts)
        if now > needed and now + self.prefixes.slots > limit:
            self._tighten()
            now = needed
        self.prefixes.shrink(limit - now)
        return True

    def _keep(self, tokens: Sequence[int], session: TargetSession, drafter: Drafter, row: int) -> None:
        """Keep a row's text, of these tokens, if there is room for it and other texts can go on from it."""
        room = self.prefixes.limit
        if self.budget.limit is not None:
            room = self.budget.limit - self.budget.of_batches_now(self._running, self._being_read)
        self.prefixes.keep(tokens, self.budget.of_tokens(len(tokens)), room, session, drafter, row)
