"""Exported EAGLE-3 heads have the names and fields that vLLM, SGLang, EAGLE and speculators read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.eagle3 import IDS, VARIANTS, eagle3_files, eagle3_head
from support.tiny_models import HIDDEN, VOCAB, tiny_head

from eagle_fsd import hub
from eagle_fsd.drafting.eagle3.config import Reading, possible_readings
from eagle_fsd.drafting.eagle3.export import LAYOUTS
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle3.rope import Rope

# The keys of the files that are in use: https://huggingface.co/yuhuili/EAGLE3-LLaMA3.1-Instruct-8B and
# https://huggingface.co/RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3; d2t and t2d are their maps.
LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
]
REST = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}


def exported(head: Eagle3Head, folder: Path, layout: str, **options: Any) -> tuple[dict[str, Any], Any]:
    hub.save_eagle3_head(head, folder, options.pop("layers", 2), layout, **options)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("layout", "layer"), [("eagle3", "midlayer"), ("speculators", "layers.0")])
def test_the_keys_and_maps_of_the_files_in_use(tmp_path: Path, layout: str, layer: str) -> None:
    head = eagle3_head(1)
    _, tensors = exported(head, tmp_path, layout)
    assert set(tensors) == REST | {f"{layer}.{name}" for name in LAYER}
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool and t2d.shape == (VOCAB,)
    assert torch.equal(d2t + torch.arange(40), head.draft_tokens)
    assert torch.equal(t2d.nonzero()[:, 0], head.draft_tokens)
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors[f"{layer}.self_attn.q_proj.weight"].shape == (HIDDEN, 2 * HIDDEN)


def test_maps_are_written_where_a_reader_asks_for_them(tmp_path: Path) -> None:
    """EAGLE's own code asks even where every token is drafted; a head without an lm_head has no map."""
    for layout, name, wanted in (
        ("eagle3", "whole vocabulary", True),
        ("speculators", "whole vocabulary", False),
        ("eagle3", "target's lm_head", False),
    ):
        config, tensors = exported(eagle3_head(1, **VARIANTS[name]), tmp_path / layout / name, layout)
        assert ("d2t" in tensors, "t2d" in tensors) == (wanted, wanted), (layout, name)
        assert config["draft_vocab_size"] == (None if name == "target's lm_head" else VOCAB)
        if wanted:
            assert not tensors["d2t"].any() and tensors["t2d"].all()


def test_the_config_that_vllm_and_sglang_read(tmp_path: Path) -> None:
    config, _ = exported(eagle3_head(1), tmp_path, "eagle3", dtype=torch.float16)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (VOCAB, 40, 1)
    assert config["rope_theta"] == 10000.0 and config["torch_dtype"] == "float16"
    assert config["bias"] is config["attention_bias"] is config["tie_word_embeddings"] is False
    wanted = eagle3_files(eagle3_head(1))[0]
    assert {name: config[name] for name in wanted.keys() - {"eagle_config", "architectures"}} == {
        name: value for name, value in wanted.items() if name not in ("eagle_config", "architectures")
    }


def test_the_config_that_speculators_read(tmp_path: Path) -> None:
    config, _ = exported(eagle3_head(1), tmp_path, "speculators", target="owner/target")
    assert config["speculators_model_type"] == "eagle3" and config[IDS] == [1, 2, 2]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    assert config["norm_before_residual"] is False, "which these files take for true if it is missing"
    assert config["draft_vocab_size"] == 40 and config["transformer_layer_config"]["vocab_size"] == VOCAB
    assert config["transformer_layer_config"]["model_type"] == "llama"


def test_the_usual_taps_are_not_named_and_others_are_by_both_conventions(tmp_path: Path) -> None:
    """All engines assume the usual ones; a file that names others leaves nothing open here."""
    usual, _ = exported(eagle3_head(1, taps=(2, 4, 5)), tmp_path / "usual", "eagle3", layers=8)
    other, _ = exported(eagle3_head(1, taps=(2, 4, 6)), tmp_path / "other", "eagle3", layers=8)
    assert IDS not in usual and "eagle_config" not in usual
    assert other[IDS] == [2, 4, 6] and other["eagle_config"] == {IDS: [1, 3, 5]}
    for data, taps in ((usual, (2, 4, 5)), (other, (2, 4, 6))):
        assert possible_readings(data, 3 * HIDDEN, HIDDEN, 8) == [Reading(taps)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_head_is_read_back_as_it_was(tmp_path: Path, name: str, layout: str) -> None:
    fields = {"rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 256), "trained_positions": 77}
    head = eagle3_head(1, **VARIANTS[name], **fields)
    hub.save_head(tiny_head().restrict(torch.arange(9)), tmp_path)  # another head was there before
    exported(head, tmp_path, layout)
    again = hub.load_any_head(str(tmp_path), HIDDEN, VOCAB, 2)
    assert isinstance(again, Eagle3Head) and again.config == head.config
    assert (again.draft_tokens is None) == (head.draft_tokens is None)
    for key, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    if head.draft_tokens is not None:
        assert torch.equal(again.draft_tokens, head.draft_tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
