"""Rotary positions of EAGLE-3 heads: plain, linearly scaled, or scaled as in Llama 3.1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.core.checks import format_value, require_integer, require_number
from eagle_fsd.drafting.eagle_config import CHECK, DEFAULT_ROPE_THETA, LARGEST, LEAST, MOST, rotary_fields

DEFAULT, LINEAR, LLAMA3 = "default", "linear", "llama3"
KINDS = (DEFAULT, LINEAR, LLAMA3)


@dataclass(frozen=True)
class Rope:
    """The angles by which a head turns its queries and keys. They are the head's own, never the target's.

    theta: the base. factor: positions are stretched by it, in llama3 only for slow angles: fully where a turn
    takes more than original / low positions, and not at all where it takes fewer than original / high.
    """

    theta: float = DEFAULT_ROPE_THETA
    kind: str = DEFAULT
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        require_number("rope_theta", self.theta, LEAST, MOST, CHECK)
        require_number("the rope's factor", self.factor, LEAST, MOST, CHECK)
        require_number("low_freq_factor", self.low, LEAST, MOST, CHECK)
        require_number("high_freq_factor", self.high, LEAST, MOST, CHECK)
        require_integer("original_max_position_embeddings", self.original, 1, CHECK, LARGEST)
        if self.kind == LLAMA3 and self.high <= self.low:
            raise ValueError(
                f"high_freq_factor is {self.high:g}: it must be above low_freq_factor ({self.low:g}); {CHECK}"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rope:
        """Read the rotary fields of a config.json.

        Raises ValueError for a kind of scaling that is not built here.
        """
        fields = rotary_fields(data)
        kind = fields["rope_type"]
        if kind not in KINDS or "mrope_section" in fields:
            shown = "mrope" if "mrope_section" in fields else kind
            raise ValueError(
                f"rope scaling is {format_value(shown)}: EAGLE-3 heads here have {', '.join(KINDS)}; choose "
                "another head"
            )
        if kind != DEFAULT and "factor" not in fields:
            raise ValueError(f"rope scaling {kind!r} names no factor: it must; {CHECK}")
        usual = cls()
        return cls(
            theta=fields["rope_theta"],
            kind=kind,
            factor=fields.get("factor", 1.0) if kind != DEFAULT else 1.0,
            low=fields.get("low_freq_factor", usual.low),
            high=fields.get("high_freq_factor", usual.high),
            original=fields.get("original_max_position_embeddings", usual.original),
        )

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return the angles per position [head_dim / 2], float32 on the CPU."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        plain = float(self.theta) ** -exponents
        if self.kind == DEFAULT:
            return plain.float()
        if self.kind == LINEAR:
            return (plain / self.factor).float()
        turns = self.original * plain / (2 * math.pi)  # that a pair of dimensions makes over `original`
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)  # of the plain angle
        return (share * plain + (1 - share) * plain / self.factor).float()
