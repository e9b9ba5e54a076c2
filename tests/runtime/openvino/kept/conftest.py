"""What the tests of kept graphs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_fsd.files.kept_folders import OFF


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    monkeypatch.delenv(OFF, raising=False)
    return tmp_path
