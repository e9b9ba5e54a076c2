"""Continuous batching: texts join and leave while others are decoded.

A text is admitted, waits for a place, is read together with other waiting texts, joins the batch, and leaves
it when it is done. Its tokens depend only on its prompt, its terms and its stream of random numbers, up to
the rounding of kernels that see other rows beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.sampling import RowRandom
from eagle_fsd.core.stats import Stopwatch
from eagle_fsd.decoding.loop import Batch, prefill
from eagle_fsd.decoding.request import Text
from eagle_fsd.decoding.workspace import AHEAD
from eagle_fsd.drafting.drafter import DrafterSpec, NoDrafter
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

CANCELLED = "cancelled"  # the finish reason of a retired text


class Scheduler:
    """Decodes texts as they come, at most `rows` at a time; `step` is its heartbeat.

    drafter: None for plain decoding. tree: the tree of every text. rows: the most texts in the batch. group:
    waiting texts join when this many places are free, since reading several prompts together takes fewer
    forwards.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterSpec | None,
        tree: TreeConfig,
        rows: int,
        group: int = 1,
        watch: Stopwatch | None = None,
    ) -> None:
        require_integer("rows", rows, 1, "64 suits a CPU")
        self.target, self.tree, self.rows, self.group = target, tree, rows, min(group, rows)
        self.drafter: DrafterSpec = NoDrafter(target.vocab_size)
        if drafter is not None and tree.total_tokens > 1:
            self.drafter = drafter
        self.watch = watch or Stopwatch()
        self.waiting: deque[Text] = deque()
        self.batch: Batch | None = None
        self._accept_step = AcceptStep(target.stepper)

    def admit(self, text: Text) -> None:
        """Add a text to those that wait for a place.

        Raises ValueError if its prompt is empty or leaves no position.
        """
        length, positions = len(text.prompt), self.target.max_positions
        if not 0 < length < positions:
            raise ValueError(
                f"prompt {text.number} has {length} tokens: it must have at least one, and fewer than the "
                f"target's {positions} positions; leave it out"
            )
        text.limit = min(text.limit, positions - length)
        self.waiting.append(text)

    def retire(self, text: Text) -> None:
        """End a text early: it gets no more tokens, and its place becomes free."""
        if text in self.waiting:
            self.waiting.remove(text)
        if not text.done:
            text.stats.finish_reason = CANCELLED

    @property
    def decoding(self) -> list[Text]:
        """The texts in the batch that are not done."""
        return [] if self.batch is None else self.batch.active

    @property
    def busy(self) -> bool:
        """Whether any text is waiting or being decoded."""
        return bool(self.waiting or self.decoding)

    @torch.inference_mode()
    def step(self) -> dict[Text, list[int]]:
        """Let waiting texts join, run one step and return the tokens that each text in the batch emitted."""
        self._admit_waiting()
        if self.batch is None or not self.batch.active:
            self.batch = None  # frees its memory
            return {}
        return self.batch.step(keep_done=bool(self.waiting))

    def run(self) -> Iterator[tuple[Text, list[int]]]:
        """Run steps until all texts are done, and yield the tokens that each text emits."""
        while self.busy:
            yield from self.step().items()

    def _admit_waiting(self) -> None:
        active = len(self.decoding)
        free = self.rows - active
        if not self.waiting or (active and free < self.group):
            return
        new = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        with self.watch("prefill"):
            joining = self._read_prompts(new)
            if self.batch is None or not active:
                self.batch = joining
            else:
                self.batch.join(joining)

    def _read_prompts(self, texts: Sequence[Text]) -> Batch:
        """Read the prompts of texts as a batch of their own; equal prompts are read once."""
        prompts = [tuple(text.prompt) for text in texts]
        unique = list(dict.fromkeys(prompts))
        count, longest = len(unique), max(map(len, unique))
        first = min(self.target.max_positions, longest + min(AHEAD, max(text.limit for text in texts)))
        drafter = self.drafter.make(count, first, self.tree)
        slots = first + self.tree.total_tokens
        session = TargetSession(self.target, count, slots, drafter.needs.taps)
        tokens = pad_right(unique, 0).to(self.target.device)
        roots = prefill(tokens, [len(prompt) for prompt in unique], session, drafter)
        if count < len(texts):
            rows = [unique.index(prompt) for prompt in prompts]
            session.select(rows)
            drafter.select(rows)
            roots = roots[rows]
        streams = RowRandom([text.stream for text in texts], len(texts), self.target.device)
        batch = Batch(session, drafter, streams, self.tree, self.watch, self._accept_step)
        batch.begin(texts, roots)
        return batch
