"""The gated delta rule on a tree, without a state for each node.

The rule (arXiv 2412.06464, equation 10) turns the state S [K, V] of a head behind one token into
S' = exp(g) S + k u^T with u = beta (v - (exp(g) S)^T k), and gives o = S'^T q. Written out along a path from
the state S_0 before the tree, with G the sum of g up to a node,

    S = exp(G) S_0 + sum over the node and its ancestors i of exp(G - G_i) k_i u_i^T.

So u and o of a node need S_0 and the k, u and G of its ancestors alone. Written out is only the state that a
text goes on from. A state has K V numbers, 64 kB and more, so this is most of what a tree costs on a CPU.
Shapes: B rows, M nodes of a level, H heads, K and V the sizes of keys and values.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RULE = "torch_recurrent_gated_delta_rule"  # what transformers calls it, in each family that has it


@dataclass(frozen=True)
class Level:
    """The nodes of one depth in the trees of a batch. A node's place is its number among them.

    rows, nodes: [M], in order. parents: [M], their parents' places in the level before. counts: of nodes, by
    row.
    """

    rows: Tensor
    nodes: Tensor
    parents: Tensor
    counts: list[int]

    def to(self, device: torch.device) -> Level:
        """Return the level on a device."""
        return Level(self.rows.to(device), self.nodes.to(device), self.parents.to(device), self.counts)


@dataclass(frozen=True)
class Added:
    """What the nodes of a level add to the states of their rows.

    lines: [M, level + 1], the places of each node's ancestors and its own. keys: [M, H, K]. updates: u,
    [M, H, V]. decays: G, [M, H].
    """

    rows: Tensor
    lines: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


class DeltaTree:
    """The states of one layer behind the nodes of trees. start: [rows, H, K, V], those before the trees."""

    def __init__(self, start: Tensor, levels: Sequence[Level]) -> None:
        self.start, self.levels = start, levels
        self.added: list[Added] = []

    def behind(self, level: int) -> LevelStates:
        """Return the states behind the nodes of a level; -1: those before the tree, of its roots' rows."""
        return LevelStates(self, level)

    def step(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Run the next level and return o [M, H, V]. q, k: [M, H, K]. v: [M, H, V]. g, beta: [M, H]."""
        level = self.levels[len(self.added)]
        lines = torch.arange(len(level.rows), device=q.device)[:, None]
        if self.added:
            before = self.added[-1]
            lines = torch.cat((before.lines[level.parents], lines), dim=1)
            g = g + before.decays[level.parents]
        both = torch.stack((k, q), dim=2)  # [M, H, 2, K]
        seen = g.exp()[..., None, None] * self._read_start(level, both)  # [M, H, 2, V]
        for added, place in zip(self.added, lines.unbind(1), strict=False):
            share = (both * added.keys[place, :, None]).sum(-1)  # [M, H, 2]
            share = share * (g - added.decays[place]).exp()[..., None]
            seen = seen + share[..., None] * added.updates[place, :, None]
        u = beta[..., None] * (v - seen[:, :, 0])
        self.added.append(Added(level.rows, lines, k, u, g))
        return seen[:, :, 1] + (k * q).sum(-1, keepdim=True) * u

    def state(self, level: int, chosen: Tensor) -> Tensor:
        """Write out the states [n, H, K, V] behind n nodes of a level, by their places in it."""
        last = self.added[level]
        lines, decays = last.lines[chosen], last.decays[chosen]
        state = decays.exp()[..., None, None] * self.start[last.rows[chosen]]
        for added, place in zip(self.added, lines.unbind(1), strict=False):
            keys = (decays - added.decays[place]).exp()[..., None] * added.keys[place]
            state += keys[..., None] * added.updates[place][..., None, :]
        return state

    def _read_start(self, level: Level, x: Tensor) -> Tensor:
        """Return S_0^T x [M, H, n, V] of the rows' states for x [M, H, n, K], without a copy for nodes."""
        read = []
        for state, part in zip(self.start, x.split(level.counts), strict=False):
            found = part.transpose(0, 1).flatten(1, 2) @ state  # [H, m * n, V] for the m nodes of a row
            read.append(found.unflatten(1, (len(part), x.shape[2])).transpose(0, 1))
        return torch.cat(read)


@dataclass(frozen=True)
class LevelStates:
    """The states behind a level of a DeltaTree, in the place of a tensor [M, H, K, V]."""

    tree: DeltaTree
    level: int

    @property
    def device(self) -> torch.device:
        return self.tree.start.device

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """Return the states of some nodes, by their places in the level."""
        return self.tree.state(self.level, chosen)


def with_tree_rule(forward: Callable[..., Any], mixer: nn.Module) -> Callable[..., Any] | None:
    """Return a recurrent layer's forward whose delta rule takes LevelStates too; None if it has no such rule.

    transformers' layers find the rule among the globals of their module. The forward returned has globals of
    its own, so nothing of transformers is changed.
    """
    function = getattr(forward, "__func__", None)
    while function is not None and hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # decorators that rename arguments, or move weights for accelerate
    if function is None or RULE not in function.__code__.co_names or hooked(mixer):
        return None
    original = function.__globals__[RULE]

    def rule(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = kwargs.get("initial_state")
        if not isinstance(states, LevelStates):
            return original(query, key, value, *args, **kwargs)
        return run_level(states, query, key, value, kwargs)

    known = {**function.__globals__, RULE: rule}
    mine = types.FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    mine.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(mine, mixer)


def hooked(mixer: nn.Module) -> bool:
    """Return whether accelerate moves weights of a layer, so that its forward must be called as it is."""
    return any(hasattr(module, "_hf_hook") for module in mixer.modules())


def run_level(
    states: LevelStates, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, LevelStates]:
    """Run the next level as transformers' rule would: query, key [M, 1, h, K] and value [M, 1, H, V]."""
    shared = value.shape[2] // key.shape[2]  # heads of values that share one of keys
    q, k = (x[:, 0].float().repeat_interleave(shared, dim=1) for x in (query, key))
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, g, beta = value[:, 0].float(), options["g"][:, 0].float(), options["beta"][:, 0].float()
    output = states.tree.step(q, k, v, g, beta)
    return output[:, None].to(query.dtype), states.tree.behind(states.level + 1)
