"""What a target's config says about its layers, positions and logits, and which models are supported."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.tree import within_chunk, within_window
from eagle_fsd.files.fingerprints import is_plain, stored, weights_of
from eagle_fsd.target.states.mixers import find_mixers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)

ATTENTION = ("sdpa", "eager")  # implementations that take our masks
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Kinds of attention to a part of a text: the config's field with its size, and what narrows a mask to it.
NARROWED = {SLIDING: ("sliding_window", within_window), CHUNKED: ("attention_chunk_size", within_chunk)}
RECURRENT = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}  # kinds of layers with states
# The attention in a layer of each kind that can run on a tree; None: it has none. In a hybrid layer it is
# beside a recurrence.
ATTENTION_IN = {
    **{FULL: FULL, SLIDING: SLIDING, CHUNKED: CHUNKED, "attention": FULL},
    **{"hybrid": FULL, "hybrid_sliding": SLIDING},
    **dict.fromkeys(("linear_attention", "mamba", "conv", "mlp", "moe")),
}
# Options of a generation_config that this package does not apply, and the value that turns each one off.
NEUTRAL_DEFAULTS = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), 1.0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")),
    **dict.fromkeys(("exponential_decay_length_penalty",)),
    **dict.fromkeys(("stop_strings", "max_time", "watermarking_config", "top_h", "penalty_alpha")),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids")),
    **{"num_beams": 1, "token_healing": False},
}
# Options of a generation_config that are applied: GenerationOptions' name and its own.
PROCESSING_DEFAULTS = {
    **{name: name for name in ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids")},
    **{name: name for name in ("suppress_tokens", "min_new_tokens")},
    "logit_bias": "sequence_bias",
}
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
SPARE_SLOTS = 1024  # for the nodes of a tree, where slots are limited
MULTIPLIED = ("hyperclovax",)  # kinds whose logits_scaling is a factor; Granite and others divide by it
UNLIMITED = 2**31 - 1  # positions of a model whose config names no limit


@functools.cache
def cache_argument(decoder: type[nn.Module]) -> str:
    """Return what a decoder's forward calls its cache, which transformers renamed in 5.24."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class LogitsTransform:
    """A transform of lm_head's output z: t = scale * z, then cap * tanh(t / cap) if there is a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits [...] for the output [...] of its lm_head."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits

    def slope(self, transformed: Tensor) -> Tensor | float:
        """Return the derivative dt / dz [...] at transformed logits [...]; a number if it is constant."""
        if self.cap is None:
            return self.scale
        return self.scale * (1 - (transformed / self.cap).square())


PLAIN = LogitsTransform()  # the logits are lm_head's output itself


def logits_transform(config: PretrainedConfig) -> LogitsTransform:
    """Return the transform of lm_head's output that a config names; fields absent, None or 0 do nothing."""
    values = {}
    for name in ("logits_scaling", "logit_scale", "lm_head_multiplier", "final_logit_softcapping"):
        values[name] = value = getattr(config, name, None) or None
        if not isinstance(value, int | float | None):
            raise ValueError(
                f"the target's {name} is {value!r}: it must be a number; correct its config.json, or use "
                "another target"
            )
    scaling, *factors, cap = values.values()  # fields of Granite, Cohere, Falcon-H1 and Gemma
    scaling = scaling or 1.0
    scale = scaling if config.model_type in MULTIPLIED else 1.0 / scaling
    return LogitsTransform(scale * math.prod(one or 1.0 for one in factors), cap)


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError, naming what is wrong, unless the config describes a decoder that can verify trees."""
    name = config.model_type
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ValueError(
            f"target is a {name!r} model: encoder-decoders are not supported; use a decoder-only causal LM"
        )
    if not isinstance(text, PretrainedConfig):
        raise ValueError(
            f"target is a {name!r} model whose text_config is {one_line(repr(text), 60)}: it must be a "
            "config of its own; correct its config.json, or use another target"
        )
    if unknown := sorted(set(layer_kinds(text)) - ATTENTION_IN.keys()):
        raise ValueError(
            f"target is a {name!r} model with layers of kind {unknown}: full, sliding and chunked attention "
            "and recurrent layers can be run on a tree, sparse attention cannot; use another target"
        )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal LM before its lm_head.

    Of some classes (Llama 4's) get_decoder returns the model itself, or another part of it.
    """
    found: nn.Module = model.get_decoder()
    if found is not model and hasattr(found, "config"):
        return found
    return getattr(model, "model", found)


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError, naming what is wrong, unless a model has the parts that decoding needs."""
    check_supported(model.config)
    kind = model.config.model_type
    kinds = set(named_layer_kinds(model.config.get_text_config(decoder=True)))
    # A class with recurrent layers may be used without them: Granite 4's small dense models are.
    stateful = kinds & RECURRENT if kinds else getattr(model, "_is_stateful", False)
    if stateful and not find_mixers(decoder_of(model)):
        from transformers import Cache  # imports all of transformers' modelling: see kept_model

        update = "" if hasattr(Cache, "get_conv_state") else "update transformers to 5.22 or newer, or "
        raise ValueError(
            f"target is a {kind!r} model whose recurrent layers keep their states where they cannot be "
            f"rolled back to an accepted path: they must be in transformers' cache; {update}use another "
            "target"
        )
    attention = model.config._attn_implementation
    if attention not in ATTENTION:
        raise ValueError(
            f"attn_implementation is {attention!r}: tree masks need 'sdpa' or 'eager'; load the target "
            "with one of these"
        )
    lm_head = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    if lm_head is None:
        raise ValueError(f"target is a {kind!r} model without an lm_head: load it as a causal LM")
    if isinstance(lm_head, nn.ModuleList):
        raise ValueError(
            f"target is a {kind!r} model with {len(lm_head)} lm_heads: it must write one text; "
            "use another target"
        )
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise ValueError(
            f"target is a {kind!r} model whose config names no hidden_size: drafting reads "
            "features of that size; use another target"
        )
    ends = (lm_head, model.get_input_embeddings())
    if any(weight.is_meta for part in ends for weight in part.parameters(recurse=False)):
        raise ValueError(
            "device_map offloads the embeddings or the lm_head: drafting reads both all the time; place "
            "them on a device and offload decoder layers only"
        )


@torch.inference_mode()
def feature_device(model: PreTrainedModel) -> torch.device:
    """Return the last layer's device, where features come out; a `device_map` needs a forward to tell."""
    if not getattr(model, "hf_device_map", None):
        return model.device
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    return decoder_of(model)(input_ids=token, use_cache=False).last_hidden_state.device


def quantised_by(model: nn.Module) -> str | None:
    """Return the method that holds a model's weights in fewer bits, "bitsandbytes" say; None: they are plain.

    A GGUF file's weights, and those that transformers unpacked while it loaded, are plain.
    """
    if not getattr(model, "is_quantized", False):
        return None
    method = model.hf_quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def vocabulary_size(lm_head: nn.Module) -> int:
    """Return how many tokens an lm_head has logits of: a quantised weight's shape may not say it."""
    weight = getattr(lm_head, "weight", None)
    return int(weight.shape[0] if is_plain(weight) else lm_head.out_features)


def weights_read(model: PreTrainedModel) -> list[Tensor]:
    """Return the weights that a forward over text reads: the decoder's and the lm_head's.

    Input embeddings that are not the lm_head's are left out: few of their rows are read.
    """
    embeddings, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings()
    read = {id(weight) for weight in weights_of((decoder_of(model), lm_head))}
    if lm_head.weight is not embeddings:
        read.discard(id(embeddings))
    return [weight for weight in stored(model) if id(weight) in read]


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the attention kind of every layer; if the config names none, one kind for all layers."""
    kinds = named_layer_kinds(config)
    return kinds or [next((kind for kind, size in window_sizes(config).items() if size), FULL)]


def attention_kinds(config: PretrainedConfig) -> set[str]:
    """Return which kinds of attention a model's layers have."""
    found = {ATTENTION_IN[kind] for kind in layer_kinds(config)}
    return {kind for kind in found if kind is not None}


def window_sizes(config: PretrainedConfig) -> dict[str, int]:
    """Return how many positions each kind of attention in NARROWED sees; 0 if the config says none."""
    return {kind: getattr(config, field, None) or 0 for kind, (field, _) in NARROWED.items()}


def facts(config: PretrainedConfig) -> tuple[object, ...]:
    """Return all that decoding reads of a config. Raises AttributeError if something is missing."""
    sizes = (config.hidden_size, config.num_hidden_layers, config.model_type)
    windows = tuple(window_sizes(config).values())
    return *sizes, layer_kinds(config), windows, logits_transform(config), longest_text(config)


def named_layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the attention kind of every layer if the config names them, else an empty list."""
    for name in ("layer_types", "layers_block_type"):
        if kinds := getattr(config, name, None):
            return list(kinds)
    # GPT-Neo's local layers apply a window by slot themselves, so they keep a kind that is not supported.
    return [FULL if kind == "global" else kind for kind in getattr(config, "attention_layers", None) or ()]


def longest_text(config: PretrainedConfig) -> int:
    """Return how many positions a text may use.

    A "longrope" model rotates every position by other angles once the text outgrows its original length. The
    cached keys are then wrong, and the nodes of one tree would disagree. So its texts end there. Llama 4
    scales queries by their slots in the cache, in steps; no node may be beyond the first.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None)
    limits = [UNLIMITED if limit is None else limit]
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if parameters.get("rope_type") == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    if getattr(config, "attn_temperature_tuning", None):
        limits.append(config.floor_scale - SPARE_SLOTS)
    return min(limits)


def ignored_defaults(generation: GenerationConfig | None) -> dict[str, object]:
    """Return the options of a model's generation_config that this package does not apply, by name."""
    found = {}
    for name, neutral in NEUTRAL_DEFAULTS.items():
        value = getattr(generation, name, None)
        if value is not None and value != neutral and value not in ([], {}):
            found[name] = value
    return found


def own_defaults(generation: GenerationConfig | None) -> dict[str, Any]:
    """Return what a model's generation_config says about sampling and processing.

    The names are those of GenerationOptions. As in Hugging Face's `generate`, sampling counts only if it
    asks for sampling, and top_k is 50 then if it says nothing else.
    """
    found = {
        mine: value
        for mine, its in PROCESSING_DEFAULTS.items()
        if (value := getattr(generation, its, None)) is not None and value not in ([], {})
    }
    if getattr(generation, "do_sample", None):
        found |= {**SAMPLING_DEFAULTS, **named_sampling(generation)}
    return found


def named_sampling(generation: GenerationConfig | None) -> dict[str, Any]:
    """Return the sampling that a generation_config names, whether it asks for sampling or not."""
    named = {name: getattr(generation, name, None) for name in SAMPLING_DEFAULTS}
    return {name: value for name, value in named.items() if value is not None}


def report_defaults(ignored: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Warn about defaults of a model's generation_config that are not applied, and note those that are."""
    if ignored:
        logger.warning(
            "the model's generation_config asks for %s, which is not supported here: texts are those of "
            "generate without it",
            one_line(", ".join(f"{name}={value!r}" for name, value in ignored.items()), 200),
        )
    if own:
        logger.info(
            "defaults from the model's generation_config: %s; arguments override them",
            one_line(", ".join(f"{name}={value!r}" for name, value in own.items()), 200),
        )


def end_tokens(config: PretrainedConfig, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Return every token that ends a text, by the rules of `generate`; empty if there is none."""
    ids = getattr(generation, "eos_token_id", None)
    ids = getattr(config, "eos_token_id", None) if ids is None else ids
    ids = () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    for token in ids:
        if not isinstance(token, int):
            raise ValueError(
                f"the target's eos_token_id is {one_line(repr(ids), 60)}: end tokens must be token ids; "
                "check its generation_config.json"
            )
    return ids
