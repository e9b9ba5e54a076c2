"""The names and fields by which other engines read an EAGLE-3 head.

There are two layouts. In EAGLE's own, which vLLM and SGLang read, the layer is `midlayer` and config.json has
a Llama's fields. In that of the speculators library, which vLLM reads too, it is `layers.0`, and the layer's
fields are nested. Both name the drafted tokens by d2t, an offset to draft token i, and t2d, their mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_fsd.drafting.eagle3.config import IDS, NESTED, SLIDING, TYPE, Eagle3Config, usual_taps
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle3.rope import DEFAULT, LLAMA3

EAGLE, SPECULATORS = "eagle3", "speculators"
LAYOUTS = (EAGLE, SPECULATORS)
NO_TAPS: dict[str, Any] = {"eagle_config": {"use_aux_hidden_state": False}}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def exported_tensors(head: Eagle3Head, layout: str) -> dict[str, Tensor]:
    """Return a head's tensors by the names of a layout, on the CPU, with d2t [W] and t2d [V]."""
    tensors = {key: value.detach().cpu() for key, value in head.state_dict().items()}
    if layout == EAGLE and len(head.layers) == 1:
        tensors = {key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()}
    size = head.config.vocab_size
    drafted = torch.arange(size, device="cpu") if head.draft_tokens is None else head.draft_tokens.cpu()
    # Speculators leaves both out where every token is drafted; EAGLE's own code asks for them even then.
    if head.config.lm_head and (layout == EAGLE or head.draft_tokens is not None):
        tensors["d2t"] = drafted - torch.arange(len(drafted), device="cpu")
        tensors["t2d"] = torch.isin(torch.arange(size, device="cpu"), drafted)
    return tensors


def exported_config(
    config: Eagle3Config, layout: str, target_layers: int, target: str = ""
) -> dict[str, Any]:
    """Return the config.json of a layout, without the dtype.

    target_layers: of the target, which tell whether the taps are the usual ones. target: its name, which
    speculators files hold.
    """
    notes: dict[str, Any] = {name: True for name in FLAGS if getattr(config, name)}
    if config.logit_scale != 1:
        notes["logit_scale"] = config.logit_scale
    if config.target_size != config.hidden_size:
        notes["target_hidden_size"] = config.target_size
    if config.trained_positions is not None:
        notes["trained_positions"] = config.trained_positions
    notes["draft_vocab_size"] = config.draft_vocab_size if config.lm_head else None
    if layout == SPECULATORS:
        return {
            "architectures": ["Eagle3Speculator"],
            TYPE: "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": target or None, "architectures": []},
            },
            NESTED: layer_fields(config),
            "norm_before_residual": config.norm_before_residual,
            "target_hidden_size": None,
            **notes,
            **({IDS: list(config.taps)} if config.taps else NO_TAPS),
        }
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer_fields(config), **notes} | tap_fields(
        config.taps, target_layers
    )


def layer_fields(config: Eagle3Config) -> dict[str, Any]:
    """Return the fields of the head's layer, a Llama's. vocab_size is the target's, in both layouts."""
    fields: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",  # as speculators names such a layer
        "num_hidden_layers": len(config.windows),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act,
        "bias": config.fc_bias,
        # Engines give o_proj a bias then, and where the file has none they leave it as memory was.
        "attention_bias": config.qkv_bias and config.o_bias,
        "qkv_bias": config.qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if config.rope.kind != DEFAULT:
        scaling: dict[str, Any] = {"rope_type": config.rope.kind, "factor": config.rope.factor}
        if config.rope.kind == LLAMA3:
            scaling |= {"low_freq_factor": config.rope.low, "high_freq_factor": config.rope.high}
            scaling["original_max_position_embeddings"] = config.rope.original
        fields["rope_scaling"] = scaling
    if any(config.windows):
        fields["layer_types"] = [SLIDING if window else "full_attention" for window in config.windows]
        fields["sliding_window"] = max(config.windows)
    return fields


def tap_fields(taps: tuple[int, ...], target_layers: int) -> dict[str, Any]:
    """Return the fields that name taps in EAGLE's layout; none for the usual ones, which all engines assume.

    SGLang reads numbers inside eagle_config as layers whose outputs are read, vLLM those beside it as taps.
    A file with both leaves nothing open here.
    """
    if not taps:
        return NO_TAPS
    if taps == usual_taps(target_layers):
        return {}
    return {"eagle_config": {IDS: [tap - 1 for tap in taps]}, IDS: list(taps)}
