"""Loading onto a pretended GPU: whichever files, dtypes and places are named, the text is that of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretended_cuda_calls import pretended_cuda
from support.tiny_engine import save_near_models
from support.tiny_gguf import tiny_weights, write_gguf
from support.tiny_models import tiny_head

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.hub import save_head

PROMPT = [[5, 40, 12, 7]]
HERE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "pack": False, "lookup": False}
THERE = HERE | {"device": "cuda"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_near_models(folder)
    save_head(tiny_head(4).restrict(torch.arange(0, 96, 2), 8), folder / "head")
    return folder


def text(target: Path, drafts: str, how: dict[str, Any], device: str) -> list[list[int]]:
    model = EagleFSD.from_pretrained(target, drafts, **how)
    tree = TreeConfig(1) if model.drafter is None else TreeConfig(4, 2, 2)
    assert model.device.type == device and model.target.held.get_input_embeddings().weight.is_cuda == (
        device == "cuda"
    )
    return model.generate(PROMPT, max_new_tokens=5, tree=tree).new_tokens


@pytest.mark.parametrize(
    ("how", "device"),
    [
        (THERE, "cuda"),
        (THERE | {"dtype": "bfloat16", "head_dtype": "float32"}, "cuda"),
        (THERE | {"dtype": None}, "cuda"),
        (HERE | {"device": None}, "cuda"),
        (HERE | {"device": None, "device_map": {"": "cuda:0"}}, "cuda"),
        (THERE | {"draft_model": "draft", "draft_device": "cpu"}, "cuda"),
        (HERE | {"draft_model": "draft", "draft_device": "cuda"}, "cpu"),
        (THERE | {"draft_layers": 1, "lookup": True}, "cuda"),
    ],
    ids=["cuda", "two dtypes", "its dtype", "its device", "map", "draft here", "draft there", "layers"],
)
def test_text_of_a_gpu_is_that_of_a_cpu(models: Path, how: dict[str, Any], device: str) -> None:
    drafts = "none" if how.keys() & {"draft_model", "draft_layers"} else str(models / "head")
    how = dict(how)
    if "draft_model" in how:
        how["draft_model"] = models / how["draft_model"]
    dtype = "bfloat16" if how["dtype"] is None else how["dtype"]
    plain = text(models / "target", "none", HERE | {"dtype": dtype}, "cpu")
    with pretended_cuda():
        assert text(models / "target", drafts, how, device) == plain


def test_a_gguf_file_is_converted_for_a_gpu_and_read_again(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_weights())
    with pretended_cuda():
        texts = [text(file, "none", THERE, "cuda") for _ in range(2)]
    assert texts == [text(file, "none", HERE, "cpu")] * 2
