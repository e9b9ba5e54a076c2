"""Publishing a head: what the card says of its runs, the folder, the push, and what is refused."""

from __future__ import annotations

import json
import logging
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from support.tiny_models import HIDDEN, VOCAB, tiny_head
from support.training_world import ends_in_one_line

from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.files.provenance import public_command
from eagle_fsd.hub import load_head, save_head
from eagle_fsd.hub.head_digest import head_digests
from eagle_fsd.training.run import model_card

SCRIPT = Path(__file__).parents[2] / "train" / "publish.py"
TRAINING = {
    "base_model": "owner/target@main",
    "run": "r1",
    "best_step": 7,
    "command": "python train/train_head.py --data own.jsonl --output runs/head",
    "commit": "0123456789ab",
    "device": "x86_64",
    "eagle_fsd": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "steps": 2027,
    "training_seconds": 1985,
    "sequences": 5996,
    "tokens": 1280661,
    "learned_tokens": 931962,
    "held_out": {"top1": [0.5022, 0.4321], "positions": 5297},
}
ROW = {
    "key": "ab",
    "task": "prompts/own",
    "version": 1,
    "seed": 0,
    "base_model": "owner/target",
    "ea_model": "head",
    "finish_reason": "length",
    "seconds": 1.0,
    "batch_size": 8,
    "law": None,
    "log_p": None,
    "scores": {},
    "max_new_tokens": 64,
    "sampling": {"temperature": 0.0},
    "tree": {"total_tokens": 16, "depth": 5, "top_k": 8, "min_confidence": 0.0},
    "rule": {"name": "lossless"},
    "dtype": "bfloat16",
    "steps": 100,
    "new_tokens": 239,
    "fuzzy_accepts": 0,
    "command": "python eval/measure_tau.py --prompts own.jsonl",
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A head, the record of its training and its rows of tau."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(TRAINING))
    return made(tmp_path, tiny_head())


def made(runs: Path, head: DraftHead) -> Path:
    """As if the run had exported this head and it had been measured."""
    save_head(head, runs / "head")
    export = {"run": "r1", "step": 7, **head_digests(runs / "head" / "model.safetensors")}
    (runs / "run" / "exports.jsonl").write_text(json.dumps(export) + "\n")
    rows_of(runs, {}, {})
    return runs


def rows_of(runs: Path, *changes: dict[str, Any]) -> None:
    """Write a row of the head for each of these changes; those of one key are of samples 0, 1, ..."""
    of_head = {
        "head": head_digests(runs / "head" / "model.safetensors"),
        "draft_vocab_size": json.loads((runs / "head" / "config.json").read_text()).get("draft_vocab_size"),
    }
    keys = [change.get("key", ROW["key"]) for change in changes]
    samples = [str(keys[:place].count(key)) for place, key in enumerate(keys)]
    rows = [ROW | of_head | {"sample": one} | change for one, change in zip(samples, changes, strict=True)]
    (runs / "tau.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(runs: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    argv = ["publish.py", "--head", str(runs / "head"), "--run", str(runs / "run"), "--tau"]
    argv += [str(runs / "tau.jsonl"), "--base-model", "owner/target", "--repo-id", "me/EAGLE-target"]
    argv += ["--data", "Answers of the target, MIT.", "--output", str(runs / "out"), *more]
    monkeypatch.setattr("sys.argv", argv)
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_draft_vocabulary_is_published_with_its_head(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(runs, tiny_head().restrict(torch.arange(9).flip(0)))
    run(runs, monkeypatch, "--dry-run")
    head = load_head(str(runs / "out"), HIDDEN, VOCAB)
    assert head.draft_tokens.tolist() == list(range(9))[::-1]


class FakeApi:
    """What the client would have done; a fault of its own where it is given one."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fault = fault

    def __call__(self) -> FakeApi:
        return self

    def create_repo(self, repo_id: str, **options: Any) -> str:
        if self.fault is not None:
            raise self.fault
        self.calls.append((repo_id, options))
        return f"https://hub/{repo_id}"

    def upload_folder(self, **options: Any) -> None:
        files = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        self.calls.append((options["repo_id"], {"files": files}))
        # What an earlier head may have left there, and never the card.
        assert {"draft_vocabulary.safetensors", "calibration.json", "custom_generate/*"} <= set(
            options["delete_patterns"]
        )
        assert "README.md" not in options["delete_patterns"]


def test_a_dry_run_writes_the_repository_and_pushes_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_card, "HfApi", lambda: pytest.fail("the Hub was asked"))
    run(runs, monkeypatch, "--dry-run")
    assert capsys.readouterr().out == f"{runs / 'out'}\n"
    names = sorted(path.name for path in (runs / "out").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    assert load_head(str(runs / "out"), 32, 96).config == load_head(str(runs / "head"), 32, 96).config


def test_the_card_says_what_the_runs_recorded(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(runs, monkeypatch, "--dry-run", "--license", "mit")
    card = ModelCard.load(runs / "out" / "README.md")
    assert (card.data.license, card.data.base_model) == ("mit", "owner/target")
    assert "eagle" in card.data.tags
    for words in (
        "--base-model owner/target --ea-model me/EAGLE-target",
        "Answers of the target, MIT.",
        "first 2 prompts of each set, 64 new tokens, bfloat16; a tree is total_tokens / depth / top_k:",
        "| 0 | lossless |  |  | 0 | 2.39 | 2.39 | +0% | 0.00 |",
        "2,027 steps in 33 minutes on x86_64, 5,996 sequences, 1,280,661 tokens, 931,962 of which",
        "best in 50.2 / 43.2 % of 5,297 positions at drafting steps 1 to 2",
        "\npython train/train_head.py --data own.jsonl --output head\n",
        "\npython eval/measure_tau.py --prompts own.jsonl\n",
        "commit 0123456789ab",
    ):
        assert words in card.text


def test_a_card_of_an_installed_package_names_no_commit(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout, a record has none."""
    (runs / "run" / "provenance.json").write_text(json.dumps(TRAINING | {"commit": None}))
    run(runs, monkeypatch, "--dry-run")
    card = (runs / "out" / "README.md").read_text()
    assert f"\neagle_fsd {TRAINING['eagle_fsd']}, torch {TRAINING['torch']}, transformers " in card


PRIVATE = "/home/ada/secret plans"


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        (
            f"python '{PRIVATE}/eagle/train/train_head.py' --data '{PRIVATE}/rows.jsonl' ../b/more.jsonl",
            "python train/train_head.py --data rows.jsonl more.jsonl",
        ),
        (f"python x.py '--output={PRIVATE}/head'", "python x.py --output=head"),
        ("python x.py --base-model owner/target@main", "python x.py --base-model owner/target@main"),
        (f"python x.py --base-model '{PRIVATE}/target/'", "python x.py --base-model target"),
        ("python x.py --data owner/rows", "python x.py --data rows"),
        ("python x.py --dataset owner/rows", "python x.py --dataset owner/rows"),
        ("python x.py --draft-model owner/small", "python x.py --draft-model owner/small"),
        ("python x.py --init-head owner/head", "python x.py --init-head owner/head"),
        ("python x.py --base-model runs/ada/target", "python x.py --base-model target"),
        (f"python '{PRIVATE}/eagle/eval/speed.py' -token abc", "python eval/speed.py -token ..."),
        ("python x.py --tree 16/5/8 8/6/4/0.1 --limit 2", "python x.py --tree 16/5/8 8/6/4/0.1 --limit 2"),
        ("python x.py --sampling=0.6/50/0.9", "python x.py --sampling=0.6/50/0.9"),
        ("python x.py --methods plain lossless@8/4/2/0.1", "python x.py --methods plain lossless@8/4/2/0.1"),
        ("python x.py --data runs/16/5", "python x.py --data 5"),
        ("python x.py --data 2026/11 --tree 16/5/8", "python x.py --data 11 --tree 16/5/8"),
        (
            "python x.py --methods js:inf:swap:price=2+lookup@8/6/4/0.1",
            "python x.py --methods js:inf:swap:price=2+lookup@8/6/4/0.1",
        ),
        ("python x.py --token abc --rows 3", "python x.py --token ... --rows 3"),
        ("python x.py --api-key=abc --batch-tokens 4", "python x.py --api-key=... --batch-tokens 4"),
        ("python x.py --data hf_abcdefghijkl", "python x.py --data ..."),
        ("python x.py --data https://ada:pw@host/rows.jsonl", "python x.py --data ..."),
        (r"python x.py --data 'C:\Users\ada\rows.jsonl'", "python x.py --data rows.jsonl"),
        ("python x.py --data '/home/ada/quote", "python x.py --data quote"),
    ],
)
def test_a_public_command_names_no_folder_and_no_secret(recorded: str, shown: str) -> None:
    assert public_command(recorded) == shown


def test_a_folder_here_is_no_hub_id_in_a_public_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_command("python x.py --base-model owner/target") == "python x.py --base-model target"


def test_a_card_shows_no_folder_and_no_secret_and_a_dry_run_says_what_it_shows(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = f"python '{PRIVATE}/train/train_head.py' --data '{PRIVATE}/rows.jsonl' --token hf_abcdefghijkl"
    (runs / "run" / "provenance.json").write_text(json.dumps(TRAINING | {"command": command}))
    rows_of(runs, {"command": f"python '{PRIVATE}/eval/measure_tau.py' --prompts '{PRIVATE}/own.jsonl'"})
    with caplog.at_level(logging.INFO):
        run(runs, monkeypatch, "--dry-run")
    for file in (runs / "out").iterdir():
        assert not any(word in file.read_bytes() for word in (b"/home", b"ada/", b"plans", b"hf_abc"))
    card = (runs / "out" / "README.md").read_text()
    for shown in (
        "python train/train_head.py --data rows.jsonl --token ...",
        "python eval/measure_tau.py --prompts own.jsonl",
    ):
        assert shown in card and f"the card shows: {shown}\n" in caplog.text


def test_a_published_config_says_of_biases_what_the_weights_hold(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the trained head's config says; and a bias of fc comes with a warning."""
    path = runs / "head" / "config.json"
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "attention_bias"}
    path.write_text(json.dumps(older | {"bias": True}))
    run(runs, monkeypatch, "--dry-run")
    flags = json.loads((runs / "out" / "config.json").read_text())
    assert [flags[name] for name in ("bias", "attention_bias", "qkv_bias")] == [False] * 3
    assert "bias" not in caplog.text
    made(runs, tiny_head(fc_bias=True))
    run(runs, monkeypatch, "--dry-run")
    flags = json.loads((runs / "out" / "config.json").read_text())
    assert [flags[name] for name in ("bias", "attention_bias", "qkv_bias")] == [True, False, False]
    assert "fc.bias is in the weights: vLLM" in caplog.text and "eagle-fsd train fold-bias" in caplog.text


def test_a_push_creates_the_repository_and_uploads_the_folder(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = FakeApi()
    monkeypatch.setattr(model_card, "HfApi", api)
    run(runs, monkeypatch, "--private")
    assert capsys.readouterr().out == "https://hub/me/EAGLE-target\n"
    assert api.calls == [
        ("me/EAGLE-target", {"private": True, "exist_ok": True}),
        ("me/EAGLE-target", {"files": ["README.md", "config.json", "model.safetensors"]}),
    ]


def test_a_push_that_is_refused_is_one_line_and_keeps_the_folder(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = SimpleNamespace(headers={}, request=None, status_code=401)
    for fault in (
        HfHubHTTPError("401 Client Error\nunauthorized", response=response),
        huggingface_hub.errors.HFValidationError("bad name"),
        ConnectionError("no network"),
        getattr(huggingface_hub.errors, "HTTPError", OSError)("[Errno -2] Name or service not known"),
    ):
        monkeypatch.setattr(model_card, "HfApi", FakeApi(fault))
        with ends_in_one_line(r"repository 'me/EAGLE-target' cannot be written \(.*--dry-run$"):
            run(runs, monkeypatch, "--output", str(runs / f"out-{type(fault).__name__}"))
        assert (runs / f"out-{type(fault).__name__}" / "README.md").is_file()


def test_the_card_says_only_what_holds_for_all_its_rows(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"total_tokens": 60, "depth": 6, "top_k": 10}
    chat = {"key": "c", "task": "prompts/chat", "command": "another"}
    rows_of(runs, {}, {}, chat, {"key": "d", "tree": tree}, {"key": "d", "tree": tree})
    run(runs, monkeypatch, "--dry-run")
    text = (runs / "out" / "README.md").read_text()
    assert "on the first 2 prompts of own, 1 prompts of chat, 64 new tokens, bfloat16;" in text
    assert "| 16/5/8 | 0 |" in text and "| 60/6/10 | 0 |" in text
    assert f"{ROW['command']}\nanother\n```" in text
    rows_of(runs, {"sample": "21"}, {"sample": "20"})
    run(runs, monkeypatch, "--dry-run")
    text = (runs / "out" / "README.md").read_text()
    assert "on 2 prompts of each set, behind the first 20, 64 new tokens, bfloat16;" in text
    rows_of(runs, {"weight_format": "int8"})
    run(runs, monkeypatch, "--dry-run")
    text = (runs / "out" / "README.md").read_text()
    assert "on the first 1 prompts of each set, 64 new tokens, bfloat16, weights int8;" in text


def test_an_earlier_repository_is_replaced_and_a_changed_card_kept(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(runs, tiny_head().restrict(torch.arange(9)))
    run(runs, monkeypatch, "--dry-run")
    out, old = runs / "out", runs / "out.README.md.old"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(model_card, "HfApi", FakeApi())
    run(runs, monkeypatch)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before and not old.exists()
    (out / "README.md").write_text("library_name: eagle-fsd, by hand")
    for name in ("model.safetensors", "config.json", "draft_vocabulary.safetensors"):
        (runs / "head" / name).unlink()
    with ends_in_one_line(r".*has no config.json"):
        run(runs, monkeypatch)
    assert {path.name for path in out.iterdir()} == set(before), "a publication that fails changes nothing"
    made(runs, tiny_head())
    run(runs, monkeypatch)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert load_head(str(out), HIDDEN, VOCAB).draft_tokens is None
    assert old.read_text() == "library_name: eagle-fsd, by hand"
    assert sorted(path.name for path in runs.iterdir()) == ["head", "out", old.name, "run", "tau.jsonl"]


@pytest.mark.parametrize("other", ["notes.txt", "sub/model.safetensors"])
def test_a_folder_with_anything_else_is_refused_and_left(
    runs: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    run(runs, monkeypatch, "--dry-run")
    (runs / "out" / other).parent.mkdir(exist_ok=True)
    (runs / "out" / other).write_text("mine")
    card = (runs / "out" / "README.md").read_bytes()
    with ends_in_one_line(r"folder .*out' is not empty: .* another with --output"):
        run(runs, monkeypatch, "--license", "mit")
    assert (runs / "out" / other).read_text() == "mine"
    assert (runs / "out" / "README.md").read_bytes() == card


def test_a_head_is_not_published_onto_itself(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(runs, monkeypatch, "--dry-run")
    with ends_in_one_line(r"folder .*out' is not empty"):
        run(runs, monkeypatch, "--head", str(runs / "out"))
    assert load_head(str(runs / "out"), HIDDEN, VOCAB)


def test_a_publication_that_is_killed_half_way_is_done_again(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever files are in their place by then: the folder is known as a repository of ours."""
    replace, moved = Path.replace, []

    def killed(path: Path, place: Path) -> Path:
        if place.parent == runs / "out":
            if len(moved) == killed_at:
                raise KeyboardInterrupt
            moved.append(place.name)
        return replace(path, place)

    for killed_at in range(1, 3):
        moved.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            with pytest.raises(SystemExit):
                run(runs, patch, "--dry-run")
        assert len(list((runs / "out").iterdir())) == killed_at
        run(runs, monkeypatch, "--dry-run")
        assert load_head(str(runs / "out"), HIDDEN, VOCAB)
        for path in (runs / "out").iterdir():
            path.unlink()


def test_a_place_that_takes_nothing_is_named_before_a_head_is_read(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "file").write_text("")
    with ends_in_one_line(r"--output names .*file/out, where nothing can be written"):
        run(runs, monkeypatch, "--dry-run", "--output", str(runs / "file" / "out"))


def lose(name: str) -> Any:
    return lambda runs: (runs / "run" / "provenance.json").write_text(
        json.dumps({key: value for key, value in TRAINING.items() if key != name})
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda runs: (runs / "tau.jsonl").write_text(""),
            "no rows in .*tau.jsonl: .* run `eagle-fsd eval tau`",
        ),
        (
            lambda runs: (runs / "run" / "provenance.json").unlink(),
            "training record .* cannot be read .* --output",
        ),
        (
            lambda runs: (runs / "run" / "provenance.json").write_text("{"),
            "training record .* cannot be read",
        ),
        (lose("held_out"), "has no held_out: the run must have ended; resume it"),
        (lambda runs: (runs / "head" / "model.safetensors").unlink(), "head"),
        (lambda runs: (runs / "head" / "config.json").unlink(), "has no config.json"),
        (lambda runs: save_head(tiny_head(), runs / "out"), "is not empty: .* name another"),
        (lambda runs: (runs / "out").write_text(""), "is a file: .* name another"),
        (
            lambda runs: rows_of(runs, {"ea_model": "a"}, {"key": "c", "ea_model": "b"}),
            "ea_model is 'a' and 'b' in .*tau.jsonl: .* one head and setting; keep the rows of one",
        ),
        (
            lambda runs: rows_of(runs, {}, {"key": "c", "draft_vocab_size": 9}),
            "draft_vocab_size is None and 9 in ",
        ),
        (lambda runs: rows_of(runs, {}, {"key": "c", "max_new_tokens": 9}), "max_new_tokens is 64 and 9 in "),
        (
            lambda runs: rows_of(runs, {}, {"key": "c", "dtype": "float32"}),
            "dtype is 'bfloat16' and 'float32' in ",
        ),
        (
            lambda runs: rows_of(runs, {"base_model": "a"}, {"key": "c", "base_model": "b"}),
            "base_model is 'a' and 'b' in ",
        ),
        (
            lambda runs: rows_of(runs, {}, {"key": "c"}),
            "prompts is 'own' twice in .* with tree 16/5/8, temperature 0 and the same rule: ",
        ),
    ],
)
def test_what_is_not_there_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    spoil(runs)
    monkeypatch.setattr(model_card, "HfApi", lambda: pytest.fail("the Hub was asked"))
    with ends_in_one_line(f".*{message}"):
        run(runs, monkeypatch)


def record(runs: Path, **changes: Any) -> None:
    (runs / "run" / "provenance.json").write_text(json.dumps(TRAINING | changes))


def test_the_records_of_one_head_and_target_are_not_questioned(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the folder's name, with another list of tokens, folded; under any name of the target."""
    run(runs, monkeypatch, "--dry-run")
    rows_of(runs, {"ea_model": "elsewhere/head", "base_model": "Owner/Target@v2"})
    run(runs, monkeypatch, "--dry-run")
    save_head(tiny_head().restrict(torch.arange(9)), runs / "head")  # as `train rank` makes it
    rows_of(runs, {}, {})
    run(runs, monkeypatch, "--dry-run")
    before = head_digests(runs / "head" / "model.safetensors")["weights"]
    save_head(tiny_head(seed=9), runs / "head", {"folded_from": before})
    rows_of(runs, {}, {})
    run(runs, monkeypatch, "--dry-run")
    record(runs, base_model="smollm2-135m")
    rows_of(runs, {"base_model": "smollm2-135m"})
    run(runs, monkeypatch, "--dry-run", "--base-model", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "not compared" not in caplog.text


def test_what_cannot_be_compared_is_said(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Records of older versions say less, and a folder's name does not say which target is in it."""
    (runs / "run" / "exports.jsonl").unlink()
    record(runs, base_model=None, run=None)
    rows = [json.loads(line) for line in (runs / "tau.jsonl").read_text().splitlines()]
    old = [{name: row[name] for name in row if name != "head"} | {"base_model": str(runs)} for row in rows]
    (runs / "tau.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    run(runs, monkeypatch, "--dry-run")
    for words in (
        "tau.jsonl does not say which head it is of: measure again",
        "run does not say which heads it exported: export the head again",
        "run does not say which target it is of",
        f"tau.jsonl is of {str(runs)!r}: nothing says whether that is 'owner/target'",
    ):
        assert f"not compared: {runs}/{words}" in caplog.text
    assert (runs / "out" / "README.md").is_file()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda runs: save_head(tiny_head(seed=9), runs / "head"),
            r"tau.jsonl is of 'head', not of .*/head \(weights was \w+, now \w+\): .*; measure that one",
        ),
        (
            lambda runs: save_head(tiny_head().restrict(torch.arange(9)), runs / "head"),
            r"tau.jsonl is of 'head', not of .*/head \(draft_vocabulary was None, now \w+\): ",
        ),
        (
            lambda runs: rows_of(runs, {"head": None, "ea_model": "none"}),
            r"tau.jsonl is of 'none', not of .*/head \(no head drafted\): ",
        ),
        (
            lambda runs: (
                save_head(tiny_head().restrict(torch.arange(9)), runs / "head"),
                rows_of(runs, {}, {"draft_vocab_size": None, "key": "c"}),
            ),
            "draft_vocab_size is 9 and None in ",
        ),
        (
            lambda runs: (
                save_head(tiny_head().restrict(torch.arange(9)), runs / "head"),
                rows_of(runs, {"draft_vocab_size": None}),
            ),
            "draft_vocab_size is None in .*tau.jsonl and 9 in .*/head: .* without --full-vocabulary",
        ),
        (
            lambda runs: (save_head(tiny_head(seed=9), runs / "head"), rows_of(runs, {})),
            r"/head has the weights \w+, and .*/run exported \w+: .*; name that one with --run",
        ),
        (
            lambda runs: (runs / "run" / "exports.jsonl").unlink(),
            "/run has exported no head, so .*/head is not of it: .*; name that one with --run, or export",
        ),
        (
            lambda runs: record(runs, best_step=9),
            "/head is of step 7 of .*/run, whose record is of step 9: .* has trained on since; export again",
        ),
        (
            lambda runs: record(runs, base_model="owner/other"),
            "base_model is 'owner/target', and .*/run is of 'owner/other': .* with --base-model",
        ),
        (
            lambda runs: rows_of(runs, {"base_model": "owner/other"}),
            "base_model is 'owner/target', and .*/tau.jsonl is of 'owner/other': .* with --base-model",
        ),
        (
            lambda runs: (runs / "tau.jsonl").write_text('{"prompt": "Why?"}\n'),
            "tau.jsonl:1: has no 'key': a raw row needs it",
        ),
        (lambda runs: (runs / "tau.jsonl").write_text("# a table\n"), "tau.jsonl:1: is not JSON"),
        (lambda runs: rows_of(runs, {"command": None}), "row 1 has no command: .*; measure again"),
        (
            lambda runs: (runs / "run" / "provenance.json").write_text("[1]"),
            "training record .* cannot be read",
        ),
        (lambda runs: record(runs, held_out={"top1": [1]}), "has no top1 and positions in held_out: "),
        (lambda runs: record(runs, device=None), "has no device: the run must have ended"),
    ],
)
def test_records_of_another_head_or_target_make_no_card(
    runs: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    spoil(runs)
    monkeypatch.setattr(model_card, "HfApi", lambda: pytest.fail("the Hub was asked"))
    with ends_in_one_line(f".*{message}"):
        run(runs, monkeypatch)
    assert not (runs / "out").exists()


def test_a_card_names_its_target_by_a_hub_id(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way the target is named; a folder's path is not published."""
    line = re.escape(f"base_model is {str(runs)!r}: a card names the target by its Hub id OWNER/NAME, not")
    with ends_in_one_line(line):
        run(runs, monkeypatch, "--dry-run", "--base-model", str(runs))
    assert not (runs / "out").exists()
    run(runs, monkeypatch, "--dry-run", "--base-model", "owner/target@main")
    assert ModelCard.load(runs / "out" / "README.md").data.base_model == "owner/target"
    record(runs, base_model="smollm2-135m")
    rows_of(runs, {"base_model": "smollm2-135m"})
    run(runs, monkeypatch, "--dry-run", "--base-model", "smollm2-135m")
    assert "--base-model HuggingFaceTB/SmolLM2-135M-Instruct " in (runs / "out" / "README.md").read_text()


def test_a_repository_may_bring_code_for_hugging_faces_generate(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be published again, without the code and with it; another file beside it is somebody's."""
    out, folder = runs / "out", runs / "out" / "custom_generate"
    for flags, there in ((["--custom-generate"], True), ([], False), (["--custom-generate"], True)):
        run(runs, monkeypatch, "--dry-run", *flags)
        text = (out / "README.md").read_text()
        assert folder.exists() == there == ("custom_generate=" in text) == ("- custom_generate" in text)
    run(runs, monkeypatch, "--dry-run", "--custom-generate")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["generate.py", "requirements.txt"]
    assert "EA_MODEL = 'me/EAGLE-target'" in (folder / "generate.py").read_text()
    (folder / "mine.py").write_text("")
    with ends_in_one_line(".*is not empty"):
        run(runs, monkeypatch, "--dry-run", "--custom-generate")
