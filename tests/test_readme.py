"""README and docs/ say what is there: commands run, links lead somewhere, tables are their sources'."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd import EagleFSD, chat, generate, hub
from eagle_fsd.acceptance.calibration import (
    CalibratedThreshold,
    Calibration,
    format_sampling,
    read_calibrations,
)
from eagle_fsd.autotune import step_costs
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.core.checks import override
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.evaluation.measure.speed import PEERS, parse_own
from eagle_fsd.evaluation.repeating_prompts import PASSAGES
from eagle_fsd.evaluation.weight_formats import command as weight_formats
from eagle_fsd.hub import load_head
from eagle_fsd.hub.loading import pair
from eagle_fsd.hub.loading.options import LoadOptions
from eagle_fsd.hub.resolve import TargetSource, resolve_head, resolve_target
from eagle_fsd.runtime import timing

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LOGS = [
    ROOT / name for name in ("eval/SPEED.md", "eval/RUNTIMES.md", "eval/QUALITY.md", "train/EXPERIMENTS.md")
]
CARDS = [*sorted((ROOT / "weights").rglob("README.md")), *sorted((ROOT / "eval" / "results").rglob("*.md"))]
WIDTH, LENGTH = 110, 130  # characters of a line, lines of the README


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.DOTALL)


def commands() -> list[str]:
    """Return the commands of all pages' shell blocks, each once, without their comments."""
    lines = "\n".join("".join(blocks(page, "bash")) for page in PAGES).replace("\\\n", " ").splitlines()
    without_comments = (re.sub(r"\s+#.*", "", line) for line in lines if line.strip())
    return list(dict.fromkeys(re.sub(r"\s+", " ", line) for line in without_comments))


COMMANDS = commands()
MAKE = [line for line in COMMANDS if line.startswith("make ")]
GENERATE = [line for line in COMMANDS if "python -m eagle_fsd.generate" in line]
SCRIPTS = [line for line in COMMANDS if re.match(r"python (train|eval)/(?!harness\.py)", line)]
HARNESS = [line for line in COMMANDS if line.startswith("python eval/harness.py ")]  # see test_harness
DRAWN = [line for line in COMMANDS if line.startswith("python docs/")]  # see the tests of what they write
STORAGE = [line for line in COMMANDS if line == "python -m eagle_fsd.storage"]
SERVE = [
    line for line in COMMANDS if re.match(r"(python -m eagle_fsd\.serve|curl) ", line)
]  # see tests/serving
VLLM = [  # see tests/integrations/test_vllm_engine.py
    line for line in COMMANDS if re.match(r"python -m (vllm\.|pytest .*/test_vllm)", line)
]
CHAT = [line for line in COMMANDS if line.startswith("python -m eagle_fsd.chat")]
SET_UP = [
    line for line in COMMANDS if re.match(r"pip (un)?install |source |echo '[^|]*' > prompts\.jsonl$", line)
]

TOY = {  # sizes at which a command does all that it does, in seconds; a later flag overrides the page's
    "synthesize": "--self-prompts 5 --max-new-tokens 6",
    "train_head": "--minutes 0 --epochs 1 --held-out 2 --batch-tokens 64",
    "extract_features": "",
    "rank_tokens": "",
    "evaluate_head": "--max-new-tokens 6",
    "measure_tau": "--prompts prompts.jsonl --max-new-tokens 6 --temperature 0",
    "check_greedy": "--max-new-tokens 6 --tree 16/5/8",
    "publish": "",
    "export_vllm": "--head-only",
    "speed": "--prompts prompts.jsonl --skip 0 --limit 1 --methods hf plain lossless --max-new-tokens 4",
    "limits": "--context 16 --nodes 4",
    "weight_formats": "--prompts prompts.jsonl --limit 1 --max-new-tokens 4 --formats torch/float32",
    "sweep": "--prompts prompts.jsonl --skip 0 --max-new-tokens 4",
    "report": "",
    "exchange": "--resamples 100",
    "calibrate": "--max-new-tokens 6",
    "repeating_prompts": "--data toy_data --count 3",
}


def write_toy_data(folder: Path) -> None:
    """Write a row of each of the files of which prompts that repeat themselves are made."""
    folder.mkdir()
    text = "Water falls as rain. " * 20
    rows = {
        "humaneval": {"entry_point": "f", "prompt": "def f():\n", "canonical_solution": f'    "{text}"\n'},
        "gsm8k_train": {"question": text, "answer": "It is wet. #### 1"},
        "p3_text": {"task": f"p3_{PASSAGES[0]}", "prompt": text},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")


def needed(lines: Sequence[str]) -> list[bool]:
    """Return which commands a quick run needs: the first of each script in train/, and what those read."""
    scripts = [line.split()[1] for line in lines]
    run = [
        script.startswith("train/") and script not in scripts[:place] for place, script in enumerate(scripts)
    ]
    for place in reversed(range(len(lines))):
        if found := re.search(r"--output (\S+)", lines[place]):
            name = re.compile(rf"{re.escape(found[1])}(?![\w.])")
            later = zip(lines[place + 1 :], run[place + 1 :], strict=True)
            run[place] |= any(is_run and name.search(line) for line, is_run in later)
    return run


class Parsed(Exception):
    """A script has read its arguments."""


def only_parse(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
    argparse.ArgumentParser.parse_known_args(parser, *given, **named)
    raise Parsed


def arguments(line: str) -> list[str]:
    return shlex.split(line.partition("eagle_fsd.generate")[2].partition(" > ")[0])


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    known = [*MAKE, *GENERATE, *SCRIPTS, *HARNESS, *DRAWN, *STORAGE, *SERVE, *VLLM, *CHAT, *SET_UP]
    assert [line for line in COMMANDS if line not in known] == []
    assert {"make demo", "make test"} <= set(MAKE)
    readme = "".join(blocks(README, "bash"))
    assert readme.count("python -m eagle_fsd.generate") == 3 and len(blocks(README, "python")) == 1


@pytest.mark.parametrize("line", MAKE)
def test_make_targets(line: str) -> None:
    """`make -n` says what would run; the demo's command must parse."""
    plan = subprocess.run(
        ["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if line == "make demo":
        (run,) = [
            step for step in plan.stdout.replace("\\\n", " ").splitlines() if "eagle_fsd.generate" in step
        ]
        assert build_parser().parse_args(arguments(run)).threshold > 0


def test_the_continuous_integration_runs_the_tests() -> None:
    assert re.search(r"^exec make (test|check)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def answer(line: str, *more: str) -> int:
    """Run a documented command on the engine that the tests share; returns its exit code."""
    return generate.main([*arguments(line), *more, "--max-new-tokens", "12"])


@pytest.mark.parametrize("line", GENERATE)
def test_generate_commands(
    line: str, smollm2: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(generate, "load_model", lambda args: smollm2)
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "Name a river."}\n{"question": "Why?"}\n')
    if line.startswith("echo "):
        said = shlex.split(line.partition("|")[0])[1]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{said}\n".encode())))
    # Measuring the fastest tree takes a minute or two; see the next test.
    tree = [] if "--total-tokens" in line else ["--total-tokens", "16"]
    assert answer(line, *tree) == 0
    assert capsys.readouterr().out.strip()


class Loading(Exception):
    """Raised where a model would be loaded: all that is checked before has passed."""


@pytest.mark.real
@pytest.mark.parametrize("line", GENERATE)
def test_the_flags_that_load_a_model_go_together(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the page names must not be there: the shipped head stands in for heads, a folder for models."""
    if "openvino" in line or "packed" in line:
        pytest.importorskip("openvino", reason="the command needs the extra openvino")

    def find(name: str, **_options: object) -> TargetSource:
        is_default = name == hub.DEFAULT_TARGET
        return resolve_target(name) if is_default else TargetSource(name, tmp_path)

    def load(*_given: object, **_options: object) -> None:
        raise Loading

    monkeypatch.setattr(pair, "resolve_head", lambda *_: resolve_head(None, hub.DEFAULT_TARGET))
    monkeypatch.setattr(pair, "resolve_target", find)
    monkeypatch.setattr(pair, "load_planned", load)
    args = build_parser().parse_args(arguments(line))
    args.verbose = False  # the level of the log would stay
    generation_options(args)
    with pytest.raises(Loading):
        generate.load_model(args)


def test_the_methods_of_the_speed_commands_are_read() -> None:
    """The commands run below with fewer methods."""
    races = [line.partition("--methods ")[2].partition(" --")[0] for line in SCRIPTS if "speed.py" in line]
    assert len(races) >= 4 and all(races)
    ours = [parse_own(name) for name in " ".join(races).split() if name not in PEERS]
    assert any(one.beside for one in ours) and any(one.alone for one in ours)


@pytest.mark.slow
def test_a_command_measures_its_tree(
    smollm2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "load_model", lambda args: smollm2)
    assert answer(GENERATE[0]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.real
def test_the_readmes_python(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(README, "python")
    assert len(example.strip().splitlines()) <= 10
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"^tau \d\.\d\d, \d+ fuzzy accepts$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.real
@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if blocks(page, "python") and page.stem != "serve"], ids=name_of
)
def test_the_pages_python(page: Path, smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks run one after the other; the engine that is loaded already stands in for theirs."""

    def load(
        base_model: str = "", ea_model: str | None = None, options: Any = None, **keywords: Any
    ) -> EagleFSD:
        override(LoadOptions, options, keywords)
        return smollm2

    monkeypatch.setattr(EagleFSD, "from_pretrained", load)
    namespace: dict[str, Any] = {"__name__": "a_page"}
    monkeypatch.setitem(sys.modules, "a_page", type(sys)("a_page"))  # where dataclasses look their module up
    for block in blocks(page, "python"):
        if "json_schema=" in block and importlib.util.find_spec("llguidance") is None:
            continue  # it needs an extra of its own
        exec(compile(block, name_of(page), "exec", dont_inherit=True), namespace)


@pytest.mark.longest
@pytest.mark.real
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_scripts_commands_run_one_after_the_other(
    every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Any
) -> None:
    """As a reader would run them, in the order of the pages, at toy size; every one of them, or those of
    train/ and what they read. The others, which have quick tests of their own, read their arguments.
    """
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'eagle-fsd[train]'")
    monkeypatch.setattr(hub, "load_target", cache(hub.load_target))  # the target of each dtype once
    monkeypatch.setattr(EagleFSD, "from_pretrained", cache(EagleFSD.from_pretrained))  # and each engine
    monkeypatch.setattr(weight_formats, "in_own_process", lambda work, *given: work(*given))
    for module, name, few in (  # each of few sizes is timed once
        (timing, "ENOUGH", 1e-9),
        (step_costs, "WIDTHS", (2, 8)),
        (step_costs, "TIMED_TOKENS", 2),
    ):
        monkeypatch.setattr(module, name, few)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    write_toy_data(tmp_path / "toy_data")
    named = [re.match(r"python \w+/(\w+)\.py", line).group(1) for line in SCRIPTS]
    assert set(named) == set(TOY) and len(GENERATE) >= 5
    for line, name, whole in zip(SCRIPTS, named, needed(SCRIPTS), strict=True):
        _, script, *argv = shlex.split(f"{line} {TOY[name]}")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [script, *argv])
            if not whole and not every:
                patch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            except SystemExit as end:
                assert end.code in (0, None) and (whole or every), (line, end.code)
            except Parsed:
                pass
            else:
                assert whole or every, line
    export = tmp_path / "runs" / "head" / "export"
    model = EagleFSD(smollm2.target, load_head(str(export), 576, 49152), tokenizer=smollm2.tokenizer)
    assert len(model.generate([[1, 2, 3]], max_new_tokens=6).new_tokens[0]) <= 6
    card = (tmp_path / "runs" / "head" / "publish" / "README.md").read_text()
    assert "me/EAGLE-SmolLM2-135M" in card
    assert (tmp_path / "runs" / "head" / "evaluation" / "report.json").is_file()


def test_the_storage_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from eagle_fsd import storage

    assert STORAGE and storage.main([]) == 0
    assert capsys.readouterr().out.strip()


def drawn(script: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / script))


def test_the_chats_commands_parse() -> None:
    for line in CHAT:
        assert chat.build_parser().parse_args(shlex.split(line)[3:]).max_new_tokens == 1024
    assert CHAT


def test_the_flags_of_the_command_line_are_the_parsers() -> None:
    """python docs/make_cli.py writes them anew."""
    page = ROOT / "docs" / "cli.md"
    assert drawn("make_cli.py")["filled"](read(page)) == read(page)
    described = set(re.findall(r"--[a-z][a-z-]+", read(page)))
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert {option for option in known if option.startswith("--")} <= described


def test_every_script_is_listed_as_a_program() -> None:
    page = read(ROOT / "docs" / "cli.md")
    scripts = [name_of(path) for folder in ("train", "eval") for path in sorted((ROOT / folder).glob("*.py"))]
    missing = [script for script in scripts if f"`python {script}`" not in page]
    assert missing == ["eval/compare_checkouts.py"]  # which is for a checkout alone


def test_the_pictures_are_the_scripts() -> None:
    """python docs/make_picture.py and docs/make_architecture.py draw them anew."""
    for script, picture in (("make_picture.py", "step.svg"), ("make_architecture.py", "architecture.svg")):
        assert read(ROOT / "docs" / picture) == drawn(script)["picture"](), f"run docs/{script}"


# -- links and names ----------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *LOGS, *CARDS], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(read(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            wrong.append(link)
    assert not wrong


def test_every_page_is_linked_from_the_readme() -> None:
    text = read(README)
    assert [name for name in map(name_of, PAGES[1:]) if f"]({name})" not in text] == []


def test_the_statistics_that_are_named_exist() -> None:
    said = (
        read(ROOT / "docs" / "python-api.md").partition("The statistics of a row")[2].partition("On a GPU")[0]
    )
    names = re.findall(r"`(\w+)`", said)
    assert {"steps", "new_tokens", "sources", "tau"} <= set(names)
    assert [name for name in names if not hasattr(GenerationStats(), name)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_and_modules_exist(page: Path) -> None:
    text = read(page)
    files = re.findall(r"`((?:eagle_fsd|eval|train|tests|docs|weights)/[\w./-]*)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert [name for name in re.findall(r"`(eagle_fsd(?:\.\w+)+)`", text) if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or what a module holds."""
    try:
        importlib.import_module(name)
        return True
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return bool(module) and is_there(module) and hasattr(importlib.import_module(module), attribute)


# -- tables and sizes ----------------------------------------

SOURCES = {  # the log that has a table's rows
    "greedy": "eval/SPEED.md",
    "speed": "eval/SPEED.md",
    "sampling": "eval/SPEED.md",
    "float32": "eval/SPEED.md",
    "repeating": "eval/SPEED.md",
    "formats": "eval/RUNTIMES.md",
    "long": "eval/SPEED.md",
    "warm": "eval/SPEED.md",
    "gpu": "eval/SPEED.md",
    "tau": "eval/results/tau.md",
    "second_halves": "eval/results/tau.md",
    "frontier": "eval/QUALITY.md",
    "own": "train/EXPERIMENTS.md",
    "vocabulary": "eval/SPEED.md",
}
Row = list[tuple[str, str]]  # a table's row: heading and cell of every column


def rows(text: str) -> Iterator[Row]:
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        heading, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        yield from (list(zip(heading, line, strict=True)) for line in lines)


def is_part(row: Row, whole: Row) -> bool:
    """Whether all columns of a row are among those of another one, in their order."""
    rest = iter(whole)
    return all(column in rest for column in row)


def shown_tables() -> list[tuple[Path, str, str]]:
    return [
        (page, name, table)
        for page in PAGES
        for name, table in re.findall(r"<!-- table:(\w+) -->\n(.*?)<!-- /table:\1 -->", read(page), re.DOTALL)
    ]


def test_the_tables_are_marked() -> None:
    assert {name for _, name, _ in shown_tables()} == set(SOURCES)
    for page in PAGES:
        opened = len(re.findall(r"<!-- table:", read(page)))
        assert opened == sum(table_page == page for table_page, *_ in shown_tables()), name_of(page)


@pytest.mark.parametrize("name", SOURCES)
def test_tables_are_those_of_the_logs(name: str) -> None:
    log = list(rows(read(ROOT / SOURCES[name])))
    for page, shown, table in shown_tables():
        if shown == name:
            found = list(rows(table))
            assert found and all(re.search(r"\d\.\d", str(row)) for row in found)
            wrong = [row for row in found if not any(is_part(row, whole) for whole in log)]
            assert wrong == [], f"table {name} of {name_of(page)} is not that of {SOURCES[name]}"


@pytest.mark.parametrize("page", [*PAGES, *LOGS, *CARDS], ids=name_of)
def test_every_table_has_a_head(page: Path) -> None:
    """Rows after an empty line are shown as text, with all their bars."""
    lines = without_code(read(page)).splitlines()
    begins = [
        place
        for place, line in enumerate(lines)
        if line.startswith("|") and not (place and lines[place - 1].startswith("|"))
    ]
    assert [lines[place] for place in begins if not lines[place + 1].startswith("| ---")] == []


def drafts_of(calibration: Calibration) -> str:
    drafts = "head+lookup" if str(calibration.models["head"]).startswith("merged-") else "head"
    return drafts + ", GPU" * (calibration.device == "cuda")


def dial_of(found: CalibratedThreshold) -> str:
    return f"price {found.price:g}" if found.price else f"T {found.threshold:g}"


def test_the_thresholds_are_the_shipped_heads() -> None:
    (table,) = re.findall(r"<!-- calibration -->\n(.*?)<!-- /", read(ROOT / "docs" / "quality.md"), re.DOTALL)
    file = ROOT / "weights" / "smollm2-135m-instruct" / "calibration.json"
    kept = [
        f"{drafts_of(one)} {format_sampling(one.sampling)} {dial_of(found)} {found.tv:.3f} {found.bound:.3f} "
        f"{found.tau:.2f} {found.lossless_tau:.2f} {found.tau_ratio:.2f}"
        for one in read_calibrations(file)
        for found in one.thresholds
    ]
    assert [" ".join(cell for _, cell in row) for row in rows(table)] == kept


def test_the_readme_is_a_landing_page() -> None:
    assert len(read(README).splitlines()) <= LENGTH


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short(page: Path) -> None:
    lines = read(page).splitlines()
    kept_whole = () if page == README else ("|", "![")  # tables and pictures
    assert [line for line in lines if len(line) > WIDTH and not line.startswith(kept_whole)] == []
