"""Checkpoints whose weights another tool quantised: which method their config.json names, and what it needs.

transformers loads them by that method. Where it is unknown or a package is missing, it says so late, in other
words for each method, or not at all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from eagle_fsd.core.checks import format_value

BITSANDBYTES = "bitsandbytes"
# What transformers needs to run weights that these methods quantised; of others its own errors tell.
PACKAGES = {
    **{BITSANDBYTES: ("bitsandbytes",), "compressed-tensors": ("compressed-tensors",)},
    **{"gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "torchao": ("torchao",), "hqq": ("hqq",)},
}


def quantisation_of(config: Mapping[str, Any]) -> str | None:
    """Return the method that quantised a checkpoint, by its config.json; None if its weights are plain."""
    for part in (config, config.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(found, Mapping) and found:
            bits = found.get("load_in_8bit") or found.get("load_in_4bit")
            return BITSANDBYTES if bits else str(found.get("quant_method"))
    return None


def check_quantisation(config: Mapping[str, Any], name: str) -> str | None:
    """Return the method that quantised a checkpoint, None if its weights are plain.

    Raises ValueError if transformers does not know it, or needs a package that is not installed.
    """
    method = quantisation_of(config)
    if method is None:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # takes a while

    if method not in (BITSANDBYTES, *AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise ValueError(
            f"target {name!r} is quantised by {format_value(method)}: transformers must know the method; "
            "choose a checkpoint that another one made, or one that is not quantised"
        )
    lost = [
        one for one in PACKAGES.get(method, ()) if importlib.util.find_spec(one.replace("-", "_")) is None
    ]
    if lost:
        raise ValueError(
            f"target {name!r} is quantised by {method}: the package {lost[0]} must be installed; "
            f"pip install {' '.join(lost)}, or choose a checkpoint that is not quantised"
        )
    return method
