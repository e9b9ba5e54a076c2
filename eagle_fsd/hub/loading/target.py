"""Loads a target and puts it on the runtime that was planned for it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.devices import multiplies_bfloat16
from eagle_fsd.hub.choose_runtime import AUTO, TORCH, Plan, argument_for_openvino, settle
from eagle_fsd.hub.kept.second_start import SecondStart
from eagle_fsd.hub.loading.options import LoadOptions
from eagle_fsd.hub.loading.progress import show_progress
from eagle_fsd.hub.resolve import TargetSource
from eagle_fsd.hub.target_loader import Loaded, load_target
from eagle_fsd.runtime.cuda_graphs import usual_stepper
from eagle_fsd.runtime.matmul_backends import find_fastest_backend
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.gguf_blocks import GGUFBlocks
from eagle_fsd.runtime.openvino.kept.graph_store import log_sizes
from eagle_fsd.runtime.openvino.weight_formats import OWN_BLOCKS
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.runtime.ranks import Ranks
from eagle_fsd.runtime.step_recorder import EAGER
from eagle_fsd.target.admission.checks import refuse_layers
from eagle_fsd.target.architecture import quantised_by
from eagle_fsd.target.kept.kept_model import KeptModel, shapes_of, whole
from eagle_fsd.target.model import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def load_planned(
    source: TargetSource, plan: Plan, options: LoadOptions, ranks: Ranks
) -> tuple[TargetModel, PreTrainedTokenizerBase | None]:
    """Load a target as planned, and its tokenizer (None if the source has none)."""
    load = reader(source, options)
    second, may_keep = None, options.weights_cache and not options.trust_remote_code
    if may_keep and plan.runtime != TORCH and plan.dtype == torch.float32:
        second = SecondStart.of(source, plan.weight_format, options.attn_implementation)
    found = second and second.find(lambda: load(dtype=torch.float32)[0])
    held, tokenizer = found or ranks.together(functools.partial(load, dtype=plan.dtype, ranks=ranks))
    asked = argument_for_openvino(options.runtime, options.weight_format)
    if asked is None and quantised_by(held) is not None:
        plan = replace(plan, runtime=TORCH)
    runtimes = Runtimes(source, plan, options, ranks, load, held)
    if plan.runtime == AUTO:
        target = settle(plan, shapes_of(held), runtimes.on_torch, runtimes.on_openvino)
    else:
        target = runtimes.on_torch() if plan.runtime == TORCH else runtimes.on_openvino()
    if target.runtime is None:
        if plan.dtype == torch.bfloat16 and not multiplies_bfloat16(target.device):
            logger.warning(
                "dtype is bfloat16, which this device emulates: it takes many times as long as other dtypes; "
                "leave it out"
            )
        return target, tokenizer
    log_sizes()
    if options.attn_implementation is not None:
        logger.warning(
            "attn_implementation is %r: it has no effect on a target that OpenVINO computes, which has an "
            "attention of its own; leave it out, or use runtime torch",
            options.attn_implementation,
        )
    if second is not None and not isinstance(target.held, KeptModel):
        second.keep(target, tokenizer)
    return target, tokenizer


def reader(source: TargetSource, options: LoadOptions) -> Callable[..., Loaded]:
    """Return what reads a source's model. It takes dtype, and the device where that is not the options'."""
    return functools.partial(
        load_target,
        source,
        device=options.device,
        device_map=options.device_map,
        attn_implementation=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        weights_cache=options.weights_cache,
    )


@dataclass(frozen=True)
class Runtimes:
    """The runtimes that a target that has been read may be put on.

    load: reads it again. held: the model, or what stands for it at a second start.
    """

    source: TargetSource
    plan: Plan
    options: LoadOptions
    ranks: Ranks
    load: Callable[..., Loaded]
    held: PreTrainedModel | KeptModel

    def on_torch(self) -> TargetModel:
        model = whole(self.held)
        pack_for(model, self.options)
        records = self.options.graphs and not self.options.movable
        return TargetModel(model, usual_stepper(model.device) if records else EAGER, ranks=self.ranks)

    def on_openvino(self) -> TargetModel:
        if isinstance(self.held, KeptModel):
            try:
                return compile_target(self.held, self.source, self.plan.weight_format)
            # Somebody has deleted its graphs since, or it is another machine.
            except (ValueError, TypeError) as error:
                logger.info("%s is loaded whole: %s", self.source.name, one_line(error, 200))
        else:
            refuse_layers(self.held)  # before it is read again
        is_float32 = self.plan.dtype == torch.float32
        model = whole(self.held) if is_float32 else self.load(dtype=torch.float32)[0]
        return compile_target(model, self.source, self.plan.weight_format)


def pack_for(model: torch.nn.Module, options: LoadOptions) -> None:
    """Give a model's linear layers the products that the options want: the fastest here, or torch's."""
    # A packed layer that moves would be packed again each time.
    packs = options.pack and not options.movable
    pack_linears(model, find_fastest_backend(model) if packs else None)


def compile_target(
    model: PreTrainedModel | KeptModel, source: TargetSource, weight_format: str, pages: bool = True
) -> TargetModel:
    """Return a model in float32 as a target that OpenVINO computes. pages: see TargetModel.

    Raises ValueError if another tool holds its weights quantised, or it cannot be converted.
    """
    if (method := quantised_by(model)) is not None:
        raise ValueError(
            f"target {source.name!r} is quantised by {method}: OpenVINO's graphs are made of plain weights; "
            "use runtime torch without a weight_format, or choose a checkpoint that is not quantised"
        )
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
