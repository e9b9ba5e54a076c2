"""Whether trees can be verified on a model: by evidence. One small tree is verified and compared with plain
forwards over its paths, which refuses positions taken from slots (ALiBi), attention that ignores masks,
recurrence and unknown logits transforms alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.runtime.flash_attention import flash_available
from eagle_fsd.target.architecture import FULL, SLIDING, named_layer_kinds
from eagle_fsd.target.hf_attention import private_copy
from eagle_fsd.target.session import MaskedForward, TargetSession

logger = logging.getLogger(__name__)

NARROW_WINDOW = 3  # slots of a sliding window while a model is admitted
# What a forward raises that cannot take our cache, masks or positions.
FORWARD_ERRORS = (
    *(TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError),
    *(IndexError, KeyError, AssertionError),
)


class Candidate(MaskedForward, Protocol):
    """A model that asks to be a target: a TargetModel that is being made."""

    model: PreTrainedModel
    config: PreTrainedConfig
    vocab_size: int
    kinds: set[str]
    window: int
    flash: bool

    @property
    def input_device(self) -> torch.device: ...


@torch.inference_mode()
def check_tree_verification(target: Candidate) -> None:
    """Raise ValueError unless a small tree comes out of `verify` as it does of plain forwards."""
    kind = target.config.model_type
    try:
        if SLIDING in target.kinds and target.window:
            with narrow_window(target):
                difference = tree_difference(target)
                if not difference < tolerance(target) and not named_layer_kinds(target.config):
                    target.kinds = {FULL}  # the config has a window that this class of models ignores
                    difference = tree_difference(target)
        else:
            difference = tree_difference(target)
    except FORWARD_ERRORS as error:
        reason = one_line(error)
        raise ValueError(
            f"target is a {kind!r} model, which cannot verify draft trees here: {reason}; use another target"
        ) from error
    if not difference < tolerance(target):
        raise ValueError(
            f"target is a {kind!r} model whose tree verification differs from its plain forward by "
            f"{difference:.2g} (relative): its positions (ALiBi, say), masks or logits follow rules "
            "that are not supported; use another target"
        )


@torch.inference_mode()
def flash_verifies(target: Candidate) -> bool:
    """Whether flash-attn is there for layers with full attention, and gets a small tree right."""
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
        logger.warning("flash-attn is not used on this %r model: %s", target.config.model_type, reason)
        return False
    return True


def tolerance(target: Candidate) -> float:
    """Kernels differ in the last bits; a sibling that leaks or a wrong position differs in the first."""
    return 1e-3 if target.dtype == torch.float32 else 0.1


@contextlib.contextmanager
def narrow_window(target: Candidate) -> Iterator[None]:
    """Let a short text outgrow the sliding window of our masks, for a while."""
    window, target.window = target.window, NARROW_WINDOW
    try:
        yield
    finally:
        target.window = window


def tree_difference(target: Candidate) -> float:
    """How far the logits of the tree a(b(d), c(e)) behind a two-token prefix are from those of plain
    forwards over its two paths, relative."""
    prefix = [1 % target.vocab_size, 2 % target.vocab_size]
    tokens = [token % target.vocab_size for token in (3, 4, 5, 6, 7)]
    tree = DraftTree(
        tokens=torch.tensor([tokens], device=target.device),
        parents=torch.tensor([[-1, 0, 0, 1, 2]], device=target.device),
        depths=torch.tensor([[0, 1, 1, 2, 2]], device=target.device),
        log_q=torch.empty(1, 0, target.vocab_size, device=target.device),
        owners=torch.empty(1, 0, dtype=torch.int64, device=target.device),
        depth=2,
    )
    plain_model = private_copy(target.model)
    if target.window:
        plain_model.config.get_text_config(decoder=True).sliding_window = target.window
    session = TargetSession(target, batch=1, capacity=16)
    session.prefill(torch.tensor([prefix], device=target.device), [2])
    logits, _ = session.verify(tree)
    differences = []
    for path in ([0, 1, 3], [0, 2, 4]):
        ids = torch.tensor([prefix + [tokens[node] for node in path]], device=target.input_device)
        plain = plain_model(input_ids=ids, use_cache=False).logits[0, len(prefix) :].float()
        plain = plain.to(target.device)
        differences.append(float((logits[0, path] - plain).norm() / plain.norm()))
    return math.nan if any(map(math.isnan, differences)) else max(differences)
