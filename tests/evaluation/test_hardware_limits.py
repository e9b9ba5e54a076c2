"""The machine's limits and the target's forwards beside them."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny_head, tiny_model

from eagle_fsd import EagleFSD
from eagle_fsd.autotune.step_costs import WIDTHS
from eagle_fsd.evaluation.commands import limits as script
from eagle_fsd.evaluation.measure.hardware_limits import Machine, forwards, machine, table
from eagle_fsd.runtime.matmul_backends import backend_for
from eagle_fsd.runtime.packed_linear import PackedLinear, backend_names, pack_linears
from eagle_fsd.target.model import TargetModel


def test_a_forward_is_bound_by_reading_or_by_multiplying() -> None:
    here = Machine(bandwidth=10.0, rate=100.0)
    assert here.limit(weight_bytes=40, parameters=10, nodes=1) == 4.0
    assert here.limit(weight_bytes=40, parameters=10, nodes=40) == 8.0


def test_every_width_is_timed() -> None:
    engine = EagleFSD(TargetModel(pack_linears(tiny_model())), tiny_head())
    backend = backend_for(torch.zeros(1, 1))
    assert backend_names(engine.target.model) == ([backend.name] if backend else [])
    found, costs = forwards(engine, Machine(1e9, 1e9), 32, [2])
    assert [one.nodes for one in found] == [1, *WIDTHS]
    assert all(min(one.limit, one.plain_linears, one.linears) > 0 for one in found)
    assert all(one.verify == costs.verify[one.nodes] for one in found)
    assert not any(layer.plain for layer in engine.target.model.modules() if isinstance(layer, PackedLinear))
    assert table(found).count("\n") == 1 + len(found)


@pytest.mark.slow
def test_the_machine_has_rates() -> None:
    here = machine(torch.device("cpu"), torch.float32)
    assert 1e8 < here.bandwidth < 1e13 and 1e9 < here.rate < 1e15


def test_the_script_end_to_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = EagleFSD(TargetModel(tiny_model()), tiny_head())
    monkeypatch.setattr(script, "load_engine", lambda _: engine)
    monkeypatch.setattr(script, "machine", lambda *_: Machine(2e9, 3e9))
    script.main(["--context", "20"])
    printed = capsys.readouterr().out
    assert "float32: 2.0 GB/s, 3 GFLOP/s; linear layers as loaded" in printed
    assert "beam 8: " in printed and "accept and keep: " in printed
    with pytest.raises(SystemExit):
        script.main(["--context", "0"])
    assert "context is 0" in capsys.readouterr().err
