"""`eagle-fsd` and its subcommands: which program each name runs, and what the lists show."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd import generate
from eagle_fsd.cli import console
from eagle_fsd.cli.console import COMMANDS, Command, Group
from eagle_fsd.files.provenance import command_line, public_command
from eagle_fsd.training.commands import publish

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("train/*.py"))
ENTRIES = {
    f"{name} {inner}": command
    for name, group in COMMANDS.items()
    if isinstance(group, Group)
    for inner, command in group.commands.items()
} | {name: entry for name, entry in COMMANDS.items() if isinstance(entry, Command)}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_command_is_there(name: str) -> None:
    module, function = ENTRIES[name].target.split(":")
    assert callable(getattr(import_module(module), function))


def test_lists_name_every_command_and_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from eagle_fsd.cli.console import main\n"
        "for words in (['--help'], ['train', '-h'], ['eval', '--help']):\n"
        "    try:\n"
        "        main(words)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  (\S+)  +\S", shown, re.MULTILINE)
    assert listed == [*COMMANDS, *(name.split()[1] for name in ENTRIES if " " in name)]
    assert max(map(len, shown.splitlines())) < 80


def test_the_package_is_a_program_too() -> None:
    """The command itself may not be on the PATH."""
    command = [sys.executable, "-m", "eagle_fsd", "train", "heed"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.startswith("eagle-fsd train: error: 'heed' is no command")


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ([], []),
        (["Why is the sky blue?"], ["Why is the sky blue?"]),
        (["generate", "train"], ["train"]),
        (["--threshold", "0.3", "train"], ["--threshold", "0.3", "train"]),
        (["generate", "--help"], ["--help"]),
        (["sunny", "day"], ["sunny", "day"]),
        (["bogus"], ["bogus"]),
        (["What"], ["What"]),
        ([""], [""]),
        (["serve me well"], ["serve me well"]),
        (["generate", "sever"], ["sever"]),
        (["--prompt", "sever"], ["--prompt", "sever"]),
    ],
)
def test_what_is_no_command_is_for_generate(
    words: list[str], rest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(generate, "main", lambda argv: seen.append((argv, sys.argv)) or 130)
    before = sys.argv
    assert console.main(words) == 130
    assert seen == [(rest, ["eagle-fsd", *rest])] and sys.argv is before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "eagle-fsd train: error: no command is given: it must be one of synthesize, text, "),
        (["train", "haed"], "eagle-fsd train: error: 'haed' is no command: it must be one of synthesize, "),
        (
            ["sever"],
            "eagle-fsd: error: 'sever' is no command: it must be one of generate, chat, serve, train, "
            "eval, storage; write serve, or eagle-fsd generate sever to ask it as a prompt\n",
        ),
        (["hcat"], "eagle-fsd: error: 'hcat' is no command: "),
        (["Chat", "--seed", "1"], "eagle-fsd: error: 'Chat' is no command: "),
        (["trian", "head"], "eagle-fsd: error: 'trian' is no command: "),
    ],
)
def test_a_wrong_command_is_a_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "main", lambda argv: pytest.fail("no model is to answer"))
    assert console.main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(message) and said.err.count("\n") == 1 and not said.out
    monkeypatch.setattr(sys, "stderr", None)
    assert console.main(words) == 2


def test_a_command_goes_by_its_full_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        pairs = ["--pairs", str(tmp_path / "gone"), "--pairs-rows", "1"]
        console.main(["train", "text", *pairs, "--output", str(tmp_path / "o")])
    assert re.match(r"eagle-fsd train text: error: .*gone: cannot be read", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        console.main(["train", "head"])
    assert "\neagle-fsd train head: error: the following arguments are" in capsys.readouterr().err


def test_records_hold_the_command_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(publish, "main", lambda argv: seen.append(command_line()))
    assert console.main(["train", "publish", "--head", "a b"]) == 0
    assert seen == ["eagle-fsd train publish --head 'a b'"]
    assert public_command("eagle-fsd train head --data /home/a/rows.jsonl") == (
        "eagle-fsd train head --data rows.jsonl"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_its_command(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another name and for the rest the same, to the last line of its help."""
    (name,) = re.findall(r"`eagle-fsd ([\w -]+)`", script.read_text(encoding="utf-8"))
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    help_of_script = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        console.main([*name.split(), "--help"])
    help_of_command = capsys.readouterr().out
    assert help_of_script.startswith(f"usage: {script.name} ")
    assert help_of_command.startswith(f"usage: eagle-fsd {name} ")
    assert help_of_script.partition("\n\n")[2] == help_of_command.partition("\n\n")[2]
