"""A target and its draft head, loaded and made ready to run on this machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.devices import resolve_device, resolve_dtype
from eagle_fsd.drafting.drafter import NO_HEAD
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub.choose_runtime import AUTO, OPENVINO, TORCH, plan_runtime, settle
from eagle_fsd.hub.eagle3_checkpoint import is_eagle3
from eagle_fsd.hub.resolve import load_any_head, load_target, resolve_head, resolve_target
from eagle_fsd.hub.target_loader import show_progress
from eagle_fsd.runtime.cuda_graphs import cuda_recorder
from eagle_fsd.runtime.matmul_backends import find_fastest_backend
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.gguf_blocks import GGUFBlocks
from eagle_fsd.runtime.openvino.weight_formats import INT8, PACKED
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.runtime.step_recorder import EAGER, Graphs
from eagle_fsd.target.model import TargetModel


@dataclass(frozen=True)
class Pair:
    """A loaded target and head. base_model, ea_model: their sources. folder: has the head's files, if any."""

    target: TargetModel
    head: DraftHead | Eagle3Head | None
    tokenizer: PreTrainedTokenizerBase | None
    base_model: str
    ea_model: str
    folder: Path | None


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
    runtime: str,
    weight_format: str | None,
    head_taps: Sequence[int] | None = None,
    norm_output: bool | None = None,
) -> Pair:
    """Load a target and its head, if it has one; see EagleFSD.from_pretrained."""
    # First the checks that are faster than a download.
    place, movable = resolve_device(device), device_map is not None
    if head_dtype is not None:
        head_dtype = resolve_dtype(head_dtype, place)
    head_source = None if ea_model == NO_HEAD else resolve_head(ea_model, base_model)
    if head_source is not None and is_eagle3(head_source.file, head_source.name):
        runtime = runtime_for_taps(runtime, weight_format, head_source.name)
    source = resolve_target(base_model, trust_remote_code=trust_remote_code)
    plan = plan_runtime(runtime, weight_format, dtype, place, movable, source.gguf_file is not None)
    load = functools.partial(
        load_target,
        source,
        device=device,
        device_map=device_map,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        weights_cache=weights_cache,
    )
    model, tokenizer = load(dtype=plan.dtype)

    def on_torch() -> TargetModel:
        # A packed layer that moves would be packed again each time.
        pack_linears(model, find_fastest_backend(model) if pack and not movable else None)
        records = graphs and not movable and model.device.type == "cuda"
        return TargetModel(model, Graphs(cuda_recorder(model.device)) if records else EAGER)

    def on_openvino() -> TargetModel:
        whole = model if plan.dtype == torch.float32 else load(dtype=torch.float32)[0]
        show_progress(
            f"preparing {source.name} in {plan.weight_format} for OpenVINO; "
            "the first time takes half a minute ..."
        )
        own = None
        if plan.weight_format == PACKED:
            assert source.gguf_file is not None
            own = GGUFBlocks(source.folder / source.gguf_file)
        return TargetModel(whole, runtime=OpenVINO(plan.weight_format, own))

    if plan.runtime == AUTO:
        target = settle(plan, model, on_torch, on_openvino)
    else:
        target = on_torch() if plan.runtime == TORCH else on_openvino()
    if head_source is None:
        return Pair(target, None, tokenizer, source.name, NO_HEAD, None)
    head = load_any_head(
        head_source,
        target.hidden_size,
        target.vocab_size,
        target.config.num_hidden_layers,
        head_dtype or target.dtype,
        target.device,
        head_taps,
        norm_output,
    )
    if full_vocabulary:
        use_full_vocabulary(head, head_source.name)
    if target.runtime is None:
        pack_linears(head, find_fastest_backend(target.model) if pack and not movable else None)
    return Pair(target, head, tokenizer, source.name, head_source.name, head_source.folder)


def runtime_for_taps(runtime: str, weight_format: str | None, name: str) -> str:
    """Return the runtime that shows a target's layers: torch. Raises ValueError if another is asked for."""
    asked = f"runtime is {runtime!r}" if runtime == OPENVINO else f"weight_format is {weight_format!r}"
    if runtime == OPENVINO or weight_format in (INT8, PACKED):
        raise ValueError(
            f"{asked} with the EAGLE-3 head {name!r}: it reads the target's layers, which only the runtime "
            "torch with plain weights shows; use runtime torch (--runtime torch), or an EAGLE-1/2 head"
        )
    return TORCH


def use_full_vocabulary(head: DraftHead | Eagle3Head, name: str) -> None:
    """Let a head draft all of the target's tokens. Raises ValueError if it knows only some of them."""
    if isinstance(head, DraftHead):
        head.restrict(None)
    elif head.draft_tokens is not None:
        raise ValueError(
            f"full_vocabulary with the EAGLE-3 head {name!r}: its own lm_head knows "
            f"{len(head.draft_tokens)} tokens and no others; leave it out"
        )
