"""A tiny engine whose tokenizer is one of bytes, for texts that have a form."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.core.processing import Processing
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.target.model import TargetModel
from support.tiny_models import tiny_model
from support.tiny_tokenizer import TOOL_TEMPLATE, byte_tokenizer

END_ID = 2


def new_schema_engine(
    runtime: str = "torch", template: str = TOOL_TEMPLATE, dtype: torch.dtype = torch.float32
) -> EagleFSD:
    """Return an engine whose drafter is near its target."""
    near, model = (tiny_model(max_position_embeddings=2048).to(dtype) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(dtype))
    model.generation_config.eos_token_id = END_ID
    target = TargetModel(model, runtime=OpenVINO("float32") if runtime == "openvino" else None)
    drafter = DraftModelSpec.for_target(TargetModel(near), target)
    return EagleFSD(target, drafter, byte_tokenizer(template), base_model="tiny")


schema_engine = cache(new_schema_engine)  # one of each kind for all tests


def writes(text: str, force: float = 60.0) -> Processing:
    """Return what makes a model write this text after the prompt."""
    tokenizer = schema_engine().tokenizer
    script = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    mark = tokenizer.encode("assistant:", add_special_tokens=False)

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        for row, tokens in enumerate(ids.tolist()):
            ends = (at for at in range(len(tokens), 0, -1) if tokens[at - len(mark) : at] == mark)
            said = tokens[next(ends, len(tokens)) :]
            changed[row, script[min(len(said), len(script) - 1)]] += force
        return changed

    return Processing.of(logits_processor=forced)


def as_call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
