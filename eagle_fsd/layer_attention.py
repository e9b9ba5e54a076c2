"""What Hugging Face's attention layers call in place of sdpa while one of our forwards runs."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle_fsd.attention import grouped_attention
from eagle_fsd.flash import FlashPlan, flash_attention, takes_heads

GROUPED = "eagle_fsd_grouped"  # our attention's name among Hugging Face's
UNKNOWN = ("softcap", "position_bias", "s_aux", "cache")  # of an attention that is more than a mask


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
    """transformers' sdpa attention, but for the keys that it repeats for each group of heads.

    flash_plan: the model hands it through from `TargetModel.features`. A layer that got a mask of its own (a
    window's, a copy on another device), or has heads that flash-attn does not take, goes by the mask.
    """
    if attention_mask is None or any(value is not None for value in map(kwargs.get, UNKNOWN)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if flash_plan is not None and attention_mask is flash_plan.mask and takes_heads(query, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mixed = flash_attention(query, key, value, flash_plan, scale)
    else:
        mixed = grouped_attention(query, key, value, attention_mask, scaling)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention_forward)
