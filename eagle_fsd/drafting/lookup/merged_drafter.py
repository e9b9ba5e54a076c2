"""The drafter of merged trees: a head grows candidates, and what the text repeats joins them.

The head runs wherever its own spec runs it; merging is on the host, after it. A text whose next tokens a
copied chain tells with confidence is drafted without the head. Whether it is depends on that text alone, so
that its trees do not depend on the texts beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import fetch, host_can_read
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.drafting.draft_vocabulary import OwnTokens
from eagle_fsd.drafting.drafter import Drafter, DrafterSpec, Seen, Verifier
from eagle_fsd.drafting.lookup.lookup_drafter import LookupDrafter, LookupSpec
from eagle_fsd.drafting.lookup.merging import (
    ALL_PRIORS,
    DEEPEST,
    LEAST,
    MOST,
    SURE,
    HeadDraft,
    deepest,
    is_sure,
    merge,
)
from eagle_fsd.drafting.lookup.packing import Vocabulary, pack_trees
from eagle_fsd.drafting.lookup.text_memory import Sources
from eagle_fsd.drafting.text_tokens import TextTokens
from eagle_fsd.drafting.tree_growth import BeamDrafter, Grown
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.runtime.kv_cache import SavedRow

# Beside a head, only copies: a head knows more than lists of earlier next tokens, and these cost a pass over
# all logits in every step.
COPIES = Sources(recycled=False)
NOTHING = HeadDraft((), (), 0, {}, lambda place, token: None)  # of a text that a head does not draft for


@dataclass(frozen=True)
class MergedSpec:
    """A way to draft with a head and with what is looked up. head: makes a BeamDrafter."""

    head: DrafterSpec
    lookup: LookupSpec
    sparse: ClassVar[bool] = True
    rests: ClassVar[bool] = False

    @classmethod
    def for_target(cls, head: DrafterSpec, target: Verifier, sources: Sources = COPIES) -> MergedSpec:
        """Return the spec that drafts for this target, for which the head's spec was made."""
        # The head's drafts are made before it is known what they are worth.
        return cls(head, LookupSpec.for_target(target, sources, worth=0.0))

    @property
    def name(self) -> str:
        return f"{self.head.name}+{self.lookup.name}"

    @property
    def tokens(self) -> int:
        return self.head.tokens

    @property
    def longest(self) -> int | None:
        return self.head.longest

    @property
    def network(self) -> nn.Module | None:
        return self.head.network

    @property
    def identity(self) -> str:
        """A digest of the head's weights, and of everything else that decides which trees a text gets."""
        return merged_identity(self.head.identity, self.lookup)

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> MergedDrafter:
        made = self.head.make(batch, tokens, tree)
        if not isinstance(made, BeamDrafter):
            raise ValueError(
                f"lookup beside the drafter {self.head.name!r}: it must be one that grows trees with a "
                "network; leave lookup out"
            )
        return MergedDrafter(made, LookupDrafter(self.lookup, batch, ALL_PRIORS))


def merged_identity(head: str | None, lookup: LookupSpec) -> str:
    """Return what drafting with lookup beside a head of this identity is known by."""
    settings = {
        "head": head,
        "lookup": lookup.identity,
        "priors": [round(rate, 6) for rate in ALL_PRIORS],
        "limits": [DEEPEST, LEAST, MOST, SURE],
    }
    return f"merged-{digest_json(settings)}"


class MergedDrafter:
    """Merges a head's candidates and looked-up tokens into one tree for each text of a batch."""

    def __init__(self, head: BeamDrafter, lookup: LookupDrafter) -> None:
        self.head, self.lookup = head, lookup
        self.needs = replace(head.needs, next_tokens=lookup.needs.next_tokens)
        drafted = head.predictor.drafted
        # Candidates come to the roots' device, wherever the head is.
        self.listed = Vocabulary(
            None if drafted is None else drafted.to(lookup.spec.device), lookup.spec.tokens
        )
        self.vocabulary = self.listed
        self._own: OwnTokens | None = None  # those that the vocabulary has beside the list

    @property
    def rows(self) -> int:
        return self.head.rows

    def begin(self, seen: Seen) -> None:
        self.head.begin(seen)
        self.lookup.begin(seen)

    def read_on(self, seen: Seen) -> None:
        self.head.read_on(seen)
        self.lookup.read_on(seen)

    def extend(self, seen: Seen) -> None:
        self.head.extend(seen)
        self.lookup.extend(seen)

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        """Propose a tree below roots [B]. A row whose copies are sure has only looked-up nodes."""
        memories = self.lookup.memories
        sure = [is_sure(memory, config) for memory in memories]
        grown = None if all(sure) else self.head.candidates(roots, config, noise)
        if (own := self.head.predictor.own) is not None and (now := own.now()) is not self._own:
            self._own = now
            drafted = self.listed.drafted if now is None else now.drafted
            self.vocabulary = Vocabulary(drafted, self.listed.size, self.listed)
        drafts = [NOTHING] * len(sure) if grown is None else self.to_host(grown)
        fixed = self.lookup.spec.fixed_shapes
        size = config.unpruned if fixed else config
        trees = [
            merge(memory, memory.store.text[-1], NOTHING if alone else draft, size)
            for memory, alone, draft in zip(memories, sure, drafts, strict=True)
        ]
        return pack_trees(
            trees,
            roots,
            self.vocabulary,
            config.total_tokens,
            deepest(config),
            () if grown is None else grown.log_q,
            with_rest=self.lookup.spec.sources.recycled,
            filled=fixed,
            recorded=fixed and not host_can_read(roots),
        )

    def to_host(self, grown: Grown) -> list[HeadDraft]:
        """Return what the head drafted for each text."""
        pool, width = grown.pool, grown.pool.scores.shape[1] // grown.expanded.shape[1]
        vocabulary, own = self.vocabulary, self.head.predictor.own
        scores = torch.nan_to_num(pool.scores, nan=-math.inf)
        parts = fetch(vocabulary.tokens(pool.columns), scores, grown.expanded)
        rows = zip(*(part.tolist() for part in parts), strict=True)
        return [
            HeadDraft(tokens, values, width, places_of(expanded), Prob(grown.log_q, row, vocabulary, own))
            for row, (tokens, values, expanded) in enumerate(rows)
        ]

    def select(self, rows: Sequence[int]) -> None:
        self.head.select(rows)
        self.lookup.select(rows)

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        assert isinstance(other, MergedDrafter)
        self.head.replace(rows, other.head)
        self.lookup.replace(rows, other.lookup)

    def save_row(self, row: int, tokens: int) -> tuple[SavedRow, ...] | None:
        return self.head.save_row(row, tokens)

    def load_row(self, row: int, saved: tuple[SavedRow, ...], tokens: Sequence[int]) -> None:
        self.head.load_row(row, saved, tokens)
        self.lookup.load_row(row, (), tokens)

    def reset(self, longest: int, tree: TreeConfig) -> None:
        self.head.reset(longest, tree)
        self.lookup.rows = self.head.rows  # a cache that grew has no memory for the rows that had left
        self.lookup.reset(longest, tree)


@dataclass(frozen=True)
class Prob:
    """The head's probabilities for one row; see HeadDraft.prob. own: see Predictor."""

    log_q: Sequence[Tensor]
    row: int
    vocabulary: Vocabulary
    own: TextTokens | None = None

    def __call__(self, place: int, token: int) -> float | None:
        column = self.vocabulary.column(token)
        if column is not None and self.own is not None and not self.own.drafts(self.row, token):
            column = None  # another text of the batch has it
        return None if column is None else math.exp(float(self.log_q[place][self.row, column]))


def places_of(expanded: Sequence[int]) -> dict[int, int]:
    return {candidate: place for place, candidate in enumerate(expanded)}
