"""A tiny engine whose tokenizer is one of bytes, for texts that have a form."""

from __future__ import annotations

from functools import cache

import torch

from eagle_fsd import EagleFSD
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
