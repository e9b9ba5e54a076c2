"""Lets a recurrent layer run once for all nodes of trees, where its code allows that.

transformers' layers of the gated delta rule, of Mamba-2 and of short convolutions mix the tokens of a text in
two functions alone, which they find among the globals of their module: a convolution and a recurrence. Here
these get stand-ins that follow the paths of a tree. Shapes: B rows, N nodes, C channels.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.target.states.path_states import PathStates, run_delta_rule, run_mamba2_scan
from eagle_fsd.target.states.tree_plan import TreePlan

CONVOLUTION = "causal_conv1d_fn"
RULES: dict[str, Callable[..., tuple[Tensor, PathStates]]] = {
    "torch_chunk_gated_delta_rule": run_delta_rule,
    "mamba2_chunk_scan": run_mamba2_scan,
}
STATE = ("recurrent", 0)  # the key of a rule's state


class TreeStates:
    """What a recurrent layer sees of the cache when it runs once for all nodes of trees.

    before: the states of the rows before the trees, by kind and number; empty before their first token.
    """

    def __init__(self, before: Mapping[tuple[str, int], Tensor], plan: TreePlan) -> None:
        self.before, self.plan = dict(before), plan
        self.windows: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.rule: PathStates | None = None
        self._convolution = ("conv", 0)

    def is_recording_past(self, _layer_idx: int) -> bool:
        """Return True: not even a tree of one node replaces the states."""
        return True

    def get_conv_state(self, _layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs [B, C, kernel] of a convolution before the tree."""
        return self.before.get(("conv", state_idx))

    def get_recurrent_state(self, _layer_idx: int, state_idx: int = 0) -> None:
        """Return None, with which a layer calls its rule for several tokens; that knows the state."""

    def update_conv_state(
        self, conv_states: Tensor, _layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> Tensor:
        """Note which convolution is next; `convolve` finds what it still sees."""
        self._convolution = ("conv", state_idx)
        return conv_states

    def update_recurrent_state(self, _states: None, layer_idx: int, **_kwargs: object) -> None:
        """Do nothing: `behind` writes out the states that are needed."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the stand-ins that are called meanwhile follow these trees."""
        token = _states.set(self)
        try:
            yield
        finally:
            _states.reset(token)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution [B, C, N] of each node's path. x: [B, C, N]. weight: [C, kernel]."""
        before = self.before.get(self._convolution)
        if before is None:
            before = x.new_zeros(*x.shape[:2], weight.shape[1])
        seen = torch.cat((before.mT, x.mT), dim=1).flatten(0, 1)  # [B * (kernel + N), C]
        lines = self.plan.lines(weight.shape[1]).to(x.device)
        self.windows[self._convolution] = seen, lines
        wide = torch.promote_types(weight.dtype, torch.float32)  # rounded once, as convolutions are
        inputs = seen.to(weight.dtype).to(wide)
        made = None if bias is None else bias.to(wide).expand(lines[0].numel(), -1)
        for line, tap in zip(lines.flatten(1), weight.to(wide).mT, strict=True):
            made = inputs[line] * tap if made is None else torch.addcmul(made, inputs[line], tap)
        assert made is not None, "a kernel has a size"
        return made.to(weight.dtype).view(len(x), -1, x.shape[1]).mT

    def run_rule(self, rule: Callable[..., tuple[Tensor, PathStates]], *args: Any, **kwargs: Any) -> Tensor:
        """Run a recurrence from the states before the trees, and return its output."""
        relation = self.plan.relation.to(args[0].device)
        output, self.rule = rule(self.before.get(STATE), relation, *args, **kwargs)
        return output

    def behind(self, rows: Tensor, nodes: Tensor) -> dict[tuple[str, int], Tensor]:
        """Return the states [n, ...] behind n nodes, by kind and number."""
        found = {}
        for key, (seen, lines) in self.windows.items():
            found[key] = seen[lines[:, rows.to(seen.device), nodes.to(seen.device)]].permute(1, 2, 0)
        if self.rule is not None:
            device = self.rule.keys.device
            found[STATE] = self.rule.behind(rows.to(device), nodes.to(device))
        return found


_states: ContextVar[TreeStates | None] = ContextVar("states", default=None)


def with_tree_functions(forward: Callable[..., Any], mixer: nn.Module) -> Callable[..., Any] | None:
    """Return a recurrent layer's forward that runs on TreeStates too; None if its code does not allow that.

    The forward returned has globals of its own, so nothing of transformers is changed.
    """
    function = getattr(forward, "__func__", None)
    while function is not None and hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # decorators that rename arguments, or move weights for accelerate
    if function is None or hooked(mixer):
        return None
    names = {*function.__code__.co_names}
    rules = names & {*RULES}
    if not {CONVOLUTION, "is_recording_past"} <= names or ("get_recurrent_state" in names) != bool(rules):
        return None
    known = function.__globals__
    mine = {name: rule_on_tree(known[name], RULES[name]) for name in rules}
    mine[CONVOLUTION] = convolution_on_tree(known[CONVOLUTION])
    made = types.FunctionType(
        function.__code__, {**known, **mine}, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(made, mixer)


def convolution_on_tree(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a stand-in for transformers' causal_conv1d_fn."""
    from transformers.activations import ACT2FN

    def convolution(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        states = _states.get()
        if states is None:
            return original(x, weight, bias, activation=activation, **kwargs)
        made = states.convolve(x, weight, bias)
        return (made if activation is None else ACT2FN[activation](made)).to(x.dtype)

    return convolution


def rule_on_tree(
    original: Callable[..., Any], on_tree: Callable[..., tuple[Tensor, PathStates]]
) -> Callable[..., Any]:
    """Return a stand-in for a recurrence of several tokens, which returns its output and their last state."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        states = _states.get()
        return (
            original(*args, **kwargs) if states is None else (states.run_rule(on_tree, *args, **kwargs), None)
        )

    return rule


def hooked(mixer: nn.Module) -> bool:
    """Return whether accelerate moves weights of a layer, so that its forward must be called as it is."""
    return any(hasattr(module, "_hf_hook") for module in mixer.modules())
