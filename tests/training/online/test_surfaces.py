"""--adapt and --adapt-save: nothing that was learned is lost, and a failure to learn ends nothing else."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.training.online import surfaces
from eagle_fsd.training.online.surfaces import check_adaptation, save_adapted, update_between


class Adapter:
    """Stands in for a HeadAdapter. wrong: folders that cannot be written."""

    def __init__(self, *wrong: Path) -> None:
        self.wrong, self.updates, self.adapted = wrong, 0, True

    def update(self) -> None:
        self.updates += 1
        if self.updates == 2:
            raise MemoryError("no room")

    def save(self, folder: str | Path) -> Path:
        if Path(folder) in self.wrong:
            raise OSError(f"{folder}: cannot be written (I/O error)")
        Path(folder).mkdir(parents=True)
        return Path(folder)


def flags(folder: Path | None, **others: Any) -> Namespace:
    usual = {"adapt": True, "tp_plan": None, "threshold": None, "quality_budget": None}
    return Namespace(**{**usual, "adapt_save": None if folder is None else str(folder), **others})


def test_a_place_that_cannot_be_written_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    check_adaptation(flags(tmp_path / "new" / "head"))
    assert list(tmp_path.iterdir()) == []  # what was tried is gone
    (tmp_path / "new").mkdir()
    with pytest.raises(ValueError, match=r"--adapt-save names .*, which exists: name a new folder"):
        check_adaptation(flags(tmp_path / "new"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--adapt-save names .*head, where nothing can be written \("):
        check_adaptation(flags(tmp_path / "file" / "head"))


def test_a_head_is_kept_elsewhere_if_its_place_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(surfaces.tempfile, "mkdtemp", lambda prefix: str(tmp_path / f"{prefix}x"))
    save_adapted(flags(tmp_path / "head"), Adapter(tmp_path / "head"))
    spare = tmp_path / "eagle-fsd-adapted-x" / "head"
    assert spare.is_dir()
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path / 'head'}: cannot be written (I/O error)",
        f"kept the adapted head in {spare}: --ea-model {spare} drafts with it",
    ]


def test_a_head_that_has_not_changed_is_said_to_be_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = Adapter()
    adapter.adapted = False
    save_adapted(flags(tmp_path / "head"), adapter)
    assert capsys.readouterr().err.endswith("; no update was used yet, so that it drafts as before\n")


def test_an_update_that_fails_ends_the_learning_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    adapter = Adapter()
    assert update_between(adapter) == (adapter, None) and update_between(None) == (None, None)
    assert update_between(adapter) == (None, None)
    assert "the head learns no more: no room" in caplog.text
