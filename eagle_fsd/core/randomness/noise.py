"""The noise that draws a text's tokens, shared between the target and its draft.

The token at a place of a text is x = argmax(log p + g), with p after the warpers and g standard Gumbel noise,
one number for each token of the vocabulary: then x ~ p (the Gumbel-max trick). The noise belongs to the place
and not to the tree, so that x is the same whatever was drafted. A draft may therefore look at it. Taking the
target's logits for its own plus an error that is Gumbel noise again, it gives the tokens the probabilities
softmax(log q + T g) of being x, where T is the temperature. At T = 0 this is q itself. Text that is drawn
with one noise for draft and target (Daliri, Musco and Suresh, arXiv 2408.07978) stays exactly the target's.
Shapes: B rows, D levels of a tree, K nodes, V vocabulary, W drafted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.core.config import SamplingConfig

# Where top-k, top-p or min-p cut the target's tokens, a draft leaves out those that have less than this share
# of its likeliest one's probability, at the target's temperature.
CUT = 0.01
LEAST_WAIT = 1e-30  # of 0 the noise would be infinite, and a token of probability zero could be drawn


class RowNoise:
    """The noise of one text, a vector for each place of its answer. stream: see `row_streams`.

    A vector depends on the stream and on the place alone. Vectors that may be asked for again are kept.
    """

    def __init__(self, stream: tuple[int, int]) -> None:
        self._stream = stream
        self._kept: dict[int, Tensor] = {}

    def places(self, first: int, count: int, size: int) -> list[Tensor]:
        """Return the noise [size] float32 of `count` places from `first` on, and forget the places before."""
        self._kept = {place: vector for place, vector in self._kept.items() if place >= first}
        for place in range(first, first + count):
            if place not in self._kept:
                self._kept[place] = self._make(place, size)
        return [self._kept[place] for place in range(first, first + count)]

    def _make(self, place: int, size: int) -> Tensor:
        seed, row = self._stream
        source = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(row, place))))
        # On float32's grid the smallest numbers, which draw the least likely tokens, would be 0 too often.
        waits = source.standard_exponential(size, dtype=np.float64).clip(min=LEAST_WAIT)
        return torch.from_numpy(waits).float().log_().neg_()


def noise_on(
    device: torch.device, keys: Sequence[int | None], first: Sequence[int], count: int, size: int
) -> Tensor:
    """Return the noise [B, count, size] float32 that a GPU draws by itself, for `count` places of every row.

    keys: each row's own, below 2**63; None: zeros. first: by row, the first place. On one model of GPU a
    vector depends on its row's key and its place alone. It is not the one that RowNoise has: drawing that on
    the host and copying it would take longer than a step of a small target.
    """
    waits = torch.ones(len(keys), count, size, dtype=torch.float32, device=device)
    exact = torch.empty(size, dtype=torch.float64, device=device)  # see RowNoise
    generator = torch.Generator(device)  # counter-based on a GPU: any two seeds are two streams
    for row, key in enumerate(keys):
        if key is None:
            continue
        for place in range(count):
            generator.manual_seed((key + first[row] + place) % 2**63)
            waits[row, place] = exact.exponential_(generator=generator)
    return waits.clamp_(min=LEAST_WAIT).log_().neg_()


@dataclass(frozen=True)
class DraftNoise:
    """What a draft knows of the noise at the places below its roots.

    noise: [B, D, V] float32, which draws a token at each level. temperatures: [B]. least: [B] float32,
    how far below its largest one a draft's log-probability may be, at most 0. shared: [B] bool, which rows'
    drafts know their noise; the others draft as without.
    """

    noise: Tensor
    temperatures: Tensor
    least: Tensor
    shared: Tensor

    def condition(self, log_q: Tensor, level: int, drafted: Tensor | None) -> Tensor:
        """Return the log-probabilities [B, K, W] of what the target will draw `level` levels below the root.

        log_q: [B, K, W], of the draft alone. drafted: the tokens [W] that it covers; None: all.
        """
        noise = self.noise[:, level, None]
        if drafted is not None:
            noise = noise.index_select(-1, drafted)
        least = log_q.amax(-1, keepdim=True) + self.least[:, None, None]
        expected = torch.addcmul(log_q, noise, self.temperatures[:, None, None])
        expected = torch.where(log_q >= least, expected, -math.inf).log_softmax(-1)
        return torch.where(self.shared[:, None, None], expected, log_q)


def least_log_q(sampling: SamplingConfig) -> float:
    """Return the least log-probability, below the largest one, of tokens that the target may draw."""
    return sampling.temperature * math.log(CUT) if sampling.cuts else -math.inf
