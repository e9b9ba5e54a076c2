"""Places that a run will write to: what can be written passes without a trace, the rest is one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from eagle_fsd.files.places import require_file, require_folder, require_new_folder

REQUIRE = (require_file, require_folder, require_new_folder)


@pytest.mark.parametrize("require", REQUIRE)
def test_a_place_that_is_not_there_yet_passes_and_is_not_made(require, tmp_path: Path) -> None:
    require("--output", tmp_path / "new" / "deep" / "place")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("require", REQUIRE)
def test_a_place_below_a_file_is_refused(require, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"^--output names .*/file/x, where nothing can be written \(Not a d"
    ):
        require("--output", tmp_path / "file" / "x")


@pytest.mark.parametrize("require", REQUIRE)
def test_a_place_that_may_not_be_written_is_refused(
    require, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str, mode: int = 0o777) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)  # which root does not meet

    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(
        ValueError, match=r"^--output names .*/x, where nothing .*\(Permission denied\): name"
    ):
        require("--output", tmp_path / "x")


def test_a_device_or_a_pipe_is_no_place_for_rows(tmp_path: Path) -> None:
    """A file that is written as a whole would take its place, and rows that are appended are read again."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, Path(os.devnull)):
        with pytest.raises(
            ValueError, match=r"^--output names .*, which is a device or a pipe: it must be a"
        ):
            require_file("--output", path)


def test_what_is_there_decides(tmp_path: Path) -> None:
    """A file may be replaced and a folder filled, not the other way round; a new folder must be new."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    require_file("--output", file)
    require_folder("--output", folder)
    with pytest.raises(
        ValueError, match=r"^--output names .*/folder, which is a folder: it must be a file; "
    ):
        require_file("--output", folder)
    with pytest.raises(ValueError, match=r"^--output names .*\.gz: rows are written uncompressed; name a"):
        require_file("--output", tmp_path / "rows.jsonl.gz")
    with pytest.raises(ValueError, match=r"^--output names .*/file, where nothing .* \(Not a directory\)"):
        require_folder("--output", file)
    for there in (file, folder):
        with pytest.raises(ValueError, match=r"^--output names .*, which exists: name a new folder$"):
            require_new_folder("--output", there)
    assert file.read_text() == "mine" and list(folder.iterdir()) == []
