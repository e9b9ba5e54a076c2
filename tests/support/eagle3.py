"""Random EAGLE-3 heads for the tiny models, and their network written straight down."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eagle_fsd.drafting.eagle3.config import Eagle3Config
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from support.tiny_models import HIDDEN, VOCAB, randomize

IDS = "eagle_aux_hidden_state_layer_ids"
TAPS = (1, 2, 2)  # of a model with two layers
# The flags of the network, and whatever else may differ between the heads that people have.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "whole vocabulary": {"draft_vocab_size": VOCAB},
    "target's lm_head": {"lm_head": False, "draft_vocab_size": VOCAB},
    "own embeddings": {"embeddings": True},
    "another width": {"embeddings": True, "hidden_size": 24},
    "biases": {"fc_bias": True, "qkv_bias": True, "o_bias": True},
    "qk_norm": {"qk_norm": True, "head_dim": 12},
    "two layers": {"windows": (0, 0)},
    "window": {"windows": (0, 4), "norm_output": True},
    "five taps": {"taps": (1, 1, 1, 2, 2)},
    "no taps": {"taps": ()},
    "no fc": {"taps": (), "fc": False},
    "logit_scale": {"logit_scale": 0.5},
}


def eagle3_config(**fields: Any) -> Eagle3Config:
    """Return the shape of a head that fits the tiny models and drafts 40 of their tokens."""
    usual: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "target_size": HIDDEN,
        "taps": TAPS,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": 40,
    }
    return Eagle3Config(**{**usual, **fields})


def eagle3_head(seed: int = 0, **fields: Any) -> Eagle3Head:
    """Return a random head; its draft vocabulary is random too."""
    config = eagle3_config(**fields)
    drafted = None
    if config.draft_vocab_size < config.vocab_size:
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(config.vocab_size, generator=draw)
        drafted = order[: config.draft_vocab_size].sort().values
    head = Eagle3Head(config, drafted).eval()
    randomize(head, seed)
    return head


class Eagle3Twin:
    """The network of a head on whole sequences, from its tensors by name: no modules, no cache, no tree."""

    def __init__(self, head: Eagle3Head) -> None:
        self.config, self.weights = head.config, dict(head.state_dict())

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps
        return x / scale.sqrt() * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights.get(f"{name}.bias", 0.0)

    def start(self, features: Tensor) -> Tensor:
        """Return the states [n, d] of features [n, taps * d_t]."""
        if self.config.norm_before_fc:
            features = self.norm("input_norm", features)
        if self.config.fc_norm:
            width = self.config.target_size
            parts = features.split(width, dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return self.linear("fc", features) if self.config.fc else features

    def run(self, states: Tensor, embeddings: Tensor, positions: list[int]) -> Tensor:
        """Return the next states [n, d] of states and embeddings [n, d], each seeing those before it."""
        hidden = states
        for number, window in enumerate(self.config.windows):
            at = f"layers.{number}"
            if number == 0:
                a = self.norm(f"{at}.hidden_norm", hidden)
                inputs = torch.cat((self.norm(f"{at}.input_layernorm", embeddings), a), dim=-1)
                residual = a if self.config.norm_before_residual else hidden
            else:
                inputs, residual = self.norm(f"{at}.input_layernorm", hidden), hidden
            hidden = residual + self.attention(at, inputs, positions, window)
            x = self.norm(f"{at}.post_attention_layernorm", hidden)
            gated = F.silu(self.linear(f"{at}.mlp.gate_proj", x)) * self.linear(f"{at}.mlp.up_proj", x)
            hidden = hidden + self.linear(f"{at}.mlp.down_proj", gated)
        return self.norm("norm", hidden) if self.config.norm_output else hidden

    def attention(self, at: str, inputs: Tensor, positions: list[int], window: int) -> Tensor:
        size, heads = self.config.head_dim, self.config.num_attention_heads
        shared = heads // self.config.num_key_value_heads
        q, k, v = (self.linear(f"{at}.self_attn.{x}_proj", inputs).unflatten(-1, (-1, size)) for x in "qkv")
        if self.config.qk_norm:
            q, k = self.norm(f"{at}.self_attn.q_norm", q), self.norm(f"{at}.self_attn.k_norm", k)
        out = torch.zeros(len(positions), heads, size)
        for i, here in enumerate(positions):
            for h in range(heads):
                seen = [j for j in range(i + 1) if self.sees(here, positions[j], window)]
                turned = [self.turn(k[j, h // shared], positions[j]) for j in seen]
                scores = [self.turn(q[i, h], here) @ key / math.sqrt(size) for key in turned]
                weights = torch.stack(scores).softmax(0)
                out[i, h] = sum(w * v[j, h // shared] for w, j in zip(weights, seen, strict=True))
        return self.linear(f"{at}.self_attn.o_proj", out.flatten(1))

    def sees(self, here: int, there: int, window: int) -> bool:
        longest = self.config.trained_positions
        if window and here - there >= window:
            return False
        # Beyond the longest text of its training: half as far back, and the first tokens.
        return longest is None or here < longest or here - there < longest // 2 or there < 4

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Rotate the pairs (x_i, x_{i + half}) by position * theta^(-2 i / D)."""
        half = len(x) // 2
        angle = position * self.config.rope.theta ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos().float(), angle.sin().float()
        return torch.cat((x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin))

    def logits(self, states: Tensor, target_lm_head: Tensor | None = None) -> Tensor:
        x = states if self.config.norm_output else self.norm("norm", states)
        lm_head = self.weights["lm_head.weight"] if target_lm_head is None else target_lm_head
        return x @ lm_head.T * self.config.logit_scale


def eagle3_files(head: Eagle3Head, family: str = "safeailab") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config.json and the tensors of a head as a family of trainers writes them.

    The config names the taps as the family does, and only the flags that it knows.
    """
    config = head.config
    layer: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "num_hidden_layers": len(config.windows),
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
    }
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    data = {name: getattr(config, name) for name in flags if getattr(config, name)}
    data |= {"draft_vocab_size": config.draft_vocab_size if config.lm_head else None}
    if config.target_size != config.hidden_size:
        data["target_hidden_size"] = config.target_size
    if config.logit_scale != 1:
        data["logit_scale"] = config.logit_scale
    ids = list(config.taps)
    if not ids:
        data["eagle_config"] = {"use_aux_hidden_state": False}
    elif family == "speculators":
        data[IDS] = ids
    else:
        data["eagle_config"] = {IDS: [tap - 1 for tap in ids] if family == "specforge" else ids}
    tensors = {key: value.clone() for key, value in head.state_dict().items()}
    if head.draft_tokens is not None:
        tensors["d2t"] = head.draft_tokens - torch.arange(len(head.draft_tokens))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][head.draft_tokens] = True
    if family == "speculators":
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        layer |= {"layer_types": kinds, "sliding_window": max(config.windows) or None}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}
        verifier = {"verifier_norm.weight": torch.ones(3), "verifier_lm_head.weight": torch.ones(3)}
        data |= {"speculators_model_type": "eagle3", "norm_before_residual": config.norm_before_residual}
        return data | {"transformer_layer_config": layer | rope}, tensors | verifier
    names = {"safeailab": "LlamaForCausalLM", "specforge": "LlamaForCausalLMEagle3"}
    data |= layer | {"architectures": [names.get(family, "Eagle3LlamaForCausalLM")]}
    if any(config.windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        data |= {"layer_types": kinds, "sliding_window": max(config.windows)}
    if family == "nemo":
        return data, {f"model.{key}": value for key, value in tensors.items()}
    return data, {key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()}


def save_eagle3(
    head: Eagle3Head, folder: Path, family: str = "safeailab", suffix: str = "safetensors"
) -> Path:
    """Write a head's files in a family's layout and return the folder."""
    data, tensors = eagle3_files(head, family)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    if suffix == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder
