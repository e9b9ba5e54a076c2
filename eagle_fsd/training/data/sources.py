"""The sources of a run's text: what they hold is known, and checked, before a feature is computed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from accelerate import Accelerator

from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.batching import require_held_out
from eagle_fsd.training.data.examples import Example
from eagle_fsd.training.data.features import Extraction, OnlineFeatures
from eagle_fsd.training.data.shards import Features, StoredFeatures, finished_shards, shard_counts
from eagle_fsd.training.eagle3.new_head import require_window
from eagle_fsd.training.loss import Head

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sources:
    """A run's text.

    files: the examples of each, by the name of its folder of features. shards: folders that are ready.
    """

    files: Mapping[str, Sequence[Example]]
    shards: Sequence[Path]

    @property
    def examples(self) -> list[Example]:
        """The examples of all files, in the order in which they are numbered."""
        return list(chain.from_iterable(self.files.values()))

    @property
    def counts(self) -> list[int]:
        """The number of sequences of each source, in the order in which they are numbered."""
        return [*map(len, self.files.values()), *shard_counts(self.shards)]

    def require(self, held_out: int, head: Head | None) -> None:
        """Raise ValueError for text that cannot train a head. held_out: sequences that it is not to see."""
        counts = self.counts
        require_held_out(sum(counts), held_out, counts[0])
        if isinstance(head, Eagle3Head):
            require_window(head, max((len(example.tokens) for example in self.examples), default=0))

    def online(self, target: TargetModel, taps: Sequence[int]) -> Features:
        """Return features that the target computes each time they are read. There must be no shards."""
        return OnlineFeatures(target.decoder, self.examples, taps=taps)

    def stored(
        self, target: TargetModel, target_name: str, root: Path, accelerator: Accelerator, taps: Sequence[int]
    ) -> Features:
        """Return the features of all sources, after computing those of files that `root` lacks.

        The accelerator's processes divide the shards.
        """
        identity = target.identity(target_name)
        for folder in self.shards:
            finished_shards(folder, identity, taps)  # those of another target, before hours of computing
        folders = {root / name: examples for name, examples in self.files.items()}
        extraction = Extraction(target.decoder, identity, target.dtype, taps)
        if accelerator.is_main_process and (cost := extraction.estimate(folders)).tokens:
            logger.info("features: %s", cost)
        extraction.write(folders, (accelerator.process_index, accelerator.num_processes))
        accelerator.wait_for_everyone()
        return StoredFeatures([*folders, *self.shards], identity, taps)
