"""The test that admits a model as a target: a small tree is verified and compared with plain forwards.

It detects positions taken from cache slots (ALiBi), attention that ignores masks, recurrence and unknown
transforms of the logits. Graphs of a model, and the taps that they show, pass it before they are used.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.devices import refuse_lack_of_memory
from eagle_fsd.runtime.flash_attention import flash_available
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.block_cache import BlockCache
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.step_recorder import EAGER
from eagle_fsd.target.admission.reasons import FORWARD_ERRORS, reason_of
from eagle_fsd.target.admission.small_tree import (
    Candidate,
    narrow_windows,
    taps_difference,
    tolerance,
    tree_difference,
)
from eagle_fsd.target.architecture import (
    CHUNKED,
    FULL,
    PLAIN,
    attention_kinds,
    decoder_of,
    named_layer_kinds,
    quantised_by,
)
from eagle_fsd.target.graph_decoder import REMEDY, caches_for, trace_graphs
from eagle_fsd.target.states.mixers import find_mixers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()


@torch.no_grad()  # no inference mode: layers may keep what they make
def run_quantised(model: PreTrainedModel) -> None:
    """Run a quantised model's own forward once. Raises ValueError if it fails.

    Some packages make their layers ready in it: compressed-tensors unpacks them. Ours runs the decoder alone.
    """
    method = quantised_by(model)
    if method is None:
        return
    kind = model.config.model_type
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    try:
        model(input_ids=token, use_cache=False)
    except FORWARD_ERRORS as error:
        dtype = str(model.dtype).removeprefix("torch.")
        refuse_lack_of_memory(f"target {kind!r}", error)
        raise ValueError(
            f"target is a {kind!r} model quantised by {method}, whose own forward fails in {dtype} "
            f"({one_line(error, 200)}): it must run here; try dtype "
            f"{'float16' if dtype == 'bfloat16' else 'bfloat16'}, or another checkpoint"
        ) from error


@torch.inference_mode()
def check_tree_verification(target: Candidate) -> None:
    """Raise ValueError unless `verify` gives the same logits on a small tree as plain forwards do."""
    try:
        if any(target.windows.get(one) for one in target.kinds):
            with narrow_windows(target):
                difference = tree_difference(target)
                unknown = target.graphs is None and not named_layer_kinds(target.config)
                if unknown and not difference < tolerance(target):
                    target.kinds = {FULL}  # this model class ignores the window in its config
                    difference = tree_difference(target)
        else:
            difference = tree_difference(target)
        named = target.logits_transform
        if not difference < tolerance(target) and named != PLAIN:
            target.logits_transform = PLAIN  # classes that also read images may leave out the text's scaling
            if (plainly := tree_difference(target)) < tolerance(target):
                difference = plainly
            else:
                target.logits_transform = named
    except FORWARD_ERRORS as error:
        kind = kind_of(target)
        refuse_lack_of_memory(f"target {kind!r}", error)
        reason = reason_of(target, f"its forward takes other caches, masks or positions ({one_line(error)})")
        raise ValueError(
            f"target is a {kind!r} model, which cannot verify draft trees here: {reason}"
        ) from error
    if not difference < tolerance(target):
        kind = kind_of(target)
        reason = reason_of(target, "its positions, masks or logits follow rules that are not supported")
        raise ValueError(
            f"target is a {kind!r} model whose tree verification differs from its plain forward by "
            f"{difference:.2g} (relative): {reason}"
        )


def kind_of(target: Candidate) -> str:
    """Return a target's kind. Its own config may be that of the text's part of a whole model."""
    return str(target.model.config.model_type)


def refuse_layers(model: PreTrainedModel) -> None:
    """Raise ValueError if a model has recurrent layers or chunked attention, which no graph is made of."""
    chunks = CHUNKED in attention_kinds(model.config.get_text_config(decoder=True))
    if chunks or find_mixers(decoder_of(model)):
        raise ValueError(
            f"target is a {model.config.model_type!r} model with "
            f"{'chunked attention' if chunks else 'recurrent layers'}, which OpenVINO does not compute here: "
            f"{REMEDY}, without int8 or packed"
        )


@torch.inference_mode()
def compute_with(target: Candidate, runtime: OpenVINO, pages: bool) -> None:
    """Let a runtime compute a target's features and logits. Raises ValueError if it cannot run this model.

    pages: whether its graphs may attend over pages.
    """
    refuse_layers(target.model)
    target.stepper = FixedShapes()
    for cache in caches_for(sorted(target.kinds), runtime, pages):
        try:
            trace_and_test(target, runtime, cache)
            return
        except ValueError as error:
            if cache is BlockCache:
                raise
            logger.info("a %s is not used: %s", cache.__name__, one_line(error, 200))
            target.graphs = None


@torch.inference_mode()
def show_taps(target: Candidate, taps: Sequence[int]) -> None:
    """Give a target graphs that show these taps, and all that its graphs show now.

    They are tested on a copy, so that other threads go on with its graphs meanwhile. Graphs that passed at an
    earlier start are read, so that the model itself is not needed. Raises ValueError if it cannot be; the
    target then keeps its graphs.
    """
    with _one_at_a_time:
        before = target.graphs
        assert before is not None, "only graphs are made again"
        if set(taps) <= set(before.taps):
            return
        wanted = sorted({*before.taps, *taps})
        found = before.with_taps(wanted)
        if found is None:
            trial = copy.copy(target)
            trial.graphs, trial.kinds = None, set(target.kinds)
            trace_and_test(trial, before.runtime, before.cache, wanted)
            check_taps(trial, tuple(taps))
            found = trial.graphs
            assert found is not None
            before.note_taps(found)
        target.graphs = found


def trace_and_test(
    target: Candidate, runtime: OpenVINO, cache_class: type[BlockCache], taps: Sequence[int] = ()
) -> None:
    """Trace graphs for a target that has none, and test them unless kept ones passed the test here before."""
    cache = KVCache(1, 2, target.device, EAGER.view)  # one token in it tells its layers and their sizes
    cache.reserve(1)
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    visible = token.new_ones(1, 1, 1, dtype=torch.bool)
    target.features(token, cache.place(1), visible, token, cache)
    target.graphs = trace_graphs(target.model, sorted(target.kinds), cache.layers, runtime, cache_class, taps)
    if not target.graphs.was_admitted():
        check_tree_verification(target)
        target.graphs.note_admission()


@torch.inference_mode()
def flash_verifies(target: Candidate) -> bool:
    """Return whether flash-attn can run the layers with full attention and gets a small tree right."""
    if target.config._attn_implementation != "sdpa" or FULL not in target.kinds:
        return False
    if not flash_available(target.device, target.dtype):
        return False
    target.flash = True
    try:
        difference = tree_difference(target)
        reason = f"a tree differs from plain forwards by {difference:.2g} (relative)"
    except FORWARD_ERRORS as error:
        difference, reason = math.nan, one_line(error)
    finally:
        target.flash = False
    if not difference < tolerance(target):
        logger.warning("flash-attn is not used on this %r model: %s", kind_of(target), reason)
        return False
    return True


@torch.inference_mode()
def check_taps(target: Candidate, taps: tuple[int, ...]) -> None:
    """Raise ValueError unless taps are those of plain forwards, in a prompt and in a small tree."""
    try:
        difference = taps_difference(target, taps)
    except FORWARD_ERRORS as error:
        kind = kind_of(target)
        refuse_lack_of_memory(f"target {kind!r}", error)
        raise ValueError(
            f"target is a {kind!r} model, whose layers cannot be read here: {one_line(error)}; use a head "
            "that reads no layers, or another target"
        ) from error
    if not difference < tolerance(target):
        kind = kind_of(target)
        raise ValueError(
            f"target is a {kind!r} model whose layers' states in a tree differ from its plain forward's by "
            f"{difference:.2g} (relative): they must agree; use a head that reads no layers, or another "
            "target"
        )
