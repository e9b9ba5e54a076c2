"""What Hugging Face's attention layers call in place of sdpa while one of our forwards runs."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle_fsd.attention import grouped_attention

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
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, but for the keys that it repeats for each group of heads."""
    if attention_mask is None or any(value is not None for value in map(kwargs.get, UNKNOWN)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    mixed = grouped_attention(query, key, value, attention_mask, scaling)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention_forward)
