"""A tiny Llama's weights, a GGUF file of them in llama.cpp's names and row order, and rows of any type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from eagle_fsd.runtime.openvino.gguf_blocks import LAYOUTS


def tiny_weights(seed: int = 0, tied: bool = False) -> dict[str, Tensor]:
    """Make a Llama's weights for `write_gguf`. tied: the output matrix is the embedding's."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    found = transformers.LlamaForCausalLM(config).state_dict()
    if tied:
        del found["lm_head.weight"]
    return found


def write_gguf(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a Llama of two layers, two heads and one key-value head with these float32 weights."""
    import gguf

    vocab, width = tensors["model.embed_tokens.weight"].shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*"abcdefghijklmnopqrstuvwxyz", "ab", "bc", *(f"<{i}>" for i in range(vocab - 28))])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    layer_names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {
        f"model.layers.{i}.{old}": f"blk.{i}.{new}" for i in range(2) for old, new in layer_names.items()
    }
    for key, value in tensors.items():
        heads = 2 if "q_proj" in key else 1 if "k_proj" in key else 0
        if heads:  # llama.cpp pairs neighbouring rows for its rotary positions
            value = value.reshape(heads, 2, -1, width).transpose(1, 2).reshape(-1, width)
        writer.add_tensor(f"{names[key.removesuffix('.weight')]}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return packed rows of random bytes; only the floats of each block are drawn from sane ones."""
    import gguf

    rng = np.random.default_rng(seed)
    layout = np.dtype(LAYOUTS[kind].fields)
    size, numbers = layout.itemsize, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    blocks = rng.integers(256, size=(rows * columns // numbers, size), dtype=np.uint8).view(layout)[:, 0]
    for name in {"d", "m"} & {*layout.names}:
        blocks[name] = rng.normal(size=len(blocks)) * 0.01
    return blocks.view(np.uint8).reshape(rows, -1)


def plain_rows(kind: str, packed: np.ndarray) -> np.ndarray:
    """Return the float32 numbers that packed rows stand for, by the package gguf."""
    import gguf

    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
