"""The wings of the house, read from the package's imports: they point downward, and there are no circles."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle_fsd"

# Lowest first. Wings of one line never import each other: target, drafting and acceptance stand side by side.
WINGS = [
    {"version", "core"},
    {"files"},
    {"runtime"},
    {"target", "drafting", "acceptance"},
    {"text", "decoding"},
    {"hub"},
    {"autotune"},
    {"engine"},
    {"cli", "evaluation"},
    {"training"},  # which measures the heads that it trains
    {"generate", "chat", "storage", "serving"},
    {"serve"},
    {"__main__"},
    {"integrations"},  # other programs' ways to reach all of this
]
RANK = {wing: rank for rank, line in enumerate(WINGS) for wing in line}

# Who may know Hugging Face's libraries, and so text; the rest knows tensors and token ids.
HUGGING_FACE = {"transformers", "huggingface_hub", "tokenizers"}
KNOWS_HUGGING_FACE = {
    "target",
    "autotune",
    "hub",
    "engine",
    "text",
    "training",
    "evaluation",
    "integrations",
    "cli",  # to load a model
}


def wing_of(path: Path) -> str:
    """`eagle_fsd/engine.py` is `engine`, and everything under `eagle_fsd/core/` is `core`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str, package: str = "eagle_fsd") -> set[str]:
    """Dotted names of all that a source file imports, anywhere in its code; relative ones made absolute."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
IMPORTS = {
    path: imports(path.read_text(encoding="utf-8"), ".".join(path.parent.relative_to(PACKAGE.parent).parts))
    for path in FILES
}
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]


def test_imports_reads_every_spelling() -> None:
    source = "import a.b\nfrom . import c\nfrom .d import e\ndef f():\n    from eagle_fsd.g import h\n"
    assert imports(source) == {"a.b", "eagle_fsd.c", "eagle_fsd.d.e", "eagle_fsd.g.h"}
    assert imports("from ..cache import keep", "eagle_fsd.training") == {"eagle_fsd.cache.keep"}


def modules_named(name: str) -> set[str]:
    """Return the module of the package that a dotted name is of, and the packages above it."""
    parts = name.split(".")
    found = set()
    for end in range(1, len(parts) + 1):
        base = PACKAGE.parent.joinpath(*parts[:end])
        if base.with_suffix(".py").is_file():
            found.add(".".join(parts[:end]))
    return found


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_point_downward(path: Path) -> None:
    wing = wing_of(path)
    assert wing in RANK, f"eagle_fsd/{wing} has no place: give it one in WINGS"
    for name in IMPORTS[path]:
        parts = name.split(".")
        if parts[0] != "eagle_fsd" or parts[1] == wing:
            continue
        assert parts[1] in RANK, (
            f"{path.name} imports {name}: name the module that defines it, not the package"
        )
        assert RANK[parts[1]] < RANK[wing], f"{wing} imports {parts[1]}, which is not below it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {}
    for path in FILES:
        own = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        graph[own] = {module for name in IMPORTS[path] for module in modules_named(name)} - {own}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(FILES)  # raises CycleError


def test_a_folder_is_read_at_a_glance() -> None:
    """At most about eight modules a folder, 21 places at the top, and no module of more than 350 lines."""
    for folder in {path.parent for path in FILES}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 9, f"{folder.name} has {len(modules)} modules: what two ideas are in it?"
    places = {wing_of(path) for path in FILES} - {"__init__", "__main__"}
    assert len(places) <= 21
    assert {path.name: length for path in FILES if (length := len(path.read_text().splitlines())) > 350} == {}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_the_edges_know_hugging_face(path: Path) -> None:
    known = {name.split(".")[0] for name in IMPORTS[path]} & HUGGING_FACE
    assert not known or wing_of(path) in KNOWS_HUGGING_FACE, f"{wing_of(path)} imports {known}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_runtime_modules_import_nothing_outside_the_requirements(path: Path) -> None:
    """Training and evaluation have extras of their own; the rest gets by with what the package requires."""
    if wing_of(path) in {"training", "evaluation", "integrations"}:
        return
    required = {"torch", "transformers", "safetensors", "huggingface_hub", "gguf", "accelerate", "jinja2"}
    required |= {"numpy", "filelock", "tqdm"}
    if path.stem == "flash_attention":  # which goes without where it is not installed
        required.add("flash_attn")
    if "openvino" in path.parts:  # which is loaded where it is installed and asked for
        required.add("openvino")
    if path.stem == "pictures":  # which is loaded where one is asked about
        required.add("PIL")
    if path.stem == "grammar":  # which is loaded where a form is asked for
        required.add("llguidance")
    if path.stem == "images":  # which is loaded where a request has some
        required.add("PIL")
    if wing_of(path) in {"serving", "serve"}:  # the extra; what FastAPI brings is named as well
        required |= {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"}
    roots = {name.split(".")[0] for name in IMPORTS[path]}
    assert not roots - required - {"eagle_fsd", *sys.stdlib_module_names}
