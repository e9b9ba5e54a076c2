"""The positions of a .gguf file: transformers reads their scaling for GPT-OSS alone, and few windows.

llama.cpp writes the scaling of Llama 3.1 and later, and of Phi-3, as the factors of all frequencies, others
as fields.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
ALL, LONG, SHORT = FACTORS
# All models of this rule have these values, and differ in `factor`: the file does not name them.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_positions(config: transformers.PreTrainedConfig, path: str, name: str) -> None:
    """Add to a config that was read of a .gguf file how the file scales positions, and its window.

    name: of the target. Raises ValueError for a scaling that is none of llama3, longrope, linear and yarn,
    and for heads that are rotated in part where the config knows of another part.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    if getattr(config, "sliding_window", 0) is None:
        config.sliding_window = field_of(reader, "attention.sliding_window")
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 scales no windowed layers
    if rope.get("rope_type") != "default":
        return
    rotated = settle_rotated(config, rope, reader, name)
    factors = {one.name: torch.tensor(one.data.tolist()) for one in reader.tensors if one.name in FACTORS}
    scaling = next((one for one, values in factors.items() if (values != 1).any()), None)
    kind, factor = (field_of(reader, f"rope.scaling.{part}") for part in ("type", "factor"))
    original = field_of(reader, "rope.scaling.original_context_length")
    if scaling == ALL:
        rope.update(LLAMA3, factor=float(factors[ALL].max()))
        known = is_llama3(config, factors[ALL])
    elif scaling is not None:
        lists = {f"{part}_factor": factors.get(one, ()) for part, one in (("long", LONG), ("short", SHORT))}
        known = original is not None and all(2 * len(values) == rotated for values in lists.values())
        rope.update({"rope_type": "longrope", "original_max_position_embeddings": original})
        rope.update({part: list(map(float, values)) for part, values in lists.items()})
        if (attention := field_of(reader, "rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = attention
    elif kind == "none" or factor in (None, 0.0, 1.0):
        return
    elif kind == "yarn":
        scaling, known = kind, original is not None
        rope.update({"rope_type": kind, "factor": factor, "original_max_position_embeddings": original})
    else:
        scaling, known = f"rope.scaling.type {kind}", kind in ("linear", None)
        rope.update({"rope_type": "linear", "factor": factor})
    if not known:
        raise ValueError(
            f"target {name!r} scales its positions ({scaling}) in a way that is not read of a .gguf file: "
            "texts would be wrong; name the model's folder or Hub id"
        )


def settle_rotated(
    config: transformers.PreTrainedConfig, rope: dict[str, Any], reader: Any, name: str
) -> int:
    """Add to a config which part of each head is rotated, and return how many of its values are."""
    head: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head * rope.get("partial_rotary_factor", 1.0))
    found = field_of(reader, "rope.dimension_count")
    if found in (None, rotated, getattr(config, "global_head_dim", None)):
        return rotated
    if "partial_rotary_factor" not in rope:
        raise ValueError(
            f"target {name!r} rotates {found} of {head} values of a head and {config.model_type} all: texts "
            "would be wrong; name the model's folder or Hub id"
        )
    rope["partial_rotary_factor"] = found / head
    return int(found)


def is_llama3(config: transformers.PreTrainedConfig, factors: torch.Tensor) -> bool:
    """Return whether a config divides its frequencies by these factors [D/2]."""
    if "rope_theta" not in config.rope_parameters:  # each kind of layer has its own
        return False
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(factors)) / len(factors))
    return found.shape == plain.shape and torch.allclose(found * factors, plain, rtol=1e-3, atol=0.0)


def field_of(reader: Any, part: str) -> Any:
    """Return a field of the architecture, whichever it is; None if the file has none."""
    ends = f".{part}"
    return next((field.contents() for key, field in reader.fields.items() if key.endswith(ends)), None)
