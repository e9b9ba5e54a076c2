"""How to load a target and what drafts for it: the keywords of `EagleFSD.from_pretrained`, written once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle_fsd.core.checks import plain_numbers, require_boolean, require_integer
from eagle_fsd.drafting.drafter import NO_HEAD
from eagle_fsd.hub.resolve import name_of_source

SWITCHES = ("trust_remote_code", "pack", "graphs", "full_vocabulary", "weights_cache")
ASKED = ("norm_output", "lookup")  # switches that may be left open


@dataclass(frozen=True)
class LoadOptions:
    """How to load two models: the arguments of `EagleFSD.from_pretrained` beside their names.

    dtype: of the target; None is float32 on a CPU, and on CUDA bfloat16, or float16 where that is emulated.
    head_dtype: of drafts; None is the target's. A head in bfloat16 drafts faster beside a target in float32;
      q is rounded, and lossless decoding stays lossless.
    device: None is CUDA where there is a GPU, else the CPU.
    device_map: spreads the target over devices, as in Hugging Face, in place of a device.
    attn_implementation: "sdpa" or "eager"; None is the model's own choice.
    trust_remote_code: let a Hub model run its own code.
    pack: on a CPU, keep a second, blocked copy of the weights if a short measurement finds it faster; not
      with a device_map.
    graphs: on CUDA, record the parts of a step as CUDA graphs when they come a second time; not with a
      device_map.
    full_vocabulary: draft over all of the target's tokens, even if the head has a list of frequent ones.
    weights_cache: keep the converted weights of a .gguf file on disk for the next time
      (EAGLE_FSD_NO_WEIGHTS_CACHE=1 keeps no graphs either).
    runtime: "torch", "openvino" (on a CPU, with the extra of that name), or "auto", the faster one that has
      the format, measured once on each machine.
    weight_format: "float32", "bfloat16", "int8" or "packed", which keeps a .gguf file's own blocks; None is
      dtype. int8 and packed also round activations.
    head_taps, norm_output: how to read an EAGLE-3 head's config, where that is measured otherwise: the layers
      that it reads, numbered by what enters them, and whether its carried state is normed.
    lookup: look drafts up in the text too, and put them into one tree with the head's; with ea_model "none"
      also in the target's earlier distributions. None does so on a CPU beside the head that ships with the
      package.
    draft_model: in place of a head, a language model with the target's vocabulary, named as the target is.
    draft_layers: in place of a head, this many of the target's own first layers, with its lm_head.
    draft_device: of the draft model; None is the target's.
    tp_plan: "auto" splits the target among the processes that torchrun started, which must then make the
      same calls; see docs/targets-and-heads.md.

    Raises ValueError for a device beside a device_map, for a draft_model, draft_layers or draft_device that
    cannot be, and for a switch that is not True or False. The rest is checked when the models are loaded.
    """

    dtype: torch.dtype | str | None = None
    head_dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    device_map: str | dict[str, object] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    pack: bool = True
    graphs: bool = True
    full_vocabulary: bool = False
    weights_cache: bool = True
    runtime: str = "auto"
    weight_format: str | None = None
    head_taps: Sequence[int] | None = None
    norm_output: bool | None = None
    lookup: bool | None = None
    draft_model: str | os.PathLike[str] | None = None
    draft_layers: int | None = None
    draft_device: torch.device | str | None = None
    tp_plan: str | None = None

    def __post_init__(self) -> None:
        for name in (*SWITCHES, *(name for name in ASKED if getattr(self, name) is not None)):
            require_boolean(name, getattr(self, name))
        if self.device is not None and self.device_map is not None:
            raise ValueError(
                f"device is {str(self.device)!r} with a device_map: the map places the target's layers; "
                "leave one of them out"
            )
        if self.draft_model is not None:
            object.__setattr__(self, "draft_model", name_of_source("draft_model", self.draft_model))
        if self.draft_layers is not None:
            require_integer(
                "draft_layers", self.draft_layers, 1, "name how many first layers draft, or leave it out"
            )
        if self.draft_device is not None and self.draft_model is None:
            raise ValueError(
                f"draft_device is {str(self.draft_device)!r} without a draft model: heads and the target's "
                "own layers are where the target is; name a draft model (draft_model, --draft-model), or "
                "leave it out"
            )
        plain_numbers(self)

    @property
    def movable(self) -> bool:
        """Whether a device_map places the target's layers, and may move them."""
        return self.device_map is not None

    def asked_head(self, ea_model: str | None) -> str | None:
        """Return the head that is asked for: a name, NO_HEAD, or None for the one that ships.

        Raises ValueError if more than one drafter is asked for, and for options of a head without a head.
        """
        asked = {
            f"the head {ea_model!r} (ea_model, --ea-model)": ea_model not in (None, NO_HEAD),
            f"the draft model {self.draft_model!r} (--draft-model)": self.draft_model is not None,
            f"the first {self.draft_layers} layers (--draft-layers)": self.draft_layers is not None,
        }
        given = [name for name, is_asked in asked.items() if is_asked]
        if len(given) > 1:
            raise ValueError(
                f"drafts are asked of {' and of '.join(given)}: one of them drafts; drop the others"
            )
        if ea_model != NO_HEAD and self.draft_model is None and self.draft_layers is None:
            return ea_model
        of_a_head: dict[str, Any] = {
            "head_taps": self.head_taps,
            "norm_output": self.norm_output,
            "full_vocabulary": self.full_vocabulary or None,
        }
        if self.draft_model is None:
            of_a_head["head_dtype"] = self.head_dtype
        for name, value in of_a_head.items():
            if value is not None:
                raise ValueError(f"{name} is {value} without a head: it says how one drafts; leave it out")
        return NO_HEAD
