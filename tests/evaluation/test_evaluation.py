"""Measuring on a tiny target: rows, tables and resumption of tau grids; differences of greedy texts."""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import KnowingEngine, greedy_alone, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, NonFiniteLogits, TreeConfig
from eagle_fsd.acceptance.rule_names import describe
from eagle_fsd.evaluation.cli import (
    encoded_prompts,
    load_engine,
    model_parser,
    parsed,
    plain_parser,
    say,
)
from eagle_fsd.evaluation.commands import greedy, tau
from eagle_fsd.evaluation.commands.greedy import reference
from eagle_fsd.evaluation.prompt_sets import batches, set_name
from eagle_fsd.evaluation.rows import read_rows, sole_writer
from eagle_fsd.hub import save_head
from eagle_fsd.hub.head_digest import head_digests
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training import cli as training

ROOT = Path(__file__).parents[2]
TREE = TreeConfig(16, 5, 3)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model("llama")), tiny_head(), base_model="tiny", ea_model="tiny-head")


# --- tau ---


def row_of(steps: int, new_tokens: int, fuzzy_accepts: int = 0, **fields: Any) -> dict[str, Any]:
    """An answer to a set's only prompt."""
    made = {"task": "prompts/a", "rule": {"name": "lossless"}, "sampling": {"temperature": 0.6}}
    made |= {"tree": {"total_tokens": 16, "depth": 5, "top_k": 8, "min_confidence": 0.0}, **fields}
    counts = {"steps": steps, "new_tokens": new_tokens, "fuzzy_accepts": fuzzy_accepts}
    return {**made, "key": json.dumps(made), **counts}


def test_the_table_weighs_sets_by_their_steps() -> None:
    fuzzy = {"rule": describe(Fuzzy(0.3, "js"))}
    wide = {"total_tokens": 60, "depth": 6, "top_k": 10, "min_confidence": 0.05}
    rows = [
        row_of(10, 20),
        row_of(25, 80, task="prompts/b"),
        row_of(5, 10, task="prompts/b"),
        row_of(10, 30, fuzzy_accepts=4, **fuzzy),
        row_of(30, 120, fuzzy_accepts=16, task="prompts/b", **fuzzy),
        row_of(10, 40, tree=wide),
        row_of(10, 50, tree=wide, **fuzzy),
    ]
    cells = tau.summed_up(rows)
    assert [cell["prompt_count"] for cell in cells] == [1, 2, 1, 1, 1, 1]
    (later,) = tau.summed_up([{**rows[0], "sample": number} for number in ("22", "20", "21")])
    assert (later["prompt_count"], later["skipped"]) == (3, 20)
    lines = tau.table(cells).splitlines()
    assert lines[0] == (
        "| tree | temperature | divergence | mode | child | T | a | b | all | vs lossless | fuzzy / step |"
    )
    assert lines[2] == "| 16/5/8 | 0.6 | lossless |  |  | 0 | 2.00 | 3.00 | 2.75 | +0% | 0.00 |"
    assert lines[3] == "| 16/5/8 | 0.6 | js | hybrid | draft | 0.3 | 3.00 | 4.00 | 3.75 | +36% | 0.50 |"
    assert lines[5] == "| 60/6/10/0.05 | 0.6 | js | hybrid | draft | 0.3 | 5.00 |  | 5.00 | +25% | 0.00 |"
    assert len({line.count("|") for line in lines}) == 1


# --- greedy texts ---


def test_comparison_finds_no_difference_in_lossless_texts(engine: EagleFSD) -> None:
    prompts = prompts_of((9, 2, 14, 5, 3))
    expected = greedy.reference(engine, prompts, NEW_TOKENS)
    assert expected == greedy_alone(engine.target.model, prompts, NEW_TOKENS)
    differences, stats = greedy.compare(engine, prompts, expected, TREE, 2, NEW_TOKENS)
    assert differences == []
    assert stats.new_tokens == 5 * NEW_TOKENS


def test_a_pad_token_of_a_prompt_is_text_for_the_target_alone_too(
    engine: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3, 9, 3, 7, 5]]
    expected = greedy_alone(engine.target.model, prompts, NEW_TOKENS)
    monkeypatch.setattr(type(engine.target), "pad_token_id", 3)
    assert greedy.reference(engine, prompts, NEW_TOKENS) == expected
    assert engine.target_alone(torch.tensor(prompts), max_new_tokens=NEW_TOKENS).new_tokens != expected


def test_comparison_names_every_difference_and_its_gap(engine: EagleFSD) -> None:
    prompts = prompts_of((9, 2, 14))
    expected = greedy.reference(engine, prompts, NEW_TOKENS)
    other = [text.copy() for text in expected]
    other[0][5] = (other[0][5] + 1) % 96
    del other[2][8:]
    differences, _ = greedy.compare(engine, prompts, other, TREE, 2, NEW_TOKENS)
    assert differences[0].best[0] == expected[0][5]
    assert [(d.prompt, d.position, d.expected, d.found) for d in differences] == [
        (0, 5, other[0][5], expected[0][5]),
        (2, 8, None, expected[2][8]),
    ]
    with torch.no_grad():
        logits = engine.target.model(torch.tensor([prompts[0] + expected[0][:5]])).logits[0, -1]
    best = logits.topk(2).values
    assert differences[0].gap == pytest.approx(float(best[0] - best[1]), rel=1e-4)
    assert not differences[0].excused()


@pytest.mark.parametrize(
    ("expected", "found", "gap", "excused"),
    [
        (1, 2, 0.9e-4, True),
        (2, 1, 0.0, True),
        (1, 2, 1e-4, False),
        (1, 2, float("nan"), False),
        (1, 3, 0.0, False),
        (None, 1, 0.0, False),
    ],
)
def test_a_near_tie_excuses_the_two_tokens_that_tie(
    expected: int | None, found: int | None, gap: float, excused: bool
) -> None:
    assert greedy.Difference(0, 0, expected, found, best=(1, 2), gap=gap).excused() is excused


def test_comparison_catches_a_rule_that_is_not_lossless(
    engine: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of((9, 2))
    expected = greedy.reference(engine, prompts, NEW_TOKENS)
    monkeypatch.setattr(greedy, "Lossless", lambda: Fuzzy(float("inf"), mode="paper"))
    wrong = KnowingEngine(engine.target, [[7] * 64] * 2, check=False)
    differences, _ = greedy.compare(wrong, prompts, expected, TREE, 2, NEW_TOKENS)
    assert len(differences) == 2 and not any(difference.excused() for difference in differences)


# --- prompt sets ---


class CharTokenizer:
    """One id a character, and a chat template that says so."""

    chat_template = "yes"

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return " ".join(map(str, tokens))

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: object) -> dict[str, Any]:
        assert options["add_generation_prompt"] is True
        (message,) = messages
        return {"input_ids": torch.tensor([[1, *map(ord, message["content"]), 2]])}


def test_prompts_are_chats_of_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts_few.jsonl"
    path.write_text('{"turns": ["ab", "never"]}\n\n{"prompt": "c"}\n{"turns": ["d"]}\n')

    def ids(*paths: Path, skip: int = 0, limit: int | None = None) -> list[list[int]]:
        given = argparse.Namespace(prompts=paths, skip=skip, limit=limit)
        return encoded_prompts(given, argparse.Namespace(tokenizer=CharTokenizer()))

    assert ids(path) == [[1, 97, 98, 2], [1, 99, 2], [1, 100, 2]]
    assert ids(path, limit=1) == [[1, 97, 98, 2]]
    assert ids(path, skip=1) == [[1, 99, 2], [1, 100, 2]]
    assert ids(path, path, skip=1, limit=1) == [[1, 99, 2], [1, 99, 2]]
    with pytest.raises(ValueError, match=r"skip is 3: .*prompts_few.jsonl has 3 samples; lower it"):
        ids(path, skip=3)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(
        ValueError, match=r"empty.jsonl has no samples: there must be one at least; name anot"
    ):
        ids(tmp_path / "empty.jsonl")
    assert (set_name(path), set_name(tmp_path / "own.jsonl")) == ("few", "own")
    with pytest.raises(
        ValueError, match=r"gone.jsonl: cannot be read \(No such file or directory\); name a JSONL file"
    ):
        ids(tmp_path / "gone.jsonl")
    path.write_text('{"prompt": "a"}\n{"prompt": " \\n"}\n')
    assert ids(path, limit=1) == [[1, 97, 2]]
    with pytest.raises(ValueError, match=r"prompts_few.jsonl: prompt 2 is empty: each must be a text; del"):
        ids(path, skip=1)
    path.write_text('{"turns": ["ab"]}\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=r"prompts_few.jsonl:2: has no prompt"):
        ids(path)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_batches_cover_every_index_once(size: int) -> None:
    made = list(batches(range(7), size))
    assert [index for rows in made for index in rows] == list(range(7))
    assert all(len(rows) <= size for rows in made)


# --- the scripts ---


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("measure_tau.py", ["--tree", "60/1/8"], "total_tokens is 60"),
        ("measure_tau.py", ["--tree", "16/5"], "tree is '16/5': it must be"),
        ("measure_tau.py", ["--threshold", "js", "-1"], "threshold is -1.0"),
        ("measure_tau.py", ["--threshold", "js", "x"], "threshold is 'x'"),
        ("measure_tau.py", ["--threshold", "kl", "0.1"], "rule is 'kl:0.1:hybrid:draft': it must begin with"),
        ("measure_tau.py", ["--temperature", "-1"], "temperature is -1.0"),
        ("measure_tau.py", ["--threshold", "js"], "--threshold js has no number: give"),
        ("measure_tau.py", ["--limit", "0"], "limit is 0: it must be an integer of at least 1; leave"),
        ("measure_tau.py", ["--batch-size", "0"], "batch_size is 0"),
        ("calibrate.py", ["--seed", "-1"], "seed is -1: it must be an integer of at least 0; any will do"),
        ("speed.py", ["--seed", "-1"], "seed is -1: it must be an integer of at least 0; any will do"),
        ("check_greedy.py", ["--batch-size", "1", "0"], "batch_size is 0"),
        ("check_greedy.py", ["--max-new-tokens", "0"], "max_new_tokens is 0"),
        ("check_greedy.py", ["--tree", "a/b/c"], "tree is 'a/b/c'"),
    ],
)
def test_a_mistake_is_one_line_before_any_model_is_loaded(
    name: str,
    wrong: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts_one.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    output = [] if name == "check_greedy.py" else ["--output", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr("sys.argv", [name, "--prompts", str(prompts), *output, *wrong])
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "eval" / name), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.startswith(f"{name}: error: ")


@pytest.mark.parametrize("name", ["measure_tau", "sweep", "calibrate", "speed", "weight_formats"])
def test_a_place_that_cannot_be_written_is_named_before_any_model_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts_one.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    output = prompts / "rows.jsonl"  # below a file
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--prompts", str(prompts), "--output", str(output)])
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "eval" / f"{name}.py"), run_name="__main__")
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"--output names {output}, where nothing can be written" in last


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("measure_tau", "rows.jsonl"),
        ("sweep", "rows.jsonl"),
        ("speed", "out/rows.jsonl"),
        ("calibrate", "out/calibration.json"),
    ],
)
def test_two_runs_do_not_write_into_one_output(
    name: str,
    file: str,
    engine: EagleFSD,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engine, "tokenizer", CharTokenizer())
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: engine)
    prompts, output = tmp_path / "prompts_one.jsonl", tmp_path / file.split("/")[0]
    prompts.write_text('{"prompt": "Hello"}\n')
    given = ["--prompts", str(prompts), "--output", str(output), "--max-new-tokens", "2", "--tree", "4/2/2"]
    given += ["--methods", "plain"] if name == "speed" else []
    monkeypatch.setattr("sys.argv", [f"{name}.py", *given])
    with sole_writer(tmp_path / file), pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "eval" / f"{name}.py"), run_name="__main__")
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path / file} is in use: two runs would write each row twice; wait for" in last
    assert [path for path in (tmp_path / file).parent.glob("[!.]*") if path != prompts] == []


def test_the_scripts_end_to_end(
    engine: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny target: a table of tau, and exit code 0 or 1 as the texts are equal or not."""
    monkeypatch.setattr(engine, "tokenizer", CharTokenizer())
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: engine)
    prompts = tmp_path / "prompts_few.jsonl"
    prompts.write_text('{"prompt": "!#"}\n{"prompt": "&+6"}\n{"prompt": "A"}\n')
    rows = tmp_path / "rows.jsonl"

    def run(name: str, *arguments: str) -> str:
        given = ["--prompts", str(prompts), "--max-new-tokens", "8", *arguments]
        given += ["--output", str(rows)] if name == "measure_tau.py" else []
        monkeypatch.setattr("sys.argv", [name, *given])
        runpy.run_path(str(ROOT / "eval" / name), run_name="__main__")
        return capsys.readouterr().out

    shown = run("measure_tau.py", "--threshold", "js", "0.1", "0.5", "--mode", "hybrid", "paper")
    assert [line.split("|")[3].strip() for line in shown.splitlines()[2:]] == (["lossless"] + ["js"] * 4) * 2
    assert len(rows.read_text().splitlines()) == 3 * 10
    assert run("measure_tau.py", "--threshold", "js", "0.1", "0.5", "--mode", "hybrid", "paper") == shown
    assert len(rows.read_text().splitlines()) == 3 * 10  # and none was made twice
    fewer = run("measure_tau.py", "--limit", "2", "--temperature", "0")  # of the same file
    counted = [json.loads(line) for line in rows.read_text().splitlines()]
    first = [one for one in counted if one["rule"] == {"name": "lossless"} and one["sample"] in ("0", "1")]
    steps, made = (sum(one[name] for one in first[:2]) for name in ("steps", "new_tokens"))
    assert fewer.splitlines()[2].split("|")[8].strip() == f"{made / steps:.2f}" and len(counted) == 30
    greedy_run = ("check_greedy.py", "--tree", "16/5/8", "--batch-size", "1", "2")
    with pytest.raises(SystemExit, match="0"):
        run(*greedy_run)
    assert capsys.readouterr().out.count("3 of 3 equal") == 2

    def other_text(*arguments: Any) -> list[list[int]]:
        texts = reference(*arguments)
        texts[1][3] += 1
        return texts

    monkeypatch.setattr(greedy, "reference", other_text)
    with pytest.raises(SystemExit, match="1"):
        run(*greedy_run)
    shown = capsys.readouterr().out
    assert shown.count("2 of 3 equal") == 2 and "prompt=1, position=3" in shown


def test_rows_of_tau_say_which_head_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its files, whatever the folder is called and however it is loaded. Of other drafters they say so."""
    target, folder = TargetModel(tiny_model("llama")), save_head(tiny_head(), tmp_path / "head")
    save_head(tiny_head(seed=9), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder / "other.bin.safetensors")
    rounded = tiny_head().bfloat16()
    cases = {
        "folder": EagleFSD(target, tiny_head(), ea_model=str(folder), head_folder=folder),
        "rounded": EagleFSD(target, rounded, ea_model="owner/head", head_folder=folder, lookup=True),
        "file": EagleFSD(
            target, tiny_head(seed=9), ea_model=str(folder / "other.bin.safetensors"), head_folder=folder
        ),
        "no head": EagleFSD(target, None, ea_model="none"),
        "lookup": EagleFSD(target, None, ea_model="none", lookup=True),
    }
    (tmp_path / "prompts_few.jsonl").write_text('{"prompt": "!#"}\n')
    found = {}
    for name, one in cases.items():
        monkeypatch.setattr(one, "tokenizer", CharTokenizer())
        monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, one=one, **__: one)
        tree = "1/1/1" if name == "no head" else "6/3/2"
        argv = f"--prompts {tmp_path}/prompts_few.jsonl --max-new-tokens 3 --temperature 0 --tree {tree}"
        tau.main(f"{argv} --output {tmp_path}/{name.replace(' ', '')}.jsonl".split())
        (row,) = read_rows(tmp_path / f"{name.replace(' ', '')}.jsonl")
        found[name] = row["head"]
    assert found["folder"] == found["rounded"] == head_digests(folder / "model.safetensors")
    assert found["file"] == head_digests(tmp_path / "other" / "model.safetensors")
    assert found["no head"] is found["lookup"] is None


def test_the_models_arguments_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load(*names: str, **options: Any) -> str:
        seen.update(options, names=names)
        return "engine"

    monkeypatch.setattr(EagleFSD, "from_pretrained", load)
    flags = "--base-model m --ea-model h --dtype bfloat16 --head-dtype float16 --device cpu --no-pack"
    flags += " --no-graphs --full-vocabulary"
    assert load_engine(model_parser("x").parse_args(flags.split())) == "engine"
    assert seen == {
        "names": ("m", "h"),
        "dtype": "bfloat16",
        "head_dtype": "float16",
        "device": "cpu",
        "pack": False,
        "graphs": False,
        "full_vocabulary": True,
        "runtime": "auto",
        "weight_format": None,
        "lookup": False,
        "draft_model": None,
        "draft_layers": None,
    }
    for given, dtype in (("", "float32"), ("--weight-format bfloat16", None), ("--dtype float16", "float16")):
        load_engine(model_parser("x", "float32").parse_args(given.split()))
        assert seen["dtype"] == dtype


def test_memory_that_ends_in_a_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, parsed(plain_parser("A command."), []):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: out of memory: CUDA out of memory" in line
    with pytest.raises(RuntimeError, match="a fault"), parsed(plain_parser("A command."), []):
        raise RuntimeError("a fault")


def end_parsed() -> None:
    with parsed(plain_parser("A command."), []):
        pass


@pytest.mark.parametrize(
    "run", [end_parsed, lambda: training.run_command(plain_parser("A command."), lambda _: None, [])]
)
def test_notes_of_libraries_are_not_for_who_runs_a_command(run: Callable[[], None]) -> None:
    """Such as transformers' of recurrent layers, that "the fast path is not available"."""
    library = transformers.utils.logging
    before = library.get_verbosity()
    try:
        library.set_verbosity_warning()
        run()
        notes = library.get_logger("transformers.models.mamba.modeling_mamba")
        assert not notes.isEnabledFor(logging.WARNING) and notes.isEnabledFor(logging.ERROR)
    finally:
        library.set_verbosity(before)


def test_logits_that_are_not_finite_end_a_command_as_they_end_generate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"), parsed(plain_parser("A command."), []):
        raise NonFiniteLogits(3, 0)
    assert "error: step 3 of row 0: the target's logits" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141),
    ],
)
def test_a_result_that_stdout_does_not_take_ends_in_one_line(
    error: OSError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stdout(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr(sys, "stdout", Stdout())
    with pytest.raises(SystemExit) as end:
        say("tau 3")
    told = "stdout takes no more (No space left on device): " if code == 2 else ""
    assert end.value.code == code and capsys.readouterr().err.partition("what ")[0] == told
