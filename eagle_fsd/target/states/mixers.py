"""Finds the recurrent layers of a decoder, and lets them run on a StateCache.

The code of transformers' recurrent layers is theirs: only the cache that it sees is ours, and how many tokens
of which texts a call has.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn

from eagle_fsd.target.states.state_cache import CallStates, StateCache
from eagle_fsd.target.states.whole_tree import TreeStates, with_tree_functions

STATE_METHODS = {"get_conv_state", "get_recurrent_state"}  # of the cache, from transformers 5.22 on


def find_mixers(decoder: nn.Module) -> list[nn.Module]:
    """Return the innermost modules of a decoder whose code reads or writes a state of transformers' cache."""
    found = [module for module in decoder.modules() if uses_states(type(module))]
    return [one for one in found if not any(other in found for other in one.modules() if other is not one)]


@functools.cache
def uses_states(kind: type) -> bool:
    """Return whether a method of a class calls one of the cache's methods for states."""
    members = (member for base in kind.__mro__ for member in vars(base).values())
    methods = (inspect.unwrap(member) for member in members if inspect.isfunction(member))
    return any(STATE_METHODS & {*method.__code__.co_names} for method in methods)


def wrap_mixers(decoder: nn.Module) -> nn.Module:
    """Let the recurrent layers of a private copy run on a StateCache; return the copy."""
    mixers = find_mixers(decoder)
    for module in decoder.modules() if mixers else ():
        if module._modules:  # others are the model's own
            module._compiled_call_impl = None  # compiled code would run the layers of the model itself
    for number, mixer in enumerate(mixers):
        for name, child in mixer._modules.items():
            if isinstance(child, nn.Linear):
                mixer._modules[name] = sharing_copy(child)
        mine = with_tree_functions(mixer.forward, mixer)
        vars(mixer)["forward"] = on_states(mine or mixer.forward, number, mine is not None)
    return decoder


def on_states(forward: Callable[..., Any], layer: int, whole_tree: bool) -> Callable[..., Any]:
    """Return a recurrent layer's forward that runs on a StateCache if it is given one.

    whole_tree: whether it takes TreeStates.
    """
    facts = LayerFacts()

    def run(*args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, StateCache)), None)
        if cache is None:
            return forward(*args, **kwargs)
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return cache.run(layer, hidden, Mixer(forward, args, kwargs, hidden, facts, whole_tree))

    return torch.compiler.disable(run)


class LayerFacts:
    """What calls of a recurrent layer have shown of it.

    last: the linear layer whose output is the recurrent layer's. goes_on: see Mixer.goes_on. None: not known.
    """

    last: nn.Module | None = None
    goes_on: bool | None = None


class Mixer:
    """One forward of a recurrent layer, made of calls for some tokens each.

    Unless the layer takes whole trees, a tree has a call for each level. Its linear layers run once for all
    of them: those that read the layer's input before the first level, and the one that makes its output
    behind the last level. Otherwise each level would read their weights anew. args, kwargs: of the forward.
    hidden: the input among them, [B, n, d]. last: see LayerFacts; another thread may learn it meanwhile, too
    late for this forward.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Tensor,
        facts: LayerFacts,
        whole_tree: bool,
    ) -> None:
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.hidden, self.facts, self.last = hidden, facts, facts.last
        self.whole_tree = whole_tree
        self.part, self.places = hidden, tuple[Tensor, ...]()
        self.made: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.delayed: Tensor | None = None

    def texts(self, part: Tensor, states: CallStates) -> Tensor:
        """Run tokens [M, n, d] of M texts from their states, and replace these; return the output."""
        self.part, self.places = part, ()
        output = self._call(part, states)
        if self.facts.last is None:
            self.facts.last = next((one for one, made in self.outputs.items() if made is output), None)
        self.outputs = {}
        return output

    def tree(self, states: TreeStates) -> Tensor:
        """Run all nodes of trees at once; return the output [B, N, d]."""
        with states.in_place():
            return self._call(self.hidden, states)

    def goes_on(self, part: Tensor, states: CallStates) -> bool:
        """Return whether several tokens [M, n, d] go on from their states: some layers begin anew with them.

        Then a state that is spoilt spoils the output. A rounded output would not tell one that is left out.
        """
        if self.facts.goes_on is None:
            self.facts.goes_on = all(self._reads(key, part, states) for key in states.held)
        return self.facts.goes_on

    def _reads(self, key: tuple[str, int], part: Tensor, states: CallStates) -> bool:
        copies = {one: state.clone() for one, state in states.held.items()}
        copies[key].fill_(torch.nan)
        return bool(self.texts(part, CallStates(copies)).isnan().any())

    def level(self, places: tuple[Tensor, Tensor], states: CallStates) -> Tensor:
        """Run the nodes of a tree at M places, rows and nodes; return what `finish` takes, [M, ...]."""
        self.part, self.places = self.hidden[places][:, None], places
        output = self._call(self.part, states)
        if self.last is not None and output is not self.delayed:
            raise NotImplementedError("a recurrent layer changes what its last linear layer has made")
        return output[:, 0]

    def finish(self, made: Tensor) -> Tensor:
        """Return the output [B, N, d] for what the levels returned, [B, N, ...]."""
        return made if self.last is None else cast(Tensor, self.last(made))

    def multiply(self, linear: nn.Module, x: Tensor) -> Tensor:
        """Run a linear layer in one of the calls."""
        if not self.places:
            self.outputs[linear] = linear(x)
            return self.outputs[linear]
        if linear is self.last:
            self.delayed = x
            return x
        if x is not self.part:
            return cast(Tensor, linear(x))
        if linear not in self.made:
            self.made[linear] = linear(self.hidden)
        return self.made[linear][self.places][:, None]

    def _call(self, part: Tensor, states: CallStates | TreeStates) -> Tensor:
        """Call the layer's forward on a part of its input. The padding mask is left out: there is none."""

        def exchanged(name: object, value: Any) -> Any:
            if value is self.hidden:
                return part
            return states if isinstance(value, StateCache) else None if name == "attention_mask" else value

        args = [exchanged(place, value) for place, value in enumerate(self.args)]
        token = _mixer.set(self)
        try:
            made = self.forward(*args, **{name: exchanged(name, one) for name, one in self.kwargs.items()})
        finally:
            _mixer.reset(token)
        if isinstance(made, Tensor):
            return made
        if sum(isinstance(one, Tensor) for one in made) > 1:
            raise NotImplementedError("a recurrent layer has several outputs")
        return cast(Tensor, made[0])


_mixer: ContextVar[Mixer | None] = ContextVar("mixer", default=None)


def sharing_copy(linear: nn.Module) -> nn.Module:
    """Return a stand-in for a linear layer of a recurrent one, with all that it has but its hooks."""
    mine = object.__new__(type(linear))
    vars(mine).update(vars(linear))
    for name in vars(nn.Module()):
        if "_hooks" in name:  # the layer itself runs them
            vars(mine)[name] = OrderedDict()

    def run(x: Tensor) -> Tensor:
        mixer = _mixer.get()
        return linear(x) if mixer is None else mixer.multiply(linear, x)

    vars(mine)["forward"] = run
    return mine
