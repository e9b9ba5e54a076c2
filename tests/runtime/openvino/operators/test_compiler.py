"""The operator is compiled once, whole or not at all, and nothing is lost where that fails."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.operators import compiler

pytest.importorskip("openvino", reason="OpenVINO is not installed")
if compiler.operator_folder() is None:
    pytest.skip("no operator is compiled for this processor", allow_module_level=True)

FAKE = """#!{python}
import sys
from pathlib import Path
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
Path(sys.argv[sys.argv.index("-o") + 1]).write_bytes(b"a library")
if {code}:
    sys.stderr.write("tile_product.cpp:1: error: no such thing\\nand more\\n")
raise SystemExit({code})
"""


@pytest.fixture
def log(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which operators are compiled, and the log of a compiler that does nothing."""
    monkeypatch.delenv(compiler.OFF, raising=False)
    found = cache / "calls.txt"
    found.touch()
    fake_compiler(found, 0, monkeypatch)
    return found


def fake_compiler(log: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log.with_name("fake")
    path.write_text(FAKE.format(python=sys.executable, log=str(log), code=code))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_it_is_compiled_once_for_what_the_processor_has(log: Path) -> None:
    assert compiler.known_operator() is None
    path = compiler.compiled_operator()
    assert path is not None and path.read_bytes() == b"a library"
    assert compiler.compiled_operator() == compiler.known_operator() == path
    *parts, whole = sorted(log.read_text().splitlines(), key=lambda call: "-shared" in call)
    assert len(parts) == len(compiler.CODE) and "-shared" in whole
    level = compiler.level()
    assert level is not None and path.parent.name.startswith(f"{level}-")
    flags = {f"-m{flag.replace('_', '')}" for flag in compiler.LEVELS[level]}
    assert all(flags <= set(call.split()) for call in parts)
    assert not [one for one in path.parent.parent.iterdir() if one.name.startswith(".")]
    assert [one.name for one in path.parent.iterdir() if one.suffix != ".json"] == [path.name]


def test_a_compiler_that_fails_leaves_nothing_and_is_told_of(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(log, 1, monkeypatch)
    with caplog.at_level(logging.INFO, logger=compiler.__name__):
        assert compiler.compiled_operator() is None
    _, line = caplog.messages  # the first says that it is compiled
    assert "left to OpenVINO" in line and "no such thing" in line and "\n" not in line
    assert not list(compiler.OPERATORS.root().iterdir())
    fake_compiler(log, 0, monkeypatch)
    assert compiler.compiled_operator() is not None


def test_no_compiler_is_told_of(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(log.parent))
    with caplog.at_level(logging.INFO, logger=compiler.__name__):
        assert compiler.compiled_operator() is None
    assert "g++" in caplog.text and not log.read_text()


def test_a_compiler_that_is_not_there_is_told_of(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger=compiler.__name__):
        assert compiler.compiled_operator() is None
    assert "no-such-compiler" in caplog.text


def test_it_is_turned_off_by_the_environment(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, off in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(compiler.OFF, value)
        assert (compiler.operator_folder() is None) == off
    assert compiler.compiled_operator() is None and library.operator() is None and not log.read_text()


def test_a_processor_gets_the_best_level_that_it_has() -> None:
    avx2 = set(compiler.AVX2)
    wide = {"avx512f", "avx512bw", "avx512_vnni"}
    assert compiler.level(frozenset(avx2 | wide | {"avx_vnni"})) == "avx512"
    assert compiler.level(frozenset(avx2 | {"avx512f", "avx512bw", "avx_vnni"})) == "avxvnni"
    assert compiler.level(frozenset(avx2 | {"avx512f", "avx512bw"})) == "avx2"
    assert compiler.level(frozenset(avx2 - {"fma"})) is None


def test_what_is_no_library_is_not_loaded(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = compiler.compiled_operator()
    assert path is not None
    with caplog.at_level(logging.INFO, logger=library.__name__):
        assert not library.add_operator(library.openvino().Core(), path)
    assert "left to OpenVINO" in caplog.text


def test_a_folder_that_cannot_be_written_is_told_of(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", os.devnull)
    with caplog.at_level(logging.INFO, logger=compiler.__name__):
        assert compiler.compiled_operator() is None
    assert "left to OpenVINO" in caplog.text and os.devnull in caplog.text
