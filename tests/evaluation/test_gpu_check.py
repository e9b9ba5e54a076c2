"""The check of a GPU as far as a CPU can tell: its runner, its verdicts, its arithmetic and its script.

`OpRecorder` plays the part of CUDA graphs. What needs a device that queues its work is not run here.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from support.op_recorder import OpRecorder

from eagle_fsd import EagleFSD
from eagle_fsd.acceptance import accept_step
from eagle_fsd.core import sampling, tree
from eagle_fsd.drafting import tree_growth
from eagle_fsd.evaluation.gpu import checks, steps, target, texts
from eagle_fsd.evaluation.gpu.bench import Bench, Counted, Findings, LeftOut, engine_of, tiny_model
from eagle_fsd.evaluation.gpu.checks import table
from eagle_fsd.hub import save_head
from eagle_fsd.runtime import kv_cache
from eagle_fsd.runtime.step_recorder import EAGER, Graphs

SCRIPT = Path(__file__).parents[2] / "eval" / "gpu_check.py"
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A CPU with recordings, on which no way is chosen by what a tensor holds; it has no real target."""
    for module in (kv_cache, tree_growth, sampling, tree, accept_step):
        monkeypatch.setattr(module, "host_can_read", lambda tensor: False)
    monkeypatch.setattr(Graphs, "view", 16)
    return Bench(CPU, quick=True, target="/there/is/none", record=lambda device: OpRecorder())


def parts(**runs: Callable[[], Findings]) -> dict[str, checks.Part]:
    return {name: lambda bench, run=run: run() for name, run in runs.items()}


def passes() -> Findings:
    return {"ok": True, "summary": "well"}


def fails() -> Findings:
    raise KeyError("a key\nof two lines")


def leaves_itself_out() -> Findings:
    raise LeftOut("a package is missing")


# --- the runner ---


def test_what_a_part_says_is_its_record() -> None:
    """One that fails has its traceback, one that cannot run here its reason."""
    three = parts(bad=fails, absent=leaves_itself_out, good=passes)
    bad, absent, good = (checks.run_part(name, part, Bench(CPU)) for name, part in three.items())
    assert [one["ok"] for one in (bad, absent, good)] == [False, None, True]
    assert bad["summary"] == "KeyError: 'a key\\nof two lines'"
    assert "raise KeyError" in "".join(bad["traceback"]) and absent["summary"] == "a package is missing"
    assert json.loads(json.dumps(good))["name"] == "good"
    shown = table({"machine": checks.machine(Bench(CPU)), "parts": [bad, absent, good]})
    assert [line.split(" | ")[1] for line in shown.splitlines()[4:]] == ["FAILED", "left out", "passed"]


# --- the parts ---


def test_equal_texts_pass_and_one_wrong_token_does_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = texts.equality(bench)
    assert found["ok"] and found["summary"] == "64 of 64 texts equal"
    generate = EagleFSD.generate

    def wrong(self: EagleFSD, *prompts: Any, **options: Any) -> Any:
        made = generate(self, *prompts, **options)
        made.new_tokens[0][-1] ^= 1
        return made

    monkeypatch.setattr(EagleFSD, "generate", wrong)
    found = texts.equality(replace(bench, record=None))
    assert not found["ok"] and found["summary"].endswith("wrong: llama, graphs off, qwen3, graphs off")


def test_texts_in_half_precision_are_compared(bench: Bench) -> None:
    found = texts.half_precision(bench)
    assert found["ok"] and found["cells"]["bfloat16"]["texts"] == 8  # recorded, then replayed


def test_the_distribution_is_told_from_another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts.distribution(bench)["ok"]
    generate = EagleFSD.generate

    def warmer(self: EagleFSD, *prompts: Any, **options: Any) -> Any:
        return generate(self, *prompts, **{**options, "temperature": 1.6})

    monkeypatch.setattr(EagleFSD, "generate", warmer)
    assert not texts.distribution(bench)["ok"]


def test_the_goodness_of_fit_is_pearsons() -> None:
    of = functools.partial(torch.tensor, dtype=torch.float64)
    counts, law = of([50, 30, 20]), of([0.4, 0.4, 0.2])
    wanted = chisquare(counts.numpy(), (law * 100).numpy()).pvalue
    assert texts.goodness_of_fit(counts, law) == pytest.approx(wanted, rel=1e-9)
    rare = of([0.4, 0.4, 0.17, 0.02, 0.01])  # the last two expect three together
    counts = of([45, 35, 14, 4, 2])
    wanted = chisquare([45, 35, 14, 6], [40, 40, 17, 3]).pvalue
    assert texts.goodness_of_fit(counts, rare) == pytest.approx(wanted, rel=1e-9)
    impossible = of([1, 0])
    assert texts.goodness_of_fit(of([9, 1]), impossible) == 0.0
    assert texts.goodness_of_fit(of([10, 0]), impossible) == 1.0


def test_engines_in_threads_write_their_texts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts.threads(bench)["ok"]
    generate, made = EagleFSD.generate, []

    def sometimes_wrong(self: EagleFSD, *prompts: Any, **options: Any) -> Any:
        made.append(generate(self, *prompts, **options))
        made[-1].new_tokens[0][0] ^= len(made) == 6
        return made[-1]

    monkeypatch.setattr(EagleFSD, "generate", sometimes_wrong)
    found = texts.threads(bench)
    assert not found["ok"] and sorted(found["right"]["graphs off"]) == [1, 2, 2]


def test_one_engine_writes_with_rules_in_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = texts.rules_in_turn(bench)
    assert found["ok"] and found["summary"] == "16 of 16 texts equal"
    generate, made = EagleFSD.generate, []

    last = 16  # in the second turn, with recordings

    def once_wrong(self: EagleFSD, *prompts: Any, **options: Any) -> Any:
        made.append(generate(self, *prompts, **options))
        made[-1].new_tokens[0][0] ^= len(made) == last
        return made[-1]

    monkeypatch.setattr(EagleFSD, "generate", once_wrong)
    found = texts.rules_in_turn(bench)
    assert found["summary"] == "15 of 16 texts equal; wrong: 8/3/3, js:0.5, 0.8"
    with pytest.raises(LeftOut):
        texts.rules_in_turn(replace(bench, record=None))


def test_what_is_recorded_is_counted_as_long_as_it_is_held(bench: Bench) -> None:
    found = steps.recordings(bench)
    assert found["ok"] and all(len(passes) == 3 for passes in found["cells"].values())
    last = found["cells"]["2 prompt lengths"][2]
    assert 0 < last["held"] == last["made"] < last["replays"]


def test_recordings_that_are_never_let_go_are_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of another size takes the memory of the one before, unless something keeps it."""
    stepper = bench.graphs()
    engine, counted = engine_of(tiny_model("llama", CPU), stepper), stepper.record
    kept, record = [], Counted.__call__

    def leaks(self: Counted, *work: Any) -> Any:
        kept.append(record(self, *work))
        return kept[-1]

    monkeypatch.setattr(Counted, "__call__", leaks)
    passes = steps.three_times(bench, engine, counted, [([9], {}), ([9, 9], {})])
    assert steps.grows(passes) and passes[2]["held"] == passes[2]["made"] == len(kept)
    flat = {"held": 9, "bytes reserved": 0}
    assert not steps.grows([flat, flat, flat])
    assert steps.grows([flat, flat, {**flat, "bytes reserved": 2**30}])


def test_a_forward_that_waits_is_survived(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps.failed_capture(bench)
    assert found["ok"] and len(found["warnings"]) == 1 and "no CUDA graphs" in found["warnings"][0]
    assert set(found["after"].values()) == {None}

    def spoiled(*_: Any, **__: Any) -> None:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly")

    monkeypatch.setattr(steps.F, "dropout", spoiled)
    found = steps.failed_capture(bench)
    assert not found["ok"] and "no longer works: dropout (RuntimeError: Offset increment" in found["summary"]


def test_steps_are_watched_one_by_one() -> None:
    """As many as are counted, each with a token for every row."""
    engine = engine_of(tiny_model("llama", CPU), EAGER)
    chunks = list(steps.steps_of(engine, [5, 9], 8, tree=steps.TREE))
    assert len(chunks) == 8 and all(row for rows in chunks for row in rows)
    with pytest.raises(LeftOut, match="no queue"):
        steps.host_waits(Bench(CPU))


def test_waits_are_counted_by_what_torch_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one, also where the same line waits again; and the mode is put back after an error."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits_thrice() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert steps.waits_in(waits_thrice) == 3 and modes == ["warn", "default"]
    with pytest.raises(KeyError):
        steps.waits_in(fails)
    assert modes[2:] == ["warn", "default"]


def test_the_commands_run_with_graphs_and_without(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's exit code is the part's verdict, and what it printed is its table."""
    found: list[list[str]] = []

    def command(argv: list[str]) -> None:
        found.append(argv)
        sys.stdout.write("a table\n")
        if "--no-graphs" in argv and "float32" in argv:
            sys.exit(1)

    with pytest.raises(LeftOut, match="there is no real target with a head"):
        target.costs(bench, "bfloat16")
    monkeypatch.setattr(target.hub, "resolve_target", lambda _: None)
    monkeypatch.setattr(target.hub, "resolve_head", lambda *_: None)
    monkeypatch.setattr(target.limits, "main", command)
    passed, failed = target.costs(bench, "bfloat16"), target.costs(bench, "float32")
    assert passed["ok"] and passed["table"].count("a table") == 2 and not failed["ok"]
    assert failed["summary"] == "ended: graphs off with 1, graphs on with 0"
    assert ["--no-graphs" in argv for argv in found] == [True, False] * 2
    monkeypatch.setattr(target.greedy, "main", lambda argv: found.append(argv))
    assert target.equality(bench)["ok"] and "--prompts" in found[-1]


# --- a rehearsal of what only a GPU runs ---


@pytest.fixture
def paper_gpu(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A CPU that says it is a GPU: all that is asked of torch.cuda has an answer, and none means anything."""
    answers: dict[str, object] = {
        "empty_cache": None,
        "set_sync_debug_mode": None,
        "memory_reserved": 2**21,
        "mem_get_info": (2**35, 2**36),
        "get_device_capability": (9, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(Bench, "on_gpu", True)
    return bench


def test_every_branch_for_a_gpu_runs(paper_gpu: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict is checked here: there are no waits and no memory to be seen."""
    made = checks.machine(paper_gpu)
    assert (made["capability"], made["memory"], made["free_memory"]) == ("9.0", 2**36, 2**35)
    monkeypatch.setattr(steps, "WAITS", 2)
    found = steps.host_waits(paper_gpu)
    assert not found["ok"] and set(found["cells"]) >= {"graphs on, 3 rows, fuzzy, sampled"}
    assert not any(found["cells"].values())
    found = steps.failed_capture(paper_gpu)
    assert found["ok"] and {"empty_cache", "allocation"} <= set(found["after"])
    engine = engine_of(tiny_model("llama", CPU), stepper := paper_gpu.graphs())
    (*_, last) = steps.three_times(paper_gpu, engine, stepper.record, [([9], {})])
    assert last["bytes reserved"] == 2**21


# --- the script ---


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")  # the script sets them: they are put back afterwards
    monkeypatch.setattr("sys.argv", ["gpu_check.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_script(monkeypatch) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert not shown.out and line.startswith("gpu_check.py: no CUDA device") and "nothing was checked" in line


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (["--target", "/there/is/none.gguf"], "does not exist"),
        (["--target", "/there/is/none"], "is not there"),
        (["--head", "/there/is/none"], "is not there"),
        (["--only", "speed"], "part is 'speed': it must be one of equality, "),
        (["--device", "gpu"], "device 'gpu' is not there"),
    ],
)
def test_a_mistake_is_one_line(
    wrong: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_script(monkeypatch, "--device", "cpu", *wrong) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert complaint in last and last.startswith("gpu_check.py: error: ")


@pytest.mark.parametrize(("run", "code"), [(passes, 0), (fails, 1), (leaves_itself_out, 0)])
def test_the_exit_code_says_whether_a_part_failed(
    run: Callable[[], Findings],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The JSON object is all of stdout; with --output it is in the file, and stdout has the table."""

    def talks() -> Findings:
        sys.stdout.write("a library's word\n")
        return run()

    monkeypatch.setattr(checks, "PARTS", parts(one=talks, two=passes))
    assert run_script(monkeypatch, "--device", "cpu") == code
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["ok"] is (code == 0) and result["machine"]["torch"] == torch.__version__
    assert "a library's word" in shown.err and "| two | passed |" in shown.err
    file = tmp_path / "made" / "check.json"
    assert run_script(monkeypatch, "--device", "cpu", "--only", "two", "--output", str(file)) == 0
    assert "| two | passed |" in capsys.readouterr().out
    assert [one["name"] for one in json.loads(file.read_text())["parts"]] == ["two"]


def test_what_was_found_is_in_the_file_before_the_check_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "check.json"

    def killed() -> Findings:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "PARTS", parts(one=passes, two=killed))
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--device", "cpu", "--output", str(file)])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert [one["name"] for one in json.loads(file.read_text())["parts"]] == ["one"]
    assert "one: passed: well" in capsys.readouterr().err


def test_a_target_in_a_folder_is_timed_with_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama", CPU)
    model.save_pretrained(tmp_path / "target")
    save_head(engine_of(model, EAGER).head, tmp_path / "head")
    options = ["--device", "cpu", "--quick", "--target", str(tmp_path / "target"), "--only", "costs, float32"]
    assert run_script(monkeypatch, *options) == 0  # no head ships for this target
    (left,) = json.loads(capsys.readouterr().out)["parts"]
    assert left["ok"] is None and "there is no real target with a head" in left["summary"]
    assert run_script(monkeypatch, *options, "--head", str(tmp_path / "head")) == 0
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert part["ok"] and "| 32 | 16 |" in part["table"]


def test_every_part_has_a_name_of_its_own() -> None:
    assert "equality of the target" in checks.PARTS
    shown = table({"machine": checks.machine(Bench(CPU)), "parts": []})
    assert f"torch {torch.__version__}" in shown
