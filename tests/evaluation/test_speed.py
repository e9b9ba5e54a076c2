"""Speed side by side: the order of runs, the sums, and the script as a user runs it."""

from __future__ import annotations

import gc
import json
import platform
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.op_recorder import OpRecorder
from support.tiny_models import prompts_of, tiny_head, tiny_model

from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation import repeating_prompts
from eagle_fsd.evaluation.commands import speed as script
from eagle_fsd.evaluation.commands.speed import results
from eagle_fsd.evaluation.markdown_table import filled_columns
from eagle_fsd.evaluation.measure.observers import likelihoods
from eagle_fsd.evaluation.measure.speed import (
    Answers,
    Method,
    Setting,
    engine_of,
    method,
    parse_own,
    race,
    stretched,
)
from eagle_fsd.files import provenance
from eagle_fsd.runtime.packed_linear import PackedLinear, pack_linears
from eagle_fsd.runtime.step_recorder import Graphs
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.prompt_files import read_prompts

SETTING = Setting(8, SamplingConfig(), TreeConfig(6, 3, 2))


def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head())


def stub(name: str, seconds: float, calls: list[tuple[str, int]]) -> Method:
    """Answers every prompt with two tokens in one step."""

    def answer(prompts: Sequence[Sequence[int]]) -> Answers:
        calls.append((name, len(prompts)))
        stats = GenerationStats(steps=1, new_tokens=2, seconds=seconds, verify_seconds=seconds / 2)
        tree = None if name == "hf" else TreeConfig(1 if name == "plain" else 4)
        return Answers([[1, 2]] * len(prompts), [stats] * len(prompts), tree)

    return answer


def raced(calls: list[tuple[str, int]], count: int = 5, size: int = 2) -> list[dict[str, Any]]:
    seconds = {"hf": 2.0, "plain": 1.0, "lossless": 0.5}
    methods = {name: stub(name, each, calls) for name, each in seconds.items()}
    prompts = prompts_of([3] * count)
    return list(race(methods, prompts, size, torch.device("cpu"), lambda part, _: {"said": len(part)}))


@pytest.mark.parametrize("name", ["hf", "plain", "lossless"])
def test_where_nothing_ends_a_text_all_answers_are_as_long(name: str) -> None:
    model, prompts = engine(), prompts_of([4, 6])
    stock = TargetModel(tiny_model())
    texts = method(name, model, lambda: stock, SETTING)(prompts).tokens
    for target in (model.target, stock):
        target.model.generation_config.eos_token_id = [texts[0][2], texts[1][3]]
    ended = method(name, model, lambda: stock, SETTING)(prompts).tokens
    assert [len(row) for row in ended] == [
        len(row[: row.index(end) + 1]) for row, end in ((texts[0], texts[0][2]), (texts[1], texts[1][3]))
    ]
    endless = method(name, model, lambda: stock, SETTING._replace(endless=True))(prompts)
    assert endless.tokens == texts and all(len(row) == 8 for row in texts)


def test_every_method_answers_every_batch_in_rotating_order() -> None:
    calls: list[tuple[str, int]] = []
    rows = raced(calls)
    assert [row["method"] for row in rows] == [
        *("hf", "plain", "lossless"),
        *("plain", "lossless", "hf"),
        *("lossless", "hf", "plain"),
    ]
    assert [row["prompts"] for row in rows[::3]] == [[0, 1], [2, 3], [4]]
    assert [row["tree"] for row in rows[:3]] == [None, None, "4/5/8"]  # plain decoding has no tree
    assert [name for name, _ in calls[:9]] == ["hf"] * 3 + ["plain"] * 3 + ["lossless"] * 3  # untimed
    assert [size for _, size in calls[9:]] == [2] * 6 + [1] * 3
    assert all(row["said"] == len(row["prompts"]) and row["peak_memory"] > 10**6 for row in rows)
    assert json.loads(json.dumps(rows)) == rows


def test_results_are_ratios_of_sums_with_quartiles() -> None:
    hf, plain, lossless = results(raced([]))
    assert (hf.method, hf.cells["batch"], hf.cells["tau"]) == ("hf", "2", "")
    assert hf.tokens_per_second == pytest.approx(10 / 6)
    assert plain.ratios["hf"] == pytest.approx((2.0, 2.0, 2.0))
    assert lossless.ratios["hf"] == pytest.approx((4.0, 4.0, 4.0)) and "lossless" not in lossless.ratios
    assert hf.ratios["plain"] == pytest.approx((0.5, 0.5, 0.5))
    assert plain.cells["verify ms"] == "500.0"  # three batches of one step each
    text = filled_columns([one.cells for one in (hf, plain, lossless)], script.ORDER)
    assert (
        "| 2 | lossless | 4/5/8 | 6.7 | 2.00 | 250.0 |" in text and "| 4.00 (4.00 to 4.00) | 2.00 (" in text
    )
    assert "context" not in text and "draft ms" not in text
    uneven = [row | {"seconds": 2.0 * place} for place, row in enumerate(raced([], 5, 1)[::3], 1)]
    ones = [row | {"method": "plain", "seconds": 2.0} for row in uneven]
    (_, plain) = results([row | {"method": "hf"} for row in uneven] + ones)
    assert plain.ratios["hf"] == pytest.approx((3.0, 2.0, 4.0))  # of the sums, and the quartiles of 1 to 5


def test_prompts_are_stretched_by_the_others() -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    assert stretched(prompts, 4) == [[5, 6, 1, 2], [6, 1, 2, 3], [3, 4, 5, 6]]
    assert stretched(prompts, 2) == [[1, 2], [2, 3], [5, 6]]
    assert [len(text) for text in stretched(prompts, 15)] == [15] * 3


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "fast",
            r"method is 'fast': it is none of hf, hf-compiled, lookup, llama.cpp, llama.cpp\+lookup, plain, "
            "and rule is 'fast'",
        ),
        ("js:0.3:both", "mode is 'both'"),
        ("js:0.3@6", "tree is .6.: it must be"),
        ("hf@6/3/2", "method is 'hf@6/3/2': it is none of hf, "),
    ],
)
def test_methods_that_there_are_not(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        method(
            name,
            EagleFSD(TargetModel(tiny_model()), tiny_head()),
            lambda: pytest.fail("no model is needed to refuse"),
            SETTING,
        )


def test_no_method_undoes_what_another_one_recorded() -> None:
    """On a GPU steps are recorded; in rotation every method must find its own recordings again."""
    recorder, prompts = OpRecorder(), [prompts_of([length]) for length in (4, 6, 5)]
    model = EagleFSD(TargetModel(tiny_model(), Graphs(recorder)), tiny_head())
    names = ("plain", "lossless@6/3/2", "js:0.5@6/3/2", "lossless@8/3/3", "lossless+lookup@6/3/2")
    methods = {name: method(name, model, lambda: model.target, SETTING) for name in names}
    made = []
    for _ in range(4):
        before = recorder.recordings
        list(race(methods, [row for one in prompts for row in one], 1, model.device))
        made.append(recorder.recordings - before)
    assert made[0] > 0 and made[-1] == 0, made


def test_methods_deliver_the_targets_greedy_text() -> None:
    model = engine()
    prompts = prompts_of([5, 9])
    wanted = model.generate(prompts[:1], max_new_tokens=8).new_tokens
    for name in ("hf", "lookup", "plain", "lossless", "js:0"):
        one = method(name, model, lambda: model.target, SETTING)
        answers = one(prompts[:1])
        assert answers.tokens == wanted and answers.stats[0].new_tokens == len(wanted[0])
        assert answers.stats[0].seconds > 0 and (answers.tree is None) == (name in ("hf", "lookup"))


def test_a_method_may_have_a_tree_of_its_own() -> None:
    model = engine()
    for name, tree in (
        ("lossless", SETTING.tree),
        ("lossless@4/2/2", TreeConfig(4, 2, 2)),
        ("js:0.3@1/1/1", TreeConfig(1, 1, 1)),
    ):
        one = method(name, model, lambda: model.target, SETTING)
        assert one(prompts_of([5])).tree == tree


@pytest.mark.parametrize("shared", [3, 1000], ids=["beginnings read once", "read apart"])
def test_likelihoods_are_the_plain_forwards(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_fsd.decoding.prompts.prefill.SHARED", shared)
    model, wanted = tiny_model(), []
    start, other = prompts_of([7, 4])
    prompts, answers = [start, start + other, start], [[3, 1, 4, 1, 5], [9, 2], []]
    for prompt, tokens in zip(prompts[:2], answers, strict=False):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
        log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        wanted.append(pytest.approx(log_p[range(len(tokens)), tokens].mean().item(), rel=1e-4))
    assert likelihoods(TargetModel(model), prompts, answers) == [*wanted, None]


def test_the_script_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    model = engine()
    monkeypatch.setattr(script, "load_engine", lambda _: model)
    monkeypatch.setattr(script, "encoded_prompts", lambda *_: [*prompts_of([4, 6]), *prompts_of([3])])
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    argv = f"--prompts {tmp_path}/a.jsonl --output {tmp_path}/out --max-new-tokens 6"
    argv += " --methods hf plain js:0.5:paper"
    script.main(f"{argv} --batch-size 1 2 --context 5 9 --tree 6/3/2 --likelihood".split())
    printed = capsys.readouterr().out
    assert (tmp_path / "out" / "table.md").read_text() == printed
    assert "prompts: 3, at most 6 new tokens, temperature 0. " in printed and "quartiles" in printed
    assert printed.count("js:0.5:paper") == 4 and "| 9 | 2 | hf |" in printed and "log p" in printed
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * (3 * 3 + 3 * 2) and all(
        row["command"] and row["log_likelihood"] < 0 and row["runtime"] == "torch" for row in rows
    )
    assert all(row["sampling"]["temperature"] == 0 and row["weight_format"] == "float32" for row in rows)
    assert (tmp_path / "out" / "speed.png").read_bytes()[:4] == b"\x89PNG"
    script.main(f"{argv} --methods lossless --tree auto".split())
    assert "| 1 | lossless | " in capsys.readouterr().out
    for wrong, complaint in (
        ("--methods fast", "method is 'fast'"),
        ("--methods lookup --batch-size 1 2", "batch_size is 2 with lookup"),
        ("--context 251", "context and max_new_tokens are 257 together: the target has 256 positions"),
        ("--context 0", "context is 0"),
        (
            "--max-new-tokens 251",
            "the longest prompt and max_new_tokens are 257 together: the target has 256",
        ),
    ):
        with pytest.raises(SystemExit):
            script.main(f"{argv} {wrong}".split())
        assert complaint in capsys.readouterr().err


def test_a_race_that_was_stopped_leaves_no_table_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(script, "load_engine", lambda _: engine())
    monkeypatch.setattr(script, "encoded_prompts", lambda *_: prompts_of([4]))
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    argv = f"--prompts {tmp_path}/a.jsonl --output {tmp_path}/out --max-new-tokens 2 --methods plain".split()
    script.main([*argv, "--batch-size", "1", "1"])
    made = [path.name for path in sorted((tmp_path / "out").glob("[!.]*"))]
    assert made == ["rows.jsonl", "speed.png", "table.md"]
    assert (
        len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 1
    )  # a size named twice runs once

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "race", stopped)
    with pytest.raises(SystemExit):
        script.main(argv)
    assert list((tmp_path / "out").glob("[!.]*")) == []


def test_the_stock_target_is_loaded_where_ours_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine()
    assert script.stock_target(plain, "tiny") is plain.target
    packed = EagleFSD(TargetModel(pack_linears(tiny_model())), tiny_head())
    monkeypatch.setattr(script.hub, "load_target", lambda *_: (tiny_model(), None))
    stock = script.stock_target(packed, "tiny")
    assert stock is not packed.target
    assert not any(isinstance(layer, PackedLinear) for layer in stock.model.modules())


def test_a_race_loads_the_stock_target_once_and_keeps_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    models: list[weakref.ref[Any]] = []

    def load_engine(_: object) -> EagleFSD:
        packed = EagleFSD(TargetModel(pack_linears(tiny_model())), tiny_head())
        models.extend(map(weakref.ref, (packed, packed.target, packed.target.held)))
        return packed

    def load_target(*_: object) -> tuple[Any, None]:
        stock = tiny_model()
        models.append(weakref.ref(stock))
        return stock, None

    monkeypatch.setattr(script, "load_engine", load_engine)
    monkeypatch.setattr(script.hub, "load_target", load_target)
    monkeypatch.setattr(script, "encoded_prompts", lambda *_: prompts_of([4]))
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    argv = f"--prompts {tmp_path}/a.jsonl --output {tmp_path}/out --max-new-tokens 2 --tree 6/3/2"
    script.main(f"{argv} --methods hf lookup plain".split())
    gc.collect()
    assert len(models) == 4 and [model() for model in models] == [None] * 4


def test_a_row_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its architecture, where no file tells."""
    told = "processor\t: 0\nmodel name\t: A Processor 3000\nmodel name\t: Another\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: told)
    assert provenance.processor() == "A Processor 3000"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Features: fp asimd\n")
    assert provenance.processor() == platform.machine()

    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert provenance.processor() == platform.machine()


def test_methods_with_looked_up_drafts() -> None:
    model = engine()
    prompts = prompts_of([5, 9])
    wanted = model.generate(prompts[:1], max_new_tokens=8).new_tokens
    for name, drafter in (("lossless+lookup@4/2/2", "eagle+lookup"), ("lookup@4/2/2", "lookup")):
        for lookup in (False, True):
            loaded = engine_of(model, parse_own("lossless+lookup")) if lookup else model
            one = method(name, loaded, lambda: pytest.fail("no other model is needed"), SETTING)
            assert one(prompts[:1]).tokens == wanted and one(prompts[:1]).tree == TreeConfig(4, 2, 2)
            assert engine_of(loaded, parse_own(name)).drafter.name == drafter
    assert engine_of(model, parse_own("lossless")).settler is model.settler  # no tree is measured twice
    with pytest.raises(ValueError, match=r"method is 'hf\+lookup'"):
        method("hf+lookup", model, lambda: pytest.fail("no model is needed to refuse"), SETTING)


def test_prompts_that_repeat_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = {"prompt": "def add(a, b):\n" + "    # it adds\n" * 25, "canonical_solution": "    return a + b\n"}
    rows = {
        "humaneval": code | {"entry_point": "add"},
        "gsm8k_train": {
            "question": "There were seven things. " * 14,
            "answer": "So there are seven.\n#### 7",
        },
        "p3_text": {"task": "qa_based_on", "prompt": "A passage about something. " * 15},
    }
    for name, row in rows.items():
        lines = [json.dumps(row), json.dumps(row | {"prompt": "", "question": "", "canonical_solution": ""})]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    argv = ["--data", str(tmp_path), "--output", str(tmp_path / "out" / "prompts_repeating.jsonl")]
    repeating_prompts.main([*argv, "--count", "3"])
    made = read_prompts(tmp_path / "out" / "prompts_repeating.jsonl")
    assert "3 prompts in" in capsys.readouterr().out and len(made) == 3
    assert made[0].startswith("Rename the function `add`") and "return a + b" in made[0]
    assert "seevn" in made[1] and "#### 7" not in made[1] and made[1].count("things") == 14
    assert made[2].startswith("A passage") and made[2].endswith("then answer.")
    with pytest.raises(SystemExit):
        repeating_prompts.main([*argv, "--count", "4"])
    assert "count is 4" in capsys.readouterr().err
    (tmp_path / "humaneval.jsonl").write_text('{"task_id": "0", "prompt": "def add", "entry_point": "add"}\n')
    with pytest.raises(SystemExit):
        repeating_prompts.main([*argv, "--count", "3"])
    assert "humaneval.jsonl: a row has no 'canonical_solution', which" in capsys.readouterr().err
