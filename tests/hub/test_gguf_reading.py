"""While a target is loaded its .gguf file is read once, and afterwards the package gguf is as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.tiny_gguf import tiny_weights, write_gguf

from eagle_fsd import hub
from eagle_fsd.hub.loading.gguf_reading import gguf_read_once

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_weights())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is called of the package gguf."""
    made: list[str] = []

    def counted(name: str) -> Any:
        plain = getattr(gguf, name)

        def call(*given: Any) -> Any:
            made.append(name)
            return plain(*given)

        return call

    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, counted(name))
    return made


@pytest.mark.parametrize("load", [hub.load_target, hub.load_text])
def test_a_file_is_read_once_for_config_weights_and_tokenizer(
    load: Any, path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_NO_WEIGHTS_CACHE", "1")
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    load(hub.resolve_target(str(path)))
    assert calls.count("GGUFReader") == 1
    assert calls.count("get_tensor_name_map") == (1 if load is hub.load_target else 0)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    load(hub.resolve_target(str(path)))
    assert calls.count("GGUFReader") == 2  # nothing is held between two loads


def test_a_file_that_changes_is_read_again(path: Path, calls: list[str]) -> None:
    with gguf_read_once():
        first = gguf.GGUFReader(str(path))
        assert gguf.GGUFReader(str(path)) is first
        os.utime(path, ns=(0, 0))
        assert gguf.GGUFReader(str(path)) is not first
    assert len(calls) == 2


def test_blocks_may_overlap_and_end_with_an_error(path: Path, calls: list[str]) -> None:
    before = gguf.GGUFReader
    with gguf_read_once():
        with pytest.raises(KeyError), gguf_read_once():
            gguf.GGUFReader(str(path))
            raise KeyError
        gguf.GGUFReader(str(path))
    assert gguf.GGUFReader is before and len(calls) == 1
