"""Measuring on a pretended GPU: rows of a CPU's figures, and times without the observers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretended_cuda_calls import NAME, pretended_cuda
from support.tiny_models import Letters, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.evaluation.commands import limits
from eagle_fsd.evaluation.measure import head_quality
from eagle_fsd.evaluation.measure.observers import likelihoods
from eagle_fsd.evaluation.measure.speed import Setting, method, race
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.tasks import Sample
from eagle_fsd.evaluation.tasks.mt_bench import MT_BENCH
from eagle_fsd.files.provenance import provenance
from eagle_fsd.runtime.cuda_graphs import usual_stepper
from eagle_fsd.target.model import TargetModel

TREE = TreeConfig(4, 2, 2)
PROMPTS = prompts_of([4, 6])
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def engine_on(device: torch.device) -> EagleFSD:
    target = TargetModel(tiny_model().to(device), usual_stepper(device))
    return EagleFSD(target, tiny_head().to(device), Letters())  # type: ignore[arg-type]


def measured(device: torch.device, folder: Path) -> tuple[list[dict[str, Any]], list[float | None]]:
    """Return the rows of a sweep, with a fuzzy rule's own text and what rules are expected to do."""
    engine = engine_on(device)
    samples = [Sample(str(place), (), {}) for place in range(len(PROMPTS))]
    asked = Questions(MT_BENCH, samples, PROMPTS, range(len(PROMPTS)))
    rules = (Lossless(), Fuzzy(0.5))
    cells = [Cell(asked, rule, SamplingConfig(), TREE, 5) for rule in rules]
    rows = run(engine, cells[1:], folder / "own.jsonl", 2, provenance(engine.device), timed=False)
    rows += run(engine, cells[:1], folder / "same.jsonl", 2, provenance(engine.device), rules)
    found = [row for mine in rows for row in mine]
    return found, likelihoods(engine.target, PROMPTS, [row["token_ids"] for row in found[:2]])


def test_a_sweep_has_the_rows_of_a_cpu(tmp_path: Path) -> None:
    on_cpu, likely = measured(CPU, tmp_path / "cpu")
    with pretended_cuda():
        on_gpu, as_likely = measured(GPU, tmp_path / "gpu")
    assert as_likely == pytest.approx(likely) and {row["device"] for row in on_gpu} == {NAME}
    assert len(on_gpu) == len(on_cpu) == 4
    for mine, its in zip(on_gpu, on_cpu, strict=True):
        same = ("key", "sample", "token_ids", "steps", "exact_accepts", "fuzzy_accepts", "fuzzy_at")
        assert [mine.get(name) for name in same] == [its.get(name) for name in same]
        assert mine["log_p"] == pytest.approx(its["log_p"])
        assert mine.get("law", {}) == pytest.approx(its.get("law", {}))
        for one, other in zip(mine.get("expected", ()), its.get("expected", ()), strict=True):
            assert one["new_tokens"] == pytest.approx(other["new_tokens"])
            assert one["law"] == pytest.approx(other["law"])


def test_a_race_on_a_gpu_asks_it_for_its_memory() -> None:
    setting = Setting(4, SamplingConfig(), TREE)
    with pretended_cuda():
        engine = engine_on(GPU)
        methods = {name: method(name, engine, lambda: engine.target, setting) for name in ("hf", "lossless")}
        rows = list(race(methods, PROMPTS[:1], 1, engine.device))
    assert [row["method"] for row in rows] == ["hf", "lossless"] and {row["peak_memory"] for row in rows} == {
        5
    }
    assert json.loads(json.dumps(rows)) == rows


def test_a_gpus_rate_is_timed_with_a_larger_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one takes it no longer than its start, so that its rate would seem far too low."""
    monkeypatch.setattr(limits, "LARGE", 4096)
    monkeypatch.setattr(limits, "SQUARE", 8)
    monkeypatch.setattr(limits, "ON_A_GPU", 32)
    monkeypatch.setattr(limits, "median_seconds", lambda work, device: float(work().numel()))
    with pretended_cuda():
        on_gpu = limits.machine(GPU, torch.float32)
    assert limits.machine(CPU, torch.float32).rate == 2 * 8**3 / 8**2
    assert on_gpu.rate == 2 * 32**3 / 32**2


def test_the_speed_of_a_head_is_without_what_looking_at_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for a GPU to look at drafts, as it does not when it decodes."""

    def answered(*_: Any, observer: head_quality.DraftObserver, **__: Any) -> Any:
        observer.seconds = 2.0
        observer.confidence, observer.taken = [torch.tensor([0.5])], [torch.tensor([True])]
        return [], GenerationStats(new_tokens=10, steps=5, seconds=7.0)

    monkeypatch.setattr(head_quality, "answer_all", answered)
    report, _ = head_quality.observe(engine_on(CPU), PROMPTS, TREE, 5, 1)
    assert report.tokens_per_second == 2.0
