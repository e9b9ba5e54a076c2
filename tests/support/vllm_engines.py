"""vLLM with FSD for tests: this checkout as an installed plugin, and engines that end with their test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DRAFTED = 4  # tokens in a chain


@contextmanager
def installed_plugin(folder: Path) -> Iterator[None]:
    """Make this checkout an installed package with its entry points, here and in processes of vLLM."""
    command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    paths = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_PLUGINS": "fsd"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@contextmanager
def engine(target: Path, draft: Path | None = None, method: str = "eagle", **options: Any) -> Iterator[Any]:
    """Run vLLM in this process' children: with FSD if there is a draft, else as it is. method: vLLM's."""
    from vllm import LLM

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "seed": 0}
    settings |= {"kv_cache_memory_bytes": 200_000_000, "gpu_memory_utilization": 0.1}
    if draft is not None:
        speculation = {"method": method, "model": str(draft), "num_speculative_tokens": DRAFTED}
        settings |= {"speculative_config": speculation, "additional_config": {"fsd": {}}}
    llm = LLM(str(target), **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def counts(llm: Any) -> dict[str, int]:
    return llm.collective_rpc("fsd_counts")[0]
