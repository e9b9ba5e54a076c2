"""Attention as it is traced into graphs. It reads the committed keys and values where they lie.

Where our operator TreeAttention can be compiled, it attends, and writes the new keys and values to their
slots by itself. Else `attend_blocks` does, which is made of plain products. Both can do all that a model may
ask for. Shapes: B rows, H query heads, K key-value heads, g = H / K query heads that share one, n new tokens,
D head size, N blocks of BLOCK slots, S slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.block_cache import BLOCK, FIRST_ADDRESS


class TracedAttention:
    """The attention of a traced network: it gives a layer its keys and values, and takes its new ones.

    masks: one for each kind, to be handed to `attend`. members: each layer's committed (keys, values).
    addresses: of a WrittenCache, so that TreeAttention attends; see WrittenCache.sight. The masks then only
    stand for those whose addresses these are, and are told apart by their identity.
    """

    def __init__(
        self,
        masks: Sequence[Tensor],
        members: Sequence[tuple[Tensor, Tensor]] = (),
        addresses: Tensor | None = None,
    ) -> None:
        self.masks, self.members, self.addresses = list(masks), members, addresses
        self.new: dict[int, tuple[Tensor, Tensor]] = {}  # by layer

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention of new tokens over committed ones and each other: [B, H, n, D of values].

        layer: the place of its members. q: [B, H, n, D]. k, v: [B, K, n, D], of the new tokens. softcap,
        sinks: see attend_blocks. Raises NotImplementedError for a mask that is none of `masks`, in place.
        """
        self.new[layer] = k, v
        if self.addresses is None:
            return attend_blocks(q, k, v, *self.members[layer], mask, scale, softcap, sinks)
        kind = next((kind for kind, its in enumerate(self.masks) if its is mask), None)
        if kind is None:
            raise NotImplementedError("a layer attends under a mask that it has changed")
        none = torch.zeros(0, dtype=torch.float32, device="cpu")
        given = (q, k, v, self.addresses, none if sinks is None else sinks)
        places = (FIRST_ADDRESS + kind, FIRST_ADDRESS + len(self.masks) + 2 * layer)
        return _stand_in(*given, scale, softcap or 0.0, *places).transpose(1, 2)


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of new tokens over committed ones and each other: [B, H, n, D].

    The scores of both parts are computed apart, joined for the softmax, and split again for the values.

    q: [B, H, n, D]. k, v: [B, K, n, D], of the new tokens. keys, values: [N, B, K, BLOCK, D], committed.
    mask: [B, 1, n, S + n], additive, for committed slots and then for the new tokens. softcap: scores become
    softcap * tanh(scores / softcap). sinks: [H], a score for nothing at all, which takes part in the softmax.
    """
    batch, kv_heads, count, width = k.shape
    groups = q.shape[1] // kv_heads
    rows = (q * scale).reshape(1, batch, kv_heads, groups * count, width)
    committed = rows @ keys.transpose(-1, -2)  # [N, B, K, g * n, BLOCK]
    committed = committed.permute(1, 2, 3, 0, 4).reshape(batch, kv_heads, groups * count, -1)
    new = rows[0] @ k.transpose(-1, -2)
    scores = torch.cat((committed, new), dim=-1).view(batch, kv_heads, groups, count, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask[:, :, None]
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, count, -1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.reshape(batch, kv_heads, groups * count, -1)
    before = weights[..., :-count].reshape(batch, kv_heads, groups * count, -1, BLOCK).permute(3, 0, 1, 2, 4)
    mixed = (before @ values).sum(0) + weights[..., -count:] @ v
    return mixed.reshape(batch, kv_heads * groups, count, v.shape[-1])


# -- in place ----------------------------------------

STAND_IN = "eagle_fsd::tree_attention"


@torch.library.custom_op(STAND_IN, mutates_args=())
def _stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    addresses: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float,
    mask: int,
    keys: int,
) -> Tensor:
    """Stand for TreeAttention while a graph is traced. Only the shape of what it returns is right.

    mask, keys: the places of their addresses.
    """
    batch, heads, count, _ = q.shape
    return q.new_zeros(batch, count, heads, v.shape[3])


def tree_attention_extension() -> Any:
    """Return what lets OpenVINO's converter make TreeAttention of what stands for it."""
    library.openvino()  # quietly
    from openvino.frontend.pytorch import ConversionExtension

    return ConversionExtension(STAND_IN, _convert)


def _convert(context: Any) -> list[Any]:
    """Return the operator's output, given the traced one's inputs."""
    inputs = [context.get_input(place) for place in range(5)]
    kinds = {"scale": float, "softcap": float, "mask": int, "keys": int}
    attributes = {
        name: context.get_values_from_const_input(place, None, kind)
        for place, (name, kind) in enumerate(kinds.items(), len(inputs))
    }
    made = library.node_factory().create("TreeAttention", inputs, attributes)
    return [made.output(0)]
