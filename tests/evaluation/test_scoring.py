"""Raw rows and their scores: made from the text alone, resumed, replaced as a whole, summed up by cell."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.evaluation.commands import score as scoring
from eagle_fsd.evaluation.commands.score import score_file, score_rows
from eagle_fsd.evaluation.tasks import TASKS

ROOT = Path(__file__).parents[2]
LOSSLESS = {"name": "lossless"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of two tasks: what is n + n, for n from 0 to 4; and a prompt of MT-Bench."""
    folder = tmp_path / "data"
    folder.mkdir()
    sums = [json.dumps({"question": f"{n} + {n}?", "answer": f"#### {2 * n}"}) for n in range(5)]
    (folder / "gsm8k.jsonl").write_text("\n".join(sums))
    (folder / "mt_bench.jsonl").write_text(json.dumps({"question_id": 81, "turns": ["Write."]}))
    return folder


def row(sample: int, text: str, **fields: Any) -> dict[str, Any]:
    return {
        "key": "a",
        "task": "gsm8k",
        "version": 1,
        "sample": str(sample),
        "rule": LOSSLESS,
        "sampling": {"temperature": 0.6},
        "text": text,
        "new_tokens": 10,
        "finish_reason": "stop",
        **fields,
    }


ROWS = [
    row(3, "The answer is 6."),
    row(1, "It is 2"),
    row(2, "The answer is 5, no, 4"),
    row(0, "", finish_reason="length", new_tokens=30),
]
SCORES = [(1.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 0.0)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(one["scores"]["strict"], one["scores"]["flexible"]) for one in rows]


def test_rows_get_their_samples_scores_and_lose_nothing(data: Path) -> None:
    old = [{**one, "scores": {"strict": 0.5}} for one in ROWS]
    found = list(score_rows(old, data))
    assert pairs(found) == SCORES
    assert [{**one, "scores": None} for one in found] == [{**one, "scores": None} for one in old]
    assert old[0]["scores"] == {"strict": 0.5}
    prompts = [row(81, "x", task="mt_bench")]
    assert [one["scores"] for one in score_rows(prompts, data)] == [{}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "gsm9k"}, r"rows:2: task is 'gsm9k': it must be one of"),
        ({"version": 2}, r"rows:2: version is 2: gsm8k is version 1 here"),
        ({"version": None}, r"rows:2: version is None"),
        ({"sample": "5"}, r"rows:2: sample is '5': gsm8k has no such sample where"),
        ({"text": None}, r"rows:2: text is None: a row needs its generated text"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(fields: dict[str, Any], said: str, data: Path) -> None:
    with pytest.raises(ValueError, match=said):
        list(score_rows([ROWS[0], {**ROWS[1], **fields}], data))


def test_rows_of_an_older_version_are_not_scored_by_a_newer_task(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "gsm8k", replace(TASKS["gsm8k"], version=2))
    with pytest.raises(ValueError, match=r"rows:1: version is 1: gsm8k is version 2 here, .*; generate"):
        list(score_rows(ROWS, data))


def test_answers_to_mere_prompts_have_no_score(data: Path) -> None:
    rows = list(score_rows([row(0, "x", task="prompts/a+b"), ROWS[0]], data))
    assert [one["scores"] for one in rows] == [{}, {"strict": 1.0, "flexible": 1.0}]


def test_scores_are_not_written_to_a_compressed_file(data: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"scored\.jsonl\.gz: scored rows are written uncompressed; name"):
        (score_file(source, tmp_path / "scored.jsonl.gz", data))
    assert not (tmp_path / "scored.jsonl.gz").exists()


def test_the_file_itself_is_replaced_as_a_whole(data: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    found = score_file(path, path, data)
    assert read(path) == found and pairs(found) == SCORES
    before = path.read_bytes()
    assert (score_file(path, path, data)) == found and path.read_bytes() == before
    broken = write(tmp_path / "rows.jsonl", [*ROWS, {**ROWS[0], "sample": "9"}]).read_bytes()
    with pytest.raises(ValueError, match=r"rows.jsonl:5: sample is '9'"):
        (score_file(path, path, data))
    assert path.read_bytes() == broken and sorted(p.name for p in tmp_path.iterdir()) == [
        "data",
        "rows.jsonl",
    ]


@pytest.mark.parametrize("name", ["read_jsonl", "score_rows"])
def test_a_file_that_grows_meanwhile_is_not_replaced(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where the row comes right after the last one is read: it would be lost."""
    path = write(tmp_path / "rows.jsonl", ROWS)
    work = getattr(scoring, name)

    def grow(*arguments: Any, **options: Any) -> Any:
        yield from work(*arguments, **options)
        with path.open("a") as file:
            file.write(json.dumps(ROWS[0]) + "\n")

    monkeypatch.setattr(scoring, name, grow)
    with pytest.raises(ValueError, match=r"rows.jsonl: has grown meanwhile"):
        score_file(path, path, data)
    assert len(read(path)) == len(ROWS) + 1 and "scores" not in path.read_text()


def test_a_torn_last_row_is_passed_over(data: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS[:2])
    with source.open("a") as file:
        file.write(json.dumps(ROWS[2])[:-5])
    assert pairs(score_file(source, tmp_path / "scored.jsonl", data)) == SCORES[:2]


def test_the_script_end_to_end(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)

    def script(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["score.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "eval" / "score.py"), run_name="__main__")

    script("--rows", source, "--data", data, "--output", tmp_path / "scored.jsonl")
    assert capsys.readouterr().out == f"4 rows scored: {tmp_path / 'scored.jsonl'}\n"
    assert source.read_text().count("scores") == 0 and pairs(read(tmp_path / "scored.jsonl")) == SCORES
    script("--rows", source, "--data", data)
    assert pairs(read(source)) == SCORES
    for arguments, said in (
        (("--rows", tmp_path / "none.jsonl"), "none.jsonl: cannot be read"),
        (("--rows", source, "--data", tmp_path), "has no gsm8k_test.jsonl or gsm8k.jsonl"),
    ):
        with pytest.raises(SystemExit) as end:
            script(*arguments)
        assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
