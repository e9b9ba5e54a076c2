"""A target and its draft head, loaded and made ready to run on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.devices import resolve_device, resolve_dtype
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub.resolve import load_head, load_target, resolve_head, resolve_target
from eagle_fsd.runtime.cuda_graphs import cuda_recorder
from eagle_fsd.runtime.matmul_backends import find_fastest_backend
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.runtime.step_recorder import EAGER, Graphs
from eagle_fsd.target.model import TargetModel


@dataclass(frozen=True)
class Pair:
    """A loaded target and head. base_model, ea_model: their sources. folder: has the head's files."""

    target: TargetModel
    head: DraftHead
    tokenizer: PreTrainedTokenizerBase | None
    base_model: str
    ea_model: str
    folder: Path


def load_pair(
    base_model: str,
    ea_model: str | None,
    *,
    dtype: torch.dtype | str | None,
    head_dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    device_map: str | dict[str, object] | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    pack: bool,
    graphs: bool,
    full_vocabulary: bool,
    weights_cache: bool,
) -> Pair:
    """Load a target and its head; see EagleFSD.from_pretrained."""
    # First the checks that are faster than a download.
    if head_dtype is not None:
        head_dtype = resolve_dtype(head_dtype, resolve_device(device))
    head_source = resolve_head(ea_model, base_model)
    source = resolve_target(base_model, trust_remote_code=trust_remote_code)
    model, tokenizer = load_target(
        source,
        dtype=dtype,
        device=device,
        device_map=device_map,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        weights_cache=weights_cache,
    )
    movable = device_map is not None  # a packed layer that moves would be packed again each time
    backend = find_fastest_backend(model) if pack and not movable else None
    pack_linears(model, backend)
    records = graphs and not movable and model.device.type == "cuda"
    target = TargetModel(model, Graphs(cuda_recorder(model.device)) if records else EAGER)
    head = load_head(
        head_source, target.hidden_size, target.vocab_size, head_dtype or target.dtype, target.device
    )
    if full_vocabulary:
        head.restrict(None)
    pack_linears(head, backend)
    return Pair(target, head, tokenizer, source.name, head_source.name, head_source.folder)
