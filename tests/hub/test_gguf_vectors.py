"""A .gguf file with norms or biases that the model's class has no place for is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_gguf import tiny_weights, write_gguf

from eagle_fsd import hub

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

BIAS = "blk.{}.attn_q.bias"


def file_with(path: Path, extra: dict[str, torch.Tensor]) -> str:
    """Write the tiny model, of two layers, with further tensors."""

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, *given: object) -> None:
            for name, tensor in extra.items():
                self.add_tensor(name, tensor.numpy())
            super().write_header_to_file(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        return str(write_gguf(path, tiny_weights()))


def test_biases_without_a_place_are_refused(tmp_path: Path) -> None:
    path = file_with(tmp_path / "biased.gguf", {BIAS.format(layer): torch.ones(32) for layer in range(2)})
    kinds = r"attn_norm.weight, attn_q.bias, ffn_norm.weight, output_norm.weight"
    with pytest.raises(
        ValueError, match=rf"has 7 norms and biases \({kinds}\).* a place for 5: .*folder or Hub"
    ):
        hub.load_target(path)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"rope_freqs.weight": torch.ones(8)}, id="frequencies"),
        pytest.param({BIAS.format(2): torch.ones(32)}, id="a layer beyond the model's"),
        pytest.param({}, id="nothing"),
    ],
)
def test_what_no_text_depends_on_is_left_out(tmp_path: Path, extra: dict[str, torch.Tensor]) -> None:
    model, _ = hub.load_target(file_with(tmp_path / "whole.gguf", extra))
    assert torch.equal(model.state_dict()["model.norm.weight"], tiny_weights()["model.norm.weight"])
