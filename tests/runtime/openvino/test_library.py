"""OpenVINO leaves the process as it was: compiling on several threads keeps the locale; nothing is sent."""

from __future__ import annotations

import locale
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_fsd.runtime.openvino import library

UTF8 = "C.UTF-8"


@pytest.fixture(autouse=True)
def utf8() -> Iterator[None]:
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, UTF8)
    except locale.Error:
        pytest.skip(f"this system has no locale {UTF8}")
    yield
    locale.setlocale(locale.LC_ALL, before)


class Core:
    """Sets the locale as OpenVINO does, in two calls that overlap: the second finds "C", and sets it last."""

    def __init__(self) -> None:
        self.set, self.found, self.done = (threading.Event() for _ in range(3))

    def compile_model(self, model: str, device: str, config: dict[str, Any]) -> str:
        second = model == "second"
        if second:
            assert self.set.wait(10)
        found = locale.setlocale(locale.LC_ALL)
        locale.setlocale(locale.LC_ALL, "C")
        (self.found if second else self.set).set()
        assert (self.done if second else self.found).wait(10)
        locale.setlocale(locale.LC_ALL, found)
        self.done.set()
        return model


def compile_two(compile_model: Any) -> None:
    threads = [threading.Thread(target=compile_model, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_graphs_that_are_compiled_together_keep_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    monkeypatch.setattr(library, "core", lambda: core)
    monkeypatch.setattr(library, "describe_pages", lambda model: False)
    compile_two(lambda name: library.compile_graph(name, "f32", False, 1))
    assert core.done.is_set() and locale.setlocale(locale.LC_ALL) == UTF8


def test_without_a_keeper_they_do_not() -> None:
    core = Core()
    compile_two(lambda name: core.compile_model(name, "CPU", {}))
    assert locale.setlocale(locale.LC_ALL) == "C"


def test_the_converter_sends_nothing_about_a_users_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """And forks no process to do so, which takes seconds where a model is large."""
    telemetry = pytest.importorskip("openvino_telemetry", reason="openvino came without it")
    pytest.importorskip("openvino", reason="the extra openvino is not installed")  # tells of itself
    monkeypatch.setattr(telemetry.Telemetry, "send_event", lambda *args: pytest.fail("it sends something"))
    library.convert(torch.nn.Linear(2, 3), (torch.zeros(1, 2),))  # the first looks at the processor
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    library.convert(torch.nn.Linear(2, 3), (torch.zeros(1, 2),))
    assert resource.getrusage(resource.RUSAGE_CHILDREN) == children


IMPORTS = """
import os, resource, sys, time
from eagle_fsd.runtime.openvino import library
{first}
library.openvino().Core()
print("openvino_telemetry" in sys.modules, os.listdir(os.environ["HOME"]))
import openvino_telemetry  # others may have it after that
"""


@pytest.mark.parametrize("first", ["", "import openvino"])
def test_an_import_of_openvino_sends_nothing(tmp_path: Path, first: str) -> None:
    """By itself OpenVINO counts imports: it numbers the user in the home folder, unless it runs in CI."""
    pytest.importorskip("openvino_telemetry", reason="openvino came without it")
    few = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
    few |= {"HOME": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}  # so that nobody is reached
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(first=first)],
        env=few,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    counted = bool(first)  # so the test would see it
    assert ran.stdout.split(maxsplit=1)[0] == str(counted)
    assert (tmp_path / "intel").exists() == counted


def test_a_network_is_traced_once() -> None:
    """Torch keeps all traces, with the stack of Python at each node, for as long as the process lives."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    calls = []

    class Counting(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            calls.append(rows.shape)
            return rows + 1

    library.convert(Counting(), (torch.zeros(1, 2),))
    assert len(calls) == 1
