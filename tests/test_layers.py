"""The package's layers, read from its imports: a module imports lower layers, never its own."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle_fsd"

# Lowest first. Two modules of one layer never import each other: acceptance, target and draft stay apart, and
# so do training and evaluation. A subpackage counts as one module.
LAYERS = [
    {"checks", "timing", "version"},
    {
        "architecture",
        "attention",
        "config",
        "eagle_config",
        "placement",
        "divergence",
        "files",
        "flash",
        "graphs",
        "identity",
        "jsonl",
        "padding",
        "provenance",
        "stats",
    },
    {"remembered"},
    {"libraries"},
    {"capture", "layer_attention", "packing", "prompts", "tensors"},
    {"sampling", "tree", "vocabulary"},
    {"head"},
    {"cache", "checkpoint", "drafter"},
    {"acceptance", "session", "draft", "download", "weights_cache"},
    {"admission", "fuzzy", "target_files"},
    {"relaxed", "target"},
    {"baseline", "judge", "law", "loading", "outputs", "requests", "tuning"},
    {"decoding", "detokenizer", "hub", "rules", "text", "workspace"},
    {"stop_strings"},
    {"measuring"},
    {"autotree", "calibration"},
    {"engine"},
    {"training", "evaluation"},
    {"flags", "report", "storage"},
    {"arguments"},
    {"generate"},
]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}

# Who may know Hugging Face's libraries, and so text; the rest knows tensors and token ids.
HUGGING_FACE = {"transformers", "huggingface_hub", "tokenizers"}
KNOWS_HUGGING_FACE = {
    "admission",
    "detokenizer",
    "stop_strings",
    "target",
    "layer_attention",
    "hub",
    "download",
    "loading",
    "target_files",
    "architecture",
    "engine",
    "text",
    "training",
    "evaluation",
    "generate",
}


def module_of(path: Path) -> str:
    """`eagle_fsd/tree.py` is `tree`, and everything under `eagle_fsd/training/` is `training`."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


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


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_module_imports_lower_layers_only(path: Path) -> None:
    module = module_of(path)
    assert module in RANK, f"eagle_fsd/{module} has no layer: give it one in LAYERS"
    for name in IMPORTS[path]:
        parts = name.split(".")
        if parts[0] != "eagle_fsd" or parts[1] in (module, "__version__"):
            continue
        assert parts[1] in RANK, f"{module} imports {name}: name the module that defines it, not the package"
        assert RANK[parts[1]] < RANK[module], f"{module} imports {parts[1]}, which is not in a lower layer"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_the_edges_know_hugging_face(path: Path) -> None:
    known = {name.split(".")[0] for name in IMPORTS[path]} & HUGGING_FACE
    assert not known or module_of(path) in KNOWS_HUGGING_FACE, f"{module_of(path)} imports {known}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_runtime_modules_import_nothing_outside_the_requirements(path: Path) -> None:
    """Training and evaluation have extras of their own; the rest gets by with what the package requires."""
    if module_of(path) in {"training", "evaluation"}:
        return
    required = {"torch", "transformers", "safetensors", "huggingface_hub", "gguf", "accelerate", "jinja2"}
    required |= {"numpy", "filelock"}
    if module_of(path) == "flash":  # which goes without where it is not installed
        required.add("flash_attn")
    roots = {name.split(".")[0] for name in IMPORTS[path]}
    assert not roots - required - {"eagle_fsd", *sys.stdlib_module_names}
