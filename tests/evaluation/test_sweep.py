"""The sweep's runner: rows of every cell and sample, made once, resumed, the same whatever the batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import Letters, prompts_of, tiny_head, tiny_model
from support.whole_distribution import distances, path_distributions

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified
from eagle_fsd.acceptance.other_rules import Cactus, SGLang
from eagle_fsd.acceptance.rule_names import describe, parse_rule
from eagle_fsd.core.config import PAPER
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.points import panels
from eagle_fsd.evaluation.commands import sweep as script
from eagle_fsd.evaluation.commands.sweep import GRIDS
from eagle_fsd.evaluation.measure import sweep
from eagle_fsd.evaluation.measure.observers import DistanceMeter, likelihoods
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, encoded, run, turns
from eagle_fsd.evaluation.rows import read_raw_rows, read_rows
from eagle_fsd.evaluation.tasks import Sample, Task
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.chat import encode_as_trained

WARM = SamplingConfig(0.9, 20, 0.95)
TREE = TreeConfig(8, 3, 3)


def engine() -> EagleFSD:
    made = EagleFSD(TargetModel(tiny_model()), tiny_head(), Letters())  # type: ignore[arg-type]
    made.target.model.generation_config.eos_token_id = [90, 91]
    return made


def questions(count: int, name: str = "toy", first: int = 0) -> Questions:
    """Prompts of other lengths, scored by the share of letters up to `m`."""
    task = Task(
        name=name,
        version=3,
        files=("toy.jsonl",),
        ask=lambda row, place: (str(place), [], {}),
        max_new_tokens=10,
        judge=lambda reference, text: {"early": sum(letter <= "m" for letter in text) / max(len(text), 1)},
    )
    samples = [Sample(str(first + place), (), {}) for place in range(count)]
    prompts = prompts_of([3 + place % 5 for place in range(first + count)])[first:]
    return Questions(task, samples, prompts, range(first, first + count))


def cells(asked: Questions, *rules: AcceptanceRule, sampling: SamplingConfig = WARM) -> list[Cell]:
    return [Cell(asked, rule, sampling, TREE, 10) for rule in rules]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left = [
        {k: v for k, v in row.items() if k not in ("seconds", "batch_size", "log_p", "law")} for row in rows
    ]
    return sorted(left, key=lambda row: (row["key"], row["sample"]))


def test_every_row_is_what_generate_gives(tmp_path: Path) -> None:
    """Tokens, text, score, statistics; what the target says of them; and the report's reader takes them."""
    model, rules = engine(), (Lossless(), Fuzzy(0.5, mode="paper"), Cactus(0.3))
    run(model, cells(questions(4), *rules), tmp_path / "rows.jsonl", 1, {"commit": "abc"})
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 12 and len({row["key"] for row in rows}) == 3
    assert len(read_raw_rows([tmp_path / "rows.jsonl"])[tmp_path / "rows.jsonl"]) == 12
    for row in rows:
        place = int(row["sample"])
        rule = next(rule for rule in rules if describe(rule) == row["rule"])
        prompt = questions(4).prompts[place]
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=10,
            rule=rule,
            tree=TREE,
            seed=[(0, place)],
            temperature=0.9,
            top_k=20,
            top_p=0.95,
        )
        assert row["token_ids"] == output.new_tokens[0] and row["seed"] == place
        assert row["text"] == Letters().decode(row["token_ids"])
        assert row["scores"] == {"early": sum(x <= "m" for x in row["text"]) / len(row["text"])}
        assert (row["steps"], row["fuzzy_accepts"]) == (output.stats[0].steps, output.stats[0].fuzzy_accepts)
        assert row["log_p"] < 0 < row["seconds"] and row["commit"] == "abc"
        if rule == Lossless():
            assert row["law"] == {"kl": 0.0, "tv": 0.0}
    assert any(row["law"]["tv"] > 0.01 for row in rows)


def test_the_law_is_summed_over_the_tokens_that_were_emitted(tmp_path: Path) -> None:
    """Step by step, against distances taken one node at a time; also where the limit cuts a step short."""
    model, rule = engine(), Fuzzy(10.0, "tv", mode="paper", child="likeliest")
    wanted = {"kl": 0.0, "tv": 0.0}
    counts: list[int] = []

    def watch(verified: Verified, verdict: Verdict, emitted: dict[int, int]) -> None:
        counts.append(emitted[0])
        law, p = path_distributions(verified, verdict, PAPER)
        for level in range(emitted[0]):
            kl, tv = distances(law[0, level], p[0, level])
            wanted["kl"], wanted["tv"] = wanted["kl"] + float(kl), wanted["tv"] + float(tv)
        meter(verified, verdict, emitted)

    meter = DistanceMeter(PAPER, 1)
    prompt = torch.tensor(prompts_of([5]))
    options = {"max_new_tokens": 11, "rule": rule, "tree": TREE, "temperature": 1.0, "seed": 0}
    output = model.generate(prompt, **options, observer=watch)
    assert sum(counts) == len(output.new_tokens[0]) == 11 and max(counts) > 1
    found = meter.row(0)["law"]
    assert found["tv"] == pytest.approx(wanted["tv"], rel=1e-4) and found["tv"] > 0.1
    assert found["kl"] == pytest.approx(wanted["kl"], rel=1e-4)


@pytest.mark.parametrize("expected", [(), (Fuzzy(0.3),)], ids=["own texts", "same trees"])
def test_log_p_is_a_plain_forwards(expected: tuple[AcceptanceRule, ...], tmp_path: Path) -> None:
    """The verified trees say it, also of rows that end before others, or in the middle of a step."""
    model, asked = engine(), questions(5)
    rule = Lossless(share_noise=False) if expected else Fuzzy(0.6)
    run(model, cells(asked, rule), tmp_path / "r.jsonl", 3, {}, expected)
    rows = {row["sample"]: row for row in read_rows(tmp_path / "r.jsonl")}
    texts = [rows[sample.id]["token_ids"] for sample in asked.samples]
    assert len({len(text) for text in texts}) > 1
    wanted = likelihoods(model.target, asked.prompts, texts)
    found = [rows[sample.id]["log_p"] for sample in asked.samples]
    assert found == pytest.approx(wanted, rel=1e-4)


def test_greedy_rows_have_no_kl_where_it_is_infinite(tmp_path: Path) -> None:
    model = engine()
    run(
        model,
        cells(questions(2), Fuzzy(10.0, mode="paper"), sampling=SamplingConfig()),
        tmp_path / "r.jsonl",
        1,
        {},
    )
    for row in read_rows(tmp_path / "r.jsonl"):
        assert row["law"]["kl"] is None and row["law"]["tv"] == row["fuzzy_accepts"]


def test_fuzzy_accepts_stand_where_the_target_would_have_written_another_token(tmp_path: Path) -> None:
    """Greedy, in batches: at these places, and no others, a token is not the argmax of the target."""
    model, asked = engine(), questions(4)
    run(model, cells(asked, Fuzzy(10.0), sampling=SamplingConfig()), tmp_path / "r.jsonl", 3, {})
    found = 0
    for row in read_rows(tmp_path / "r.jsonl"):
        place = [sample.id for sample in asked.samples].index(row["sample"])
        prompt, ids = asked.prompts[place], row["token_ids"]
        with torch.inference_mode():
            logits = model.target.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        others = [
            n
            for n, (token, best) in enumerate(zip(ids, logits.argmax(-1).tolist(), strict=True))
            if token != best
        ]
        assert row["fuzzy_at"] == others and len(others) == row["fuzzy_accepts"]
        found += len(others)
    assert found > 3


@pytest.mark.parametrize("batch_size", [2, 3, 5])
def test_rows_do_not_depend_on_the_batch(tmp_path: Path, batch_size: int) -> None:
    model, rules = engine(), (Lossless(), Fuzzy(0.4), SGLang(0.2))
    for size in (1, batch_size):
        run(model, cells(questions(5), *rules), tmp_path / f"{size}.jsonl", size, {})
    alone, together = (read_rows(tmp_path / f"{size}.jsonl") for size in (1, batch_size))
    assert without_times(alone) == without_times(together)
    laws = [{(row["key"], row["sample"]): row["law"]["tv"] for row in rows} for rows in (alone, together)]
    assert laws[0] == pytest.approx(laws[1], abs=1e-4)


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle, a torn line, then the same command: every row once, and none made twice."""
    model, wanted, output = engine(), cells(questions(3), Lossless(), Fuzzy(0.4)), tmp_path / "rows.jsonl"
    asked: list[list[int]] = []
    original = sweep.answer

    def answer(*arguments: Any) -> Any:
        asked.append(list(arguments[2]))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(sweep, "answer", answer)
    with pytest.raises(KeyboardInterrupt):
        run(model, wanted, output, 1, {})
    assert len(read_rows(output)) == 3
    with output.open("ab") as file:
        file.write(b'{"key": "ab')
    asked[:] = [[]] * 10
    run(model, wanted, output, 1, {})
    assert len(asked) == 13  # the three that were missing
    rows = read_rows(output)
    assert len({(row["key"], row["sample"]) for row in rows}) == len(rows) == 6
    run(model, cells(questions(4), Lossless()), output, 1, {})  # one more sample
    assert len(asked) == 14 and len(read_rows(output)) == 7


def test_what_a_process_does_once_is_in_no_rows_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that does not count comes before the first one of a run, if there is any."""
    model, wanted, asked = engine(), cells(questions(2), Lossless(), Fuzzy(0.4)), list[dict[str, Any]]()
    original = sweep.prompt_sets.answer

    def answer(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return original(*given, **options)

    monkeypatch.setattr(sweep.prompt_sets, "answer", answer)
    monkeypatch.setattr(sweep, "WARM_UP", 3)

    def calls(output: str, **options: Any) -> list[int]:
        asked.clear()
        run(model, wanted, tmp_path / output, 1, {}, **options)
        return [one["max_new_tokens"] for one in asked]

    assert calls("rows.jsonl") == [3, 10, 10, 10, 10] and len(read_rows(tmp_path / "rows.jsonl")) == 4
    assert calls("rows.jsonl") == []  # nothing was missing
    assert calls("untimed.jsonl", timed=False) == [10] * 4
    assert without_times(read_rows(tmp_path / "untimed.jsonl")) == without_times(
        read_rows(tmp_path / "rows.jsonl")
    )
    wanted = cells(questions(2), Lossless(share_noise=False))
    assert calls("expected.jsonl", expected=[Lossless(), Fuzzy(0.4)]) == [10] * 2


def test_other_prompts_under_the_same_names_are_refused(tmp_path: Path) -> None:
    model, output, asked = engine(), tmp_path / "rows.jsonl", questions(2)
    run(model, cells(asked, Lossless()), output, 1, {})
    before = output.read_bytes()
    other = replace(asked, prompts=[asked.prompts[0], [*asked.prompts[1], 5]])
    with pytest.raises(
        ValueError, match=r"rows\.jsonl: sample '1' of toy was another prompt when .* another o"
    ):
        run(model, cells(other, Lossless(), Fuzzy(0.4)), output, 1, {})
    assert output.read_bytes().startswith(before)
    rows = [{k: v for k, v in row.items() if k != "prompt"} for row in read_rows(output)]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(model, cells(other, Lossless()), output, 1, {})  # rows of before prompts were kept
    assert len(read_rows(output)) == len(rows)


def test_rows_say_the_batch_that_was_asked_for(tmp_path: Path) -> None:
    """Also those of the last, smaller batch: they are of the same run, and comparable."""
    run(engine(), cells(questions(5), Lossless()), tmp_path / "rows.jsonl", 2, {})
    assert [row["batch_size"] for row in read_rows(tmp_path / "rows.jsonl")] == [2] * 5


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            "a letter\nand its end",
            r"rows\.jsonl: ends in b'and its end', which is not a row; name another output",
        ),
        ('{"key": "a", "tau": 2}\n', r"rows\.jsonl:1: has no 'sample': these are other rows; name another"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str, line: str) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text(content)
    with pytest.raises(ValueError, match=line):
        run(engine(), cells(questions(1), Lossless()), output, 1, {})
    assert output.read_text() == content


def test_another_head_is_another_cell(tmp_path: Path) -> None:
    (cell,) = cells(questions(1), Lossless())
    other = EagleFSD(engine().target, tiny_head(seed=5), Letters())  # type: ignore[arg-type]
    mine, its = (cell.key(one, one.identity()) for one in (engine(), other))
    assert mine != its
    for weights, known in ((engine().head, mine), (other.head, its)):  # wherever the files are
        moved = EagleFSD(engine().target, weights, Letters(), "elsewhere/target", "elsewhere/head")  # type: ignore[arg-type]
        assert cell.key(moved, moved.identity()) == known
    assert replace(cell, seed=1).key(engine(), engine().identity()) == mine  # rows carry their seed


def test_another_weight_format_is_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded weights write other texts. Rows of plain weights keep their key, and do not say more."""
    asked, output = cells(questions(2), Lossless()), tmp_path / "rows.jsonl"
    run(engine(), asked, output, 1, {})
    monkeypatch.setattr(EagleFSD, "weight_format", "int8")
    run(engine(), asked, output, 1, {})
    run(engine(), asked, output, 1, {})
    plain, rounded = (read_rows(output)[part] for part in (slice(2), slice(2, None)))
    assert all("weight_format" not in row for row in plain) and len(rounded) == 2
    assert {row["runtime"] for row in plain} == {"torch"}  # on which seconds depend
    assert [row["weight_format"] for row in rounded] == ["int8"] * 2
    assert {row["key"] for row in plain}.isdisjoint(row["key"] for row in rounded)
    found = panels(read_raw_rows([output])[output], Bootstrap(100))
    assert [panel.row.weight_format for panel in found] == ["float32", "int8"]


def test_cells_take_turns() -> None:
    """All rules see a batch before the next one; each is first in turn; tasks one after the other."""
    first, second = questions(3, "a"), questions(1, "b")
    rules = [Lossless(), Fuzzy(0.1), Fuzzy(0.2)]
    order = [
        (cell.questions.task.name, list(places), rules.index(cell.rule))
        for cell, places in turns([*cells(first, *rules), *cells(second, *rules)], 1)
    ]
    assert order == [
        *(("a", [0], n) for n in (0, 1, 2)),
        *(("a", [1], n) for n in (1, 2, 0)),
        *(("a", [2], n) for n in (2, 0, 1)),
        *(("b", [0], n) for n in (0, 1, 2)),
    ]


def test_a_samples_seed_does_not_depend_on_what_was_left_out(tmp_path: Path) -> None:
    model = engine()
    run(model, cells(questions(4), Lossless()), tmp_path / "all.jsonl", 2, {})
    run(model, cells(questions(2, first=2), Lossless()), tmp_path / "late.jsonl", 2, {})
    late = without_times(read_rows(tmp_path / "late.jsonl"))
    assert late == without_times(read_rows(tmp_path / "all.jsonl"))[2:]


def test_sets_asked_together_keep_their_names_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample's draws do not depend on how many samples the other sets have."""
    monkeypatch.setattr(sweep, "encode_as_trained", lambda _, messages: [7])
    paths = [tmp_path / f"prompts_{name}.jsonl" for name in "ab"]

    def asked(count: int, *files: Path) -> Questions:
        for path in files:
            path.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(count)))
        return Questions.of_prompts(files, engine(), None, 0, 8)

    few, more = (asked(count, *paths) for count in (2, 3))
    assert few.task.name == "prompts/a+b" and len(few.prompts) == 4
    assert [one.id for one in few.samples] == ["a/0", "a/1", "b/0", "b/1"]
    seeds = [dict(zip([s.id for s in one.samples], one.numbers, strict=True)) for one in (few, more)]
    assert seeds[0].items() <= seeds[1].items() and len(set(more.numbers)) == 6
    alone = asked(2, paths[0])
    assert alone.task.name == "prompts/a" and [one.id for one in alone.samples] == ["0", "1"]


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_rules_and_begin_lossless(name: str) -> None:
    rules = [parse_rule(word) for word in GRIDS[name]]
    assert rules[0] == Lossless() and len(set(rules)) == len(rules)


def test_the_frontier_has_what_must_be_compared() -> None:
    """At least eight thresholds of js and reverse_kl in both modes, and five settings of each other rule."""
    found: dict[tuple[str, ...], int] = {}
    for word in GRIDS["frontier"]:
        described = describe(parse_rule(word))
        family = tuple(str(described[key]) for key in ("name", "divergence", "mode") if key in described)
        family = family[:1] if described["name"] != "fuzzy" else family
        found[family] = found.get(family, 0) + 1
    for divergence in ("js", "reverse_kl"):
        for mode in ("hybrid", "paper"):
            assert found["fuzzy", divergence, mode] >= 8
    assert all(
        found[name,] >= 5 for name in ("typical", "relaxed_topk", "cactus", "ensemble", "fly", "sglang")
    )


def test_the_script_sweeps_a_file_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts_a.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(3))
    )
    monkeypatch.setattr(sweep, "encode_as_trained", lambda _, messages: [len(messages[0]["content"]), 7])
    monkeypatch.setattr(script, "load_engine", lambda _: engine())
    argv = f"--prompts {tmp_path}/prompts_a.jsonl --skip 1 --rules lossless js:0.3:paper js:0.30:mode=paper"
    argv += " --sampling 0 0.6/50/0.9 0.60/50/0.9 --tree 6/2/3 --max-new-tokens 5 --batch-size 2"
    script.main(f"{argv} --output {tmp_path}/out/rows.jsonl".split())
    (rows,) = read_raw_rows([tmp_path / "out" / "rows.jsonl"]).values()
    assert len(rows) == 2 * 2 * 2 and {row.task for row in rows} == {"prompts/a"}
    assert {row.sample for row in rows} == {"1", "2"} == {str(row.seed) for row in rows}
    assert {row.sampling for row in rows} == {SamplingConfig(), SamplingConfig(0.6, 50, 0.9)}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "nothing to sweep: name --tasks"),
        ("--tasks chess", "task is 'chess': it must be one of gsm8k"),
        ("--tasks ifeval --rules jss:0.3", "rule is 'jss:0.3'"),
        ("--tasks ifeval --sampling warm", "sampling is 'warm': it must be temperature"),
        ("--tasks ifeval --sampling 1/2/3/4", "sampling is '1/2/3/4'"),
        ("--tasks ifeval --tree 6", "tree is '6'"),
        ("--tasks ifeval --batch-size 0", "batch_size is 0"),
        ("--tasks ifeval --limit 0", "limit is 0"),
        ("--tasks ifeval --data /nowhere", "/nowhere"),
        ("--tasks ifeval --skip -1", "skip is -1"),
        ("--prompts a/prompts_x.jsonl b/x.jsonl", "x.jsonl: another file is the prompt set 'x' as well"),
    ],
)
def test_mistakes_are_one_line(
    arguments: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "load_engine", lambda _: engine())
    with pytest.raises(SystemExit) as ending:
        script.main(f"{arguments} --output {tmp_path}/rows.jsonl".split())
    assert ending.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "rows.jsonl").exists()


class Plain:
    """The tokenizer of a base model: it has no chat template."""

    chat_template = None

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}


def test_a_base_model_is_asked_in_plain_text() -> None:
    """It continues the messages, a blank line between two."""
    model = engine()
    model.tokenizer = Plain()  # type: ignore[assignment]
    sample = Sample("0", ({"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1="}), {})
    assert "".join(map(chr, encoded([sample], model)[0])) == "Sum.\n\n1+1="


def test_a_sample_that_does_not_fit_is_named_before_anything_runs() -> None:
    model = engine()
    model.tokenizer = Plain()  # type: ignore[assignment]
    fits, long = (
        Sample(name, ({"role": "user", "content": "a" * size},), {})
        for name, size in (("set/6", 255), ("set/7", 256))
    )
    assert list(map(len, encoded([fits], model))) == [255]
    with pytest.raises(ValueError, match="sample 'set/7' has 256 tokens: the target has 256 positions"):
        encoded([fits, long], model)


def test_half_a_character_is_refused_in_one_line() -> None:
    """As by `generate`, whether the target takes chats or continues text."""
    for template in ("yes", None):
        with pytest.raises(ValueError, match="not UTF-8 at character 1: retype it"):
            encode_as_trained(SimpleNamespace(chat_template=template), "a\ud800")  # type: ignore[arg-type]
