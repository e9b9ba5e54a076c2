"""The EAGLE-1/2 draft head: a network from (feature, next token) pairs to the next feature.

It knows no cache, mask or tree.

h'_t = DecoderLayer(fc(concat(embed(x_{t+1}), f_t))) predicts f_{t+1} (EAGLE, arXiv 2401.15077, section 4.1).
Parameter names are the keys of EAGLE's own checkpoints. The decoder layer is Llama's without its input norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_fsd.drafting.draft_vocabulary import check_draft_tokens
from eagle_fsd.drafting.eagle_config import HeadConfig

# Takes q [B, H, n, D], k and v [B, Hkv, n, D], q and k rotated, and returns [B, H, n, D]. The caller owns
# masks and caches.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DraftHead(nn.Module):
    """`fc`, then one decoder layer. The head uses the target's embedding and lm_head and does not own them.

    draft_tokens: the ids [K] int64 of the tokens that it drafts; None for the target's whole vocabulary. It
    is a buffer, so that it moves with the head, but not part of state_dict, which keeps EAGLE's keys.
    """

    draft_tokens: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        if config.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size is {config.draft_vocab_size}: a head must be told which tokens these are; "
                "build it with None, then call restrict"
            )
        self.config = config
        self.register_buffer("draft_tokens", None, persistent=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        # On the CPU also where the head has no memory: torch computes on "meta" by way of its compiler, whose
        # import takes a second.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
        frequencies = float(config.rope_theta) ** (-steps / config.head_dim)
        # A plain attribute, not a buffer: `.to(bfloat16)` must not round it (positions past 256 would
        # collide).
        self.inverse_frequencies = frequencies.float()

    def restrict(self, token_ids: Tensor | None, text_tokens: int | None = None) -> DraftHead:
        """Draft only the target's tokens token_ids [K] (FR-Spec, arXiv 2502.14856), or all of them for None.

        text_tokens: how many that a text has had itself are drafted for it beside these, see text_tokens.py.
        This changes the head in place, except its weights; call it before an engine takes the head.
        training.data.token_counts.rank_tokens chooses tokens. Raises ValueError unless they are int64,
        distinct and in the vocabulary. Returns self.
        """
        if token_ids is not None:
            check_draft_tokens(
                token_ids, self.config.vocab_size, "draft_tokens", "rank_tokens makes such a list"
            )
            token_ids = token_ids.detach().to(self.fc.weight.device, copy=True)
        self.draft_tokens = token_ids
        size = None if token_ids is None else len(token_ids)
        more = None if token_ids is None else text_tokens
        self.config = replace(self.config, draft_vocab_size=size, draft_text_tokens=more)
        return self

    def forward(self, features: Tensor, embeddings: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Predict the next feature at every position.

        features, embeddings: [B, n, d], the feature f_t and the embedding of x_{t+1}; position_ids: [B, n], t
        itself. Returns [B, n, d], the prediction of f_{t+1}.
        """
        hidden = self.fc(torch.cat((embeddings, features), dim=-1))
        return self.layers[0](hidden, self.rotary(position_ids, hidden.dtype), attend)

    def rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, 1, n, head_dim] of the rotary embedding, computed in float32."""
        if self.inverse_frequencies.device != position_ids.device:
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids.device)
        return cos_and_sin(position_ids, self.inverse_frequencies, dtype)


def cos_and_sin(
    position_ids: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, 1, n, head_dim] of rotary angles, computed in float32, of positions [B, n]."""
    angles = position_ids[:, None, :, None].float() * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)  # both halves of a head turn by the same angles
    return angles.cos().to(dtype), angles.sin().to(dtype)


class DecoderLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(hidden, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (self.split_heads(proj(hidden)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = attend(rotate(q, rotary), rotate(k, rotary), v)  # [B, H, n, D]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner_size, bias=False)
        self.up_proj = nn.Linear(size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return x [B, H, n, D], rotated in halves as Llama does it."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
