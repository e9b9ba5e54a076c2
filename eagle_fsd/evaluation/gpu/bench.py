"""What the parts of a GPU check share: the device, random models that need no file, and the real target."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from eagle_fsd import hub
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.padding import pad_left
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.runner import LeftOut
from eagle_fsd.runtime.step_recorder import EAGER, Graphs, Recorder, Stepper
from eagle_fsd.target.model import TargetModel

OFF, ON = "graphs off", "graphs on"
VOCAB, HIDDEN = 96, 32
WINDOW = {"sliding_window": 8}
SOFT = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
# Family -> what its config has beside the sizes. One each of plain rotary positions, norms of q and k, a
# sliding window, two kinds of layers with capped logits, learned positions and scaled logits.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma2": {**WINDOW, **SOFT, **MIXED},
    "gpt2": {},
    "granite": {"logits_scaling": 7.0, "embedding_multiplier": 2.0},
}


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

    quick: sizes for a CPU and for tests. target, head: as `EagleFSD.from_pretrained` takes them; given: the
    user named the target. record: makes the recorder of a device; None: there are no graphs here.
    """

    device: torch.device
    quick: bool = False
    target: str = hub.DEFAULT_TARGET
    head: str | None = None
    given: bool = False
    record: Callable[[torch.device], Recorder] | None = None
    loaded: dict[torch.dtype, tuple[nn.Module, Any]] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def modes(self) -> dict[str, Stepper]:
        """Return a new stepper without graphs and, where they can be had, one with them."""
        return {OFF: EAGER} if self.record is None else {OFF: EAGER, ON: self.graphs()}

    def graphs(self) -> Graphs:
        """Return a new stepper whose recorder is Counted. Raises LeftOut where there are no graphs."""
        if self.record is None:
            raise LeftOut("it needs CUDA graphs, and this device has none")
        return Graphs(Counted(self.record(self.device)))

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def real_target(self, dtype: torch.dtype) -> tuple[transformers.PreTrainedModel, Any]:
        """Load the real target in this dtype and its tokenizer, once. Raises LeftOut where there is none."""
        if dtype not in self.loaded:
            try:
                self.loaded[dtype] = hub.load_target(
                    hub.resolve_target(self.target), dtype=dtype, device=self.device
                )
            except ValueError as error:
                if self.given:
                    raise
                raise LeftOut(f"there is no real target: {one_line(error, 200)}") from error
        return self.loaded[dtype]

    def real_head(self, target: TargetModel) -> tuple[DraftHead, str]:
        """Load the real target's head; returns it and its name. Without one it is random, of its shape."""
        try:
            source = hub.resolve_head(self.head, self.target)
        except ValueError:
            if self.head is not None:
                raise
            return head_like(target.config, self.device, target.dtype), "random, of the target's shape"
        head = hub.load_head(source, target.hidden_size, target.vocab_size, target.dtype, self.device)
        return head, source.folder.name

    def real_engine(self, dtype: torch.dtype, stepper: Stepper) -> EagleFSD:
        """Return the real target with its head."""
        model, tokenizer = self.real_target(dtype)
        target = TargetModel(model, stepper)
        head, name = self.real_head(target)
        return EagleFSD(target, head, tokenizer, self.target, name)

    def tiny_engine(self, stepper: Stepper, family: str = "llama", **sizes: Any) -> EagleFSD:
        """Return a tiny random model with a random head; see tiny_model."""
        return engine_of(tiny_model(family, self.device, **sizes), stepper)


def engine_of(model: transformers.PreTrainedModel, stepper: Stepper) -> EagleFSD:
    """Return a model with a random head of its own shape, the same one for the same shape."""
    target = TargetModel(model, stepper)
    head = head_like(target.config, target.device, torch.float32)
    randomize(head, seed=1)
    return EagleFSD(target, head)


def tiny_model(
    family: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB,
    hidden_size: int = HIDDEN,
    layers: int = 2,
    positions: int = 1024,
) -> transformers.PreTrainedModel:
    """Return a model of the family without end tokens; its random weights are the same on every device."""
    heads, ends = 4, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": positions,
    }
    if family == "gpt2":
        sizes = {"n_embd": hidden_size, "n_layer": layers, "n_head": heads, "n_positions": positions}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=vocab_size, tie_word_embeddings=False, **sizes, **ends, **FAMILIES[family]
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
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            parameter.add_(0.1 * noise)


def head_like(config: transformers.PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """Return a random head of the shape that EAGLE trains for a target with this config."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    shape = HeadConfig(
        hidden_size=hidden,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab_size=config.vocab_size,
        fc_bias=False,
    )
    with device:  # a large head is drawn where it stays
        return DraftHead(shape).to(dtype).eval()


def prompts_of(lengths: list[int], vocab_size: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Draw random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def ids_of(lengths: list[int], vocab_size: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Draw a left-padded batch of random prompts of these lengths; returns it and its mask."""
    return pad_left(prompts_of(lengths, vocab_size), 0)
