"""The noise that a step's draft and draws share; see core/randomness/noise.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.randomness.noise import DraftNoise, least_log_q
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.decoding.request import Text


def draft_noise(
    texts: Sequence[Text], random: RowRandom, tree: TreeConfig, vocab_size: int
) -> DraftNoise | None:
    """Return the noise for the next tree; None if no text shares its noise, or nothing is drafted.

    texts, random: of the rows of the batch.
    """
    shared = [text.terms.shares_noise and not text.done for text in texts]
    if tree.total_tokens == 1 or not any(shared):
        return None
    samplings = [text.terms.sampling for text in texts]
    numbers = [[one.temperature for one in samplings], [least_log_q(one) for one in samplings]]
    temperatures, least = torch.tensor(numbers, dtype=torch.float32, device="cpu").to(random.device)
    noise = row_noise(texts, random, tree.reach, vocab_size)
    return DraftNoise(noise, temperatures, least, on_device(shared, noise.device).bool())


def row_noise(texts: Sequence[Text], random: RowRandom, places: int, vocab_size: int) -> Tensor:
    """Return the noise [B, places, V] from the next token of each text on; zeros where it is not shared."""
    shared = [text.terms.shares_noise and not text.done for text in texts]
    return random.noise([text.stats.new_tokens for text in texts], places, vocab_size, shared)
