"""The caller's wishes, checked: options, prompts as one batch, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verdict, Verified
from eagle_fsd.acceptance.published_fsd import PublishedFSD
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import (
    FSD_PAPER_SAMPLING,
    FSD_PAPER_TREE,
    AutoThreshold,
    AutoTree,
    SamplingConfig,
    TreeConfig,
)
from eagle_fsd.core.padding import infer_mask, unpad
from eagle_fsd.core.sampling import Seed
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.target.model import TargetModel


class Observer(Protocol):
    """Looks at every step of a batch and changes nothing.

    emitted: how many of the verdict's tokens each row emitted, by the row's number in the request. If steps
    are recorded (see step_recorder.py), the next step overwrites all these tensors: copy what you keep.
    """

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None: ...


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate: the arguments of `EagleFSD.generate` beside the prompts.

    max_new_tokens: the most new tokens of each text.
    temperature, top_k, top_p: see SamplingConfig; temperature 0 is greedy.
    rule: when a drafted token is accepted; None is Lossless(), and AutoThreshold() reads the threshold of a
      quality budget from the head's calibration.
    tree: the draft tree's size; None is TreeConfig(), total_tokens=1 is plain decoding, and AutoTree()
      measures which is fastest here, or takes the calibration's.
    seed: the same seed and the same tree give the same texts; None draws a fresh one, which the output names.
      Row r of an int seed s draws from the stream (s, r), whatever else is in the batch. A sequence names
      each row's stream, so that seed=[(s, r)] gives row r again on its own.
    eos_token_id: the tokens that end a text; None takes the model's own.
    observer: sees every step, for measurements.

    Raises ValueError for values out of range and for a tree of another type.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    rule: AcceptanceRule | AutoThreshold | None = None
    tree: TreeConfig | AutoTree | None = None
    seed: Seed | None = None
    eos_token_id: int | Sequence[int] | None = None
    observer: Observer | None = None

    @classmethod
    def fsd_paper(cls, threshold: float = 0.3, divergence: str = "js", **fields: Any) -> GenerationOptions:
        """Return the algorithm of the FSD paper as published, with the settings of its experiments.

        A chain of five greedy drafts, accepted while divergence(p, q) <= threshold on raw distributions; the
        first failure ends the step. The paper drafts with a draft model. fields: others of this class, which
        override these settings.
        """
        sampling = asdict(FSD_PAPER_SAMPLING)
        rule = PublishedFSD(threshold, divergence)
        return cls(**{"rule": rule, "tree": FSD_PAPER_TREE, **sampling, **fields})

    def __post_init__(self) -> None:
        require_integer("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token")
        SamplingConfig(self.temperature, self.top_k, self.top_p)  # raises ValueError for bad values
        if self.tree is not None and not isinstance(self.tree, (TreeConfig, AutoTree)):
            raise ValueError(
                f"tree is {self.tree!r}: it must be a TreeConfig, such as TreeConfig(16, 5, 8), or AutoTree()"
            )

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a batch.

    tokens: [B, longest], right-padded. lengths: of each prompt. limits: the most new tokens of each.
    """

    tokens: Tensor
    lengths: list[int]
    limits: list[int]

    @classmethod
    def from_padded(
        cls, target: TargetModel, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
    ) -> Prompts:
        """Read prompts [B, L], padded as attention_mask [B, L] says.

        Limits end at the target's last position. Without a mask the model's pad tokens are padding, as in
        Hugging Face's `generate`. Raises ValueError if the input holds no token ids, or a prompt fills the
        whole context.
        """
        if attention_mask is None:
            attention_mask = infer_mask(input_ids, target.pad_token_id, target.eos_token_ids)
        tokens, lengths = unpad(input_ids, attention_mask, target.vocab_size)
        limits = [
            min(max_new_tokens, remaining_positions(target, row, length))
            for row, length in enumerate(lengths)
        ]
        return cls(tokens, lengths, limits)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> list[list[int]]:
        """Each prompt's token ids."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths, strict=True)]

    @property
    def longest_text(self) -> int:
        """The most tokens that a text may have, its prompt included."""
        return max(length + limit for length, limit in zip(self.lengths, self.limits, strict=True))

    @property
    def context(self) -> int:
        """The length of the longest text about halfway through its generation."""
        return max(self.lengths) + max(self.limits) // 2


def remaining_positions(target: TargetModel, row: int, length: int) -> int:
    """Return how many of the target's positions a prompt of this length leaves for the answer."""
    positions = target.max_positions
    if length >= positions:
        raise ValueError(
            f"row {row} of the batch has {length} tokens: the target has {positions} positions, and one "
            "must be left for the answer; shorten the prompt"
        )
    return positions - length


def end_token_ids(target: TargetModel, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the tokens that end a text: the caller's, or else the model's own."""
    if eos_token_id is None:
        return target.eos_token_ids
    ids = tuple(eos_token_id) if isinstance(eos_token_id, (list, tuple, set)) else (eos_token_id,)
    for token in ids:
        is_id = isinstance(token, Integral) and not isinstance(token, bool)
        if not is_id or not 0 <= int(token) < target.vocab_size:
            raise ValueError(
                f"eos_token_id is {eos_token_id!r}: it must be one token id or a list of them, in "
                f"0..{target.vocab_size - 1}; None takes the model's own"
            )
    return tuple(int(token) for token in ids)


@dataclass(frozen=True)
class Terms:
    """How a text's tokens are chosen and which tokens end it. Rows with equal terms share an accept step."""

    eos_token_ids: tuple[int, ...]
    rule: AcceptanceRule = Lossless()  # noqa: RUF009  # it is frozen
    sampling: SamplingConfig = SamplingConfig()  # noqa: RUF009


@dataclass(eq=False)
class Text:
    """One text that is decoded. number: its name among others. limit: the most new tokens.

    prompt, stream: its token ids and its stream of random numbers, if it goes through a Scheduler. reused:
    the tokens of its prompt that were not read, since a kept text began with them.
    """

    number: int
    limit: int
    terms: Terms
    stats: GenerationStats = field(default_factory=GenerationStats)
    prompt: Sequence[int] = ()
    stream: tuple[int, int] = (0, 0)
    reused: int = 0

    @property
    def done(self) -> bool:
        return self.stats.finish_reason is not None


@dataclass(frozen=True)
class Request:
    """One batch to decode.

    tokens: [B, L] right-padded prompts; lengths: each at least 1; limits: most new tokens per row.
    observer: sees every step.
    """

    tokens: Tensor
    lengths: Sequence[int]
    limits: Sequence[int]
    eos_token_ids: Sequence[int]
    rule: AcceptanceRule
    tree: TreeConfig
    sampling: SamplingConfig
    observer: Observer | None = None

    @classmethod
    def from_prompts(
        cls,
        prompts: Prompts,
        options: GenerationOptions,
        eos_token_ids: Sequence[int],
        rule: AcceptanceRule,
        tree: TreeConfig,
        device: torch.device,
    ) -> Request:
        """Return the request for these prompts, with the rule and the tree that were settled."""
        return cls(
            tokens=prompts.tokens.to(device),
            lengths=prompts.lengths,
            limits=prompts.limits,
            eos_token_ids=eos_token_ids,
            rule=rule,
            tree=tree,
            sampling=options.sampling,
            observer=options.observer,
        )
