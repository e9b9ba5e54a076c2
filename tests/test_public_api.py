"""The import paths and commands that users rely on: they stay, whatever moves inside the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import eagle_fsd

ROOT = Path(__file__).parents[1]
NAMES = {
    "AcceptanceRule", "AutoThreshold", "AutoTree", "DraftHead", "EagleFSD", "Fuzzy", "GenerationOutput",
    "GenerationStats", "HeadConfig", "Lossless", "NonFiniteLogits", "SamplingConfig", "TreeConfig", "Typical",
}  # fmt: skip
MODULES = {  # paths below the package that scripts and users import, and what they take from each
    "acceptance": ("AcceptanceRule", "Fuzzy", "Lossless"),
    "evaluation.tasks": ("PROMPTS", "TASKS", "Message", "Sample", "Task", "cut", "task_named"),
    "generate": ("main",),
    "hub": ("DEFAULT_TARGET", "load_head", "load_target", "resolve_head", "resolve_target"),
    "target": ("TargetModel",),
}
TASKS = {"gsm8k", "commonsense_qa", "mmlu", "humaneval", "ifeval", "mt_bench"}
# A module that is None in sys.modules cannot be imported.
WITHOUT_TORCH = "import runpy, sys; sys.modules.update(torch=None, transformers=None); "

# A stand-in for lm-eval: a registry, and a command line that shows which class a model's name leads to.
LM_EVAL = {
    "__init__.py": "",
    "__main__.py": """
        import sys
        from lm_eval.api.registry import MODELS
        def cli_evaluate():
            print(MODELS[sys.argv[sys.argv.index("--model") + 1]].__name__)
    """,
    "models.py": "",
    "utils.py": "def simple_parse_args_string(text): ...",
    "api/__init__.py": "",
    "api/instance.py": "class Instance: ...",
    "api/model.py": "class LM: ...",
    "api/registry.py": """
        MODELS = {}
        def register_model(name):
            return lambda model: MODELS.setdefault(name, model)
    """,
}


def python(*arguments: str, before: Path | None = None) -> str:
    """Run the interpreter on this checkout and return what it prints; it must succeed.

    before: a folder whose packages come before the installed ones.
    """
    folders = [str(folder) for folder in (before, ROOT) if folder is not None]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_names_what_it_offers() -> None:
    assert set(eagle_fsd.__all__) >= NAMES
    for name in set(eagle_fsd.__all__) - {"__version__"}:
        assert getattr(eagle_fsd, name).__name__ == name
    assert re.fullmatch(r"\d+\.\d+\.\d+", eagle_fsd.__version__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = eagle_fsd.Nothing


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_has_its_names(module: str) -> None:
    found = import_module(f"eagle_fsd.{module}")
    assert not [name for name in MODULES[module] if not hasattr(found, name)]


def test_one_name_is_one_thing_at_both_of_its_paths() -> None:
    for name in MODULES["acceptance"]:
        assert getattr(eagle_fsd, name) is getattr(import_module("eagle_fsd.acceptance"), name)


def test_the_tasks_have_their_names() -> None:
    tasks = import_module("eagle_fsd.evaluation.tasks")
    assert set(tasks.TASKS) >= TASKS
    assert all(tasks.task_named(name).name == name for name in TASKS)


def test_the_import_loads_no_torch() -> None:
    python("-c", "import sys, eagle_fsd; assert not {'torch', 'transformers'} & set(sys.modules)")
    python("-c", WITHOUT_TORCH + "import eagle_fsd; print(eagle_fsd.__version__)")


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_the_command_introduces_itself_without_torch(flag: str) -> None:
    run = f"sys.argv[1:] = ['{flag}']; runpy.run_module('eagle_fsd.generate', run_name='__main__')"
    assert "eagle_fsd" in python("-c", WITHOUT_TORCH + run)


@pytest.mark.parametrize("module", ["generate", "storage"])
def test_a_module_runs_as_a_command(module: str) -> None:
    assert python("-m", f"eagle_fsd.{module}", "--help").startswith(f"usage: python -m eagle_fsd.{module} ")


def test_the_console_script_leads_to_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """As setup.py names it: an installed package may be of another version."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (entry,) = re.findall(r'"eagle-fsd = ([\w.]+):(\w+)"', setup)
    main = getattr(import_module(entry[0]), entry[1])
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: ")


def test_lm_eval_finds_the_model_by_its_name(tmp_path: Path) -> None:
    for name, source in LM_EVAL.items():
        file = tmp_path / "lm_eval" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(re.sub("^ {8}", "", source, flags=re.MULTILINE))
    script = str(ROOT / "eval" / "harness.py")
    assert python(script, "--model", "eagle_fsd", before=tmp_path).splitlines()[-1] == "EagleLM"


OF_A_CALLER = """
import numpy
import torch

from eagle_fsd import EagleFSD


def answer(model: EagleFSD) -> None:
    rows, array, tensor = [[1, 2]], numpy.array([[1, 2]]), torch.tensor([[1, 2]])
    model.generate(rows, rows)
    model.generate(array, array)
    model.generate(tensor, tensor)
    model.generate([array[0]])
    model.stream(array)
    model.generate_many([array[0], [1]])
    model.generate("text")  # type: ignore[arg-type]
    model.generate([1, 2])  # type: ignore[list-item]
"""


@pytest.mark.slow
def test_prompts_of_every_kind_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    """What runs passes a caller's mypy too, and a comment that ignores nothing is an error of its own."""
    pytest.importorskip("mypy")
    (tmp_path / "caller.py").write_text(OF_A_CALLER)
    python("-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "caller.py"))
