"""Finds the recurrent layers of a decoder, and lets them run on a StateCache.

The code of transformers' recurrent layers is theirs: only the cache that it sees is ours, and how many tokens
of which texts a call has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.target.states.state_cache import CallStates, StateCache

STATE_METHODS = {"get_conv_state", "get_recurrent_state"}  # of the cache, from transformers 5.22 on


def find_mixers(decoder: nn.Module) -> list[nn.Module]:
    """Return the innermost modules of a decoder whose code reads or writes a state of transformers' cache."""
    found = [module for module in decoder.modules() if uses_states(type(module))]
    return [one for one in found if not any(other in found for other in one.modules() if other is not one)]


def uses_states(kind: type) -> bool:
    """Return whether a method of a class calls one of the cache's methods for states."""
    members = (member for base in kind.__mro__ for member in vars(base).values())
    methods = (inspect.unwrap(member) for member in members if inspect.isfunction(member))
    return any(STATE_METHODS & {*method.__code__.co_names} for method in methods)


def wrap_mixers(decoder: nn.Module) -> nn.Module:
    """Let the recurrent layers of a private copy run on a StateCache; return the copy."""
    for number, mixer in enumerate(find_mixers(decoder)):
        mixer._compiled_call_impl = None
        vars(mixer)["forward"] = on_states(mixer.forward, number)
    return decoder


def on_states(forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
    """Return a recurrent layer's forward that runs on a StateCache if it is given one.

    The padding mask is left out, since no call has padding.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        cache = next((value for value in given if isinstance(value, StateCache)), None)
        if cache is None:
            return forward(*args, **kwargs)
        hidden = next(value for value in given if isinstance(value, Tensor))
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None

        def call(part: Tensor, states: CallStates) -> Tensor:
            def exchanged(value: Any) -> Any:
                return part if value is hidden else states if value is cache else value

            made = forward(*map(exchanged, args), **{name: exchanged(kwargs[name]) for name in kwargs})
            return made if isinstance(made, Tensor) else made[0]

        return cache.run(layer, hidden, call)

    return torch.compiler.disable(run)
