"""A target and a head made by hand, for the tests of traps: exact only if every seam of drafting is right.

The target is a Llama of one layer whose next token is argmax(first[x_t] + second[x_{t - LAG}]): its one
attention head looks exactly LAG positions back. The draft head must find the same token, and can do so only
- at the right rotary positions: its attention looks exactly LAG - 1 pairs back;
- from true features: a pair's token is read off a part of the feature ("secret") that the head's own
  predictions leave empty;
- after the final norm: the norm's gains have random signs and sizes, which the head undoes.
Then every step accepts a full path, tau is depth + 1, and any of the above that breaks costs most of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.config import HeadConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.head import DraftHead
from eagle_fsd.target import TargetModel

VOCAB = 32
LAG = 7  # at least the tree's depth, so that a drafted node looks at committed pairs only
THETA = 10000.0
FOCUS = 60.0  # attention scores' scale: 40 nats between the right position and its neighbours
TOKEN, SECRET, LAGGED, SPARE = (slice(i * VOCAB, (i + 1) * VOCAB) for i in range(4))  # parts of a feature
ONE = 4 * VOCAB
WIDTH = 4 * VOCAB + 8
SIZE = ((WIDTH - 1) / 2) ** 0.5  # of a one-hot entry, such that an embedding has a root mean square of 1
LAGGED_SIZE = 6.0


def exact_pair(sharpness: float = 10.0, seed: int = 0) -> tuple[LlamaForCausalLM, DraftHead]:
    """The target and its exact head. sharpness: scale of the logits; at 10 the best lead by several nats."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    signs = torch.randint(0, 2, (WIDTH,), generator=generator) * 2 - 1
    gains = signs * (0.5 + 1.5 * torch.rand(WIDTH, generator=generator))
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=VOCAB,
        max_position_embeddings=512,
        rope_theta=THETA,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = LlamaForCausalLM(config).eval()
    rms = ((2 * SIZE**2 + LAGGED_SIZE**2 + 1) / WIDTH) ** 0.5  # of the last hidden state, the same everywhere
    unit = gains / rms  # what the final norm makes of 1
    eye = torch.eye(VOCAB)
    layer = target.model.layers[0]
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.fill_(1.0)
        target.model.norm.weight.copy_(gains)
        embedding = target.model.embed_tokens.weight
        embedding[:, TOKEN] = embedding[:, SECRET] = SIZE * eye
        embedding[:, ONE] = 1.0
        look_back(layer.self_attn, LAG)
        layer.self_attn.v_proj.weight[:, TOKEN] = eye / SIZE
        layer.self_attn.o_proj.weight[LAGGED] = LAGGED_SIZE * eye
        target.lm_head.weight[:, TOKEN] = sharpness * first.T / (unit[TOKEN] * SIZE)
        target.lm_head.weight[:, LAGGED] = 2 * sharpness * second.T / (unit[LAGGED] * LAGGED_SIZE)

    head = DraftHead(
        HeadConfig(
            hidden_size=WIDTH,
            intermediate_size=8,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=VOCAB,
            vocab_size=VOCAB,
            rope_theta=THETA,
            max_position_embeddings=512,
        )
    ).eval()
    attention = head.layers[0].self_attn
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.weight[TOKEN, TOKEN] = unit[TOKEN].diag()  # of the embedding, the input's first half
        feature = head.fc.weight[:, WIDTH:]
        feature[SPARE, SECRET] = (1 / (unit[SECRET] * SIZE)).diag()
        head.fc.bias[ONE] = 1.0
        look_back(attention, LAG - 1)  # pair p holds token p's feature and predicts token p + 1's
        attention.v_proj.weight[:, SPARE] = eye
        attention.o_proj.weight[LAGGED] = (unit[LAGGED] * LAGGED_SIZE).diag()
    return target, head


def look_back(attention: nn.Module, distance: int) -> None:
    """Constant queries and keys whose rotary product peaks where query position - key position = distance."""
    angles = THETA ** (-torch.arange(0, VOCAB, 2) / VOCAB) * distance
    scale = FOCUS * VOCAB**0.5
    attention.q_proj.weight[: VOCAB // 2, ONE] = scale
    attention.k_proj.weight[:, ONE] = torch.cat((angles.cos(), angles.sin()))


def exact_engine(sharpness: float = 10.0, seed: int = 0) -> EagleFSD:
    target, head = exact_pair(sharpness, seed)
    return EagleFSD(TargetModel(target), head)


def random_tokens(batch: int, length: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_llama(vocab_size: int = 64, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A tiny Llama with weights large enough that its text does not collapse into one token."""
    settings: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def random_head(model: LlamaForCausalLM, seed: int = 0) -> DraftHead:
    config = model.config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DraftHead(
            HeadConfig(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                vocab_size=config.vocab_size,
            )
        ).eval()
