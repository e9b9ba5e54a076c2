"""Ctrl-C ends every program of eval/ and train/ as generate: one line, no traceback, code 130."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from support.tiny_models import tiny_head, tiny_model

from eagle_fsd import EagleFSD
from eagle_fsd.cli import console
from eagle_fsd.evaluation.serving import soak
from eagle_fsd.evaluation.weight_formats.passes import send_mistake
from eagle_fsd.hub import save_head
from eagle_fsd.target.model import TargetModel

ROOT = Path(__file__).parents[2]
EVAL, TRAIN = "eagle_fsd.evaluation", "eagle_fsd.training.commands"
PROMPTS = "--prompts {0}/prompts_one.jsonl"
ROWS, OUT = "--output {0}/rows.jsonl", "--output {0}/out"
# Of each script: what it is at work on when Ctrl-C comes, past the checks of its arguments; and these.
AT_WORK = {
    "eval/calibrate": (
        f"{EVAL}.commands.calibrate:kept_in",
        f"{PROMPTS} {OUT} --max-new-tokens 2 --install",
    ),
    "eval/check_greedy": (f"{EVAL}.commands.greedy:reference", PROMPTS),
    "eval/exchange": (f"{EVAL}.commands.exchange:read_raw_rows", "--rows x"),
    "eval/gpu_check": (f"{EVAL}.gpu.checks:run_part", "--device cpu --quick"),
    "eval/limits": (f"{EVAL}.commands.limits:machine", ""),
    "eval/measure_tau": (f"{EVAL}.commands.tau:run", f"{PROMPTS} {ROWS}"),
    "eval/repeating_prompts": (f"{EVAL}.repeating_prompts:repeating_prompts", f"--data x {ROWS}"),
    "eval/report": (f"{EVAL}.commands.report:read_raw_rows", f"--rows x {OUT}"),
    "eval/score": (f"{EVAL}.commands.score:score_file", "--rows x"),
    "eval/serving_speed": (f"{EVAL}.serving.race_command:gguf_file", f"{PROMPTS} {OUT} -- --total-tokens 8"),
    "eval/soak": (f"{EVAL}.serving.soak_command:started", OUT),
    "eval/speed": (f"{EVAL}.commands.speed:race", f"{PROMPTS} {OUT} --methods lossless"),
    "eval/sweep": (f"{EVAL}.commands.sweep:run", f"{PROMPTS} {ROWS}"),
    "eval/weight_formats": (f"{EVAL}.weight_formats.command:jobs_of", f"{PROMPTS} {ROWS}"),
    "train/evaluate_head": (f"{TRAIN}.evaluate:observe", f"{PROMPTS} {OUT}"),
    "train/export_vllm": (f"{TRAIN}.export_vllm:read_plain_head", f"{OUT} --ea-model {{0}}/head"),
    "train/extract_features": ("eagle_fsd.hub:resolve_target", f"--data {{0}}/prompts_one.jsonl {OUT}"),
    "train/fold_bias": (f"{TRAIN}.fold_bias:shard_counts", f"--shards {{0}} {OUT}"),
    "train/make_text": (f"{TRAIN}.text:functions", f"--functions 1 {ROWS}"),
    "train/publish": (
        f"{TRAIN}.publish:read_tau",
        f"--head x --run x --tau x --base-model o/t --data x --repo-id me/x {OUT}",
    ),
    "train/rank_tokens": (
        "eagle_fsd.hub:resolve_target",
        f"--data {{0}}/prompts_one.jsonl --draft-vocab-size 9 {OUT}",
    ),
    "train/synthesize": ("eagle_fsd.hub:resolve_target", f"{PROMPTS} {ROWS}"),
    "train/train_head": (
        "eagle_fsd.hub:resolve_target",
        f"--cpu --data {{0}}/prompts_one.jsonl --held-out 1 {OUT}",
    ),
}


class Words:
    """One id a word."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> Any:
        return {"input_ids": torch.tensor([[len(word) for word in text.split()]])}

    def decode(self, tokens: Any, **_: object) -> str:
        return " ".join(map(str, tokens))


def press_ctrl_c(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def require_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "interrupted" and "Traceback" not in said.err and not said.out


@pytest.mark.parametrize("name", AT_WORK)
def test_ctrl_c_ends_a_script_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, argv = AT_WORK[name]
    rows = [{"prompt": "one three seven", "completion": answer} for answer in ("two", "four five")]
    (tmp_path / "prompts_one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_head(tiny_head(), tmp_path / "head")
    engine = EagleFSD(TargetModel(tiny_model("llama")), tiny_head(), Words())
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: engine)
    module, function = work.split(":")
    monkeypatch.setattr(importlib.import_module(module), function, press_ctrl_c)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *argv.format(tmp_path).split()])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    assert str(end.value) == "130"
    require_one_line(capsys)


def test_ctrl_c_ends_the_harness_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = ModuleType("lm_eval.__main__")
    harness.cli_evaluate = press_ctrl_c
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", harness)
    monkeypatch.setitem(sys.modules, "eagle_fsd.integrations.lm_eval.model", ModuleType("model"))
    monkeypatch.setattr("sys.argv", ["harness.py"])
    with pytest.raises((SystemExit, KeyboardInterrupt), match="130"):
        runpy.run_path(str(ROOT / "eval" / "harness.py"), run_name="__main__")
    require_one_line(capsys)


def test_ctrl_c_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "import_module", press_ctrl_c)
    assert console.main(["eval", "speed"]) == 130
    require_one_line(capsys)


def test_every_script_is_asked() -> None:
    """But for the comparison of checkouts, whose workers only live as long as it does."""
    scripts = {
        f"{folder}/{path.stem}" for folder in ("eval", "train") for path in (ROOT / folder).glob("*.py")
    }
    assert scripts == {*AT_WORK, "eval/harness", "eval/compare_checkouts"}


def test_a_process_that_a_command_started_leaves_the_line_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, KeyboardInterrupt), match="130"):
        send_mistake(None, press_ctrl_c, ())
    assert capsys.readouterr().err == ""


def test_a_soak_does_not_wait_for_its_time_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients end with the action that they are at."""
    at_work, begun = threading.Barrier(2), threading.local()

    def act(client: soak.SoakClient) -> None:
        if not hasattr(begun, "place"):
            begun.place = at_work.wait(10)
        if begun.place == 0:
            raise KeyboardInterrupt  # the pool hands it to the main thread
        time.sleep(0.01)

    monkeypatch.setattr(soak, "HOSTILE", ())
    monkeypatch.setattr(soak.SoakClient, "act", act)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        soak.soak(None, [], [], 2, 20.0)
    assert time.monotonic() - start < 10
