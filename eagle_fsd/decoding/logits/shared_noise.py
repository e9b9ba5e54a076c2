"""The noise that a step's draft and draws share; see core/randomness/noise.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import host_can_read
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.randomness.noise import DraftNoise, least_log_q
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.request import Text


def draft_noise(
    texts: Sequence[Text], random: RowRandom, tree: TreeConfig, vocab_size: int
) -> DraftNoise | None:
    """Return the noise for the next tree; None if no text shares its noise, or nothing is drafted.

    texts, random: of the rows of the batch.
    """
    shared = sharing(texts)
    if tree.total_tokens == 1 or not any(shared):
        return None
    samplings = [text.terms.sampling for text in texts]
    numbers = [[one.temperature for one in samplings], [least_log_q(one) for one in samplings]]
    both = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    temperatures, least = both.to(random.device, non_blocking=True)
    noise = random.noise(next_places(texts), tree.reach, vocab_size, shared)
    return DraftNoise(noise, temperatures, least, on_device(shared, noise.device).bool())


def draw_noise(texts: Sequence[Text], random: RowRandom, tree: DraftTree, vocab_size: int) -> Tensor | None:
    """Return the noise [B, D + 1, V] that draws tokens at all depths of a tree; None if none is shared."""
    if not any(shared := sharing(texts)):
        return None
    depth = int(tree.depths.max()) if host_can_read(tree.depths) else tree.depth
    return random.noise(next_places(texts), depth + 1, vocab_size, shared)


def sharing(texts: Sequence[Text]) -> list[bool]:
    """Return, for each text, whether more of it is drawn with noise that its draft knows."""
    return [text.terms.shares_noise and not text.done for text in texts]


def next_places(texts: Sequence[Text]) -> list[int]:
    """Return the place of each text's next token, counted from the answer's first."""
    return [text.stats.new_tokens for text in texts]
