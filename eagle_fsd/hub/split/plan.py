"""Which targets transformers can split among ranks, and what it is told. It splits the weights itself."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from eagle_fsd.core.checks import require_choice
from eagle_fsd.core.devices import resolve_device
from eagle_fsd.hub.choose_runtime import argument_for_openvino
from eagle_fsd.hub.quantised_files import quantisation_of
from eagle_fsd.runtime.ranks import Ranks

AUTO = "auto"
HEADS = ("num_attention_heads", "num_key_value_heads")


def require_splittable(
    tp_plan: str,
    runtime: str,
    weight_format: str | None,
    device_map: object,
    draft_device: object,
) -> None:
    """Raise ValueError unless a target that is loaded so can be split among ranks."""
    require_choice("tp_plan", tp_plan, (AUTO,))
    if asked := argument_for_openvino(runtime, weight_format):
        raise ValueError(
            f"{asked} with tp_plan: a target is split on the runtime torch with plain weights; use runtime "
            "torch (--runtime torch), or leave tp_plan out"
        )
    for name, value in (("device_map", device_map), ("draft_device", draft_device)):
        if value is not None:
            raise ValueError(
                f"{name} is {str(value)!r} with tp_plan: each rank has a device of its own; leave one out"
            )


def ranks_device(device: torch.device | str | None, ranks: Ranks) -> torch.device:
    """Return this rank's device. Raises ValueError if another kind of device is asked for."""
    if device not in (None, AUTO) and resolve_device(device).type != ranks.device.type:
        raise ValueError(
            f"device is {str(device)!r} with tp_plan: transformers splits a target over this machine's "
            f"{ranks.device.type} devices; leave it out"
        )
    return ranks.device


def require_weights_of_its_own(name: str, gguf_file: str | None) -> None:
    """Raise ValueError if a target comes from a .gguf file."""
    if gguf_file is not None:
        raise ValueError(
            f"target {name!r} is a .gguf file with tp_plan: transformers splits only a model's own weights; "
            "name a folder or a Hub id"
        )


def check_split(config: transformers.PreTrainedConfig, size: int, name: str) -> None:
    """Raise ValueError unless transformers has a plan for a target, and its heads can be dealt out."""
    if (method := quantisation_of(config.to_dict())) is not None:
        raise ValueError(
            f"target {name!r} is quantised by {method}: a target that is split among ranks must have plain "
            "weights; use device_map (--device-map auto), or a checkpoint that is not quantised"
        )
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"target {name!r} is a {text.model_type!r} model: transformers has no tensor parallel plan for "
            "it; use device_map (--device-map auto), or another target"
        )
    if not any(key.endswith("k_proj") and style == "colwise" for key, style in plan.items()):
        return  # its heads stay whole
    for field in HEADS:
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"target {name!r} has {field} {heads}: the {size} ranks must share them evenly; "
                f"{fitting_ranks(text, size)}"
            )


def fitting_ranks(config: Any, size: int) -> str:
    """Return what to do: how many ranks, fewer than `size`, could share the heads."""
    counts = [count for field in HEADS if isinstance(count := getattr(config, field, None), int)]
    fitting = [ranks for ranks in range(2, size) if not any(count % ranks for count in counts)]
    return f"start {fitting[-1]}" if fitting else "use another number, or another target"


def split_options(ranks: Ranks) -> dict[str, Any]:
    """Return the arguments of from_pretrained that split a target among ranks; none for a single one."""
    if not ranks.several:
        return {}
    return {"distributed_config": transformers.DistributedConfig(tp_plan=AUTO, tp_size=ranks.size)}
