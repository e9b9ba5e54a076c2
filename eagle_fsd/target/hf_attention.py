"""Our attention inside Hugging Face's layers: in a copy of the decoder, so that the model never changes.

Layers ask their config which attention to call. Changing that config during a forward would affect every
other thread, so our forwards run on a copy with its own modules and config and the same weights.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_fsd.runtime.flash_attention import FlashPlan, flash_attention, supports_heads
from eagle_fsd.runtime.grouped_attention import grouped_attention
from eagle_fsd.target.states.mixers import wrap_mixers

GROUPED = "eagle_fsd_grouped"  # our attention's name among Hugging Face's
RELEASED = ("eagle_fsd", "torch", "transformers")  # packages whose versions tell what their classes compute
UNKNOWN = ("softcap", "position_bias", "s_aux", "cache")  # arguments that ours does not support


def grouped_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    flash_plan: FlashPlan | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute transformers' sdpa attention without repeating the keys for each group of heads.

    flash_plan: passed through the model from `TargetModel.features`. A layer uses the mask instead if its
    mask is not the plan's (a window's, or a copy on another device), or flash-attn does not take its heads.
    """
    if attention_mask is None or any(value is not None for value in map(kwargs.get, UNKNOWN)):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if flash_plan is not None and attention_mask is flash_plan.mask and supports_heads(query, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mixed = flash_attention(query, key, value, flash_plan, scale)
    else:
        mixed = grouped_attention(query, key, value, attention_mask, scaling)
    return mixed.transpose(1, 2).contiguous(), None


def use_attention(decoder: nn.Module, name: str, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Let the layers of a private copy call an attention, which is registered by its name."""
    from transformers import AttentionInterface  # imports all of transformers' modelling: see kept_model

    AttentionInterface.register(name, attention)
    decoder.config._attn_implementation = name


def with_grouped_attention(decoder: nn.Module) -> nn.Module:
    """Return a private copy of a decoder whose layers call our attention instead of sdpa.

    Its recurrent layers run on a StateCache.
    """
    mine = wrap_mixers(private_copy(decoder))
    if mine.config._attn_implementation == "sdpa":
        use_attention(mine, GROUPED, grouped_attention_forward)
    return mine


def is_known_code(module: nn.Module) -> bool:
    """Return whether config and weights tell what a model computes: its code is released, and nobody's hook.

    A function that takes the place of one of a class is not seen.
    """
    for one in module.modules():
        changed = one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one)
        if changed or type(one).__module__.partition(".")[0] not in RELEASED:
            return False
    return True


def private_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a model or decoder that has its own modules and configs and shares everything else.

    Parameters, buffers, hooks, and modules without a config or submodules are shared. So the copy sees
    weights that change, but not layers that are replaced afterwards.
    """
    return _copy(module, {}, {})


def bound_to(made: nn.Module, module: nn.Module, value: Any) -> Any:
    """Return an attribute of a module for a copy of it: accelerate binds its hooks to the module."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, made)
    if isinstance(value, functools.partial) and value.args and value.args[0] is module:
        bound = functools.partial(value.func, made, *value.args[1:], **value.keywords)
        return functools.update_wrapper(bound, value)
    return value


def _copy(module: nn.Module, configs: dict[int, object], known: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module for private_copy.

    configs: deepcopy's memo, so that a shared config stays shared. known: the copies made so far.
    """
    if module in known:
        return known[module]
    if not module._modules and not any(isinstance(held, PretrainedConfig) for held in vars(module).values()):
        return module
    made = known[module] = object.__new__(type(module))
    for name, value in vars(module).items():
        if isinstance(value, PretrainedConfig):
            value = copy.deepcopy(value, configs)
        vars(made)[name] = bound_to(made, module, value)
    vars(made)["_modules"] = {
        name: child and _copy(child, configs, known) for name, child in module._modules.items()
    }
    return made
