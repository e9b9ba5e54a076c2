"""The drafter that looks its tokens up, for a target without any head. Trees are made on the host.

Every row has a memory of its own; see text_memory.py. Nothing here runs a network, so it works beside any
runtime. Shapes: B rows, N nodes, M draft distributions, W drafted tokens, k tokens of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import fetch
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import DraftTree, root_only
from eagle_fsd.drafting.drafter import Drafter, Needs, NextTokens, Seen, Verifier
from eagle_fsd.drafting.lookup import confidences, suffix_store
from eagle_fsd.drafting.lookup.packing import Vocabulary, pack_trees
from eagle_fsd.drafting.lookup.recycled_lists import LENGTH, NextList, next_lists
from eagle_fsd.drafting.lookup.text_memory import COPIED, Sources, TextMemory
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.runtime.kv_cache import SavedRow

# On a CPU a forward over a small tree takes half as long again as one over a root, so a tree that is expected
# to bring fewer tokens than this is not worth it. From 0.3 to 0.8 the speed is much the same.
WORTH = 0.5


@dataclass(frozen=True)
class LookupSpec:
    """A way to draft without a network. tokens: the target's vocabulary size.

    fixed_shapes: whether trees of one config always have the same shapes, for a target that records steps.
    They are filled with the next best nodes then, also with those below min_confidence.
    worth: the drafted tokens that a tree must be expected to bring; a text that has no such tree takes a step
    of plain decoding.
    """

    tokens: int
    device: torch.device
    fixed_shapes: bool = False
    sources: Sources = field(default_factory=Sources)
    worth: float = 0.0
    name: ClassVar[str] = "lookup"
    longest: ClassVar[None] = None
    network: ClassVar[None] = None
    sparse: ClassVar[bool] = True

    @classmethod
    def for_target(
        cls, target: Verifier, sources: Sources | None = None, worth: float | None = None
    ) -> LookupSpec:
        """Return the spec that drafts for this target. worth: None means WORTH on a CPU, else 0."""
        if worth is None:
            worth = WORTH if target.device.type == "cpu" else 0.0
        return cls(target.vocab_size, target.device, target.stepper.records, sources or Sources(), worth)

    @property
    def rests(self) -> bool:
        return self.worth > 0

    @property
    def identity(self) -> str:
        """A digest of everything that decides which trees a text gets."""
        settings: dict[str, Any] = {
            **asdict(self.sources),
            "copied_most": COPIED,
            "list": LENGTH,
            "match": [suffix_store.LONGEST, suffix_store.RECENT, suffix_store.ALONE],
            "prior": [confidences.WEIGHT, *(round(rate, 6) for rate in confidences.PRIORS)],
        }
        if self.worth:
            settings["worth"] = self.worth
        return f"lookup-{digest_json(settings)}"

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> LookupDrafter:
        return LookupDrafter(self, batch)


class LookupDrafter:
    """Looks tokens up in the texts of one batch and in the target's earlier lists of next tokens.

    priors: the confidences of a text at first, by cell. rows: how many texts it is for; some may have left.
    """

    def __init__(self, spec: LookupSpec, batch: int, priors: Sequence[float] = confidences.PRIORS) -> None:
        self.spec, self.priors, self.rows = spec, priors, batch
        self.needs = Needs(next_tokens=min(LENGTH, spec.tokens) if spec.sources.recycled else 0)
        self.memories = [TextMemory(spec.sources, priors) for _ in range(batch)]
        self.vocabulary = Vocabulary(torch.empty(0, dtype=torch.int64, device=spec.device), spec.tokens)

    def begin(self, seen: Seen) -> None:
        rows = zip(self.memories, *to_host(seen), strict=True)
        for memory, tokens, lists in rows:
            memory.begin(tokens, lists)

    def read_on(self, seen: Seen) -> None:
        self.begin(seen)

    def extend(self, seen: Seen) -> None:
        for memory, tokens, lists in zip(self.memories, *to_host(seen), strict=True):
            if tokens:
                memory.extend(tokens, lists)

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        """Propose a tree below roots [B], from what the host knows: only its tensors go to the device."""
        fixed, most = self.spec.fixed_shapes, config.total_tokens
        size = config.unpruned if fixed else config
        grown = [memory.grow(memory.store.text[-1], size) for memory in self.memories]
        if self.spec.worth:
            grown = [
                tree if sum(tree.chances[1:]) >= self.spec.worth else memory.prune()
                for memory, tree in zip(self.memories, grown, strict=True)
            ]
            if all(len(tree.tokens) == 1 for tree in grown):
                return root_only(roots, self.spec.tokens, most)
        return pack_trees(grown, roots, self.vocabulary, most, config.reach, filled=fixed, recorded=fixed)

    def select(self, rows: Sequence[int]) -> None:
        taken: set[int] = set()
        # A row may be taken more than once, and its texts go on separately.
        before, self.memories, self.rows = self.memories, [], max(self.rows, len(rows))
        for row in rows:
            self.memories.append(before[row].copy() if row in taken else before[row])
            taken.add(row)

    def replace(self, rows: Sequence[int], other: Drafter) -> None:
        assert isinstance(other, LookupDrafter)
        for row, memory in zip(rows, other.memories, strict=True):
            self.memories[row] = memory

    def save_row(self, row: int, tokens: int) -> tuple[SavedRow, ...]:
        """Save nothing: a memory is soon made of the tokens, and has learned nothing from another answer."""
        return ()

    def load_row(self, row: int, saved: tuple[SavedRow, ...], tokens: Sequence[int]) -> None:
        self.memories[row] = TextMemory(self.spec.sources, self.priors)
        self.memories[row].begin(tokens, [])

    def reset(self, longest: int, tree: TreeConfig) -> None:
        self.memories = [TextMemory(self.spec.sources, self.priors) for _ in range(self.rows)]


def to_host(seen: Seen) -> tuple[Sequence[Sequence[int]], list[list[NextList]]]:
    """Return the tokens of each row without padding, and its lists, if any were asked for."""
    return seen.on_host, lists_of(seen.next_tokens, len(seen.counts))


def lists_of(found: NextTokens | None, rows: int) -> list[list[NextList]]:
    if found is None:
        return [[] for _ in range(rows)]
    ids, log_p = (part.numpy() for part in fetch(found.ids, found.log_p.float()))
    return [next_lists(*row) for row in zip(ids, log_p, strict=True)]
