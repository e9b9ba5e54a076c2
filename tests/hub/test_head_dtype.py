"""A head in another dtype than float32 is the runtime torch's: "auto" takes it, and OpenVINO is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import greedy_alone, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.hub.choose_runtime import USUAL
from eagle_fsd.hub.head_checkpoint import save_head
from eagle_fsd.hub.loading import pair
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.target.model import TargetModel


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    tiny_model().save_pretrained(tmp_path / "target")
    save_head(tiny_head(), tmp_path / "head")
    return tmp_path / "target", tmp_path / "head"


def test_auto_is_torch_then(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    monkeypatch.setenv(USUAL, "openvino")  # a preference: tiny models would be torch's anyway
    assert EagleFSD.from_pretrained(*folders, head_dtype="float32").runtime == "openvino"
    prompt = prompts_of([6])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = EagleFSD.from_pretrained(*folders, head_dtype=dtype)
        assert model.runtime == "torch" and model.head.fc.weight.dtype == dtype
        found = model.generate(prompt, max_new_tokens=8, tree=TreeConfig(8, 4, 2))
        assert found.new_tokens == greedy_alone(tiny_model(), prompt, 8)


@pytest.mark.parametrize("asked", [{"runtime": "openvino"}, {"weight_format": "int8"}], ids=str)
def test_openvino_is_refused_before_the_target_is_loaded(
    folders: tuple[Path, Path], asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pair, "load_planned")
    ((name, value),) = asked.items()
    message = rf"^{name} is '{value}' with head_dtype 'bfloat16': .*use runtime torch \(--runtime torch\)"
    with pytest.raises(ValueError, match=message):
        EagleFSD.from_pretrained(*folders, head_dtype="bfloat16", **asked)


def test_a_target_on_openvino_takes_no_other_head() -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    target = TargetModel(tiny_model(), runtime=OpenVINO("float32"))
    with pytest.raises(ValueError, match=r"the head is in bfloat16 and the target's runtime is openvino"):
        EagleFSD(target, tiny_head(), head_dtype=torch.bfloat16)
