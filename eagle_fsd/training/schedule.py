"""Settings of a training run, the head's initial weights and the learning rate over time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from eagle_fsd.core.checks import flag_of, require_integer, require_number
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.training.loss import Head, LossWeights

MOST_SEEDS = 1_000_000_000_000  # a batch's is the run's times 1,000,003 plus its place, and has 63 bits


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one run.

    minutes: 0 is off; else the schedule ends when the epochs or the minutes are over, whichever is first.
    accumulate: batches of batch_tokens in each process's share of a step.
    unroll: drafting steps per batch, once the share `unroll_after` of the run is done. Before that it is 1,
    which is more than twice as fast.
    """

    epochs: float = 10.0
    minutes: float = 0.0
    batch_tokens: int = 4096
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 0.5
    noise: float = 0.0
    unroll: int = 3
    unroll_after: float = 0.4
    loss: LossWeights = field(default_factory=LossWeights)
    eval_every: int = 200
    checkpoint_every: int = 100
    seed: int = 0
    bfloat16: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "accumulate", "unroll", "eval_every", "checkpoint_every"):
            require_integer(name, getattr(self, name), 1, f"change {flag_of(name)}")
        for name in ("epochs", "learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: it must be above 0; change {flag_of(name)}"
                )
        remedy = "every batch then has a seed of its own; change --seed"
        require_integer("seed", self.seed, 0, remedy, MOST_SEEDS - 1)
        if math.isinf(self.learning_rate):
            raise ValueError("learning_rate is inf: it must be finite; change --learning-rate")
        if not (math.isfinite(self.epochs) or self.minutes):
            raise ValueError(
                f"epochs is {self.epochs}: without --minutes a run needs an end; change --epochs"
            )
        for name in ("minutes", "weight_decay", "noise"):
            require_number(name, getattr(self, name), 0.0, math.inf, f"change {flag_of(name)}")
        for name in ("warmup", "unroll_after"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: it is a share of the run, at least 0 and below 1; "
                    f"change {flag_of(name)}"
                )


@torch.no_grad()
def initialise(head: DraftHead, seed: int, embedding: Tensor) -> None:
    """Set a head's initial weights so that it passes the feature through: `fc` is the identity on it.

    A random `fc` hardly learns. The embedding half of `fc` and all other matrices start as small noise. The
    noise of the embedding half is divided by the size of the target's embedding [V, d].
    """
    fill_with_noise(head, seed)
    width = head.config.hidden_size
    head.fc.weight[:, :width] /= max(root_mean_square(embedding.flatten()).item(), 1e-6)
    head.fc.weight[:, width:] = torch.eye(width)


@torch.no_grad()
def fill_with_noise(head: Head, seed: int) -> None:
    """Fill a head's matrices with small noise, as in Llama, and its biases with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        elif name.endswith("bias"):
            parameter.zero_()


def widen(head: Head, size: int, seed: int) -> None:
    """Give every MLP of a head `size` inner units, in place, without a change to what the head computes.

    New units read noise as large as what the old ones read, and write nothing until training lets them: their
    columns of `down_proj` are 0. Raises ValueError if the head's MLP is wider than `size`.
    """
    has = head.config.intermediate_size
    if size < has:
        raise ValueError(
            f"intermediate_size is {size}: the head has {has} inner units, and none can be taken away; give "
            "--intermediate-size at least these, or leave it out"
        )
    generator = torch.Generator().manual_seed(seed)
    for layer in head.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            old = linear.weight.detach()
            noise = torch.randn(size - has, old.shape[1], generator=generator).to(old)
            linear.weight = nn.Parameter(torch.cat((old, noise * root_mean_square(old.flatten()))))
            linear.out_features = size
        down = layer.mlp.down_proj
        old = down.weight.detach()
        down.weight = nn.Parameter(torch.cat((old, old.new_zeros(old.shape[0], size - has)), dim=1))
        down.in_features = size
    head.config = replace(head.config, intermediate_size=size)


def learning_rate_at(progress: float, config: TrainConfig) -> float:
    """Return the learning rate: a linear warm-up, then a cosine to zero. progress runs from 0 to 1."""
    if progress < config.warmup:
        return config.learning_rate * max(progress / config.warmup, 1e-3)
    return (
        config.learning_rate
        * 0.5
        * (1 + math.cos(math.pi * min((progress - config.warmup) / (1 - config.warmup), 1.0)))
    )


def root_mean_square(values: Tensor) -> Tensor:
    """Return the root mean square of every column: values [N, d] -> [d], or [N] -> a scalar."""
    return values.float().square().mean(0).sqrt()
