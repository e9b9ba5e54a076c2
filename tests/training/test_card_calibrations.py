"""A head's calibration.json: published with the head if it is of it, and found again by the head's Hub id."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from support.eagle3 import eagle3_head
from support.hub_server import FakeHub
from support.tiny_models import HIDDEN, VOCAB, tiny_head, tiny_model
from support.training_world import ends_in_one_line, run_command

from eagle_fsd import EagleFSD, SamplingConfig, TreeConfig, hub
from eagle_fsd.acceptance.calibration import (
    FILE,
    CalibratedThreshold,
    Calibration,
    read_calibrations,
    write_calibrations,
)
from eagle_fsd.core.config import AutoThreshold
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub.head_digest import head_digests
from eagle_fsd.target.model import TargetModel

WARM = SamplingConfig(0.6, 50, 0.9)
THRESHOLD = CalibratedThreshold("js", "hybrid", "draft", 0.3, 0.01, 0.0123, 3.0, 2.5)
PLAN = CalibratedThreshold("js", "swap", "draft", math.inf, 0.01, 0.021, 3.0, 2.5, price=1.5)
COMMAND = "python eval/calibrate.py --prompts /home/ada/own.jsonl --output /home/ada/runs"


def loaded(folder: Path, lookup: bool = False, full: bool = False) -> EagleFSD:
    """Return an engine of the tiny target with the head of a folder, as a user loads it."""
    target = TargetModel(tiny_model())
    head = hub.load_any_head(str(folder), HIDDEN, VOCAB, 2)
    if full:
        assert isinstance(head, DraftHead)
        head.restrict(None)
    return EagleFSD(target, head, lookup=lookup, head_folder=folder)


def calibrated(engine: EagleFSD, sampling: SamplingConfig = WARM, **fields: Any) -> Calibration:
    tree, made = TreeConfig(8, 3, 3), {"command": COMMAND, "prompts": "own"}
    found = Calibration(engine.identity(), sampling, tree, 0.95, 4, (PLAN, THRESHOLD), made)
    target = {**found.models["target"], "name": "owner/target"}
    return replace(found, models={**found.models, "target": target}, **fields)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head with a list and texts' own tokens, with the records of its run and its tau."""
    return with_records(hub.save_head(tiny_head().restrict(torch.arange(40), 16), tmp_path / "head"))


def with_records(head: Path) -> Path:
    digests, folder = head_digests(head / "model.safetensors"), head.parent
    training = {
        **{name: "x" for name in ("device", "eagle_fsd", "commit", "torch", "transformers", "command")},
        **{"base_model": "owner/target", "run": "r", "best_step": 1, "steps": 9, "training_seconds": 60},
        **{"sequences": 2, "tokens": 3, "learned_tokens": 2, "held_out": {"top1": [0.5], "positions": 4}},
    }
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "provenance.json").write_text(json.dumps(training))
    (folder / "run" / "exports.jsonl").write_text(json.dumps({"run": "r", "step": 1, **digests}) + "\n")
    row = {
        **{"key": "a", "task": "prompts/own", "version": 1, "seed": 0, "sample": "0", "law": None},
        **{"base_model": "owner/target", "ea_model": "head", "finish_reason": "length", "seconds": 1.0},
        **{"batch_size": 8, "log_p": None, "scores": {}, "max_new_tokens": 64, "dtype": "float32"},
        **{"sampling": {"temperature": 0.0}, "rule": {"name": "lossless"}, "steps": 100, "new_tokens": 239},
        **{"fuzzy_accepts": 0, "command": "tau", "head": digests},
        "tree": {"total_tokens": 16, "depth": 5, "top_k": 8, "min_confidence": 0.0},
        "draft_vocab_size": json.loads((head / "config.json").read_text()).get("draft_vocab_size"),
    }
    (folder / "tau.jsonl").write_text(json.dumps(row) + "\n")
    return head


def publish(head: Path, more: str = "--dry-run") -> Path:
    at = head.parent
    run_command(
        "publish",
        f"--head {head} --run {at}/run --tau {at}/tau.jsonl --base-model owner/target --repo-id me/head "
        f"--data Text. --output {at}/out {more}",
    )
    return at / "out"


def test_what_is_published_is_found_by_the_hub_id_and_in_the_cache(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every way to draft with the head; only the command in the file is another."""
    ways = [loaded(head), loaded(head, lookup=True), loaded(head, full=True)]
    made = [calibrated(engine) for engine in ways]
    write_calibrations(head / FILE, made)
    out = publish(head)
    assert b"/home" not in b"".join(path.read_bytes() for path in out.iterdir())
    constants = huggingface_hub.constants
    with FakeHub() as server, monkeypatch.context() as patch:
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        huggingface_hub.utils.close_session()
        server.add("me/head", {path.name: path.read_bytes() for path in out.iterdir()})
        for offline in (False, True):
            patch.setattr(constants, "HF_HUB_OFFLINE", offline)
            server.requests.clear()
            engine = loaded(hub.resolve_head("me/head", "any").folder, lookup=True)
            assert engine.calibration(WARM).thresholds == made[1].thresholds
            rule, tree = engine.settler.within_budget(AutoThreshold(0.05), WARM)
            assert (rule.price, tree) == (1.5, TreeConfig(8, 3, 3))
            assert not (offline and server.requests)
    published = read_calibrations(out / FILE)
    assert all(one.is_for(engine.identity()) for one, engine in zip(published, ways, strict=True))


def test_a_card_shows_what_was_calibrated_and_how(head: Path) -> None:
    greedy = calibrated(loaded(head, lookup=True), SamplingConfig(), device="cuda", thresholds=(THRESHOLD,))
    write_calibrations(head / FILE, [greedy, calibrated(loaded(head))])
    card = (publish(head) / "README.md").read_text()
    for words in (
        "--ea-model me/head --quality-budget 0.02 --temperature 0 --lookup ",
        "| head, --lookup | GPU | temperature 0, top-k 0, top-p 1 | 8/3/3 | 0.02 |",
        "| head | CPU | temperature 0.6, top-k 50, top-p 0.9 | 8/3/3 | 0.02 |",
        "python eval/calibrate.py --prompts own.jsonl --output runs\n",
    ):
        assert words in card
    (head / FILE).unlink()
    assert not (publish(head) / FILE).exists() and "budget" not in (head.parent / "out/README.md").read_text()


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_an_eagle_3_heads_calibration_is_its_own(tmp_path: Path, layout: str) -> None:
    made = hub.save_eagle3_head(eagle3_head(1), tmp_path / "head", 2, layout, torch.float16)
    head, engine = with_records(made), loaded(made)
    write_calibrations(head / FILE, [calibrated(engine)])
    assert read_calibrations(publish(head) / FILE)[0].is_for(engine.identity())


def test_calibrations_of_other_heads_stay_behind(head: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = loaded(hub.save_head(tiny_head(seed=9), head.parent / "other"))
    own = calibrated(loaded(head))
    write_calibrations(head / FILE, [calibrated(other), own])
    assert len(read_calibrations(publish(head) / FILE)) == 1
    assert "1 calibrations of other heads are left out" in caplog.text
    write_calibrations(head / FILE, [calibrated(other)])
    with ends_in_one_line(".*calibration.json has no calibration of the head beside it: .*, or remove the "):
        publish(head)
    (head / FILE).write_text("{")
    with ends_in_one_line(".*calibration.json: is not a calibration .*; delete it, then calibrate it"):
        publish(head)
    target = {**own.models["target"], "name": "owner/other"}
    write_calibrations(head / FILE, [replace(own, models={**own.models, "target": target})])
    with ends_in_one_line("base_model is 'owner/target', and .*calibration.json is of 'owner/other': "):
        publish(head)
