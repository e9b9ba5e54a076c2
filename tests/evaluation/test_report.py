"""The report from synthetic rows: what it says, that it says the same twice, and how it refuses."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_rows import LOSSLESS, Truth, cell_rows, fuzzy, typical, write_rows

from eagle_fsd.evaluation import plots
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Estimate
from eagle_fsd.evaluation.analysis.frontier import QUALITIES
from eagle_fsd.evaluation.analysis.points import TAU, panels
from eagle_fsd.evaluation.commands import exchange, report
from eagle_fsd.evaluation.commands.report import write_report
from eagle_fsd.evaluation.plots import style, varying_knobs
from eagle_fsd.evaluation.rows import Row

ROOT = Path(__file__).parents[2]
QUICK = Bootstrap(resamples=200)


def few(samples: int = 12, temperature: float = 0.6) -> list[dict[str, Any]]:
    """Plain-spoken rows: js at two thresholds, both faster than lossless and the second much worse."""
    setting: dict[str, Any] = {"temperature": temperature, "noise": 0.001}
    return [
        *cell_rows(LOSSLESS, Truth(), samples, **setting),
        *cell_rows(fuzzy(0.2), Truth(tau=2.4, log_p=-0.601, tv=0.01), samples, **setting),
        *cell_rows(fuzzy(0.5), Truth(tau=3.0, log_p=-0.8, tv=0.1), samples, **setting),
        *cell_rows(typical(0.3, 0.09), Truth(tau=2.2, log_p=-0.602, tv=0.02), samples, **setting),
    ]


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are slow, and have tests of their own."""
    monkeypatch.setattr(report, "plot_frontier", lambda *_: False)


def written(rows: list[dict[str, Any]], folder: Path, *asked: Any) -> str:
    found, sources = [Row.of(row) for row in rows], {"rows.jsonl": len(rows)}
    return write_report(found, folder, sources, QUICK, *asked).read_text(encoding="utf-8")


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    runpy.run_path(str(ROOT / "eval" / "report.py"), run_name="__main__")


def test_the_script_end_to_end_gives_the_same_files_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = write_rows(tmp_path / "rows.jsonl", [*few(temperature=0.0), *few()])
    with path.open("a") as file:
        file.write('{"key": "torn')
    folders = [tmp_path / "new" / "one", tmp_path / "two"]
    asked = ["--quality", "log_p", "strict", "--resamples", "200"]
    for folder in folders:
        run_script(monkeypatch, "--rows", str(path), "--output", str(folder), *asked)
        assert capsys.readouterr().out.strip() == str(folder / "report.md")
    names = sorted(file.name for file in folders[0].iterdir())
    assert names == ["frontier_log_p.png", "frontier_strict.png", "report.md"]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert (folders[0] / "frontier_log_p.png").read_bytes()[:4] == b"\x89PNG"
    text = (folders[0] / "report.md").read_text()
    for said in (
        "## SmolLM2-135M-Instruct, tree 16/5/8",
        "commit: 0123456789ab",
        "torch: 2.13.0",
        "python eval/sweep.py --output runs/sweep",
        "![log p per token against tokens/s / lossless](frontier_log_p.png)",
        "### ifeval, temperature 0.6",
        "Version 1, top-p 0.9, top-k 50, at most 256 new tokens.",
        "| js 0.2 hybrid | 12 | 12 |",
        "## What the data cannot say",
        "at temperature 0 that is every relaxed rule",
    ):
        assert said in text, said
    assert str(tmp_path) not in text


def test_a_place_that_cannot_be_written_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = write_rows(tmp_path / "rows.jsonl", few())
    monkeypatch.setattr(report, "write_report", lambda *_: pytest.fail("the work was begun"))
    with pytest.raises(SystemExit, match="2"):
        run_script(monkeypatch, "--rows", str(path), "--output", str(path))
    assert f"--output names {path}, where nothing can be written" in capsys.readouterr().err
    monkeypatch.setattr(exchange, "panels", lambda *_: pytest.fail("the work was begun"))
    with pytest.raises(SystemExit, match="2"):
        exchange.main(["--rows", str(path), "--plot", str(tmp_path)])
    assert f"--plot names {tmp_path}, which is a folder" in capsys.readouterr().err


def test_winners_at_a_glance(tmp_path: Path, no_plots: None) -> None:
    text = written(few(40), tmp_path, ["log_p"], TAU)
    titles, _, glance = next(
        text.splitlines()[place : place + 3]
        for place, line in enumerate(text.splitlines())
        if line.startswith("| fastest: tau / lossless | at most 0.5 % of log p lost |")
    )
    assert titles.endswith("| at most 5 % of log p lost |")
    cells = [cell.strip() for cell in glance.split("|")[1:-1]]
    assert cells[0] == "ifeval, temperature 0.6" and cells[4].startswith("js 0.2 hybrid: 1.2")
    assert " to " in cells[4] and cells[4].endswith(")")


def test_samplings_of_one_temperature_are_told_apart(tmp_path: Path, no_plots: None) -> None:
    rows = few(12)
    for number, other in enumerate(({"top_p": 1.0, "top_k": 0}, {"min_p": 0.1})):
        rows += [
            {**row, "key": f"{number}{row['key']}", "sampling": {**row["sampling"], **other}}
            for row in few(12)
        ]
    text = written(rows, tmp_path, ["log_p"], TAU)
    details = [line.removesuffix(".") for line in text.splitlines() if line.startswith("Version 1")]
    assert len(set(details)) == len(details) == 3
    glance = text[: text.index("###")].splitlines()
    for one in details:
        line = f"| ifeval, temperature 0.6, {one.lower()} | js 0.2 hybrid: "
        assert sum(each.startswith(line) for each in glance) == 1, line


def test_models_and_trees_become_sections(tmp_path: Path, no_plots: None) -> None:
    wide = {"total_tokens": 60, "depth": 6, "top_k": 10}
    rows = [*few(4), *cell_rows(LOSSLESS, Truth(), 4, tree=wide)]
    rows += [row | {"key": "0" * 16, "base_model": "Other"} for row in cell_rows(LOSSLESS, Truth(), 4)]
    rows += [row | {"key": "1" * 16, "weight_format": "int8"} for row in cell_rows(LOSSLESS, Truth(), 4)]
    text = written(rows, tmp_path)
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads[:4] == [
        "## Other, tree 16/5/8",
        "## SmolLM2-135M-Instruct, tree 16/5/8, weight_format float32",
        "## SmolLM2-135M-Instruct, tree 60/6/10",
        "## SmolLM2-135M-Instruct, tree 16/5/8, weight_format int8",
    ]
    assert "- rows: 16; cells: 4; samples: 4" in text and text.count("- rows: 4; cells: 1; samples: 4") == 3
    assert text.count("float32, weights int8, tree") == 1 and text.count("float32, tree") == 3


def test_a_sweep_that_another_checkout_went_on_with_is_one_section(tmp_path: Path, no_plots: None) -> None:
    """Its rows have the same cells, but another folder's name for the head."""
    rows = few(12)
    moved = [*rows[:6], *(row | {"ea_model": "/elsewhere/head"} for row in rows[6:])]
    assert rows[5]["rule"] == rows[6]["rule"] == LOSSLESS
    assert written(moved, tmp_path / "moved") == written(rows, tmp_path / "whole")


def test_gaps_are_said(tmp_path: Path, no_plots: None) -> None:
    rows = [*cell_rows(LOSSLESS, Truth(), 40), *cell_rows(fuzzy(0.2), Truth(), 15)]
    rows += cell_rows(typical(0.3, 0.09), Truth(), range(50, 55))
    rows += [row | {"commit": "other", "threads": 16} for row in cell_rows(fuzzy(0.5), Truth(), 40)]
    rows += cell_rows(fuzzy(0.5), Truth(), 3, task="gsm8k")
    text = written(rows, tmp_path)
    for said in (
        "No lossless rows, so nothing to compare with: gsm8k, temperature 0.6.",
        "2 of 4 rules lack samples that lossless has; the least has 0 pairs.",
        "Intervals over fewer than 30 pairs are rough; the least number here is 15.",
        "Rows come from several machines, runtimes, thread counts or batch sizes.",
        "Rows were made with more than one commit.",
    ):
        assert said in text, said
    assert "more than one torch" not in text
    clean = written(few(40), tmp_path)
    assert "lack samples" not in clean and "rough" not in clean and "several machines" not in clean


def test_an_estimate_is_written_with_its_interval() -> None:
    assert f"{Estimate(1.154, 1.128, 1.2, 9):.2f}" == "1.15 (1.13 to 1.20)"
    assert f"{Estimate(1.154, None, None, 1):.2f}" == "1.15"


# --- plots ---


def test_families_differ_without_colour() -> None:
    looks = {(look["marker"], look["linestyle"]) for look in map(style, range(40))}
    assert len(looks) == 40


def test_the_legend_of_a_single_panel_is_inside_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, _: drawn.append(figure))
    rules = [LOSSLESS, typical(0.3, 0.09), fuzzy(0.2, price=1.0, cost="kl"), fuzzy(0.2, min_gain=0.7)]
    rows = [Row.of(row) for rule in rules for row in cell_rows(rule, Truth(tv=0.05), 12)]
    assert plots.plot_frontier(panels(rows, QUICK), QUALITIES["law_tv"], TAU, tmp_path / "a.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 and legend.x1 <= figure.bbox.x1


def test_labels_name_the_knob_that_changes() -> None:
    rows = [Row.of(row) for e in (0.3, 0.5) for row in cell_rows(typical(e, 0.09), Truth(), 2)]
    rows += [Row.of(row) for row in cell_rows(fuzzy(0.2), Truth(), 2)]
    points = panels(rows, QUICK)[0].points
    assert [varying_knobs(point, points[1:]) for point in points[1:]] == ["0.3", "0.5"]
    assert varying_knobs(points[0], points[:1]) == "0.2"
    assert varying_knobs(points[1], points[1:2]) == "0.3/0.09"


def test_a_plot_needs_something_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from eagle_fsd.evaluation.plots import plot_frontier

    alone = panels([Row.of(row) for row in cell_rows(LOSSLESS, Truth(), 3)], QUICK)
    assert plot_frontier(alone, QUALITIES["log_p"], TAU, tmp_path / "x.png") is False
    assert list(tmp_path.iterdir()) == []


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--quality", "beauty"], "quality is 'beauty': it must be one of log_p, law_tv"),
        (["--resamples", "5"], "resamples is 5: it must be an integer of at least 100"),
        (["--rows", "none.jsonl"], "none.jsonl"),
        (["--rows", "EMPTY"], "no rows in empty.jsonl: a report needs raw rows"),
        (["--rows", "BROKEN"], "broken.jsonl:1: has no 'key'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"task": "ifeval"}\n')
    names = {"EMPTY": str(tmp_path / "empty.jsonl"), "BROKEN": str(tmp_path / "broken.jsonl")}
    rows = ["--rows", str(write_rows(tmp_path / "rows.jsonl", few(3)))]
    output = ["--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        run_script(monkeypatch, *rows, *output, *(names.get(argument, argument) for argument in arguments))
    last = capsys.readouterr().err.splitlines()[-1]
    assert complaint in last and last.startswith("report.py: error: ")
    assert not (tmp_path / "out").exists()
