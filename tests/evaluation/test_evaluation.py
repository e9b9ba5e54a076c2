"""Measuring on a tiny target: rows, tables and resumption of tau grids; differences of greedy texts."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import KnowingEngine, greedy_alone, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.evaluation.cli import load_engine, model_parser
from eagle_fsd.evaluation.commands import greedy
from eagle_fsd.evaluation.measure import acceptance_length, greedy_equality
from eagle_fsd.evaluation.measure.greedy_equality import reference
from eagle_fsd.evaluation.prompt_sets import batches, prompt_sets, set_name
from eagle_fsd.target.model import TargetModel

ROOT = Path(__file__).parents[2]
TREE = TreeConfig(16, 5, 3)
NEW_TOKENS = 12
SAMPLED = SamplingConfig(0.6, top_k=50, top_p=0.9)


@pytest.fixture(scope="module")
def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model("llama")), tiny_head(), base_model="tiny", ea_model="tiny-head")


def cell(**fields: Any) -> dict[str, Any]:
    rule = {"threshold": 0.0, "divergence": None, "mode": None, "child": None}
    if "divergence" in fields:
        rule |= {"mode": "hybrid", "child": "draft"}
    made = {"prompts": "a", "prompt_count": 4, "max_new_tokens": NEW_TOKENS, "sampling": asdict(SAMPLED)}
    return {**made, "tree": asdict(TREE), "seed": 0, "dtype": "float32", **rule, **fields}


# --- tau ---


def test_a_cells_rule() -> None:
    assert acceptance_length.rule_of(cell()) == Lossless()
    fuzzy = cell(threshold=0.2, divergence="tv", mode="paper", child="target")
    assert acceptance_length.rule_of(fuzzy) == Fuzzy(0.2, "tv", mode="paper", child="target")


def test_a_rows_key_is_its_settings_models_and_prompts(
    engine: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was trained anew in the same folder is another one, and so are other prompts."""
    monkeypatch.setattr(acceptance_length, "measure", lambda *_: {})
    prompts = prompts_of((3, 4))

    def key(made: dict[str, Any], model: EagleFSD, asked: list[list[int]] = prompts) -> str:
        (row,) = acceptance_length.run(model, [made], {"a": asked}, tmp_path / "rows.jsonl", 2, {})
        return row["key"]

    first = key(cell(), engine)
    keys = {
        first,
        key(cell(seed=1), engine),
        key(cell(threshold=0.2, divergence="tv"), engine),
        key(cell(threshold=0.2, divergence="tv", mode="paper"), engine),
        key(cell(), engine, prompts_of((3, 4), seed=1)),
        key(cell(), EagleFSD(engine.target, tiny_head(seed=1), base_model="tiny", ea_model="tiny-head")),
        key(cell(), EagleFSD(engine.target, None, base_model="tiny", ea_model="tiny-head")),
        key(cell(), EagleFSD(engine.target, tiny_head().restrict(torch.arange(9)))),
        key(cell(), EagleFSD(engine.target, tiny_head().restrict(torch.arange(1, 10)))),
    }
    assert len(keys) == 9
    assert key(cell(), EagleFSD(engine.target, engine.head, base_model="tiny")) == first


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_a_row_is_the_sum_of_its_prompts_whatever_the_batch(engine: EagleFSD, batch_size: int) -> None:
    """Prompts are sorted by length inside; the seed goes with the prompt, not with its place."""
    prompts = prompts_of((9, 2, 14, 5))
    measured = cell(threshold=0.5, divergence="js", mode="hybrid", child="draft", seed=7)
    row = acceptance_length.measure(engine, measured, prompts, batch_size)
    steps = tokens = fuzzy = 0
    for number, prompt in enumerate(prompts):
        (stats,) = engine.generate(
            [prompt],
            max_new_tokens=NEW_TOKENS,
            temperature=0.6,
            top_k=50,
            top_p=0.9,
            rule=Fuzzy(0.5, "js"),
            tree=TREE,
            seed=[(7, number)],
        ).stats
        steps, tokens, fuzzy = steps + stats.steps, tokens + stats.new_tokens, fuzzy + stats.fuzzy_accepts
    assert (row["steps"], row["new_tokens"], row["fuzzy_accepts"]) == (steps, tokens, fuzzy)
    assert row["tau"] == tokens / steps
    assert (row["divergence"], row["threshold"], row["batch_size"]) == ("js", 0.5, batch_size)


def test_a_grid_is_resumed_and_not_measured_twice(
    engine: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {"a": prompts_of((3, 4, 5, 6)), "b": prompts_of((7, 8), seed=1)}
    cells = [cell(), cell(prompts="b", prompt_count=2), cell(threshold=0.5, divergence="js")]
    output = tmp_path / "new" / "rows.jsonl"
    first = acceptance_length.run(engine, cells[:2], prompts, output, 2, {"commit": "abc"})
    assert [row["prompts"] for row in first] == ["a", "b"]
    assert all(
        (row["base_model"], row["ea_model"], row["commit"]) == ("tiny", "tiny-head", "abc") for row in first
    )
    asked: list[dict[str, Any]] = []
    measure = acceptance_length.measure
    monkeypatch.setattr(
        acceptance_length, "measure", lambda e, c, *rest: asked.append(c) or measure(e, c, *rest)
    )
    rows = acceptance_length.run(engine, cells, prompts, output, 2, {"commit": "abc"})
    assert asked == cells[2:]
    assert rows[:2] == first
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"half')
    assert (
        acceptance_length.run(engine, cells, prompts, output, 2, {}) == rows and output.read_bytes() == whole
    )
    output.write_bytes(b'{"half\n' + whole)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: is not JSON .* delete it"):
        acceptance_length.run(engine, cells, prompts, output, 2, {})


def row_of(steps: int, new_tokens: int, fuzzy_accepts: int = 0, **fields: Any) -> dict[str, Any]:
    made = {"prompts": "a", "divergence": None, "mode": None, "child": None, "threshold": 0.0, **fields}
    counts = {"steps": steps, "new_tokens": new_tokens, "fuzzy_accepts": fuzzy_accepts}
    tree = {"total_tokens": 16, "depth": 5, "top_k": 8, "min_confidence": 0.0}
    return {"tree": tree, "tau": new_tokens / steps, "sampling": {"temperature": 0.6}, **made, **counts}


def test_the_table_weighs_sets_by_their_steps() -> None:
    fuzzy = {"divergence": "js", "mode": "hybrid", "child": "draft", "threshold": 0.3}
    wide = {"total_tokens": 60, "depth": 6, "top_k": 10, "min_confidence": 0.05}
    rows = [
        row_of(10, 20),
        row_of(30, 90, prompts="b"),
        row_of(10, 30, fuzzy_accepts=4, **fuzzy),
        row_of(30, 120, fuzzy_accepts=16, prompts="b", **fuzzy),
        row_of(10, 40, tree=wide),
        row_of(10, 50, tree=wide, **fuzzy),
    ]
    lines = acceptance_length.table(rows).splitlines()
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
    expected = greedy_equality.reference(engine, prompts, NEW_TOKENS)
    assert expected == greedy_alone(engine.target.model, prompts, NEW_TOKENS)
    differences, stats = greedy_equality.compare(engine, prompts, expected, TREE, 2, NEW_TOKENS)
    assert differences == []
    assert stats.new_tokens == 5 * NEW_TOKENS


def test_comparison_names_every_difference_and_its_gap(engine: EagleFSD) -> None:
    prompts = prompts_of((9, 2, 14))
    expected = greedy_equality.reference(engine, prompts, NEW_TOKENS)
    other = [text.copy() for text in expected]
    other[0][5] = (other[0][5] + 1) % 96
    del other[2][8:]
    differences, _ = greedy_equality.compare(engine, prompts, other, TREE, 2, NEW_TOKENS)
    assert differences[0].best[0] == expected[0][5]
    assert [(d.prompt, d.position, d.expected, d.found) for d in differences] == [
        (0, 5, other[0][5], expected[0][5]),
        (2, 8, None, expected[2][8]),
    ]
    with torch.no_grad():
        logits = engine.target.model(torch.tensor([prompts[0] + expected[0][:5]])).logits[0, -1]
    best = logits.topk(2).values
    assert differences[0].gap == pytest.approx(float(best[0] - best[1]), rel=1e-4)
    assert not differences[0].excused


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
    assert greedy_equality.Difference(0, 0, expected, found, best=(1, 2), gap=gap).excused is excused


def test_comparison_catches_a_rule_that_is_not_lossless(
    engine: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of((9, 2))
    expected = greedy_equality.reference(engine, prompts, NEW_TOKENS)
    monkeypatch.setattr(greedy_equality, "Lossless", lambda: Fuzzy(float("inf"), mode="paper"))
    wrong = KnowingEngine(engine.target, [[7] * 64] * 2, check=False)
    differences, _ = greedy_equality.compare(wrong, prompts, expected, TREE, 2, NEW_TOKENS)
    assert len(differences) == 2 and not any(difference.excused for difference in differences)


# --- prompt sets ---


class CharTokenizer:
    """One id a character, and a chat template that says so."""

    chat_template = "yes"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: object) -> dict[str, Any]:
        assert options["add_generation_prompt"] is True
        (message,) = messages
        return {"input_ids": torch.tensor([[1, *map(ord, message["content"]), 2]])}


def test_prompt_sets_are_chats_of_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts_few.jsonl"
    path.write_text('{"turns": ["ab", "never"]}\n\n{"prompt": "c"}\n{"turns": ["d"]}\n')
    assert prompt_sets([path], CharTokenizer()) == {"few": [[1, 97, 98, 2], [1, 99, 2], [1, 100, 2]]}
    assert prompt_sets([path], CharTokenizer(), limit=1) == {"few": [[1, 97, 98, 2]]}
    assert prompt_sets([path], CharTokenizer(), skip=1) == {"few": [[1, 99, 2], [1, 100, 2]]}
    assert prompt_sets([path], CharTokenizer(), skip=1, limit=1) == {"few": [[1, 99, 2]]}
    with pytest.raises(ValueError, match=r"skip is 3: .*prompts_few.jsonl has 3 prompts; lower --skip"):
        prompt_sets([path], CharTokenizer(), skip=3)
    assert (set_name(path), set_name(tmp_path / "own.jsonl")) == ("few", "own")
    with pytest.raises(
        ValueError, match=r"gone.jsonl: cannot be read \(No such file or directory\); name a JSONL file"
    ):
        prompt_sets([tmp_path / "gone.jsonl"], CharTokenizer())
    path.write_text('{"turns": ["ab"]}\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=r"prompts_few.jsonl:2: has no prompt"):
        prompt_sets([path], CharTokenizer())


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
        ("measure_tau.py", ["--threshold", "kl", "0.1"], "divergence 'kl' is not known; choose"),
        ("measure_tau.py", ["--temperature", "-1"], "temperature is -1.0"),
        ("measure_tau.py", ["--threshold", "js"], "--threshold js has no number: give"),
        ("measure_tau.py", ["--limit", "0"], "limit is 0: it must be an integer of at least 1; leave"),
        ("measure_tau.py", ["--batch-size", "0"], "batch_size is 0"),
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
    output = ["--output", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr("sys.argv", [name, "--prompts", str(prompts), *output, *wrong])
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "eval" / name), run_name="__main__")
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last and last.startswith(f"{name}: error: ")


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
        given = ["--prompts", str(prompts), "--output", str(rows), "--max-new-tokens", "8", *arguments]
        monkeypatch.setattr("sys.argv", [name, *given])
        runpy.run_path(str(ROOT / "eval" / name), run_name="__main__")
        return capsys.readouterr().out

    shown = run("measure_tau.py", "--threshold", "js", "0.1", "0.5", "--mode", "hybrid", "paper")
    assert [line.split("|")[3].strip() for line in shown.splitlines()[2:]] == (["lossless"] + ["js"] * 4) * 2
    assert len(rows.read_text().splitlines()) == 10
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
    }
