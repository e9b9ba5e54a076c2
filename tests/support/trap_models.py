"""A target and a head made by hand, for the tests of traps: exact only if every seam of drafting is right.

The target is a Llama of one layer whose next token is the argmax of a sum of four tables, at x_t, x_{t-1},
x_{t-2} and x_{t-LAG}: its attention heads look exactly 1, 2 and LAG positions back. The draft head must find
the same sum, and can do so only
- at the right rotary positions: its attention looks exactly 2 and LAG - 1 pairs back;
- from true features: the token LAG back is read off a part of a committed pair's feature ("secret") that the
  head's own predictions leave empty;
- after the final norm: the norm's gains have random signs and sizes, which the head undoes;
- in the right place of the tree: x_{t-1} is read off the parent's predicted feature, x_{t-2} off an ancestor.
Then every step accepts a full path, tau is depth + 1, and any of the above that breaks costs much of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.engine import EagleFSD
from eagle_fsd.target.model import TargetModel

VOCAB = 32
LAG = 7  # at least the tree's depth, so that a drafted node reads the secret of committed pairs only
LAGS = (1, 2, LAG)
WEIGHTS = (1.0, 1.0, 1.0, 3.0)  # of the tables at x_t, x_{t-1}, x_{t-2}, x_{t-LAG}
THETA = 10000.0
FOCUS = 60.0  # attention scores' scale: 40 nats between the right position and its neighbours
PARTS = tuple(slice(i * VOCAB, (i + 1) * VOCAB) for i in range(6))  # of a feature
TOKEN, *LAGGED, SECRET, SPARE = PARTS
ONE = len(PARTS) * VOCAB
WIDTH = ONE + 6  # divisible by the number of attention heads, as Llama asks
SIZE = ((WIDTH - 1) / 2) ** 0.5  # of a one-hot entry, such that an embedding has a root mean square of 1
HEAD_SHAPE = {"hidden_size": WIDTH, "intermediate_size": 8, "head_dim": VOCAB, "vocab_size": VOCAB}


def exact_pair(sharpness: float = 10.0, seed: int = 0) -> tuple[LlamaForCausalLM, DraftHead]:
    """Return the target and its exact head.

    sharpness: the scale of the logits; at 10 the best leads by several nats.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(VOCAB, VOCAB, generator=generator) for _ in WEIGHTS]
    signs = torch.randint(0, 2, (WIDTH,), generator=generator) * 2 - 1
    gains = signs * (0.5 + 1.5 * torch.rand(WIDTH, generator=generator))
    rms = ((5 * SIZE**2 + 1) / WIDTH) ** 0.5  # of the last hidden state, the same everywhere
    unit = gains * SIZE / rms  # what the final norm makes of a one-hot entry
    eye = torch.eye(VOCAB)

    config = LlamaConfig(
        **HEAD_SHAPE,
        num_hidden_layers=1,
        num_attention_heads=len(LAGS),
        num_key_value_heads=len(LAGS),
        max_position_embeddings=512,
        rope_theta=THETA,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config).eval()
    layer, logits = target.model.layers[0], target.lm_head.weight
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.fill_(1.0)
        target.model.norm.weight.copy_(gains)
        embedding = target.model.embed_tokens.weight
        embedding[:, TOKEN] = embedding[:, SECRET] = SIZE * eye
        embedding[:, ONE] = 1.0
        for number, (lag, part) in enumerate(zip(LAGS, LAGGED, strict=True)):
            look_back(layer.self_attn, number, lag, source=TOKEN, read=eye, part=part, write=eye)
        for table, weight, part in zip(tables, WEIGHTS, (TOKEN, *LAGGED), strict=True):
            logits[:, part] = sharpness * weight * table.T / unit[part]

    shape = HeadConfig(
        **HEAD_SHAPE,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_theta=THETA,
        max_position_embeddings=512,
        fc_bias=True,
    )
    head = DraftHead(shape).eval()
    one_back, two_back, far_back = LAGGED
    attention = head.layers[0].self_attn
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        of_embedding, of_feature = head.fc.weight[:, :WIDTH], head.fc.weight[:, WIDTH:]
        of_embedding[TOKEN, TOKEN] = (unit[TOKEN] / SIZE).diag()
        of_feature[one_back, TOKEN] = (unit[one_back] / unit[TOKEN]).diag()
        of_feature[SPARE, SECRET] = (1 / unit[SECRET]).diag()
        head.fc.bias[ONE] = 1.0
        # Pair p holds token p's feature and token p + 1, and predicts token p + 1's feature.
        read, write = (1 / unit[TOKEN]).diag(), unit[two_back].diag()
        look_back(attention, 0, 2, source=TOKEN, read=read, part=two_back, write=write)
        look_back(attention, 1, LAG - 1, source=SPARE, read=eye, part=far_back, write=unit[far_back].diag())
    return target, head


def look_back(
    attention: nn.Module, number: int, distance: int, source: slice, read: Tensor, part: slice, write: Tensor
) -> None:
    """Make attention head `number` copy a part of the input at exactly `distance` positions back.

    Its queries and keys are constant, and their rotary product peaks where the positions differ by that much.
    """
    rows = PARTS[number]
    angles = THETA ** (-torch.arange(0, VOCAB, 2) / VOCAB) * distance
    constant = torch.zeros(VOCAB)
    constant[: VOCAB // 2] = FOCUS * VOCAB**0.5
    attention.q_proj.weight[rows, ONE] = constant
    attention.k_proj.weight[rows, ONE] = torch.cat((angles.cos(), angles.sin()))
    attention.v_proj.weight[rows, source] = read
    attention.o_proj.weight[part, rows] = write


def exact_engine(sharpness: float = 10.0, seed: int = 0) -> EagleFSD:
    target, head = exact_pair(sharpness, seed)
    return EagleFSD(TargetModel(target), head)


def random_tokens(batch: int, length: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_llama(vocab_size: int = 64, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Return a tiny Llama with weights large enough that its text does not collapse into one token."""
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
        "pad_token_id": None,
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
