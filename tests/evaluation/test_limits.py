"""The machine's limits and the target's forwards beside them."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny_head, tiny_model

from eagle_fsd import EagleFSD
from eagle_fsd.evaluation.commands import limits as script
from eagle_fsd.evaluation.commands.limits import (
    Behind,
    Machine,
    attention_operations,
    behind,
    context_table,
    forward_table,
    machine,
)
from eagle_fsd.runtime import timing
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession


@pytest.mark.parametrize("tied", [False, True])
def test_a_forward_reads_the_weights_that_it_multiplies_with(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    embeddings = model.get_input_embeddings().weight
    every = sum(weight.numel() for weight in model.parameters())
    assert (embeddings is model.get_output_embeddings().weight) == tied
    for target in (TargetModel(model), TargetModel(pack_linears(model))):
        assert target.parameter_count == every - (0 if tied else embeddings.numel())
        assert target.weight_bytes == 4 * target.parameter_count


def test_every_number_of_nodes_is_timed_behind_a_prompt() -> None:
    target = TargetModel(tiny_model())
    found = behind(target, Machine(bandwidth=1e6, rate=1e9), 20, [1, 3, 8])
    assert found.context == 20 and found.prefill > 0 and found.resident > 10**7
    config = target.config
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert found.cache_bytes == 28 * slot
    assert list(found.verify) == [1, 3, 8] and min(found.verify.values()) > 0
    width = config.num_attention_heads * config.head_dim
    operations = 2 * target.parameter_count + 4 * 20 * width * config.num_hidden_layers
    assert found.reading == (target.weight_bytes + found.cache_bytes) / 1e6
    assert found.node == pytest.approx(operations / 1e9)


def test_attention_counts_both_products_of_every_head() -> None:
    target = TargetModel(tiny_model())
    queries = sum(
        layer.out_features for name, layer in target.model.named_modules() if name.endswith("q_proj")
    )
    assert attention_operations(target, 10) == 2 * 2 * 10 * queries


def test_forwards_are_timed_through_a_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another runtime with these methods is measured by the same code."""
    used: list[str] = []

    class Session:
        def __init__(self, *arguments: object) -> None:
            self.real = TargetSession(*arguments)

        def __getattr__(self, name: str) -> object:
            used.append(name)
            return getattr(self.real, name)

    monkeypatch.setattr("eagle_fsd.evaluation.commands.limits.TargetSession", Session)
    behind(TargetModel(tiny_model()), Machine(1.0, 1.0), 5, [1, 2])
    assert set(used) == {"prefill", "verify", "cache_bytes"}


def test_tables_have_a_line_for_each_forward_and_context() -> None:
    """A forward is bound by reading or by multiplying."""
    found = [Behind(256, 0.5, 10**7, 10**9, 0.016, 0.003, {1: 0.02, 8: 0.03})]
    assert forward_table(found).splitlines()[2:] == [
        "| 256 | 1 | 16.0 | 3.0 | 20.0 | 1.25 | 1.00 |",
        "| 256 | 8 | 16.0 | 24.0 | 30.0 | 1.25 | 1.50 |",
    ]
    assert context_table(found).splitlines()[2:] == ["| 256 | 0.50 | 512 | 10.0 | 1000 |"]


@pytest.mark.slow
def test_the_machine_has_rates() -> None:
    here = machine(torch.device("cpu"), torch.float32)
    assert 1e8 < here.bandwidth < 1e13 and 1e9 < here.rate < 1e15


def test_the_script_end_to_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = EagleFSD(TargetModel(tiny_model()), tiny_head())
    monkeypatch.setattr(script, "load_engine", lambda _: engine)
    monkeypatch.setattr(script, "machine", lambda *_: Machine(2e9, 3e9))
    monkeypatch.setattr(timing, "ENOUGH", 1e-9)
    script.main(["--context", "20", "30", "--nodes", "4"])
    printed = capsys.readouterr().out
    assert "float32: 2.0 GB/s, 3 GFLOP/s; linear layers as loaded" in printed
    assert all(f"| {context} | {nodes} | " in printed for context in (20, 30) for nodes in (1, 4))
    assert "beam 8: " in printed and "accept and keep: " in printed
    monkeypatch.setattr(script, "load_engine", lambda _: EagleFSD(engine.target, None))
    script.main(["--context", "20"])
    assert "| 20 | 16 | " in (printed := capsys.readouterr().out) and "beam" not in printed  # nothing drafts
    monkeypatch.setattr(script, "load_engine", lambda _: engine)
    script.main([])
    printed = capsys.readouterr().out  # the tiny target has 256 positions
    assert "| 128 | 16 | " in printed and "| 256 | " not in printed
    monkeypatch.setattr(script, "CONTEXTS", (256, 1024))  # as for a target that has no room for any
    script.main(["--nodes", "4"])
    assert "| 255 | 4 | " in capsys.readouterr().out
    for wrong, complaint in (
        ("--context 0", "context is 0"),
        ("--nodes 0", "nodes is 0"),
        ("--context 20 256", "context is 256: the target has 256 positions; 255 is the longest"),
    ):
        with pytest.raises(SystemExit):
            script.main(wrong.split())
        assert complaint in capsys.readouterr().err
