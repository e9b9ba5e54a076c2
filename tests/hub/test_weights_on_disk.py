"""A large target's float32 weights are made on disk: the same ones, and never an error."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_gguf import tiny_weights, write_gguf
from support.tiny_models import tiny_model

from eagle_fsd import hub
from eagle_fsd.files.kept_folders import OFF
from eagle_fsd.hub.loading import weights_on_disk
from eagle_fsd.hub.loading.weights_on_disk import DiskArrays, unpacked_on_disk, unpacking

gguf = pytest.importorskip("gguf")


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_weights())


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every file be a large one, and return the bytes of what is copied to disk."""
    made: list[int] = []
    real = DiskArrays.write

    def counting(self: DiskArrays, plain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        written = real(self, plain)
        made.append(plain.nbytes)
        return written

    monkeypatch.setattr(DiskArrays, "write", counting)
    monkeypatch.setattr(weights_on_disk, "SMALL", 0)
    monkeypatch.setattr(weights_on_disk, "SHARE", 2**60)
    return made


def weights_of(file: Path, **options: Any) -> dict[str, torch.Tensor]:
    model, _ = hub.load_target(str(file), **options)
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_are_the_same(
    file: Path, copies: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """From the file itself and from what was kept of it; and nothing is left on disk but that."""
    found, again = weights_of(file, dtype=dtype), weights_of(file, dtype=dtype)
    assert len(copies) > 5  # the first time alone
    count = len(copies)
    assert not list(cache.glob(".unpacked-*")) and not list(cache.glob("*/.unpacked-*"))
    monkeypatch.setattr(weights_on_disk, "SHARE", 1)
    expected = weights_of(file, dtype=dtype, weights_cache=False)
    assert len(copies) == count and same(found, expected) and same(again, expected)


def test_a_full_disk_is_no_error(file: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, left = weights_of(file, weights_cache=False), [200]

    class Disk(io.FileIO):
        def write(self, data: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:100])  # and less at a time than it is asked for

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Disk(file.with_name("disk"), "w+b"))
    assert same(weights_of(file), expected) and left[0] < -3 and len(copies) > 1


def test_where_nothing_may_be_kept_or_little_is_needed_memory_serves(
    file: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_of(file, weights_cache=False)
    monkeypatch.setenv(OFF, "1")
    weights_of(file)
    monkeypatch.delenv(OFF)
    monkeypatch.setattr(weights_on_disk, "machine_memory", lambda: None)
    weights_of(file)
    assert copies == []


def test_a_folder_that_cannot_be_is_no_error(
    file: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be made, or nobody may write there."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(file / "cache"))
    with unpacking(file, may_write=True):
        assert np.copy(gguf.dequantize(np.ones(4, np.float32), gguf.GGMLQuantizationType.F32)).sum() == 4
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(file.parent / "cache"))
    monkeypatch.setattr(tempfile, "TemporaryFile", raises(PermissionError(errno.EACCES, "Permission denied")))
    with unpacking(file, may_write=True):
        assert np.copy(gguf.dequantize(np.ones(4, np.float32), gguf.GGMLQuantizationType.F32)).sum() == 4
    assert copies == []


def test_what_numpy_does_between_is_not_changed(tmp_path: Path, copies: list[int]) -> None:
    """Copies are plain arrays that may be written to; writing changes no other copy."""
    values = np.arange(24, dtype=np.float32).reshape(2, 12)
    before = gguf.dequantize
    with unpacked_on_disk(DiskArrays(tmp_path)):
        unpacked = gguf.dequantize(values, gguf.GGMLQuantizationType.F32)
        turned = (unpacked.reshape(2, 3, 4).swapaxes(1, 2) - 1).reshape(4, 6)
        copied, other = np.copy(turned), np.copy(turned)
        assert type(copied) is np.ndarray and len(copies) == 2
        copied += 1
        torch.from_numpy(copied)[0, 0] = 7.0
        wanted = (values.reshape(2, 3, 4).swapaxes(1, 2) - 1).reshape(4, 6)
        assert (
            (other == wanted).all() and copied[0, 0] == 7 and (copied.flat[1:] == wanted.flat[1:] + 1).all()
        )
        stacked = np.copy(np.stack([unpacked, unpacked]))
        assert (stacked == np.stack([values, values])).all()
    assert gguf.dequantize is before
    with pytest.raises(ZeroDivisionError), unpacked_on_disk(DiskArrays(tmp_path)):
        _ = 1 / 0
    assert gguf.dequantize is before
    assert (other == wanted).all()  # the file is there as long as a copy of it


# --- a checkpoint in 16 bits ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_float32_of_16_bits_is_the_same(
    tmp_path: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, family: str
) -> None:
    model = tiny_model(family).to(dtype)
    model.save_pretrained(tmp_path / family)
    found = weights_of(tmp_path / family, dtype="float32")
    assert len(copies) > 5 and os.environ.get(weights_on_disk.ALONE) is None
    monkeypatch.setattr(weights_on_disk, "SHARE", 1)
    count = len(copies)
    assert same(found, weights_of(tmp_path / family, dtype="float32")) and len(copies) == count
    monkeypatch.setattr(weights_on_disk, "SHARE", 2**60)
    weights_of(tmp_path / family, dtype="bfloat16")
    assert len(copies) == count  # nothing is widened


def test_a_full_disk_is_no_error_for_a_checkpoint(
    tmp_path: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    expected = weights_of(tmp_path / "llama", dtype="float32")
    monkeypatch.setattr(DiskArrays, "write", raises(OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setenv(weights_on_disk.ALONE, "0")
    assert same(weights_of(tmp_path / "llama", dtype="float32"), expected)
    assert os.environ[weights_on_disk.ALONE] == "0"


def raises(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail
