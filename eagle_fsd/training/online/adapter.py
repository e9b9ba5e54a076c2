"""Let a head learn from the texts it drafts for, between them, on a copy that must prove itself first.

Cf. Online Speculative Decoding (arXiv 2310.07177). The target has just written these texts, so what the head
should have predicted is known: the target's features and distributions along them. These are the goals, and
never the tokens, some of which a fuzzy rule may have let through. Lossless decoding stays lossless whatever
the head learns. With a threshold, text may drift: a head that comes closer to the target is followed more.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_fsd.core.checks import plain_numbers, require_integer, require_number
from eagle_fsd.core.processing import as_tokens
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub.head_checkpoint import save_head
from eagle_fsd.training.batching import collate, features_std, input_sizes, tokens_of_batch
from eagle_fsd.training.data.examples import Example, batches_by_length
from eagle_fsd.training.data.features import OnlineFeatures
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.held_out import HeldOut, best_tokens, evaluate, hold_out
from eagle_fsd.training.loss import LossWeights, head_loss
from eagle_fsd.training.optimizer import HeadOptimizer
from eagle_fsd.training.readout import Readout

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD

logger = logging.getLogger(__name__)

CLIP = 0.5  # of the gradient's norm
SETBACK = 0.05  # tokens of a chain by which a copy may be worse than the head before it is thrown away
LONGEST = 2048  # tokens of a text that are learned from
MOST_WAITING = 16  # updates' worth of text that waits to be learned from: a server may be busy for long


@dataclass(frozen=True)
class AdaptConfig:
    """How a head adapts.

    every: the least answer tokens of one update, which takes whole texts. learning_rate: see HeadOptimizer.
    replay: the share of an update that is texts of earlier updates, so that they are not forgotten.
    held_back: one text of so many is never learned from, and tells whether an update helps. kept: the most
    such texts that are kept, the newest. memory: the most tokens of texts that are kept for replay. unroll:
    drafting steps that are taught.
    """

    every: int = 512
    learning_rate: float = 1e-4
    replay: float = 0.5
    held_back: int = 4
    kept: int = 8
    memory: int = 65_536
    unroll: int = 3

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("held_back", 2), ("kept", 1), ("memory", 0), ("unroll", 1)):
            require_integer(name, getattr(self, name), least, f"the default is {getattr(AdaptConfig, name)}")
        require_number("learning_rate", self.learning_rate, 0.0, 1.0, "the default is 1e-4")
        require_number("replay", self.replay, 0.0, 0.9, "the default is 0.5")
        plain_numbers(self)


@dataclass(frozen=True)
class AdaptReport:
    """One update. tokens: answer tokens that it learned from, replay included.

    before, after: the expected tokens per step of a chain of drafts on the held-back texts, with the head
    that drafts and with the copy that has learned. used: the copy drafts from now on. dropped: it became so
    much worse that it begins again from the head that drafts.
    """

    tokens: int
    before: float
    after: float
    used: bool
    dropped: bool
    seconds: float

    def __str__(self) -> str:
        outcome = "used" if self.used else "dropped" if self.dropped else "not used yet"
        return (
            f"the head learned from {self.tokens} tokens in {self.seconds:.1f} s: chains on held-back "
            f"texts give {self.before:.3f} tokens before and {self.after:.3f} after, {outcome}"
        )


@dataclass
class HeldBackText:
    """A text that is never learned from. chain: the expected tokens per step with the head that drafts."""

    text: HeldOut
    chain: float


class HeadAdapter:
    """Adapts an engine's EAGLE-1/2 head. Call `add` for finished texts, and `update` between while `ready`.

    `update` must not run while a text is made on this engine in another thread; texts made by other engines
    of the same model are not affected. Nothing is written to disk unless `save` is called. Raises ValueError
    if the engine drafts without such a head.
    """

    def __init__(self, engine: EagleFSD, config: AdaptConfig | None = None) -> None:
        if not isinstance(engine.head, DraftHead):
            drafts = "none" if engine.drafter is None else engine.drafter.name
            raise ValueError(
                f"the drafter is {drafts}: only an EAGLE-1/2 head can adapt; leave adaptation out (--adapt), "
                "or name such a head"
            )
        self.engine, self.config = engine, config or AdaptConfig()
        target = engine.target
        self._decoder = target.decoder  # loaded now, if only its graphs were, and not between two answers
        self._embedding = target.held.get_input_embeddings().weight.detach().to("cpu", torch.float32)
        self._readout = Readout.from_target(target).to("cpu", torch.float32)
        drafted = engine.head.draft_tokens
        self._drafted = torch.arange(target.vocab_size) if drafted is None else drafted.cpu()
        self._drafts = self._readout.restrict(self._drafted)
        self._live = plain_copy(engine.head)
        self._copy = copy.deepcopy(self._live)
        self._optimizer: HeadOptimizer | None = None
        self._new: deque[Example] = deque()
        self._new_tokens = 0  # of answers in them
        self._memory: deque[FeatureSequence] = deque()
        self._held_back: deque[HeldBackText] = deque(maxlen=self.config.kept)
        self._random = Random(0)
        self._texts = 0
        self.updates: list[AdaptReport] = []

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take in a finished text: its prompt's token ids and those that were generated.

        More than MOST_WAITING updates' worth do not wait: the oldest texts are dropped. One with images or
        sound is left out. Raises ValueError for anything but the target's token ids, and for a prompt of
        none.
        """
        target = self.engine.target
        asked, said = as_tokens("prompt", prompt), as_tokens("answer", answer, some=False)
        if target.vocab_size <= max(asked) < target.media.end:
            logger.info("a text is not learned from: it has images or sound")
            return
        if (largest := max((*asked, *said))) >= target.vocab_size:
            raise ValueError(
                f"a text has the token {largest}: the target's tokens are 0..{target.vocab_size - 1}; give "
                "its token ids as they were generated"
            )
        text = Example.of_answer(asked, said, target.eos_token_ids).cut(LONGEST)
        if sum(text.learn) <= 1:
            return
        self._new.append(text)
        self._new_tokens += sum(text.learn)
        while len(self._new) > 1 and self._new_tokens > MOST_WAITING * self.config.every:
            self._next_new()
            logger.info("a text is not learned from: too many wait")

    @property
    def ready(self) -> bool:
        """Whether enough new text has come for an update."""
        return self._new_tokens >= self.config.every

    @property
    def adapted(self) -> bool:
        """Whether the head drafts otherwise than when it was loaded."""
        return any(report.used for report in self.updates)

    def update(self) -> AdaptReport | None:
        """Learn from the oldest texts that wait, if there are enough of them, and report the result.

        The copy drafts from now on if it does better on the held-back texts. While none is held back, texts
        are only collected. Returns None if nothing was learned.
        """
        if not self.ready:
            return None
        started = time.monotonic()
        learned = self._sort_in()
        if not learned or not self._held_back:
            self._remember(learned)
            return None
        tokens = self._learn(learned)
        chains = [self._chain(self._copy, one.text) for one in self._held_back]
        before = fmean(one.chain for one in self._held_back)
        after = fmean(chains)
        used = after > before
        dropped = not after >= before - SETBACK  # also for a loss that is not finite
        if used:
            self._live.load_state_dict(self._copy.state_dict())
            self.engine.draft_with(self._copy.state_dict())
            for one, chain in zip(self._held_back, chains, strict=True):
                one.chain = chain
        elif dropped:
            self._copy.load_state_dict(self._live.state_dict())
            self._optimizer = None
        report = AdaptReport(tokens, before, after, used, dropped, time.monotonic() - started)
        self.updates.append(report)
        logger.info("%s", report)
        return report

    def save(self, folder: str | Path) -> Path:
        """Write the head that drafts now as a checkpoint that `ea_model` takes, and return its folder.

        It holds what was learned from the texts, which may be private.
        """
        adapted = {
            "settings": asdict(self.config),
            "updates": len(self.updates),
            "used": sum(one.used for one in self.updates),
        }
        return save_head(self._live, folder, {"adapted": adapted})

    # -- inside ----------------------------------------

    def _sort_in(self) -> list[FeatureSequence]:
        """Compute the features of new texts, hold some texts back, and return the others."""
        new, tokens = [], 0
        while tokens < self.config.every:
            new.append(self._next_new())
            tokens += sum(new[-1].learn)
        sequences = OnlineFeatures(self._decoder, new).read(range(len(new)))
        learned = []
        for sequence in sequences:
            self._texts += 1
            if self._texts % self.config.held_back == 0:
                text = hold_out([sequence], self._readout, best=self._best)
                self._held_back.append(HeldBackText(text, self._chain(self._live, text)))
            else:
                learned.append(sequence)
        return learned

    def _next_new(self) -> Example:
        """Take the oldest text that waits."""
        text = self._new.popleft()
        self._new_tokens -= sum(text.learn)
        return text

    def _learn(self, new: list[FeatureSequence]) -> int:
        """Teach the copy with new texts and some of the memory, and return how many tokens it learned."""
        share = self.config.replay / (1 - self.config.replay)
        replayed = self._random.sample(list(self._memory), min(len(self._memory), round(len(new) * share)))
        lesson = [*new, *replayed]
        self._remember(new)
        if self._optimizer is None:
            self._optimizer = HeadOptimizer(self._copy, 0.0, input_sizes(lesson, self._embedding))
        learned = [int(one.learn.sum()) for one in lesson]
        self._copy.zero_grad()
        total, deviation = 0.0, features_std(lesson)
        # Padded to the longest text, a short one would cost as much as that.
        for group in batches_by_length([len(one.tokens) for one in lesson], LONGEST):
            batch = collate([lesson[place] for place in group])
            readout = self._readout.restrict(tokens_of_batch(self._drafted, batch))
            parts = (batch, self._embedding, readout, deviation, self.config.unroll)
            loss, _ = head_loss(self._copy, *parts, LossWeights())
            loss = loss * (sum(learned[place] for place in group) / max(sum(learned), 1))
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self._copy.parameters(), CLIP)
        if math.isfinite(total + norm.item()):
            self._optimizer.step(self.config.learning_rate)
        return sum(learned)

    def _remember(self, texts: list[FeatureSequence]) -> None:
        """Keep texts for replay, and drop the oldest ones beyond the most tokens."""
        self._memory.extend(texts)
        while sum(len(one.tokens) for one in self._memory) > self.config.memory:
            self._memory.popleft()

    def _chain(self, head: DraftHead, text: HeldOut) -> float:
        """Return the expected tokens per step of a chain of drafts on a held-back text."""
        return float(evaluate(head, text, self._embedding)["chain_tau"])

    def _best(self, features: Tensor, k: int) -> Tensor:
        """Return the k likeliest tokens [N, k], of those that are drafted, for predictions [N, d]."""
        return self._drafted[best_tokens(features, k, self._drafts)]


def plain_copy(head: DraftHead) -> DraftHead:
    """Return a copy of a head in float32 on the host, with plain layers, that can be trained."""
    made = DraftHead(replace(head.config, draft_vocab_size=None))
    made.load_state_dict({name: value.detach().cpu().float() for name, value in head.state_dict().items()})
    drafted = None if head.draft_tokens is None else head.draft_tokens.cpu()
    return made.restrict(drafted, head.config.draft_text_tokens)
