"""The command that shows and clears what is kept on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eagle_fsd import storage
from eagle_fsd.files.records import BACKENDS_FILE, recall, remember
from eagle_fsd.hub.kept import weights_cache
from eagle_fsd.hub.kept.weights_cache import WEIGHTS


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two measurements, a library and the weights of one file."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    remember("a", 1)
    remember("b", 2)
    remember("c", "MKL", BACKENDS_FILE)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    origin = weights_cache.find_origin(tmp_path / "model.gguf", [], "a test")
    weights_cache.keep(origin, "torch.float32", 3, lambda folder: (folder / "weights").write_bytes(b"abc"))
    return tmp_path / "cache"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert storage.main(arguments) == 0
    return capsys.readouterr().out


def test_what_is_kept_is_shown(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    assert text.startswith(f"{kept}\n") and "trees.json: 2 measurements" in text
    assert "libraries.json: 1 measurements" in text and "model.gguf in float32, 0 MB, used 2" in text


@pytest.mark.parametrize(
    ("arguments", "weights", "measurements"),
    [(["--clear"], 0, 0), (["--clear", "weights"], 0, 1), (["--clear", "measurements"], 1, 0)],
)
def test_what_is_kept_can_be_cleared(
    arguments: list[str], weights: int, measurements: int, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, *arguments)
    assert len(WEIGHTS.whole()) == weights and ("model.gguf" in text) == bool(weights)
    assert (recall("a", int) is not None) == bool(measurements) == ("trees.json" in text)
    assert shown(capsys, "--clear") == f"{kept}: nothing is kept\n" == shown(capsys)


def test_a_wrong_flag_gets_one_line(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--claer"], "--claer"), (["--clear", "it"], "'it'"), (["x"], "x")):
        with pytest.raises(SystemExit) as ended:
            storage.main(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and words in line and "storage: error: " in line
    assert "trees.json: 2" in shown(capsys), "and nothing was deleted"


def test_a_folder_that_vanishes_while_all_are_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    folders = [WEIGHTS.root() / name for name in "abc"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / WEIGHTS.mark).write_text("{}")
    is_file = Path.is_file

    def look(path: Path) -> bool:
        found = is_file(path)
        if path.parent == folders[1]:
            shutil.rmtree(path.parent)  # by another process
        return found

    monkeypatch.setattr(Path, "is_file", look)
    assert set(WEIGHTS.whole()) == {folders[0], folders[2]}
