"""The EAGLE-3 draft head (arXiv 2503.01840): from taps of the target and tokens to the next token.

It knows no cache, mask or tree.

g_t = fc(concat(taps at t)), once for every committed token. The first layer attends over
concat(input_layernorm(embed(x_{t+1})), hidden_norm(g_t)), and everything else is a Llama layer's. Where there
is no tap yet, below the root of a tree, the head's own output stands in the place of g. Logits are
lm_head(norm(output)), with an lm_head of its own. Parameter names are the keys of the files, `layers.0` where
some of them say `midlayer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from eagle_fsd.drafting.eagle3.config import Eagle3Config, Reading
from eagle_fsd.drafting.eagle_head import MLP, RMSNorm, cos_and_sin, rotate

# Takes the layer's number, q [B, H, n, D], k and v [B, Hkv, n, D], q and k rotated; returns [B, H, n, D]. The
# caller owns masks and caches.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Eagle3Head(nn.Module):
    """An EAGLE-3 head. A state [..., d] is what one draft step hands to the next.

    draft_tokens: the ids [W] int64 of the tokens that it drafts, ascending; None if these are all. It is a
    buffer, so that it moves with the head, but not part of state_dict. readings: the ways in which its files
    can be read; the config has the first of them until another is chosen.
    """

    draft_tokens: Tensor | None

    def __init__(self, config: Eagle3Config, draft_tokens: Tensor | None = None) -> None:
        super().__init__()
        assert config.draft_vocab_size == (
            config.vocab_size if draft_tokens is None else len(draft_tokens)
        ), "the draft vocabulary and its list of tokens differ"
        self.config = config
        self.readings: tuple[Reading, ...] = (config.reading,)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        width, count = config.hidden_size, max(len(config.taps), 1)
        self.fc = nn.Linear(config.fc_inputs, width, bias=config.fc_bias) if config.fc else None
        self.input_norm = RMSNorm(config.fc_inputs, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_size, config.rms_norm_eps) for _ in range(count)
            )
        self.layers = nn.ModuleList(Layer(config, number) for number in range(len(config.windows)))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.lm_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.embeddings else None
        # A plain attribute, not a buffer: `.to(bfloat16)` must not round it (positions past 256 would
        # collide).
        self.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def project(self, features: Tensor, fc: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return states [..., d] of what the target shows [..., taps * d_t]. Only true features come here.

        fc: computes the head's own fc instead of torch.
        """
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            taps = features.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        return features if self.fc is None else (fc or self.fc)(features)

    def forward(self, states: Tensor, embeddings: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Return the next states [B, n, d].

        states: [B, n, d], projected features of x_t, or states returned before. embeddings: [B, n, d], of
        x_{t+1}. position_ids: [B, n], t itself.
        """
        rotary = self.rotary(position_ids, states.dtype)
        hidden = states
        for layer in self.layers:
            hidden = layer(hidden, embeddings, rotary, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def readout(self, states: Tensor) -> Tensor:
        """Return what the lm_head multiplies with, [..., d]: normed states, which are never normed twice."""
        return states if self.config.norm_output else self.norm(states)

    def rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, 1, n, head_dim] of the rotary embedding, computed in float32."""
        if self.inverse_frequencies.device != position_ids.device:
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids.device)
        return cos_and_sin(position_ids, self.inverse_frequencies, dtype)


class Layer(nn.Module):
    """A decoder layer. The first one, number 0, reads embeddings beside the states."""

    def __init__(self, config: Eagle3Config, number: int) -> None:
        super().__init__()
        self.first = number == 0
        self.residual_is_normed = config.norm_before_residual
        self.self_attn = Attention(config, number)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.first:
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        residual = hidden
        if self.first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.residual_is_normed else hidden
            inputs = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)  # [B, n, 2 d], this order
        else:
            inputs = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Grouped attention. The first layer's projections take twice the width."""

    def __init__(self, config: Eagle3Config, number: int) -> None:
        super().__init__()
        self.number, self.head_dim = number, config.head_dim
        inputs = config.hidden_size * (2 if number == 0 else 1)
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, inputs: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (self.split_heads(proj(inputs)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:  # as in Qwen3
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.number, rotate(q, rotary), rotate(k, rotary), v)  # [B, H, n, D]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
