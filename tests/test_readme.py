"""The README says what is there: its commands run, its flags and files exist, its picture is the script's."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd import EagleFSD, generate, hub
from eagle_fsd.cli.flags import build_parser
from eagle_fsd.hub import load_head

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """The shell blocks' commands, without their comments."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.strip()]


GENERATE = [line for line in commands() if "eagle_fsd.generate" in line]
SCRIPTS = [line for line in commands() if re.match(r"python (train|eval)/(?!harness\.py)", line)]
TOY = {  # sizes at which a command does all that it does, in seconds; a later flag overrides the README's
    "synthesize": "--self-prompts 5 --max-new-tokens 6",
    "train_head": "--minutes 0 --epochs 1 --held-out 2 --batch-tokens 64",
    "extract_features": "",
    "rank_tokens": "",
    "evaluate_head": "--max-new-tokens 6",
    "measure_tau": "--max-new-tokens 6 --temperature 0",
    "check_greedy": "--max-new-tokens 6 --tree 16/5/8",
    "publish": "",
    "speed": "--prompts prompts.jsonl --limit 1 --methods hf plain lossless --max-new-tokens 4",
    "limits": "--context 16",
    "sweep": "--max-new-tokens 4",
    "report": "",
    "calibrate": "--max-new-tokens 6",
}
MAKE = [line for line in commands() if line.startswith("make ")]


def arguments(line: str) -> list[str]:
    return shlex.split(line.partition("eagle_fsd.generate")[2])


def test_there_are_commands() -> None:
    assert {"make demo", "make test"} <= set(MAKE)
    assert len(GENERATE) >= 3 and len(blocks("python")) == 1


@pytest.mark.parametrize("line", MAKE)
def test_make_targets(line: str) -> None:
    """`make -n` says what would run; the demo's command must parse."""
    plan = subprocess.run(
        ["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if line == "make demo":
        (run,) = [
            step for step in plan.stdout.replace("\\\n", " ").splitlines() if "eagle_fsd.generate" in step
        ]
        assert build_parser().parse_args(arguments(run)).threshold > 0


def test_the_continuous_integration_runs_the_tests() -> None:
    assert re.search(r"^exec make (test|check)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", GENERATE)
def test_generate_commands(
    line: str, smollm2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "load_model", lambda args: smollm2)
    if line.startswith("echo "):
        said = shlex.split(line.partition("|")[0])[1]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{said}\n".encode())))
    assert generate.main([*arguments(line), "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.real
def test_python_example(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"^tau \d\.\d\d, \d+ fuzzy accepts$", printed, re.MULTILINE)
    assert printed.rstrip().endswith("]")


@pytest.mark.real
def test_the_scripts_commands_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Any
) -> None:
    """As a reader would run them, in the order of the page, at toy size."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'eagle-fsd[train]'")
    monkeypatch.setattr(hub, "load_target", cache(hub.load_target))  # the target of each dtype once
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    named = [re.match(r"python \w+/(\w+)\.py", line).group(1) for line in SCRIPTS]
    assert set(named) == set(TOY) and len(GENERATE) >= 5
    for line, name in zip(SCRIPTS, named, strict=True):
        _, script, *argv = shlex.split(f"{line} {TOY[name]}")
        monkeypatch.setattr(sys, "argv", [script, *argv])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            assert end.code in (0, None), (line, end.code)
    export = tmp_path / "runs" / "head" / "export"
    model = EagleFSD(smollm2.target, load_head(str(export), 576, 49152), tokenizer=smollm2.tokenizer)
    assert len(model.generate([[1, 2, 3]], max_new_tokens=6).new_tokens[0]) <= 6
    card = (tmp_path / "runs" / "head" / "publish" / "README.md").read_text()
    assert "me/EAGLE-SmolLM2-135M" in card
    assert (tmp_path / "runs" / "head" / "evaluation" / "calibration.png").is_file()


def test_every_flag_is_described_and_no_other() -> None:
    table = README[README.index("## Flags") : README.index("## Supported targets")]
    described = set(re.findall(r"--[a-z][a-z-]+", table))
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert described <= known
    hidden_aliases = {"--max-new-token"}
    assert {option for option in known if option.startswith("--")} - described <= hidden_aliases


def test_the_picture_is_the_scripts() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))
    assert (ROOT / "docs" / "step.svg").read_text(encoding="utf-8") == script["picture"]()


def test_links_and_named_files_exist() -> None:
    links = set(re.findall(r"\]\(([^)]+)\)", README)) | set(re.findall(r"`([a-z_]+/[\w./]*)`", README))
    assert "docs/step.svg" in links
    titles = [line.strip("# ").lower() for line in README.splitlines() if line.startswith("#")]
    anchors = {"#" + title.replace(" ", "-") for title in titles}
    local = {link for link in links if "://" not in link} - anchors
    missing = [link for link in local if link.startswith("#") or not (ROOT / link).exists()]
    assert not missing


LOGS = {"tau": "eval/results/tau.md", "speed": "eval/SPEED.md"}  # where a table's rows and commands are


def test_tables_are_those_of_the_logs() -> None:
    opened, closed = re.findall(r"<!-- table:(\w+) -->", README), re.findall(r"<!-- /table:(\w+) -->", README)
    assert opened == closed and set(opened) == set(LOGS)
    for name in opened:
        _, _, *rows = README.split(f"<!-- table:{name} -->")[1].split("<!-- /table")[0].strip().splitlines()
        log = (ROOT / LOGS[name]).read_text(encoding="utf-8")
        assert rows and all(re.search(r"\d\.\d", row) for row in rows)
        assert [row for row in rows if row not in log] == [], f"table {name} is not that of {LOGS[name]}"
