"""Builds a tiny random model of every kind that transformers knows and that reads images or sound as well."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from support.every_family import SMALL, tiny_config
from support.tiny_models import randomize

LARGEST = 40_000_000  # weights
# The value of each field that the config of a tower, which reads images or sound, may have.
TOWER: dict[str, Any] = {
    **{**SMALL, "num_hidden_layers": 1, "depth": 1, "num_heads": 4, "embed_dim": 32, "out_hidden_size": 32},
    **{"image_size": 28, "patch_size": 14, "d_model": 32, "num_layers": 1, "output_dim": 32},
    **{"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    "deepstack_visual_indexes": [0],
}
# Tokens that stand for an image or a sound; no test writes them, for their embeddings may be left out.
TOKENS = {
    **{"image_token_id": 94, "image_token_index": 94, "video_token_id": 95, "video_token_index": 95},
    **{"audio_token_id": 94, "audio_token_index": 94, "vision_start_token_id": 92, "vision_end_token_id": 93},
}
BY_AXIS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# What the text's part of a kind needs, or needs otherwise.
OWN: dict[str, dict[str, Any]] = {
    **{
        kind: {"rope_parameters": BY_AXIS} for kind in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl")
    },
    **{kind: {"rope_parameters": BY_AXIS} for kind in ("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl")},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": {**BY_AXIS, "mrope_section": [1, 1, 2]},
    },
    "glm4v_moe": {"rope_parameters": {**BY_AXIS, "partial_rotary_factor": 1.0}},
    "hunyuan_vl": {"rope_parameters": {**BY_AXIS, "mrope_section": [1, 1, 1, 1]}},
    "step3p7": {"sliding_window": 8},
}
# Further fields of the whole.
WHOLE: dict[str, dict[str, Any]] = {
    "qwen2_5_omni_thinker": {"vision_start_token_id": 92},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 92},
}


def media_kinds() -> list[str]:
    """Return the model_type of every model that reads more than text, and has no class for text alone."""
    return sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())


def tiny_media_config(kind: str, **own: object) -> PreTrainedConfig:
    """Return the config of a small model of this kind. own: further fields of its text's part."""
    usual = CONFIG_MAPPING[kind]()
    text, text_part = usual.get_text_config(decoder=True), tiny_config(kind, **{**OWN.get(kind, {}), **own})
    if text is usual:
        return text_part
    parts: dict[str, Any] = {}
    for name in type(usual).sub_configs:
        part = getattr(usual, name, None)
        if part is text:
            parts[name] = text_part
        elif part is not None:
            fields = {*inspect.signature(type(part)).parameters, *vars(part)}
            parts[name] = {field: value for field, value in TOWER.items() if field in fields}
    tokens = {name: token for name, token in TOKENS.items() if hasattr(usual, name)}
    return type(usual)(**parts, **tokens, **WHOLE.get(kind, {}))


def tiny_media_model(kind: str, **own: object) -> PreTrainedModel:
    """Return a model of this kind with wide random weights in float32, in eval mode, without end tokens.

    own: further fields of its text's part.
    """
    config = tiny_media_config(kind, **own)
    model_class = getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind])
    with torch.device("meta"):
        sketch = model_class._from_config(copy.deepcopy(config))
    size = sum(weight.numel() for weight in sketch.parameters())
    assert size < LARGEST, f"a {kind!r} model of these fields is not tiny: {size} weights"
    model = model_class._from_config(copy.deepcopy(config)).float().eval()
    randomize(model, 0)
    for part in (model.config, model.config.get_text_config(decoder=True)):
        part.eos_token_id = None
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model
