"""Builds a tiny random model of every causal language model that the installed transformers knows."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.tiny_models import GPT_LIKE, LLAMA_LIKE, VOCAB, WINDOW, randomize

LAYERS = 4
LARGEST = 5_000_000  # weights
DEFAULT = object()  # in the place of a field's value: the config's own default
# The value of each field that a family's config may have: of attention, of experts, of recurrence.
COMMON: dict[str, Any] = {
    **{**LLAMA_LIKE, **GPT_LIKE, "num_hidden_layers": LAYERS, "n_layer": LAYERS, "num_layers": LAYERS},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"sliding_window": WINDOW, "n_inner": 48, "n_ctx": 256, "rotary_dim": 4, "d_model": 32, "d_kv": 8},
    **{"d_ff": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "query_pre_attn_scalar": 8},
    **{"global_head_dim": 8, "num_global_key_value_heads": 2, "activation_sparsity_pattern": None},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0},
    **{"decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_layers": 2, "encoder_layers": 2},
    **{"decoder_attention_heads": 4, "encoder_attention_heads": 4, "embedding_size": 32},
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4},
    **{"n_shared_experts": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "shared_intermediate_size": 24},
    **{"expert_ffn_hidden_size": 24, "ffn_hidden_size": 48, "num_experts_per_token": 2},
    **{"num_expert_group": 1, "dim_model_base": 32, "moe_latent_size": 16},
    **{"laurel_rank": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "v_head_dim": 8},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "attention_chunk_size": WINDOW},
    **{"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_head_dim": 8},
    **{"use_mamba_kernels": False, "state_size": 8, "ssm_state_size": 8, "n_groups": 1},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_dt_rank": 4},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_ngroups": 1, "n_mamba_heads": 4},
    **{"mamba_headdim": 16, "mamba_d_ssm": 64},
}
MAMBA_AND_ATTENTION = {"layer_types": ["mamba", "attention"] * 2, "layers_block_type": DEFAULT}
WINDOW_AND_FULL = ("sliding_attention", "full_attention")
DOTS_3 = {
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16},
    **{"swa_kv_lora_rank": 8, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "shared_experts_intermediate_size": 24,
}
INKLING_2 = {
    **{"unpadded_vocab_size": VOCAB, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    **{"swa_head_dim": 8, "sliding_window_size": WINDOW, "rel_extent": WINDOW},
}
QWEN_4 = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4},
    **{"indexer_compress_ratio": 2, "layer_types": ["linear_attention", "indexed_attention"] * 2},
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}  # of parts of a model
BYTES = {**SMALL, "vocab_size": VOCAB, "hidden_size_global": 32, "num_hidden_layers": 1}
# What else a family needs, or needs otherwise.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        **{"patcher_config": SMALL, "encoder_config": BYTES, "decoder_config": BYTES, "global_config": SMALL},
        "encoder_hash_byte_group_vocab": 50,
    },
    "cohere": {"logit_scale": 0.25},
    "cohere_compass_text": {
        "layer_types": [*WINDOW_AND_FULL] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in WINDOW_AND_FULL
        },
    },
    "dbrx": {
        **{"n_heads": 4, "n_layers": 4, "max_seq_len": 256, "num_key_value_heads": DEFAULT},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **{"dots3_note": DOTS_3, "dots3_note_text": DOTS_3},
    "falcon_h1": {"lm_head_multiplier": 0.75},
    "git": {"vision_config": {**SMALL, "num_hidden_layers": 1, "image_size": 32}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4, "window_size": WINDOW},
    **{"granite": {"logits_scaling": 7.0}, "granitemoe": {"logits_scaling": 7.0}},
    "granitemoehybrid": MAMBA_AND_ATTENTION,
    "hyperclovax": {"logits_scaling": 0.5},
    **{"inkling2_text": INKLING_2, "inkling2_loop_text": INKLING_2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "moshi": {"sliding_window": DEFAULT},  # only the cache of transformers has it, and forgets what is seen
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "phi4_multimodal": {
        "vision_config": {**SMALL, "num_hidden_layers": 1, "crop_size": 28},
        "audio_config": {**SMALL, "num_blocks": 1},
    },
    **{"qwen4_exp": QWEN_4, "qwen4_exp_text": QWEN_4},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW},
    "reformer": {
        **{"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
        "attn_layers": ["local", "lsh"] * 2,
    },
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9, "shape_embed_dim": 8},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        **{"n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"attention_hidden_size": 64, "attention_head_dim": 16},
    },
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
        **{"num_mem_blocks": 1, "head_dim": DEFAULT},
    },
    "zaya": {"num_experts_per_tok": 1},
}


def known_kinds() -> list[str]:
    """Return the model_type of every causal language model of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str, **own: object) -> PreTrainedConfig:
    """Return the config of a small model of this kind, with each kind of layer that its class has.

    own: further fields.
    """
    text = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    fields = {*inspect.signature(type(text)).parameters, *vars(text), *getattr(text, "attribute_map", {})}
    given = {name: value for name, value in COMMON.items() if name in fields}
    if not getattr(text, "sliding_window", None):
        given.pop("sliding_window", None)
    if "kv_lora_rank" in given:  # MLA: keys and values of all heads are made of one latent vector
        given["num_key_value_heads"] = given["num_attention_heads"]
        given.pop("head_dim", None)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        stored = getattr(text, "attribute_map", {}).get(name, name)
        kinds = getattr(text, name, None)
        if kinds and name in fields and not isinstance(getattr(type(text), stored, None), property):
            every = list(dict.fromkeys(kinds))
            given[name] = [every[place % len(every)] for place in range(LAYERS)]
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope:  # angles by time, height and width: as many as half a head
        given["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    given |= {**OWN.get(kind, {}), **own}
    return type(text)(**{name: value for name, value in given.items() if value is not DEFAULT})


def tiny_family(kind: str, **own: object) -> PreTrainedModel:
    """Return a model of this kind with wide random weights in float32, in eval mode, without end tokens.

    own: further fields of its config.
    """
    config, attention = tiny_config(kind, **own), "sdpa"
    with torch.device("meta"):
        try:
            sketch = made(kind, config, attention)
        except (ValueError, ImportError):  # the class has no sdpa
            attention = "eager"
            sketch = made(kind, config, attention)
    size = sum(weight.numel() for weight in sketch.parameters())
    assert size < LARGEST, f"a {kind!r} model of these fields is not tiny: {size} weights"
    model = made(kind, config, attention).float().eval()
    randomize(model, 0)
    model.config.eos_token_id = None
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def made(kind: str, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return the causal language model of a config, which is not changed."""
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    if isinstance(config, model_class.config_class):
        return model_class._from_config(config, attn_implementation=attention)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
