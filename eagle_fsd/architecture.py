"""What a target's config says of its layers and positions, and which architectures are supported."""

from __future__ import annotations

from transformers import PretrainedConfig

ATTENTION = ("sdpa", "eager")  # implementations that take our masks
FULL, SLIDING = "full_attention", "sliding_attention"
UNLIMITED = 2**31 - 1  # positions of a model whose config names no limit


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError, naming what is wrong, unless the config describes an attention-only decoder."""
    name = config.model_type
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ValueError(
            f"target is a {name!r} model: encoder-decoders are not supported; use a decoder-only causal LM"
        )
    kinds = set(layer_kinds(text))
    if kinds - {FULL, SLIDING}:
        raise ValueError(
            f"target is a {name!r} model with layers of kind {sorted(kinds - {FULL, SLIDING})}: only full "
            "and sliding attention can be rolled back to an accepted path, recurrent, hybrid and chunked "
            "layers cannot; use a model with full or sliding attention alone"
        )


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The attention kind of every layer; models that do not name them slide everywhere or nowhere."""
    kinds = named_layer_kinds(config)
    return kinds or [SLIDING if getattr(config, "sliding_window", None) else FULL]


def named_layer_kinds(config: PretrainedConfig) -> list[str]:
    """The attention kind of every layer where the config names them, else nothing."""
    for name in ("layer_types", "layers_block_type"):
        if kinds := getattr(config, name, None):
            return list(kinds)
    # GPT-Neo's local layers window by slot, inside the layer.
    return [FULL if kind == "global" else kind for kind in getattr(config, "attention_layers", None) or ()]


def longest_text(config: PretrainedConfig) -> int:
    """How many positions a text may use.

    A "longrope" model turns every position by other angles once the text outgrows its original length: what
    a cache holds is then wrong, and nodes of one tree would disagree. So its texts end there.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None)
    limits = [UNLIMITED if limit is None else limit]
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if parameters.get("rope_type") == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    return min(limits)
