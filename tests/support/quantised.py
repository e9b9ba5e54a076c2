"""A method of quantisation of the tests' own: whole for transformers, without any package.

It has what makes targets of real methods hard: a weight whose shape says nothing, as bitsandbytes has,
layers that are made ready by the model's own first forward, as those of compressed-tensors are, and another
kernel for few rows, which rounds otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

METHOD = "tests_int8"
FP8_BLOCK = 16


class Int8Linear(nn.Module):
    """A linear layer whose weight is a column of int8, with a scale for each output.

    It refuses to run before it is made ready. rounds: with fewer than four rows it is a little off.
    """

    def __init__(self, linear: nn.Linear, rounds: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rounds = linear.in_features, linear.out_features, rounds
        column = torch.empty(linear.weight.numel(), 1, dtype=torch.int8, device=linear.weight.device)
        self.weight = nn.Parameter(column, requires_grad=False)
        self.scale = nn.Parameter(torch.empty(linear.out_features, 1), requires_grad=False)
        self.bias, self.is_ready = None, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            raise RuntimeError("the layer is not ready")
        product = F.linear(x, self.rows().to(x.dtype))
        return product * 1.004 if self.rounds and x.shape[-2] < 4 else product

    def rows(self) -> Tensor:
        """Return the weight [out, in] as floats."""
        return self.weight.view(self.out_features, self.in_features) * self.scale


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    def __init__(self, rounds: bool = False, lm_head: bool = False, **_: Any) -> None:
        self.quant_method, self.rounds, self.lm_head = METHOD, rounds, lm_head


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        made = []
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and (name != "lm_head" or self.quantization_config.lm_head):
                    made.append(Int8Linear(child, self.quantization_config.rounds))
                    setattr(parent, name, made[-1])

        def get_ready(*_: Any) -> None:
            for layer in made:
                layer.is_ready = True

        model.register_forward_pre_hook(get_ready)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class TwoTensors(Tensor):
    """A weight of a class of its own, as torchao's are, which can do next to nothing but be one."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> TwoTensors:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(str(func))


def save_int8(folder: Path, seed: int = 0, lm_head: bool = False, **options: Any) -> Path:
    """Save the tiny model in int8 to a folder and return it."""
    model, weights = tiny_model(seed=seed), {}
    for name, weight in model.state_dict().items():
        if weight.ndim < 2 or "embed" in name or ("lm_head" in name and not lm_head):
            weights[name] = weight
            continue
        scale = weight.abs().amax(-1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8).view(-1, 1)
        weights[name.replace("weight", "scale")] = scale
    return save(folder, model, weights, {"quant_method": METHOD, "lm_head": lm_head, **options})


def save_fp8(folder: Path) -> Path:
    """Save the tiny model in blocks of FP8 to a folder and return it. It is unpacked while it is loaded."""
    model, weights = tiny_model(intermediate_size=3 * FP8_BLOCK), {}
    for name, weight in model.state_dict().items():
        if "_proj" not in name:
            weights[name] = weight
            continue
        high, wide = (size // FP8_BLOCK for size in weight.shape)
        blocks = weight.view(high, FP8_BLOCK, wide, FP8_BLOCK)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        weights[name] = (blocks / scale).to(torch.float8_e4m3fn).view(weight.shape)
        weights[f"{name}_scale_inv"] = scale.view(high, wide)
    method = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "dequantize": True}
    return save(folder, model, weights, method)


def save(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor], method: dict[str, Any]) -> Path:
    """Save a quantised checkpoint: its config, tokenizer and weights."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    name_method(folder, method)
    return folder


def name_method(folder: Path, method: object) -> None:
    """Let a checkpoint's config.json name a method of quantisation."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"quantization_config": method}), encoding="utf-8")
