"""Streams of random numbers, one for each row, so that a row's text does not depend on its batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.core.randomness.noise import RowNoise, noise_on

SEED_LIMIT = 2**63
# Held by who draws from torch's default generator, or sets it for a while.
DEFAULT_GENERATOR = threading.Lock()


class Uniforms(Protocol):
    """A source of random numbers. `uniform` returns the next n of every row: [B, n] float64 in [0, 1)."""

    def uniform(self, n: int) -> Tensor: ...


# One seed for the whole batch, or a seed or (seed, row) pair for each row.
Seed = int | Sequence[int | tuple[int, int]]


def row_streams(seed: Seed, batch: int) -> list[tuple[int, int]]:
    """Return the (seed, row) pair that names each row's stream of random numbers.

    An int s gives row r the stream (s, r). A sequence names each row's own stream: a pair as it is, an int s
    as (s, 0), which is what a single prompt draws with seed s. Raises ValueError for anything else.
    """
    entries: list[Any]
    pairs: list[tuple[Any, ...]]
    given: Any = seed  # a caller's value, of any type until it is checked
    if isinstance(given, Integral) and not isinstance(given, bool):
        pairs = [(given, row) for row in range(batch)]
    else:
        try:
            entries = [given] * batch if isinstance(given, str) else list(given)
        except TypeError:
            entries = [given] * batch  # the check below names it
        pairs = [tuple(one) if isinstance(one, (tuple, list)) else (one, 0) for one in entries]
    if len(pairs) != batch:
        raise ValueError(
            f"seed has {len(pairs)} values for {batch} rows: give one int or one per row, which may be a "
            "pair, as in [(seed, row)]"
        )
    for pair in pairs:
        whole = [isinstance(part, Integral) and not isinstance(part, bool) for part in pair]
        if len(pair) != 2 or not all(whole) or not all(0 <= part < SEED_LIMIT for part in pair):
            shown = pair[0] if pair[1:] == (0,) else pair
            raise ValueError(
                f"seed {shown!r} must be an int in [0, 2**63), or a list with an int or a pair (seed, row) "
                "for every row; choose another"
            )
    return [(int(one), int(row)) for one, row in pairs]


def fresh_seed() -> int:
    """Return a random seed. It comes from torch's default generator, so torch.manual_seed fixes it."""
    with DEFAULT_GENERATOR:
        return int(torch.randint(SEED_LIMIT - 1, (), device="cpu"))


class RowStream:
    """One row's random numbers: those of a generator, one after the other, and the noise of its places."""

    def __init__(self, seed: int, row: int) -> None:
        sequence = np.random.SeedSequence(seed, spawn_key=(row,))
        self.generator = np.random.Generator(np.random.PCG64(sequence))
        self.noise = RowNoise((seed, row))
        self.key = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))  # of a GPU's noise


class RowRandom:
    """One stream of uniform numbers per row of a batch, named by a (seed, row) pair; see `row_streams`.

    Streams of different pairs are independent (numpy's SeedSequence), and a stream is the same in every
    batch. The uniform numbers are the same on every device; the noise of a GPU is its own.
    """

    def __init__(self, seed: Seed, batch: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._rows = [RowStream(*stream) for stream in row_streams(seed, batch)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        self._rows = [self._rows[row] for row in rows]

    def at(self, rows: Sequence[int]) -> RowRandom:
        """Return the streams of these rows alone. They are shared: a draw from either advances both."""
        some = RowRandom(0, 0, self.device)
        some._rows = [self._rows[row] for row in rows]
        return some

    def replace(self, rows: Sequence[int], other: RowRandom) -> None:
        """Put other streams, one for each, in the place of these rows' streams."""
        for row, stream in zip(rows, other._rows, strict=True):
            self._rows[row] = stream

    def uniform(self, n: int) -> Tensor:
        """The next n numbers of every row: [B, n] float64 in [0, 1).

        In float64 whatever torch's default is: on float32's grid the least likely tokens could not be drawn.
        """
        numbers = torch.empty(len(self._rows), n, dtype=torch.float64, device="cpu")
        for row, stream in zip(numbers, self._rows, strict=True):
            stream.generator.random(out=row.numpy())
        return numbers.to(self.device, non_blocking=True)

    def noise(self, first: Sequence[int], count: int, size: int, rows: Sequence[bool]) -> Tensor:
        """Return the noise that draws tokens: [B, count, size] float32; see core/randomness/noise.py.

        first: by row, the place in its answer to begin with. rows: which of them have any; others get zeros.
        """
        if self.device.type != "cpu":
            keys = [stream.key if some else None for stream, some in zip(self._rows, rows, strict=True)]
            return noise_on(self.device, keys, first, count, size)
        none = [torch.zeros((), dtype=torch.float32, device="cpu").expand(size)] * count
        vectors = [
            stream.noise.places(first[row], count, size) if rows[row] else none
            for row, stream in enumerate(self._rows)
        ]
        flat = [vector for row in vectors for vector in row]
        noise = torch.stack(flat) if flat else torch.zeros(0, dtype=torch.float32, device="cpu")
        return noise.view(len(rows), count, size)
