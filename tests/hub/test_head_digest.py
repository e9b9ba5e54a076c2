"""A head is known by its files, by every bit of them: whatever they are called and however it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.tiny_models import tiny_head

from eagle_fsd.files.fingerprints import digest_tensors
from eagle_fsd.hub import save_head
from eagle_fsd.hub.head_digest import head_digests


def digests(folder: Path) -> dict[str, str | int | None]:
    return head_digests(folder / "model.safetensors")


def test_what_is_no_tensor_changes_no_digest(tmp_path: Path) -> None:
    first = digests(save_head(tiny_head(), tmp_path / "a"))
    again = save_head(tiny_head(), tmp_path / "b", {"note": "mine"})
    assert digests(again) == first and first["draft_vocabulary"] is None
    (again / "config.json").write_text(json.dumps({}))
    torch.save(tiny_head().state_dict(), again / "pytorch_model.bin")
    assert digests(again) == head_digests(again / "pytorch_model.bin") == first


def test_every_value_counts_and_a_list_of_tokens_counts_alone(tmp_path: Path) -> None:
    first = digests(save_head(tiny_head(), tmp_path / "head"))
    head = tiny_head()
    with torch.no_grad():
        head.fc.weight[-1, -1] += 1e-3
    assert digests(save_head(head, tmp_path / "other"))["weights"] != first["weights"]
    assert digests(save_head(tiny_head(), tmp_path / "half", dtype=torch.float16)) != first
    assert digest_tensors([torch.zeros(2, 3)]) != digest_tensors([torch.zeros(3, 2)])
    listed = digests(save_head(tiny_head().restrict(torch.arange(9)), tmp_path / "listed"))
    assert listed["weights"] == first["weights"] and listed["draft_vocabulary"] is not None
    own = digests(save_head(tiny_head().restrict(torch.arange(9), 4), tmp_path / "own"))
    assert own == listed | {"draft_text_tokens": 4}
    turned = digests(save_head(tiny_head().restrict(torch.arange(9).flip(0)), tmp_path / "turned"))
    assert turned["draft_vocabulary"] != listed["draft_vocabulary"]
