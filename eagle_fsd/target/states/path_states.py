"""Linear recurrences on all nodes of a tree at once, without a state for each node.

The gated delta rule and Mamba-2 let the state [K, V] of a head decay by exp(g) at each token, and add k u^T.
With S_0 before the tree, and G the sum of g along the path to a node, the state behind that node is

    S = exp(G) S_0 + sum over the node and its ancestors i of exp(G - G_i) k_i u_i^T.

A node's output is S^T q, so it needs S_0, and k, u and G of its path alone. These are the chunked forms of
both, with the ancestors of a node in the place of all that came before it. Written out is only the state that
a text goes on from: it has K V numbers, 64 kB and more, which is most of what a tree would cost on a CPU.
Shapes: B rows, N nodes, H heads, K and V the sizes of keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class PathStates:
    """The states of one layer behind the nodes of trees.

    start: those before the trees, [B, H, K, V]; None: zeros. relation: [B, N, N], see ancestors. keys: [B, H,
    N, K]. g: [B, H, N]. size: V. values_first: whether states are kept as [V, K]. updates: u, [B, H, N, V];
    whoever builds this sets them, since they may depend on it.
    """

    updates: Tensor

    def __init__(
        self,
        start: Tensor | None,
        relation: Tensor,
        keys: Tensor,
        g: Tensor,
        size: int,
        values_first: bool = False,
    ) -> None:
        if start is None:
            start = keys.new_zeros(*keys.shape[:2], keys.shape[-1], size)
        elif values_first:
            start = start.mT
        self.start, self.keys, self.values_first = start.to(keys), keys, values_first
        self.total = g @ relation.to(g.dtype).mT  # G, [B, H, N]
        apart = self.total[..., :, None] - self.total[..., None, :]
        # Masked before it is exponentiated: between nodes of two paths it may be too large.
        self.decay = apart.masked_fill(~relation[:, None], -torch.inf).exp()  # [B, H, N, N]

    def products(self, x: Tensor) -> Tensor:
        """Return what each node reads of the u of its path with x [B, H, N, K], as weights [B, H, N, N]."""
        return (x @ self.keys.mT) * self.decay

    def read_start(self, x: Tensor) -> Tensor:
        """Return what each node reads of the state before the tree with x [B, H, N, K]: [B, H, N, V]."""
        return self.total.exp()[..., None] * (x @ self.start)

    def behind(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Write out the states behind n nodes: [n, H, K, V], or [n, H, V, K]."""
        keys = self.decay[rows, :, nodes][..., None] * self.keys[rows]  # [n, H, N, K]
        start = self.total[rows, :, nodes].exp()[..., None, None] * self.start[rows]
        state = start + keys.mT @ self.updates[rows]
        return state.mT if self.values_first else state


def run_delta_rule(
    start: Tensor | None,
    relation: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_kwargs: object,
) -> tuple[Tensor, PathStates]:
    """Run the gated delta rule (arXiv 2412.06464, equation 10); return [B, N, H, V], and the states.

    There u = beta (v - (exp(g) S)^T k) with the parent's S, so the u of a node depend on those of its
    ancestors: a triangular system, since parents come before their children. start: [B, H, K, V]. The others
    are what transformers' torch_chunk_gated_delta_rule takes: query, key [B, N, h, K], value [B, N, H, V], g
    and beta [B, N, H].
    """
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    if v.shape[1] != k.shape[1]:  # heads of values share one of keys
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], dim=1) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    states = PathStates(start, relation, k, g, v.shape[-1])
    system = beta[..., None] * states.products(k)  # whose diagonal counts as 1
    known = beta[..., None] * (v - states.read_start(k))
    states.updates = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    output = states.read_start(q) + states.products(q) @ states.updates
    return output.transpose(1, 2).contiguous().to(query.dtype), states


def run_mamba2_scan(
    start: Tensor | None,
    relation: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_kwargs: object,
) -> tuple[Tensor, PathStates]:
    """Run Mamba-2 (arXiv 2405.21060); return [B, N, H, V], and the states.

    There u is the input times dt, k and q are B and C. start: [B, H, V, K]. The others are what transformers'
    mamba2_chunk_scan takes: hidden_states [B, N, H, V], dt [B, N, H], A, D and dt_bias [H], B and C [B, N, h,
    K].
    """
    dt = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit).transpose(1, 2).float()  # [B, H, N]
    x = hidden_states.transpose(1, 2).float()  # [B, H, N, V]
    k, q = (y.transpose(1, 2).float().repeat_interleave(x.shape[1] // y.shape[2], dim=1) for y in (B, C))
    states = PathStates(start, relation, k, A.float()[:, None] * dt, x.shape[-1], values_first=True)
    states.updates = x * dt[..., None]
    output = states.read_start(q) + states.products(q) @ states.updates + D[:, None, None] * x
    return output.transpose(1, 2).contiguous(), states
