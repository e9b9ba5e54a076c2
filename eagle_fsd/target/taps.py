"""Taps: the residual stream between a target's layers, for drafters that read more than its last state.

Tap i, 1 <= i <= n, is the output of layer i - 1, which is what enters layer i: entry i of Hugging Face's
`hidden_states`. The exception is the last entry: Hugging Face's is normed, and tap n is not.

Hooks read them, in a private copy of the decoder that is made when taps are first asked for. So they cost
nothing elsewhere, the user's model is never changed, and threads do not see each other's taps. Graphs are
traced with such a copy; see graph_decoder.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.target.hf_attention import private_copy

_recording: ContextVar[dict[int, Tensor] | None] = ContextVar("taps", default=None)


class TappedDecoder:
    """A decoder whose forwards also give some taps, in the order asked for.

    decoder: a private copy, which is changed; it has the attention that is to run. Raises ValueError if a tap
    is not in 1..layers, or if the decoder has no list of that many layers.
    """

    def __init__(self, decoder: nn.Module, layers: int, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        for tap in self.taps:
            if not 1 <= tap <= layers:
                raise ValueError(
                    f"tap {tap} is asked for: taps of this target are 1 to {layers}, the outputs of its "
                    "layers; name others"
                )
        self.decoder = decoder
        self.decoder._compiled_call_impl = None  # compiled code would not call the hooks
        stack = find_layers(self.decoder, layers)
        for tap in sorted(set(self.taps)):
            stack[tap - 1] = hooked_copy(stack[tap - 1], tap)

    def __call__(self, **inputs: Any) -> tuple[Any, list[Tensor]]:
        """Return the decoder's output and the taps, [B, q, d] each, on the devices of their layers."""
        found: dict[int, Tensor] = {}
        token = _recording.set(found)
        try:
            output = self.decoder(**inputs)
        finally:
            _recording.reset(token)
        missing = sorted(set(self.taps) - found.keys())
        if missing:
            raise ValueError(
                f"tap {missing[0]} did not come out of the target's forward: its layers must run one by one; "
                "use a head without taps, or another target"
            )
        return output, [found[tap] for tap in self.taps]


def find_layers(decoder: nn.Module, layers: int) -> nn.ModuleList:
    """Return a decoder's list of layers, which is the first of that length. Raises ValueError without one."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise ValueError(
        f"target is a {type(decoder).__name__}, whose {layers} layers are not in one list: taps cannot be "
        "read from it; use a head without taps, or another target"
    )


def hooked_copy(layer: nn.Module, tap: int) -> nn.Module:
    """Return a copy of a layer that shares everything with it but its hooks, to which one is added."""
    mine = object.__new__(type(layer))
    vars(mine).update(vars(layer))
    mine._compiled_call_impl = None
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        vars(mine)[name] = OrderedDict(vars(mine).get(name, ()))

    def record(_module: nn.Module, _arguments: Any, output: Any) -> None:
        found = _recording.get()
        if found is not None:
            found[tap] = output[0] if isinstance(output, tuple) else output

    mine.register_forward_hook(record)
    return mine


def plain_tapped_decoder(decoder: nn.Module, layers: int, taps: Sequence[int]) -> TappedDecoder:
    """Return a decoder that shows its taps with Hugging Face's own attention."""
    return TappedDecoder(private_copy(decoder), layers, taps)


def joined(taps: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return taps [B, q, d] side by side on one device, [B, q, taps * d]."""
    return torch.cat([tap.to(device) for tap in taps], dim=-1)
