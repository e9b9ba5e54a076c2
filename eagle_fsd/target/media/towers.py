"""Runs the towers of a model, which read images and sound, up to where its decoder begins."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.devices import refuse_lack_of_memory
from eagle_fsd.target.admission.reasons import FORWARD_ERRORS
from eagle_fsd.target.architecture import decoder_of
from eagle_fsd.target.hf_attention import bound_to
from eagle_fsd.target.model import TargetModel


def run_towers(
    target: TargetModel, tokens: Tensor, given: Mapping[str, Any], to_the_end: bool
) -> tuple[dict[str, Any], Tensor | None]:
    """Run the whole model up to its decoder, and return what that is given.

    to_the_end: run all of it, and return its last logits [1, V] too.
    """
    decoder = shallow(decoder_of(target.model))
    model = with_part(target.model, decoder_of(target.model), decoder)
    forward, seen = decoder.forward, dict[str, Any]()

    def note(*args: Any, **inputs: Any) -> Any:
        seen.update(inputs)
        if args:
            raise TypeError("its decoder is called by place")
        if to_the_end:
            return forward(**inputs)
        raise Reached

    vars(decoder)["forward"] = note
    device = target.input_device
    placed = on_towers(target, given)
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        placed["logits_to_keep"] = 1  # those of all tokens may take more memory than the model
    kind = target.model.config.model_type
    try:
        mask = torch.ones_like(tokens)
        output = model(input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False, **placed)
        return seen, output.logits[0, -1:].float()
    except Reached:
        return seen, None
    except FORWARD_ERRORS as error:
        refuse_lack_of_memory(f"target {kind!r}", error)
        raise ValueError(
            f"target {kind!r} does not read these inputs ({one_line(error, 200)}): they must be what its own "
            "processor makes of a chat; check them"
        ) from error


def with_part(model: nn.Module, part: nn.Module, replacement: nn.Module) -> nn.Module:
    """Return a copy of a model with another module in the place of a part, which shares all other modules.

    The towers are the model's own: transformers notes on a module that it has prepared it.
    """
    if model is part:
        return replacement
    made = shallow(model)
    for name, child in model._modules.items():
        if child is not None and any(one is part for one in child.modules()):
            made._modules[name] = with_part(child, part, replacement)
    return made


def shallow(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parts are the module's own, but may be replaced. It is not compiled."""
    made: nn.Module = object.__new__(type(module))
    vars(made).update({name: bound_to(made, module, value) for name, value in vars(module).items()})
    vars(made).update(_modules=dict(module._modules), _compiled_call_impl=None)
    return made


def on_towers(target: TargetModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what towers are given on their device, pixels and such in the model's dtype."""
    return {name: on_tower(one, target.input_device, target.dtype) for name, one in given.items()}


def on_tower(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() and value.ndim > 1 else value.to(device)


class Reached(Exception):  # it is no error
    """Ends a forward where the decoder begins."""


def own_embeddings(target: TargetModel, tokens: Tensor) -> Tensor:
    """Return the model's own embeddings of tokens [1, L]."""
    embed = target.model.get_input_embeddings()
    embedded: Tensor = embed(tokens.to(target.input_device))
    return embedded
