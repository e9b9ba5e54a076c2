"""Texts whose prompts are being read, before they join the batch: together in one go, or one in parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import on_device, pad_right
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.stats import Stopwatch
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.prompts.prefill import PromptReader, prefill
from eagle_fsd.decoding.prompts.prefix_cache import KeptText
from eagle_fsd.decoding.request import Text
from eagle_fsd.decoding.workspace import Workspace


def unique_prompts(texts: Sequence[Text]) -> list[tuple[int, ...]]:
    """Return the different prompts of texts, in order."""
    return list(dict.fromkeys(tuple(text.prompt) for text in texts))


class Reading:
    """Texts whose prompts are being read in a workspace of their own, with a row for each different prompt.

    Several prompts are read in one go; a single one may be read in parts, and may go on from the first
    `start` tokens of a kept text. branch: one of its parts ends with this token, which is not the last; 0:
    with any. roots: [B], once all is read.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        workspace: Workspace,
        kept: KeptText | None = None,
        start: int = 0,
        branch: int = 0,
    ) -> None:
        self.texts, self.workspace, self.branch = list(texts), workspace, branch
        self.prompts = unique_prompts(texts)
        session, drafter = workspace.session, workspace.drafter
        self.tokens = pad_right(self.prompts, 0).to(session.cache.device)
        self.roots: Tensor | None = None
        self.reader = None
        if kept is not None:
            self.reader = kept.load(start, self.tokens, session, drafter)
        elif len(self.prompts) == 1:
            self.reader = PromptReader(self.tokens, session, drafter)

    @property
    def wanted(self) -> bool:
        """Whether any of the texts has not been retired."""
        return not all(text.done for text in self.texts)

    @property
    def shown(self) -> int:
        """How many tokens of a single prompt have been read, the root included."""
        return 0 if self.reader is None else self.reader.shown

    @property
    def at_branch(self) -> bool:
        """Whether just the tokens before the branch have been read, so that they may be kept."""
        return self.branch > 0 and self.reader is not None and self.reader.position == self.branch - 1

    def advance(self, most: int) -> int:
        """Read on, at most `most` tokens of a single prompt, and return how many tokens were read."""
        session, drafter = self.workspace.session, self.workspace.drafter
        if self.reader is None:
            self.roots = prefill(self.tokens, [len(prompt) for prompt in self.prompts], session, drafter)
            return self.tokens.numel()
        if self.reader.position < self.branch - 1:
            most = min(most, self.branch - 1 - self.reader.position)
        count = self.reader.read(most)
        if not self.reader.left:
            self.roots = self.tokens[:, -1]
        return count

    def finish(self, tree: TreeConfig, watch: Stopwatch) -> Batch:
        """Return the texts as a batch; those that were retired in the meantime are left out."""
        assert self.roots is not None
        texts = [text for text in self.texts if not text.done]
        rows = [self.prompts.index(tuple(text.prompt)) for text in texts]
        session, drafter = self.workspace.session, self.workspace.drafter
        if rows != list(range(len(self.prompts))):
            session.select(rows)
            drafter.select(rows)
        streams = RowRandom([text.stream for text in texts], len(texts), session.cache.device)
        accept_step = self.workspace.accept_step
        batch = Batch(session, drafter, streams, tree, watch, accept_step)
        batch.begin(texts, self.roots[on_device(rows, self.roots.device)])
        return batch
