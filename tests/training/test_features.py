"""The target's features, in shards and online."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.training_world import (
    tiny_target,
)

from eagle_fsd.files.fingerprints import differences, target_identity
from eagle_fsd.training.data.examples import Example
from eagle_fsd.training.data.features import Cost, Extraction, OnlineFeatures, compute_features
from eagle_fsd.training.data.shards import FeatureSequence, StoredFeatures

WHO = {"name": "tiny", "weights": "0", "dtype": "float32"}


def everything(folder: Path) -> list[FeatureSequence]:
    stored = StoredFeatures([folder], WHO)
    return stored.read(range(len(stored.tokens)))


def test_features_are_the_final_norm_states_whatever_the_padding(tmp_path: Path) -> None:
    target = tiny_target()
    examples = [Example(list(range(1, length)), [True] * (length - 1)) for length in (9, 4, 7, 5)]
    computed = compute_features(target.base_model, examples, 16)
    for example, (features,) in zip(examples, computed, strict=True):
        with torch.inference_mode():
            alone = target.base_model(torch.tensor([example.tokens])).last_hidden_state[0]
            torch.testing.assert_close(features, alone, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                target.lm_head(features),
                target(torch.tensor([example.tokens])).logits[0],
                atol=1e-4,
                rtol=1e-4,
            )


def test_extraction_goes_on_at_the_first_missing_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target()
    examples = [
        Example(list(range(1, length)), [False] + [True] * (length - 2)) for length in (9, 4, 7, 5, 6)
    ]
    extraction = Extraction(target.base_model, WHO, dtype=torch.float32, shard_examples=2)
    extraction.write({tmp_path: examples})
    whole = everything(tmp_path)
    assert [sequence.tokens.tolist() for sequence in whole] == [example.tokens for example in examples]
    (tmp_path / "shard_00001.safetensors").unlink()
    capsys.readouterr()
    kept = (tmp_path / "shard_00000.safetensors").stat().st_mtime_ns
    extraction.write({tmp_path: examples})
    assert (tmp_path / "shard_00000.safetensors").stat().st_mtime_ns == kept
    # What is there counts as done, and not as work of this run, by which the time that is left is guessed.
    shown = capsys.readouterr().err.split("\r")
    assert "| 2/3 [" in shown[1] and "| 3/3 [" in shown[-1], shown
    for before, after in zip(whole, everything(tmp_path), strict=True):
        torch.testing.assert_close(before.features, after.features)
    with pytest.raises(
        ValueError, match=r"other data or settings \(count was 5, now 4, examples was \w+, now \w+\)"
    ):
        extraction.write({tmp_path: examples[1:]})
    with pytest.raises(ValueError, match=r"stored was float32, now bfloat16"):
        Extraction(target.base_model, WHO, shard_examples=2).write({tmp_path: examples})
    with pytest.raises(ValueError, match=r"no feature shards in .*none'; run the extraction first"):
        StoredFeatures([tmp_path / "none"], WHO)
    run = tmp_path / "run"
    (run / "answers").mkdir(parents=True)
    (run / "answers" / "shard_00000.safetensors").touch()
    with pytest.raises(ValueError, match=rf"no feature shards in .*; name '{run}/answers', inside it"):
        StoredFeatures([run], WHO)
    (tmp_path / "manifest.json").write_text('{"target": {}, "count": "5"}')
    with pytest.raises(
        ValueError, match=r"has no readable manifest\.json: .*; remove the folder and extract"
    ):
        StoredFeatures([tmp_path], WHO)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has shards and no manifest\.json: .*; remove the folder"):
        extraction.write({tmp_path: examples})
    with pytest.raises(ValueError, match=r"has no readable manifest\.json"):
        StoredFeatures([tmp_path], WHO)


def test_features_are_their_targets_however_its_folder_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slash at the end, as a shell completes it, or another way to the folder does not compute them again.

    A copy of the folder is another target.
    """
    target, examples = tiny_target(), [Example(list(range(1, 8)), [True] * 7)]
    for name in ("mine", "copy"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    Extraction(target.base_model, target_identity("mine", target)).write({tmp_path / "features": examples})
    shard = tmp_path / "features" / "shard_00000.safetensors"
    before = shard.stat().st_mtime_ns
    for name in ("mine/", "./mine", str(tmp_path / "mine"), "copy/../mine"):
        who = target_identity(name, target)
        Extraction(target.base_model, who).write({tmp_path / "features": examples})
        assert len(StoredFeatures([tmp_path / "features"], who).tokens) == 1
    assert shard.stat().st_mtime_ns == before
    who = target_identity("copy", target)
    with pytest.raises(ValueError, match=r"another target.*target\.name was mine, now copy"):
        Extraction(target.base_model, who).write({tmp_path / "features": examples})
    with pytest.raises(ValueError, match=r"another target \(target\.name was mine, now copy"):
        StoredFeatures([tmp_path / "features"], who)


def test_features_of_another_target_are_refused(tmp_path: Path) -> None:
    """Another name, other weights, another dtype: none may take up what the first one left."""
    target, examples = tiny_target(), [Example(list(range(1, 8)), [True] * 7)]
    who = target_identity("first", target)
    Extraction(target.base_model, who).write({tmp_path: examples})
    others = {
        "name": target_identity("second/target.dtype", target),
        "weights": target_identity("first", tiny_target(seed=3)),
        "dtype": target_identity("first", target.bfloat16()),
    }
    for field, other in others.items():
        assert other[field] != who[field]
        with pytest.raises(ValueError, match=rf"belong to another target.*target\.{field} was {who[field]}"):
            Extraction(target.base_model, other).write({tmp_path: examples})
        with pytest.raises(
            ValueError, match=rf"another target .*target\.{field} was .* extract them with"
        ) as one:
            StoredFeatures([tmp_path], other)
        assert ("--extract-dtype" in str(one.value)) == (field == "dtype")


def test_a_target_tuned_in_one_weight_is_another() -> None:
    before = target_identity("x", tiny_target())
    assert before == target_identity("x", tiny_target())
    assert before["weights"] == target_identity("x", tiny_target().bfloat16())["weights"]
    for name, _ in tiny_target().named_parameters():
        tuned = tiny_target()
        with torch.no_grad():
            tuned.get_parameter(name).flatten()[tuned.get_parameter(name).numel() // 2 :].mul_(1.01)
        assert target_identity("x", tuned)["weights"] != before["weights"], name


def test_differences_are_named_by_their_path() -> None:
    old, new = {"a": 1, "b": {"c": 2, "d": [3]}}, {"a": 1, "b": {"c": 4, "d": [3]}, "e": 5}
    assert differences(old, new) == "b.c was 2, now 4, e was None, now 5"
    assert differences(old, old) == ""


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    shard = tmp_path / "shard_00000.safetensors"
    (tmp_path / "manifest.json").write_text(json.dumps({"target": WHO, "count": 1, "shard_examples": 1}))
    shard.write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors is no whole feature shard"):
        StoredFeatures([tmp_path], WHO)
    shard.unlink()
    shard.mkdir()  # which is no file that can be read
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors is no whole feature shard"):
        StoredFeatures([tmp_path], WHO)


@pytest.mark.parametrize(
    ("name", "edit", "why"),
    [
        ("offsets", lambda old: old * torch.tensor([1, 9, 1]), "its offsets do not divide its tokens"),
        ("offsets", lambda old: old - torch.tensor([0, 9, 0]), "its offsets do not divide its tokens"),
        ("offsets", lambda old: old + torch.tensor([1, 0, 0]), "its offsets do not divide its tokens"),
        ("offsets", lambda old: old * torch.tensor([1, 0, 1]), "its offsets do not divide its tokens"),
        ("offsets", lambda old: old[:2], "its offsets do not divide its tokens"),
        ("learn", lambda old: old[:-1], "its offsets do not divide its tokens"),
        ("features", lambda old: old[:-1], r"features has \[7\] rows, tokens \[8\]"),
    ],
)
def test_a_shard_whose_parts_do_not_fit_is_damaged(
    name: str, edit: Callable[[torch.Tensor], torch.Tensor], why: str, tmp_path: Path
) -> None:
    """Else a head would learn from other tokens than the features are of."""
    examples = [Example([1, 2, 3], [True] * 3), Example([4, 5, 6, 7, 8], [True] * 5)]
    Extraction(tiny_target().base_model, WHO, dtype=torch.float32).write({tmp_path: examples})
    (path,) = tmp_path.glob("*.safetensors")
    whole = {key: value.clone() for key, value in load_file(path).items()}
    save_file(whole | {name: edit(whole[name]).clone()}, path)
    message = rf"is no whole feature shard \({why}.*\); remove it and extract again"
    with pytest.raises(ValueError, match=message):
        StoredFeatures([tmp_path], WHO)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (Cost(0, 0, 0.0), "all are there"),
        (Cost(40, 5_840, 3.4), "40 tokens, 0.01 MB on disk, less than a minute"),
        (Cost(2_000, 2_314_000, 66.0), "2,000 tokens, 2.31 MB on disk, about 1.1 minutes"),
        (Cost(2_000_000, 2_314_000_000, 3600.0), "2,000,000 tokens, 2.31 GB on disk, about 60.0 minutes"),
    ],
)
def test_a_cost_is_said_in_units_of_its_size(cost: Cost, said: str) -> None:
    assert str(cost) == said


def test_what_is_there_shows_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, examples = tiny_target().base_model, [Example([1, 2, 3], [True] * 3)]
    Extraction(target, WHO).write({tmp_path: examples})
    assert " 1/1 [" in capsys.readouterr().err
    assert everything(tmp_path)[0].features.dtype == torch.bfloat16  # half of the disk
    Extraction(target, WHO).write({tmp_path: examples})
    assert capsys.readouterr().err == ""


def test_an_extraction_says_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing once it is done, and a disk that is too small is named before anything is written."""
    target, examples = tiny_target().base_model, [Example(list(range(1, 9)), [True] * 8)] * 5
    extraction = Extraction(target, WHO, dtype=torch.float32, shard_examples=2)
    done, new = tmp_path / "done", tmp_path / "new"
    cost = extraction.estimate({done: examples})
    extraction.write({done: examples})
    written = sum(path.stat().st_size for path in done.glob("*.safetensors"))
    assert cost.tokens == 40 and cost.seconds > 0 and cost.size <= written < cost.size + 3 * 1000
    (done / "shard_00002.safetensors").unlink()
    assert extraction.estimate({done: examples}).tokens == 8
    assert extraction.estimate({done: examples, new: examples}).tokens == 48
    extraction.write({done: examples})
    assert extraction.estimate({done: examples}).tokens == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=cost.size))
    assert extraction.estimate({new: examples}).size == cost.size
    with pytest.raises(OSError, match=r"features of 80 tokens, .* do not fit beside .*new.*--online"):
        extraction.estimate({new: examples, tmp_path / "other": examples})
    assert not new.exists()


def test_a_folder_of_other_features_is_named_before_any_are_computed(tmp_path: Path) -> None:
    """The last one too, for which the others would be computed in vain."""
    target, examples = tiny_target().base_model, [Example(list(range(1, 9)), [True] * 8)] * 3
    Extraction(target, WHO).write({tmp_path / "others": examples[:2]})
    with pytest.raises(ValueError, match=r"others belong to another target, other data .*count was 2, now 3"):
        Extraction(target, WHO).estimate({tmp_path / "new": examples, tmp_path / "others": examples})


def test_processes_take_shards_in_turn(tmp_path: Path) -> None:
    target, examples = tiny_target().base_model, [Example(list(range(1, 9)), [True] * 8)] * 7
    extraction = Extraction(target, WHO, dtype=torch.float32, shard_examples=2)
    extraction.write({tmp_path: examples}, (1, 3))
    assert [path.name for path in tmp_path.glob("shard*")] == ["shard_00001.safetensors"]
    with pytest.raises(ValueError, match=r"has 1 of 4 shards: the extraction did not end; start it again"):
        StoredFeatures([tmp_path], WHO)
    for process in (0, 2):
        extraction.write({tmp_path: examples}, (process, 3))
    assert len(everything(tmp_path)) == 7
    twice = StoredFeatures([tmp_path, tmp_path], {"name": WHO["name"]})  # nothing else of it is compared
    assert len(twice.tokens) == 14
    (tmp_path / "shard_00003.safetensors").rename(tmp_path / "shard_00004.safetensors")
    with pytest.raises(ValueError, match=r"of 4 shards: the extraction did not end; start it again"):
        StoredFeatures([tmp_path], WHO)


def test_online_features_are_those_of_the_shards(tmp_path: Path) -> None:
    target = tiny_target().base_model
    examples = [Example(list(range(1, length)), [False] + [True] * (length - 2)) for length in (9, 4, 7)]
    Extraction(target, WHO, dtype=torch.float32).write({tmp_path: examples})
    stored, online = StoredFeatures([tmp_path], WHO), OnlineFeatures(target, examples, 16)
    for one, other in zip(stored.read([2, 0, 2]), online.read([2, 0, 2]), strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.learn, other.learn)
        torch.testing.assert_close(one.features, other.features, atol=1e-5, rtol=1e-4)
        assert not other.features.is_inference()


def test_a_shard_that_breaks_while_it_is_in_use_is_named(tmp_path: Path) -> None:
    target, examples = tiny_target().base_model, [Example(list(range(1, 9)), [True] * 8)] * 2
    Extraction(target, WHO).write({tmp_path: examples})
    stored = StoredFeatures([tmp_path], WHO)
    path = tmp_path / "shard_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors is no whole feature shard .*; remove it"):
        stored.read([1])
    path.unlink()
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors is no whole feature shard"):
        stored.read([1])
