"""The race of servers: what clients see, and the table of it. The servers that race are not needed here."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason='this needs an extra: pip install "eagle-fsd[serve]"')
pytest.importorskip("uvicorn", reason='this needs an extra: pip install "eagle-fsd[serve]"')
pytest.importorskip("prometheus_client", reason='this needs an extra: pip install "eagle-fsd[serve]"')

from support.serving import running, settings
from support.tiny_engine import tiny_engine

from eagle_fsd.evaluation.rows import sole_writer
from eagle_fsd.evaluation.serving import peers as server_peers
from eagle_fsd.evaluation.serving import race_command
from eagle_fsd.evaluation.serving.client import Client
from eagle_fsd.evaluation.serving.peers import LLAMA, OURS, Peer, peers, require_peer
from eagle_fsd.evaluation.serving.race import heat, row_of
from eagle_fsd.evaluation.serving.race_report import same_texts, summaries, table


def answer(
    prompt: int, first: float, last: float, gaps: list[float], text: str, tokens: int
) -> dict[str, Any]:
    return {"prompt": prompt, "first": first, "last": last, "gaps": gaps, "text": text, "tokens": tokens}


ROWS = [
    {"server": "a", "clients": 1, "turn": 0, "seconds": 2.0, "tokens": 10,
     "answers": [answer(0, 0.1, 1.1, [0.4, 0.6], "x", 6), answer(1, 0.3, 0.6, [0.3], "y", 4)]},
    {"server": "a", "clients": 1, "turn": 1, "seconds": 3.0, "tokens": 10,
     "answers": [answer(0, 0.2, 1.2, [1.0], "x", 6), answer(1, 0.2, 0.8, [0.6], "z", 4)]},
    {"server": "b", "clients": 1, "turn": 0, "seconds": 1.0, "tokens": 2,
     "answers": [answer(0, 0.5, 0.6, [0.1], "x ", 2), answer(1, 0.5, 0.5, [], "n", 1)]},
]  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--weight-format", "packed"], ["--total-tokens-x"]])
def test_a_server_that_would_measure_its_tree_beside_the_others_is_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        race_command.main(["--prompts", str(prompts), "--output", str(tmp_path), "--", *flags])
    assert "without --total-tokens it would measure its tree" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--total-tokens=8", "--total-token"])
def test_a_size_of_the_tree_may_be_written_as_the_server_takes_it(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object) -> None:
        raise ValueError("past the checks")

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n", encoding="utf-8")
    monkeypatch.setattr(race_command, "gguf_file", end)
    with pytest.raises(SystemExit):
        race_command.main(["--prompts", str(prompts), "--output", str(tmp_path), "--", flag, "8"])
    assert "past the checks" in capsys.readouterr().err


def test_rates_and_times_are_those_of_all_turns() -> None:
    found = summaries(ROWS)[1, "a"]
    assert found["rate"] == pytest.approx(20 / 5)
    assert found["first"][0] == pytest.approx(200)
    assert found["token"][0] == pytest.approx(200) and found["chunk"][0] == pytest.approx(600)
    assert same_texts(ROWS, "a") == {"b": 0.5}
    lines = table(ROWS, "a").splitlines()
    assert lines[2].startswith("| 1 | a | 4.0 |  | 200 / ") and "| 1 | b | 2.0 | 0.50 |" in lines[3]


def test_a_heat_asks_every_prompt_once_and_counts_its_tokens() -> None:
    tokenizer = tiny_engine().tokenizer
    with running(settings()) as (url, _):
        seconds, seen = heat(Client(url), ["Hi", "Hello you", "Hi"], 2, 9, {"ignore_eos": True})
    row = row_of("a", 2, 0, seconds, seen, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    assert [one["prompt"] for one in row["answers"]] == [0, 1, 2]
    assert row["answers"][0]["text"] == row["answers"][2]["text"]
    for one in row["answers"]:
        assert 0 < one["first"] <= one["last"] < row["seconds"] and one["tokens"] <= 9
        assert sum(one["gaps"]) == pytest.approx(one["last"] - one["first"])
    assert json.loads(json.dumps(row)) == row


def test_what_is_not_a_server_or_not_installed_is_a_line(tmp_path: Path) -> None:
    known = peers(tmp_path / "a.gguf", tmp_path, ["--max-rows", "8"], "no-such-python", None)
    with pytest.raises(ValueError, match="no-such-python cannot be run"):
        require_peer(LLAMA, known[LLAMA])
    lacking = Peer(lambda port: [sys.executable], "/", ["no_such_module"], "pip install it")
    with pytest.raises(ValueError, match=r"server x needs what .* does not have: pip install it"):
        require_peer("x", lacking)
    with pytest.raises(ValueError, match="servers is 'x'"):
        race_command.choose(known, [OURS, "x"])
    with pytest.raises(ValueError, match="eagle_fsd counts the tokens of all"):
        race_command.choose(known, [LLAMA])
    words = known[OURS].command(5)
    assert words[-2:] == ["--max-rows", "8"] and "5" in words and str(tmp_path / "a.gguf") in words


def test_a_folder_of_weights_that_is_there_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops the race while the weights are unpacked leaves no half of them for the next one."""

    class Saved:
        def save_pretrained(self, place: Path | str) -> None:
            Path(place).mkdir(exist_ok=True)
            (Path(place) / "config.json").write_text("{}")

    def stop(_source: Path, target: Path) -> None:
        target.mkdir()
        raise KeyboardInterrupt

    folder = tmp_path / "model"
    monkeypatch.setattr(server_peers, "load_target", lambda *_: (Saved(), Saved()))
    monkeypatch.setattr(shutil, "copytree", stop)
    with suppress(KeyboardInterrupt):
        server_peers.unpack(tmp_path / "a.gguf", folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    server_peers.unpack(tmp_path / "a.gguf", folder)  # is left as it is


def test_each_file_of_weights_has_a_folder_of_its_own(tmp_path: Path) -> None:
    files = [tmp_path / name / "a.gguf" for name in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(b"1")
    folders = {server_peers.stock_folder(tmp_path, file) for file in files}
    assert server_peers.stock_folder(tmp_path, files[0]) in folders and len(folders) == 2
    files[0].write_bytes(b"12")
    assert server_peers.stock_folder(tmp_path, files[0]) not in folders


def test_a_stopped_race_goes_on_with_its_own_rows_only(tmp_path: Path) -> None:
    arguments = argparse.Namespace(max_new_tokens=5, flags=[], base_model="m")
    setting = race_command.setting_of(arguments, ["a", "b"])
    file = tmp_path / "rows.jsonl"
    assert race_command.kept_rows(file, setting) == []
    file.write_text("".join(json.dumps({**row, **setting}) + "\n" for row in ROWS) + '{"torn')
    assert len(race_command.kept_rows(file, setting)) == 3
    with pytest.raises(ValueError, match=r"rows of another race \(max_new_tokens"):
        race_command.kept_rows(file, {**setting, "max_new_tokens": 6})
    with pytest.raises(ValueError, match=r"rows of another race \(asked was"):
        race_command.kept_rows(file, race_command.setting_of(arguments, ["a", "c"]))


def test_two_races_do_not_write_into_one_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "a.gguf", tmp_path / "out"
    file.write_bytes(b"1")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(race_command, "gguf_file", lambda _: file)
    monkeypatch.setattr(race_command, "start", lambda *_: pytest.fail("a server was started"))
    argv = f"--prompts {tmp_path}/a.jsonl --servers {OURS} --output {output} -- --total-tokens 8"
    with sole_writer(output / "rows.jsonl"), pytest.raises(SystemExit, match="2"):
        race_command.main(argv.split())
    assert "rows.jsonl is in use" in capsys.readouterr().err


def test_the_table_and_the_plot_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need an extra: pip install eagle-fsd[eval]")
    text = race_command.write(tmp_path, [{**row, "server": row["server"]} for row in ROWS])
    assert (tmp_path / "table.md").read_text() == text + "\n"
    assert (tmp_path / "serving_speed.png").read_bytes().startswith(b"\x89PNG")
