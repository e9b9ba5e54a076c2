"""The scaled positions of a .gguf file, which transformers reads for GPT-OSS alone.

llama.cpp writes the scaling of Llama 3.1 and later as the factors of all frequencies, others as fields.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# All models of this rule have these values, and differ in `factor`: the file does not name them.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scale_positions(config: transformers.PreTrainedConfig, path: str, name: str) -> None:
    """Add to a config that was read of a .gguf file how the file scales positions.

    name: of the target. Raises ValueError for a scaling that is none of llama3, linear and yarn.
    """
    import gguf

    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 scales no windowed layers
    if rope.get("rope_type") != "default":
        return
    reader = gguf.GGUFReader(path)
    factors = {one.name: torch.tensor(one.data.tolist()) for one in reader.tensors if one.name in FACTORS}
    scaling = next((one for one, values in factors.items() if (values != 1).any()), None)
    kind, factor = field_of(reader, "type"), field_of(reader, "factor")
    if scaling is not None:
        rope.update(LLAMA3, factor=float(factors[scaling].max()))
        known = scaling == FACTORS[0] and is_llama3(config, factors[scaling])
    elif kind == "none" or factor in (None, 0.0, 1.0):
        return
    elif kind == "yarn":
        original = field_of(reader, "original_context_length")
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


def is_llama3(config: transformers.PreTrainedConfig, factors: torch.Tensor) -> bool:
    """Return whether a config divides its frequencies by these factors [D/2]."""
    if "rope_theta" not in config.rope_parameters:  # each kind of layer has its own
        return False
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(factors)) / len(factors))
    return found.shape == plain.shape and torch.allclose(found * factors, plain, rtol=1e-3, atol=0.0)


def field_of(reader: Any, part: str) -> Any:
    """Return a field of the scaling, whatever the architecture is; None if the file has none."""
    ends = f".rope.scaling.{part}"
    return next((field.contents() for key, field in reader.fields.items() if key.endswith(ends)), None)
