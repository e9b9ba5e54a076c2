"""Loads the language models that draft in place of a head: another model, or the target's first layers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.hub.choose_runtime import argument_for_openvino
from eagle_fsd.hub.loading.options import LoadOptions
from eagle_fsd.hub.loading.target import compile_target, pack_for, reader
from eagle_fsd.hub.resolve import TargetSource
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.weight_formats import INT8, PACKED
from eagle_fsd.runtime.step_recorder import EAGER
from eagle_fsd.target.architecture import quantised_by, vocabulary_size
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.same_vocabulary import require_same_vocabulary

logger = logging.getLogger(__name__)


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
    options: LoadOptions,
    dtype: torch.dtype | None,
    device: torch.device,
) -> DraftModelSpec:
    """Load a language model that drafts for a target, and return its spec.

    It runs on the target's runtime if it is on the CPU too and no dtype is asked for; dtype: None is the
    target's. Raises ValueError if its tokens are not the target's, or if the runtime that is asked for cannot
    compute it; one that was chosen leaves it to torch.
    """
    runtime = target.runtime if device.type == "cpu" and dtype is None else None
    load = reader(source, options)
    model, own = load(dtype=dtype or target.dtype, device=device, device_map=None)
    sizes = (target.vocab_size, vocabulary_size(model.get_output_embeddings()))
    require_same_vocabulary(tokenizer, own, sizes, source.name)
    model.generation_config = GenerationConfig()  # its own is for answers, and it only drafts
    draft = None
    if runtime is not None and quantised_by(model) is None:  # else only torch computes it
        few_bits = runtime.weight_format == PACKED and source.gguf_file is None
        try:
            draft = compile_target(model, source, INT8 if few_bits else runtime.weight_format, pages=False)
        except ValueError as error:
            if argument_for_openvino(options.runtime, options.weight_format) is not None:
                raise
            logger.info("the draft model runs on torch: %s", error)
    if draft is None:
        pack_for(model, options)
        draft = TargetModel(model, target.stepper if model.device == target.device else EAGER)
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
