"""A target and what drafts for it, loaded and made ready to run on this machine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.devices import resolve_device, resolve_dtype
from eagle_fsd.drafting.drafter import NO_HEAD, DrafterSpec
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub.choose_runtime import AUTO, TORCH, argument_for_openvino, plan_runtime
from eagle_fsd.hub.head_digest import warn_of_other_target
from eagle_fsd.hub.loading.draft_models import errors_of_draft_model, load_draft_model, spec_of_layers
from eagle_fsd.hub.loading.options import LoadOptions
from eagle_fsd.hub.loading.target import load_planned, pack_for
from eagle_fsd.hub.media.processor import ProcessorSource
from eagle_fsd.hub.resolve import (
    HeadSource,
    TargetSource,
    is_shipped_head,
    load_any_head,
    name_of_source,
    resolve_head,
    resolve_target,
)
from eagle_fsd.hub.split.plan import ranks_device, require_splittable
from eagle_fsd.runtime.ranks import ALONE, Ranks, join_ranks
from eagle_fsd.target.model import TargetModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """A loaded target and what drafts for it, if anything does.

    base_model, ea_model: their sources. lookup: whether drafts are looked up in the text too. folder: has the
    drafter's files, its calibration among them, if any. head_dtype: of a head; None: of anything else.
    processor: of images and sound, if the target's files may hold one.
    """

    target: TargetModel
    tokenizer: PreTrainedTokenizerBase | None
    base_model: str
    head: DraftHead | Eagle3Head | DrafterSpec | None = None
    ea_model: str = NO_HEAD
    lookup: bool = False
    folder: Path | None = None
    head_dtype: torch.dtype | None = None
    processor: ProcessorSource | None = None


def load_pair(
    base_model: str | os.PathLike[str], ea_model: str | os.PathLike[str] | None, options: LoadOptions
) -> Pair:
    """Load a target and what drafts for it; see EagleFSD.from_pretrained."""
    # First the checks that are faster than a download.
    base_model = name_of_source("base_model", base_model)
    ea_model = options.asked_head(None if ea_model is None else name_of_source("ea_model", ea_model))
    ranks = ALONE
    if options.tp_plan is not None:
        ranks, options = join_ranks_with(options)
    place = resolve_device(options.device)
    draft_place = place if options.draft_device is None else resolve_device(options.draft_device)
    head_dtype = None if options.head_dtype is None else resolve_dtype(options.head_dtype, place)
    if ea_model != NO_HEAD and head_dtype not in (None, torch.float32):
        options = replace(options, runtime=runtime_for_head_dtype(options, head_dtype))
    sources = Sources.find(base_model, ea_model, options, ranks)
    is_gguf = sources.target.gguf_file is not None
    wanted = (options.runtime, options.weight_format, options.dtype)
    plan = plan_runtime(*wanted, device=place, movable=options.movable, gguf=is_gguf)
    target, tokenizer = load_planned(sources.target, plan, options, ranks)
    processor = None
    if not is_gguf:
        at = (sources.target.name, sources.target.folder)
        processor = ProcessorSource(*at, trust_remote_code=options.trust_remote_code)
    pair = Pair(target, tokenizer, sources.target.name, lookup=bool(options.lookup), processor=processor)
    if options.draft_layers is not None:
        layers = spec_of_layers(target, options.draft_layers)
        return replace(pair, head=layers, ea_model=f"first {options.draft_layers} layers")
    if (draft_source := sources.draft) is not None:
        with errors_of_draft_model():
            draft = load_draft_model(draft_source, target, tokenizer, options, head_dtype, draft_place)
        return replace(pair, head=draft, ea_model=draft_source.name, folder=draft_source.folder)
    if sources.head is None:
        return pair
    head = load_head(sources.head, target, options, head_dtype)
    if not ranks.several and options.device_map is None:  # else its weights are not all at hand
        warn_of_other_target(sources.head, sources.target, target)
    lookup = options.lookup
    if lookup is None:  # where it was measured to pay, and on no other pair
        lookup = target.device.type == "cpu" and is_shipped_head(sources.head.folder)
    drafts_in = next(head.parameters()).dtype
    names = {"ea_model": sources.head.name, "folder": sources.head.folder}
    return replace(pair, head=head, lookup=lookup, head_dtype=drafts_in, **names)


def join_ranks_with(options: LoadOptions) -> tuple[Ranks, LoadOptions]:
    """Join the ranks that torchrun started, and return them with the options of this one."""
    wanted = (options.runtime, options.weight_format, options.device_map, options.draft_device)
    require_splittable(options.tp_plan, *wanted)
    ranks = join_ranks()
    device = ranks_device(options.device, ranks)
    return ranks, replace(options, runtime=TORCH, pack=False, graphs=False, device=device)


@dataclass(frozen=True)
class Sources:
    """The files of target, head and draft model, all on disk. None: there is no such model."""

    target: TargetSource
    head: HeadSource | None
    draft: TargetSource | None

    @classmethod
    def find(cls, base_model: str, ea_model: str | None, options: LoadOptions, ranks: Ranks) -> Sources:
        """Find the models, or download them: first on one rank, since ranks may share a disk."""

        def find_model(name: str) -> TargetSource:
            return resolve_target(name, trust_remote_code=options.trust_remote_code)

        head = draft = None
        if ea_model != NO_HEAD:
            head = ranks.together(lambda: resolve_head(ea_model, base_model), first=True)
        target = ranks.together(lambda: find_model(base_model), first=True)
        if (name := options.draft_model) is not None:
            with errors_of_draft_model():
                draft = ranks.together(lambda: find_model(name), first=True)
        return cls(target, head, draft)


# -- heads ----------------------------------------


def load_head(
    source: HeadSource, target: TargetModel, options: LoadOptions, dtype: torch.dtype | None
) -> DraftHead | Eagle3Head:
    """Load the head of a target, in the dtype that is asked for, or in the target's."""
    sizes = (target.hidden_size, target.vocab_size, target.config.num_hidden_layers)
    reading = (options.head_taps, options.norm_output)
    head = load_any_head(source, *sizes, dtype or target.dtype, target.device, *reading)
    if options.full_vocabulary:
        use_full_vocabulary(head, source.name)
    if target.runtime is None:
        pack_for(head, options)
    return head


def runtime_for_head_dtype(options: LoadOptions, dtype: torch.dtype) -> str:
    """Return the runtime that computes a head in another dtype than float32: torch.

    Raises ValueError if another is asked for.
    """
    name = str(dtype).removeprefix("torch.")
    if asked := argument_for_openvino(options.runtime, options.weight_format):
        raise ValueError(
            f"{asked} with head_dtype {name!r}: only the runtime torch with plain weights computes a head in "
            "another dtype than float32; use runtime torch (--runtime torch), or leave head_dtype out"
        )
    if options.runtime == AUTO:
        logger.info("runtime torch: OpenVINO computes no head in %s", name)
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
