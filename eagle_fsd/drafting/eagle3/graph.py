"""An EAGLE-3 head as graphs of OpenVINO: its projection, its layers and its lm_head.

Shapes: B rows, n pairs, S slots in view, d hidden size, W drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.network import Network, Product
from eagle_fsd.runtime.openvino.traced_attention import TracedAttention


@dataclass(frozen=True)
class Eagle3Graph:
    """Computes a head instead of torch.

    fc: takes features [..., taps * d_t] to states [..., d]; None if the head has none. layers: take states
    and embeddings [B, n, d] and positions [B, n]. lm_head: takes normed states [..., d] to logits [..., W];
    None if the target's stands in for it.
    windows: those of the layers, each once, in the order of the layers' masks.
    """

    fc: Product | None
    layers: Network
    lm_head: Product | None
    windows: tuple[int, ...]

    @classmethod
    def of(cls, head: Eagle3Head, runtime: OpenVINO) -> Eagle3Graph:
        """Compile a head in float32."""
        windows = tuple(dict.fromkeys(head.config.windows))

        def work(inputs: Sequence[Tensor], attention: TracedAttention) -> Tensor:
            def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                mask = attention.masks[windows.index(head.config.windows[number])]
                return attention.attend(number, q, k, v, mask, head.config.head_dim**-0.5)

            return head(*inputs, attend)

        rows = torch.zeros(1, 3, head.config.hidden_size, dtype=torch.float32, device="cpu")
        members = [(head.config.num_key_value_heads, head.config.head_dim)] * (2 * len(head.config.windows))
        inputs = (rows, rows, torch.arange(3, device="cpu")[None])
        layout = runtime.layout(inputs, len(windows), members)
        return cls(
            None if head.fc is None else runtime.product("head_fc", head.fc.weight, head.fc.bias),
            runtime.network("head", head, work, layout, asdict(head.config)),
            None if head.lm_head is None else runtime.product("draft_lm_head", head.lm_head.weight),
            windows,
        )
