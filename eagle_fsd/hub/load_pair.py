"""A target and what drafts for it, loaded and made ready to run on this machine."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from eagle_fsd.core.checks import one_line, require_integer
from eagle_fsd.core.devices import resolve_device, resolve_dtype
from eagle_fsd.drafting.draft_model import DraftModelSpec, require_one_drafter
from eagle_fsd.drafting.drafter import NO_HEAD, DrafterSpec
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub.choose_runtime import AUTO, OPENVINO, TORCH, plan_runtime, settle
from eagle_fsd.hub.kept.second_start import SecondStart
from eagle_fsd.hub.resolve import (
    is_shipped_head,
    load_any_head,
    load_target,
    name_of_source,
    resolve_head,
    resolve_target,
)
from eagle_fsd.hub.split.plan import ranks_device, require_splittable
from eagle_fsd.hub.target_loader import Loaded, TargetSource, show_progress
from eagle_fsd.runtime.cuda_graphs import usual_stepper
from eagle_fsd.runtime.matmul_backends import find_fastest_backend
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.gguf_blocks import GGUFBlocks
from eagle_fsd.runtime.openvino.kept.graph_store import log_sizes
from eagle_fsd.runtime.openvino.weight_formats import INT8, OWN_BLOCKS, PACKED
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.runtime.ranks import ALONE, join_ranks
from eagle_fsd.runtime.step_recorder import EAGER
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.kept.kept_model import KeptModel, shapes_of, whole
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.same_vocabulary import require_same_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """A loaded target and what drafts for it, if anything does.

    base_model, ea_model: their sources. folder: has the drafter's files, its calibration among them, if any.
    head_dtype: of a head; None: of anything else.
    """

    target: TargetModel
    head: DraftHead | Eagle3Head | DrafterSpec | None
    tokenizer: PreTrainedTokenizerBase | None
    base_model: str
    ea_model: str
    folder: Path | None = None
    head_dtype: torch.dtype | None = None

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up too by default: where it was measured to pay, and on no other pair."""
        return self.target.device.type == "cpu" and is_shipped_head(self.folder)


def load_pair(
    base_model: str | os.PathLike[str],
    ea_model: str | os.PathLike[str] | None,
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
    draft_model: str | os.PathLike[str] | None = None,
    draft_layers: int | None = None,
    draft_device: torch.device | str | None = None,
    tp_plan: str | None = None,
) -> Pair:
    """Load a target and what drafts for it; see EagleFSD.from_pretrained."""
    # First the checks that are faster than a download.
    base_model = name_of_source("base_model", base_model)
    ea_model = None if ea_model is None else name_of_source("ea_model", ea_model)
    draft_model = None if draft_model is None else name_of_source("draft_model", draft_model)
    require_one_drafter(ea_model, draft_model, draft_layers)
    if draft_layers is not None:
        require_integer("draft_layers", draft_layers, 1, "the target's own first layers draft")
    if draft_device is not None and draft_model is None:
        raise ValueError(
            f"draft_device is {str(draft_device)!r} without a draft model: heads and the target's own layers "
            "are where the target is; name a draft model (draft_model, --draft-model), or leave it out"
        )
    if ea_model == NO_HEAD or draft_model is not None or draft_layers is not None:
        given = {
            "head_taps": head_taps,
            "norm_output": norm_output,
            "full_vocabulary": full_vocabulary or None,
        }
        if draft_model is None:
            given["head_dtype"] = head_dtype
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is {value} without a head: it says how one drafts; leave it out")
    ranks = ALONE
    if tp_plan is not None:
        require_splittable(tp_plan, runtime, weight_format, device_map, draft_device)
        ranks, runtime, pack, graphs = join_ranks(), TORCH, False, False
        device = ranks_device(device, ranks)
    place, movable = resolve_device(device), device_map is not None
    draft_place = place if draft_device is None else resolve_device(draft_device)
    if head_dtype is not None:
        head_dtype = resolve_dtype(head_dtype, place)
    if draft_model is not None or draft_layers is not None:
        ea_model = NO_HEAD
    head_source = None
    if ea_model != NO_HEAD:
        head_source = ranks.together(lambda: resolve_head(ea_model, base_model), first=True)
    if head_source is not None and head_dtype not in (None, torch.float32):
        runtime = runtime_for_head_dtype(runtime, weight_format, head_dtype)
    find = functools.partial(resolve_target, trust_remote_code=trust_remote_code)
    source = ranks.together(functools.partial(find, base_model), first=True)
    draft_source = None
    if draft_model is not None:
        with errors_of_draft_model():
            draft_source = ranks.together(functools.partial(find, draft_model), first=True)
    plan = plan_runtime(runtime, weight_format, dtype, place, movable, source.gguf_file is not None)
    load = functools.partial(
        load_target,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        weights_cache=weights_cache,
    )
    load_here = functools.partial(load, source, device=device, device_map=device_map)
    second = None
    if weights_cache and not trust_remote_code and plan.runtime != TORCH and plan.dtype == torch.float32:
        second = SecondStart.of(source, plan.weight_format, attn_implementation)
    found = second and second.find(lambda: load_here(dtype=torch.float32)[0])
    held, tokenizer = found or ranks.together(functools.partial(load_here, dtype=plan.dtype, ranks=ranks))
    packs = pack and not movable  # a packed layer that moves would be packed again each time

    def on_torch() -> TargetModel:
        model = whole(held)
        pack_linears(model, find_fastest_backend(model) if packs else None)
        stepper = usual_stepper(model.device) if graphs and not movable else EAGER
        return TargetModel(model, stepper, ranks=ranks)

    def on_openvino() -> TargetModel:
        if found is not None:
            try:
                return compile_target(held, source, plan.weight_format)
            # Somebody has deleted its graphs since, or it is another machine.
            except (ValueError, TypeError) as error:
                logger.info("%s is loaded whole: %s", source.name, one_line(error, 200))
        model = whole(held) if plan.dtype == torch.float32 else load_here(dtype=torch.float32)[0]
        return compile_target(model, source, plan.weight_format)

    if plan.runtime == AUTO:
        target = settle(plan, shapes_of(held), on_torch, on_openvino)
    else:
        target = on_torch() if plan.runtime == TORCH else on_openvino()
    if target.runtime is not None:
        log_sizes()
    if attn_implementation is not None and target.runtime is not None:
        logger.warning(
            "attn_implementation is %r: it has no effect on a target that OpenVINO computes, which has an "
            "attention of its own; leave it out, or use runtime torch",
            attn_implementation,
        )
    if second is not None and target.runtime is not None and not isinstance(target.held, KeptModel):
        second.keep(target, tokenizer)
    pair = functools.partial(Pair, target, tokenizer=tokenizer, base_model=source.name)
    if draft_layers is not None:
        return pair(spec_of_layers(target, draft_layers), ea_model=f"first {draft_layers} layers")
    if draft_source is not None:
        with errors_of_draft_model():
            draft = load_draft_model(draft_source, target, tokenizer, load, head_dtype, draft_place, packs)
        return pair(draft, ea_model=draft_source.name, folder=draft_source.folder)
    if head_source is None:
        return pair(None, ea_model=NO_HEAD)
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
        pack_linears(head, find_fastest_backend(target.held) if packs else None)
    drafts_in = next(head.parameters()).dtype
    return pair(head, ea_model=head_source.name, folder=head_source.folder, head_dtype=drafts_in)


def compile_target(
    model: PreTrainedModel | KeptModel, source: TargetSource, weight_format: str, pages: bool = True
) -> TargetModel:
    """Return a model in float32 as a target that OpenVINO computes. pages: see TargetModel."""
    if isinstance(model, KeptModel):
        show_progress(f"loading {source.name} in {weight_format} from its kept graphs ...")
    else:
        show_progress(
            f"preparing {source.name} in {weight_format} for OpenVINO; the first time takes half a minute ..."
        )
    own = None
    if source.gguf_file is not None and weight_format in OWN_BLOCKS:
        own = GGUFBlocks(source.folder / source.gguf_file)
    return TargetModel(model, runtime=OpenVINO(weight_format, own), pages=pages)


# -- draft models ----------------------------------------


def spec_of_layers(target: TargetModel, count: int) -> DraftModelSpec:
    """Return the spec that drafts with the target's own first layers, on its runtime."""
    model = first_layers(target.model, count)
    if target.runtime is None:
        draft = TargetModel(model, target.stepper)
    else:
        runtime = OpenVINO(target.runtime.weight_format, target.runtime.packed)
        draft = TargetModel(model, runtime=runtime, pages=False)
    return DraftModelSpec.for_target(draft, target, "first-layers")


def load_draft_model(
    source: TargetSource,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase | None,
    load: Callable[..., Loaded],
    dtype: torch.dtype | None,
    device: torch.device,
    pack: bool,
) -> DraftModelSpec:
    """Load a language model that drafts for a target, and return its spec.

    It runs on the target's runtime if it is on the CPU too and no dtype is asked for; dtype: None is the
    target's. load: loads a source. Raises ValueError if its tokens are not the target's.
    """
    runtime = target.runtime if device.type == "cpu" and dtype is None else None
    model, own = load(source, dtype=dtype or target.dtype, device=device)
    sizes = (target.vocab_size, model.get_output_embeddings().weight.shape[0])
    require_same_vocabulary(tokenizer, own, sizes, source.name)
    model.generation_config = GenerationConfig()  # its own is for answers, and it only drafts
    if runtime is None:
        pack_linears(model, find_fastest_backend(model) if pack else None)
        draft = TargetModel(model, target.stepper if model.device == target.device else EAGER)
    else:
        few_bits = runtime.weight_format == PACKED and source.gguf_file is None
        draft = compile_target(model, source, INT8 if few_bits else runtime.weight_format, pages=False)
    return DraftModelSpec.for_target(draft, target)


@contextlib.contextmanager
def errors_of_draft_model() -> Iterator[None]:
    """Say of an error that it is about the draft model: the loaders name what they load a target."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"draft model: {error}".replace("draft model: draft model ", "draft model ")
        ) from error


# -- heads ----------------------------------------


def runtime_for_head_dtype(runtime: str, weight_format: str | None, dtype: torch.dtype) -> str:
    """Return the runtime that computes a head in another dtype than float32: torch.

    Raises ValueError if another is asked for.
    """
    name = str(dtype).removeprefix("torch.")
    if (asked := asks_for_openvino(runtime, weight_format)) is not None:
        raise ValueError(
            f"{asked} with head_dtype {name!r}: only the runtime torch with plain weights computes a head in "
            "another dtype than float32; use runtime torch (--runtime torch), or leave head_dtype out"
        )
    if runtime == AUTO:
        logger.info("runtime torch: OpenVINO computes no head in %s", name)
    return TORCH


def asks_for_openvino(runtime: str, weight_format: str | None) -> str | None:
    """Return which argument asks for OpenVINO, and its value; None if none does."""
    if runtime == OPENVINO:
        return f"runtime is {runtime!r}"
    return f"weight_format is {weight_format!r}" if weight_format in (INT8, PACKED) else None


def use_full_vocabulary(head: DraftHead | Eagle3Head, name: str) -> None:
    """Let a head draft all of the target's tokens. Raises ValueError if it knows only some of them."""
    if isinstance(head, DraftHead):
        head.restrict(None)
    elif head.draft_tokens is not None:
        raise ValueError(
            f"full_vocabulary with the EAGLE-3 head {name!r}: its own lm_head knows "
            f"{len(head.draft_tokens)} tokens and no others; leave it out"
        )
