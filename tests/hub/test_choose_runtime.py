"""Which runtime and weight format is planned for what was asked for: every rule once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model

from eagle_fsd.hub import choose_runtime
from eagle_fsd.hub.choose_runtime import AUTO, OPENVINO, TORCH, USUAL, Plan, plan_runtime
from eagle_fsd.runtime import timing
from eagle_fsd.runtime.openvino import library
from eagle_fsd.target.model import TargetModel

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
Dtype = torch.dtype | str | None


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(USUAL, raising=False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let OpenVINO seem installed: no plan imports it."""
    monkeypatch.setattr(library, "is_installed", lambda: True)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)


def plan(
    runtime: str = AUTO,
    weight_format: str | None = None,
    dtype: Dtype = None,
    device: torch.device = CPU,
    movable: bool = False,
    gguf: bool = False,
) -> Plan:
    return plan_runtime(runtime, weight_format, dtype, device, movable, gguf)


@pytest.mark.parametrize(
    ("runtime", "weight_format", "dtype", "wanted"),
    [
        (TORCH, None, None, Plan(TORCH, "float32", FLOAT32)),
        (TORCH, None, "bfloat16", Plan(TORCH, "bfloat16", BFLOAT16)),
        (TORCH, None, FLOAT16, Plan(TORCH, "float16", FLOAT16)),
        (TORCH, "float32", None, Plan(TORCH, "float32", FLOAT32)),
        (TORCH, "bfloat16", None, Plan(TORCH, "bfloat16", BFLOAT16)),
        (TORCH, "bfloat16", "bfloat16", Plan(TORCH, "bfloat16", BFLOAT16)),
        (AUTO, None, None, Plan(AUTO, "float32", FLOAT32)),
        (AUTO, None, "auto", Plan(AUTO, "float32", FLOAT32)),
        (AUTO, None, "bfloat16", Plan(AUTO, "bfloat16", BFLOAT16)),
        (AUTO, "bfloat16", None, Plan(AUTO, "bfloat16", BFLOAT16)),
        (AUTO, None, "float16", Plan(TORCH, "float16", FLOAT16)),  # OpenVINO has no float16 here
        (AUTO, "int8", None, Plan(OPENVINO, "int8", FLOAT32)),  # which torch has not
        (AUTO, "int8", "float32", Plan(OPENVINO, "int8", FLOAT32)),
        (OPENVINO, None, None, Plan(OPENVINO, "float32", FLOAT32)),
        # Graphs are made from float32 weights, in whatever format they compute.
        (OPENVINO, None, "bfloat16", Plan(OPENVINO, "bfloat16", FLOAT32)),
        (OPENVINO, "bfloat16", "bfloat16", Plan(OPENVINO, "bfloat16", FLOAT32)),
        (OPENVINO, "float32", None, Plan(OPENVINO, "float32", FLOAT32)),
        (OPENVINO, "int8", None, Plan(OPENVINO, "int8", FLOAT32)),
    ],
)
@pytest.mark.usefixtures("installed")
def test_plans_on_a_cpu(runtime: str, weight_format: str | None, dtype: Dtype, wanted: Plan) -> None:
    assert plan(runtime, weight_format, dtype) == wanted


@pytest.mark.parametrize("runtime", [AUTO, OPENVINO])
@pytest.mark.usefixtures("installed")
def test_a_files_own_blocks(runtime: str) -> None:
    assert plan(runtime, "packed", gguf=True) == Plan(OPENVINO, "packed", FLOAT32, keeps_blocks=True)
    assert plan(runtime, "float32", gguf=True) == Plan(runtime, "float32", FLOAT32, keeps_blocks=True)
    assert not plan(runtime, "bfloat16", gguf=True).keeps_blocks


@pytest.mark.usefixtures("installed")
def test_torch_computes_elsewhere() -> None:
    assert plan(dtype="bfloat16", device=CUDA) == Plan(TORCH, "bfloat16", BFLOAT16)
    assert plan(movable=True) == Plan(TORCH, "float32", FLOAT32)
    assert plan(weight_format="float32", device=CUDA) == Plan(TORCH, "float32", FLOAT32)


@pytest.mark.usefixtures("missing")
def test_without_openvino_torch_computes() -> None:
    assert plan() == Plan(TORCH, "float32", FLOAT32)
    assert plan(weight_format="bfloat16") == Plan(TORCH, "bfloat16", BFLOAT16)
    assert plan(TORCH) == Plan(TORCH, "float32", FLOAT32)


@pytest.mark.parametrize(("runtime", "weight_format"), [(OPENVINO, None), (AUTO, "int8"), (OPENVINO, "int8")])
@pytest.mark.usefixtures("missing")
def test_without_openvino_its_formats_are_refused(runtime: str, weight_format: str | None) -> None:
    with pytest.raises(ValueError, match=r"run pip install .*openvino.* or use runtime torch"):
        plan(runtime, weight_format)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"runtime": "onnx"}, "runtime is 'onnx': it must be one of auto, torch, openvino"),
        (
            {"weight_format": "int3"},
            "weight_format is 'int3': it must be one of float32, bfloat16, int8, packed",
        ),
        (
            {"weight_format": "float32", "dtype": "bfloat16"},
            "dtype is bfloat16 with weight_format 'float32': they must agree; leave dtype out",
        ),
        ({"weight_format": "int8", "dtype": "bfloat16"}, "with weight_format 'int8': they must agree"),
        ({"runtime": TORCH, "weight_format": "int8"}, "weight_format is 'int8' with runtime torch"),
        ({"runtime": TORCH, "weight_format": "packed", "gguf": True}, "is 'packed' with runtime torch"),
        ({"weight_format": "packed"}, "weight_format is 'packed': the target must be a .gguf file"),
        ({"runtime": OPENVINO, "device": CUDA}, "not for device 'cuda:0'"),
        ({"runtime": OPENVINO, "movable": True}, "not with a device_map; leave device_map out, or"),
        ({"weight_format": "int8", "device": CUDA}, "runtime openvino is for a whole target on the CPU"),
        ({"runtime": OPENVINO, "dtype": "float16"}, "dtype is 'float16' with runtime openvino"),
        ({"dtype": "float8"}, "dtype 'float8' is not there"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_cannot_be_is_refused_in_one_line(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan(**asked)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value) and ("; " in str(error.value))


@pytest.mark.usefixtures("installed")
def test_the_environment_names_the_usual_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USUAL, TORCH)
    assert plan() == Plan(TORCH, "float32", FLOAT32)
    assert plan(OPENVINO).runtime == OPENVINO  # what is asked for comes first
    assert plan(weight_format="int8").runtime == OPENVINO  # torch does not have it
    monkeypatch.setenv(USUAL, OPENVINO)
    assert plan() == Plan(OPENVINO, "float32", FLOAT32)
    assert plan(TORCH).runtime == plan(device=CUDA).runtime == plan(movable=True).runtime == TORCH
    with monkeypatch.context() as patch:
        patch.setattr(library, "is_installed", lambda: False)
        assert plan().runtime == TORCH
    monkeypatch.setenv(USUAL, "")
    assert plan().runtime == AUTO
    monkeypatch.setenv(USUAL, "onnx")
    with pytest.raises(ValueError, match=f"{USUAL} is 'onnx': it must be one of auto, torch, openvino"):
        plan()


@pytest.mark.parametrize("faster", [TORCH, OPENVINO])
def test_the_faster_runtime_is_measured_once(
    faster: str, monkeypatch: pytest.MonkeyPatch, installed: None, cache: Path
) -> None:
    """For models of the same shapes, in the same format, with the same releases and threads."""
    monkeypatch.setattr(library, "version", lambda: "2026.4")
    targets: dict[str, Any] = {TORCH: object(), OPENVINO: object()}
    made: list[str] = []

    def timed(found: dict[str, Any]) -> tuple[dict[str, float], float]:
        made.append("timed")
        return {name: 1.0 if name == faster else 2.0 for name in found}, 0.0

    def settle(wanted: Plan, size: int = 2**13) -> list[str]:
        made.clear()
        loads = [lambda name=name: made.append(name) or targets[name] for name in (TORCH, OPENVINO)]
        small = size == 1
        found = choose_runtime.settle(wanted, [(2**13, size)], *loads)
        assert found is targets[TORCH if small else faster]
        return list(made)

    monkeypatch.setattr(choose_runtime, "time_forwards", timed)
    measured = [OPENVINO, TORCH, "timed"]
    assert settle(plan()) == measured and settle(plan()) == [faster]
    for other in (plan(weight_format="bfloat16"), plan(gguf=True)):
        assert settle(other) == measured
    assert settle(plan(), 2**14) == measured and settle(plan(), 1) == [TORCH]
    for place, name, value in (
        (library, "version", lambda: "2027.1"),
        (torch, "get_num_threads", lambda: 77),
    ):
        monkeypatch.setattr(place, name, value)
        assert settle(plan()) == measured


@pytest.mark.parametrize("reason", [None, OSError(28, "No space left on device"), MemoryError()])
def test_only_what_stays_so_is_remembered(
    reason: Exception | None, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    """A model that could not be converted for want of room may be at the next start."""
    noted: list[str] = []
    monkeypatch.setattr(library, "version", lambda: "2026.4")
    monkeypatch.setattr(choose_runtime, "recall", lambda *_: None)
    monkeypatch.setattr(choose_runtime, "remember", lambda _key, value, _file: noted.append(value))

    def cannot() -> TargetModel:
        try:
            raise ValueError("target cannot be converted") from reason
        except ValueError as error:
            raise ValueError("the target does not work") from error

    target: Any = object()
    assert choose_runtime.settle(plan(), [(2**13, 2**13)], lambda: target, cannot) is target
    assert noted == ([] if reason else [TORCH])


@pytest.mark.parametrize("waited", [0, 50])
def test_a_machine_whose_cores_are_taken_is_measured_at_the_next_start(
    waited: int, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(library, "version", lambda: "2026.4")
    monkeypatch.setattr(choose_runtime, "recall", lambda *_: None)
    monkeypatch.setattr(choose_runtime, "remember", lambda _key, value, _file: noted.append(value))
    monkeypatch.setattr(choose_runtime, "disagreement", lambda _: 0.0)
    told = iter([{"1": (100, 0)}, {"1": (200, waited)}])
    monkeypatch.setattr(timing, "thread_times", lambda: next(told))
    target = TargetModel(tiny_model())
    assert choose_runtime.settle(plan(), [(2**13, 2**13)], lambda: target, lambda: target) is target
    assert len(noted) == (0 if waited else 1)


def test_openvino_is_found_without_importing_it() -> None:
    assert library.is_installed() == (importlib.util.find_spec("openvino") is not None)


def test_openvino_is_no_choice_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import fails then."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert plan(runtime="auto").runtime == TORCH
    with pytest.raises(
        ValueError, match=r"^runtime is 'openvino': OpenVINO needs a home folder, .*; set HOME"
    ):
        plan(runtime="openvino")
