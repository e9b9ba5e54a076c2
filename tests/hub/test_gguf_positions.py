"""A .gguf file's scaled positions are those of the model that was made a file of, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_gguf import tiny_weights, write_gguf

from eagle_fsd import hub
from eagle_fsd.hub.loading.gguf_positions import LLAMA3, read_positions

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

WEIGHTS = tiny_weights()
WIDTH = 16  # of a head
CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA_3_2 = {**LLAMA3, "factor": 32.0}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 512,
    "long_factor": [8.0] * 8, "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


Factors = torch.Tensor | dict[str, torch.Tensor] | None


def file_with(path: Path, factors: Factors = None, **fields: Any) -> str:
    """Write the tiny model with the factors [D/2] of its frequencies, by name, and with fields."""

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, *given: Any) -> None:
            by_name = {"freqs": factors} if isinstance(factors, torch.Tensor) else factors or {}
            for name, values in by_name.items():
                self.add_tensor(f"rope_{name}.weight", values.numpy())
            for name, value in fields.items():
                add = getattr(self, f"add_rope_scaling_{name}", None) or getattr(self, f"add_{name}")
                add(value)
            super().write_header_to_file(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        return str(write_gguf(path, WEIGHTS))


def longrope_factors(parts: tuple[str, ...] = ("long", "short")) -> dict[str, torch.Tensor]:
    return {f"factors_{part}": torch.tensor(LONGROPE[f"{part}_factor"]) for part in parts}


def llama3_factors() -> torch.Tensor:
    """Return what llama.cpp writes of Llama 3.2, by its own formula; these are 1, between, and 32."""
    frequencies = 10000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    turns = 8192 * frequencies / (2 * torch.pi)  # in the context of the training
    smooth = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return 1 / ((1 - smooth) / 32 + smooth)


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


@pytest.mark.parametrize(
    ("scaling", "written"),
    [
        (LLAMA_3_2, {"factors": llama3_factors()}),
        ({"rope_type": "linear", "factor": 8.0}, {"type": gguf.RopeScalingType.LINEAR, "factor": 8.0}),
        (YARN, {"type": gguf.RopeScalingType.YARN, "factor": 4.0, "orig_ctx_len": 512}),
        (LONGROPE, {"factors": longrope_factors(), "orig_ctx_len": 512}),
        (
            {**LONGROPE, "attention_factor": 1.5},
            {"factors": longrope_factors(), "orig_ctx_len": 512, "attn_factors": 1.5},
        ),
        ({"rope_type": "default"}, {"factors": torch.ones(WIDTH // 2)}),
        ({"rope_type": "default"}, {"type": gguf.RopeScalingType.NONE, "factor": 8.0}),
    ],
    ids=["llama3", "linear", "yarn", "longrope", "longrope's attention", "ones", "none"],
)
def test_a_file_is_the_model_it_was_made_of(
    scaling: dict[str, Any], written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    config = transformers.LlamaConfig(**CONFIG, rope_parameters={"rope_theta": 10000.0, **scaling})
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(WEIGHTS)
    path = file_with(tmp_path / "tiny.gguf", **written)
    for start in ("converted", "kept"):
        assert torch.equal(logits(hub.load_target(path)[0]), logits(model)), start


@pytest.mark.parametrize(
    "written",
    [
        {"factors": torch.full([WIDTH // 2], 8.0)},
        {"factors": torch.full([3], 8.0)},
        {"type": gguf.RopeScalingType.LONGROPE, "factor": 4.0},
        {"type": gguf.RopeScalingType.YARN, "factor": 4.0},
        {"factors": longrope_factors()},
        {"factors": longrope_factors(("long",)), "orig_ctx_len": 512},
        {"factors": {name: one[:3] for name, one in longrope_factors().items()}, "orig_ctx_len": 512},
    ],
    ids=["other", "too few", "longrope", "half of yarn", "no length", "half of longrope", "few of longrope"],
)
def test_a_scaling_that_is_not_known_is_refused(written: dict[str, Any], tmp_path: Path) -> None:
    path = file_with(tmp_path / "tiny.gguf", **written)
    for load in (hub.load_target, lambda name: hub.load_text(hub.resolve_target(name))):
        with pytest.raises(ValueError, match=r"scales its positions .*; name the model's folder"):
            load(path)


def test_of_gemma_3_only_the_full_layers_are_scaled(tmp_path: Path) -> None:
    config, kind = transformers.Gemma3TextConfig(), gguf.RopeScalingType.LINEAR
    read_positions(config, file_with(tmp_path / "linear.gguf", type=kind, factor=8.0), "gemma")
    full, windowed = (config.rope_parameters[f"{one}_attention"] for one in ("full", "sliding"))
    assert (full["rope_type"], full["factor"]) == ("linear", 8.0)
    assert windowed["rope_type"] == "default" and "factor" not in windowed
    with pytest.raises(ValueError, match="scales its positions"):
        factors = file_with(tmp_path / "factors.gguf", llama3_factors())
        read_positions(transformers.Gemma3TextConfig(), factors, "gemma")


def test_a_window_and_rotated_parts_are_read(tmp_path: Path) -> None:
    config = transformers.Phi3Config(hidden_size=64, num_attention_heads=2)  # heads of 32
    path = file_with(tmp_path / "phi3.gguf", sliding_window=2047, rope_dimension_count=24)
    read_positions(config, path, "phi")
    assert config.sliding_window == 2047 and config.rope_parameters["partial_rotary_factor"] == 0.75
    windowed = transformers.Gemma2Config()  # transformers has read it by itself
    read_positions(windowed, file_with(tmp_path / "gemma.gguf", rope_dimension_count=256), "gemma")
    assert windowed.sliding_window == 4096


def test_heads_that_are_rotated_in_part_are_refused_where_all_are(tmp_path: Path) -> None:
    path = file_with(tmp_path / "tiny.gguf", rope_dimension_count=8)
    with pytest.raises(ValueError, match="rotates 8 of 128 values of a head and qwen2 all"):
        read_positions(transformers.Qwen2Config(), path, "qwen")
