"""Hundreds of malformed heads, configs, weights and calibrations: each loads or ends in one clear line.

The cases come from a seed and run in a process of their own, with limits of time and memory for each, so that
one that hangs or grows is a failure with its name, and not the end of the tests. A longer search, by hand:

    PYTHONPATH=.:tests python -m support.fuzz_files 5000 1000 head_config calibration
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fuzzing import spoil_safetensors, spoil_text, spoil_value

TESTS = Path(__file__).parent
CASES = 120
KINDS = (
    *("head_config", "head_weights", "head_bin", "draft_vocabulary", "calibration", "target_config"),
    *("target_weights", "shard_index", "trees"),
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded and measured as on Linux")


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What came of the cases of every kind."""
    process = start("-m", "support.fuzz_files", str(CASES))
    last = process.stderr.strip().splitlines()[-12:]
    assert process.returncode == 0, "the process died, at the last case named here:\n" + "\n".join(last)
    return {one["kind"]: one for one in map(json.loads, process.stdout.splitlines())}


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_file_loads_or_ends_in_one_clear_line(
    found: dict[str, dict[str, Any]], kind: str
) -> None:
    outcome = found[kind]
    assert not outcome["failures"], "\n".join(outcome["failures"])
    assert outcome["loaded"] + outcome["refused"] == CASES
    assert outcome["refused"] > CASES // 4 or kind == "trees", "the faults are faults"


def test_the_same_seed_makes_the_same_fault() -> None:
    value = {"a": [1, {"b": 2}], "c": "d"}
    for spoil in (
        lambda draw: json.dumps(spoil_value(draw, value, {"x": 1})),
        lambda draw: spoil_text(draw, json.dumps(value)),
    ):
        made = [[spoil(random.Random(seed)) for seed in range(200)] for _ in range(2)]
        assert made[0] == made[1] and len(set(made[0])) > 50
    assert value == {"a": [1, {"b": 2}], "c": "d"}


def test_no_two_faults_of_a_weights_file_are_one() -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(24)
    made = {spoil_safetensors(random.Random(seed), whole) for seed in range(300)}
    assert len(made) > 90


ENDS = {
    "while True: pass": "took more than 1 s",
    "return bytearray(2**31)": "MemoryError",
    "return torch.zeros(2**31)": "RuntimeError",
    "raise KeyError('x')": "KeyError",
    "raise ValueError('two\\nlines')": "no clear line",
    "raise ValueError('cannot be loaded (MemoryError)')": "took too much memory",
    "raise ValueError('x is 3: it must be 4; change it')": "",
    "return 1": "",
}


def test_a_hang_a_balloon_and_a_traceback_are_seen(tmp_path: Path) -> None:
    """So that a fuzz test that passes says something."""
    code = ["import sys, torch, json, pathlib", "from support import fuzz_files", "fuzz_files.SECONDS = 1"]
    for body in ENDS:
        code += ["def bad():", f"    {body}", "fuzz_files.KINDS['bad'] = lambda draw, folder, bad=bad: bad"]
        code += [f"print(json.dumps(fuzz_files.run('bad', 1, 0, pathlib.Path({str(tmp_path)!r}))))"]
    process = start("-c", "\n".join(code))
    assert process.returncode == 0, process.stderr
    outcomes = [json.loads(line)["failures"] for line in process.stdout.splitlines()]
    for (body, fault), failures in zip(ENDS.items(), outcomes, strict=True):
        assert fault in failures[0] if fault else not failures, (body, failures)
