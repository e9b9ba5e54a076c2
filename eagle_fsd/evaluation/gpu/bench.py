"""What the parts of a GPU check share: the device, and random models that need no file."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from eagle_fsd import hub
from eagle_fsd.core.devices import resolve_device
from eagle_fsd.core.padding import pad_left
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.engine import EagleFSD
from eagle_fsd.runtime.cuda_graphs import cuda_recorder
from eagle_fsd.runtime.step_recorder import EAGER, Graphs, Recorder, Stepper
from eagle_fsd.target.model import TargetModel

OFF, ON = "graphs off", "graphs on"
VOCAB = 96
OWN = 6  # tokens of its own that each text has drafted
WINDOW = {"sliding_window": 8}
SOFT = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
# Family -> what its config has beside the sizes. One each of plain rotary positions, norms of q and k, a
# sliding window, two kinds of layers with capped logits, learned positions and scaled logits.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma2": {**WINDOW, **SOFT, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
    "granite": {"logits_scaling": 7.0, "embedding_multiplier": 2.0},
}
# What a part found, ready for JSON: `ok` and a `summary` of one line, and a Markdown `table` for a reader.
Findings = dict[str, Any]


class LeftOut(Exception):
    """Raised by a part that cannot run here; its text is the reason."""


class Counted:
    """A recorder that counts what it records, what is replayed, and the recordings that are still held."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.made = self.replays = 0
        self._held: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()

    def __call__(self, *arguments: Any) -> tuple[Callable[[], None], Any]:
        replay, result = self.recorder(*arguments)

        def counted() -> None:  # which is held as long as the recording is
            self.replays += 1
            replay()

        self.made += 1
        self._held.add(counted)
        return counted, result

    def counts(self) -> dict[str, int]:
        return {"made": self.made, "held": len(self._held), "replays": self.replays}


@dataclass
class Bench:
    """Where a check runs.

    quick: sizes for a CPU and for tests. target, head: as `EagleFSD.from_pretrained` takes them. record:
    makes the recorder of a device; None: there are no graphs here.
    """

    device: torch.device
    quick: bool = False
    target: str = hub.DEFAULT_TARGET
    head: str | None = None
    record: Callable[[torch.device], Recorder] | None = None

    @classmethod
    def make(cls, device: str, target: str | None, head: str | None, quick: bool) -> Bench:
        """Return where the check runs. Raises ValueError for a device, target or head that is not there.

        The device becomes torch's current one, and float32 is multiplied in float32 alone.
        """
        place, named = resolve_device(device), target or hub.DEFAULT_TARGET
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {device!r}: the check knows cuda and cpu; use one of them")
        if target is not None:
            hub.resolve_target(target)
        if head is not None:
            hub.resolve_head(head, named)
        bench = cls(place, quick, named, head)
        if place.type == "cuda":
            index = torch.cuda.current_device() if place.index is None else place.index
            bench.device, bench.record = torch.device("cuda", index), cuda_recorder
            torch.cuda.set_device(bench.device)
            torch.set_float32_matmul_precision("highest")  # some images turn TF32 on
        return bench

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def modes(self) -> dict[str, Stepper]:
        """Return a new stepper without graphs and, where they can be had, one with them."""
        return {OFF: EAGER} | ({} if self.record is None else {ON: self.graphs()})

    def graphs(self) -> Graphs:
        """Return a new stepper whose recorder is Counted. Raises LeftOut where there are no graphs."""
        if self.record is None:
            raise LeftOut("it needs CUDA graphs, and this device has none")
        return Graphs(Counted(self.record(self.device)))

    def engines_of(self, model: transformers.PreTrainedModel) -> dict[str, EagleFSD]:
        """Return an engine on the model by mode."""
        return {mode: engine_of(model, stepper) for mode, stepper in self.modes().items()}


def engine_of(model: transformers.PreTrainedModel, stepper: Stepper) -> EagleFSD:
    """Return a model with a random head as EAGLE trains one for it, the same for the same shape.

    It drafts every other token of the vocabulary, and each text's own ones, as the shipped head does.
    """
    target = TargetModel(model, stepper)
    shape = HeadConfig.for_target(target.config, target.hidden_size, target.vocab_size)
    with target.device:
        head = DraftHead(shape).float().eval()
    randomize(head, seed=1)
    return EagleFSD(target, head.restrict(torch.arange(0, target.vocab_size, 2, device=target.device), OWN))


def tiny_model(
    family: str, device: torch.device, dtype: torch.dtype = torch.float32, **sizes: int
) -> transformers.PreTrainedModel:
    """Return a model of the family without end tokens; its random weights are the same on every device.

    sizes: others than the tiny ones, of vocab_size, hidden_size, layers and positions.
    """
    width = sizes.get("hidden_size", 32)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=sizes.get("vocab_size", VOCAB),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=sizes.get("layers", 2),
        num_attention_heads=4,
        num_key_value_heads=4 if family == "gpt2" else 2,
        head_dim=width // 4,
        max_position_embeddings=sizes.get("positions", 1024),
        tie_word_embeddings=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **FAMILIES[family],
    )
    attention = "eager" if family == "gemma2" else "sdpa"  # sdpa has no soft-cap
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    randomize(model, seed=0)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.to(device).eval()


@torch.no_grad()
def randomize(module: nn.Module, seed: int) -> None:
    """Draw every matrix so wide that context decides what comes next, and shake norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if parameter.ndim >= 2:
            parameter.copy_(1.5 * noise / min(parameter.shape[-2:]) ** 0.5)
        else:
            parameter.mul_(not name.endswith("bias")).add_(0.1 * noise)


def prompts_of(lengths: list[int], vocab_size: int = VOCAB) -> list[list[int]]:
    """Draw random prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def ids_of(lengths: list[int], vocab_size: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Draw a left-padded batch of random prompts of these lengths; returns it and its mask."""
    return pad_left(prompts_of(lengths, vocab_size), 0)


def verdict_on(cells: dict[str, Any], bad: list[str], said: str, wrong: str) -> Findings:
    """Return the findings of a part whose cells are settings, of which the bad ones are named."""
    names = f"; {wrong}: {', '.join(bad)}" if bad else ""
    return {"ok": not bad, "summary": f"{said}{names}", "cells": cells}
