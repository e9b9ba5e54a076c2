"""A target's own first layers as a model of their own, which drafts without a second set of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import GenerationConfig

from eagle_fsd.core.checks import require_integer
from eagle_fsd.target.architecture import decoder_of
from eagle_fsd.target.hf_attention import private_copy
from eagle_fsd.target.taps import find_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Fields of a config that have an entry for every layer.
BY_LAYER = ("layer_types", "layers_block_type", "attention_layers", "mlp_layer_types", "no_rope_layers")


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a model of the first `count` layers, with the same embeddings, last norm and lm_head.

    All weights are shared, and the model itself is not changed. Raises ValueError if it has fewer layers, or
    they are not in one list.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    require_integer("draft_layers", count, 1, "name how many first layers draft, or leave it out")
    if count >= layers:
        raise ValueError(
            f"draft_layers is {count}: the target has {layers} layers, and its own first ones draft; ask for "
            f"1 to {layers - 1}"
        )
    mine = private_copy(model)
    decoder = decoder_of(mine)
    mine._compiled_call_impl = decoder._compiled_call_impl = None  # compiled code would run all layers
    del find_layers(decoder, layers)[count:]
    # The parts of a model may have configs of their own.
    for config in {
        id(part.config): part.config for part in mine.modules() if hasattr(part, "config")
    }.values():
        config = config.get_text_config(decoder=True)
        if getattr(config, "num_hidden_layers", None) == layers:
            config.num_hidden_layers = count
            for name in BY_LAYER:
                kinds = getattr(config, name, None)
                if isinstance(kinds, list) and len(kinds) == layers:  # else they follow from the number
                    setattr(config, name, kinds[:count])
    mine.generation_config = GenerationConfig()  # it only drafts
    return mine
