"""Graphs that are compiled while a program still imports: taken by who asks for them, else no harm done."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.tiny_engine import tiny_engine
from support.tiny_models import greedy_alone, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, TreeConfig, chat, generate
from eagle_fsd.cli import start
from eagle_fsd.files.kept_folders import OFF
from eagle_fsd.runtime.openvino import backend, library
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.kept import head_start
from eagle_fsd.runtime.openvino.kept.head_start import MOST, Compiling, HeadStart, read_note
from eagle_fsd.target.model import TargetModel

pytest.importorskip("openvino", reason="the extra openvino is not installed")

pytestmark = pytest.mark.usefixtures("cache")

FLAGS = {"base_model": "tiny", "weight_format": "float32"}
TREE = TreeConfig(5, 2, 2)
KNOWN = {"folder": "decoder-1", "shapes": ["[?,8]"], "precision": "f32", "rounded": False, "threads": 1}


class Program:
    """One start of a program: its own head start, and the thread of each graph that is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flags: object = FLAGS) -> None:
        self.start, self.threads = HeadStart(), []
        compile_graph = library.compile_graph

        def watched(*args: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            return compile_graph(*args)

        monkeypatch.setattr(backend, "HEAD_START", self.start)
        monkeypatch.setattr(library, "compile_graph", watched)
        self.start.begin(flags)
        for thread in threading.enumerate():
            if thread.name == "head start":  # a tiny model is loaded before it has made anything
                thread.join()

    def answer(self) -> list[int]:
        model = EagleFSD(TargetModel(tiny_model("llama"), runtime=OpenVINO("float32")), tiny_head())
        made = model.generate(prompts_of([6], seed=1), max_new_tokens=12, tree=TREE).new_tokens[0]
        self.start.end(complete=True)
        return made


def run(flags: object = FLAGS) -> tuple[list[int], list[str]]:
    """Return what a program answers, and in which threads its graphs were compiled."""
    with pytest.MonkeyPatch.context() as patch:
        program = Program(patch, flags)
        return program.answer(), program.threads


def test_the_second_start_takes_what_the_first_compiled(cache: Path) -> None:
    [expected] = greedy_alone(tiny_model("llama"), prompts_of([6], seed=1), 12)
    text, threads = run()
    assert text == expected and threads and "head start" not in threads
    [note] = (cache / "graphs").glob("start-*.json")
    known = read_note(note)
    assert {one.folder.split("-")[0] for one in known} >= {"decoder", "lm_head", "head"}
    text, threads = run()
    assert text == expected and threads.count("head start") == len(known)
    assert set(read_note(note)) == set(known)  # what was taken is asked for again next time


def test_a_program_that_needs_no_graphs_forgets_them(cache: Path) -> None:
    run()
    start = HeadStart()
    start.begin(FLAGS)
    start.end(complete=True)  # torch was faster, say
    assert list((cache / "graphs").glob("start-*.json")) == []


def test_a_program_that_ended_early_takes_nothing_from_the_note(cache: Path) -> None:
    run()
    [note] = (cache / "graphs").glob("start-*.json")
    before, known = note.read_text(), read_note(note)
    for asked in ([], known[:1]):
        start = HeadStart()
        start.begin(FLAGS)
        for one in asked:
            start.take(one)
        start.end()  # a prompt was too long, say
        assert note.read_text() == before
    more = [*known, Compiling("decoder-1", ("[?,?,8]",), "f32", False, 1)]
    start = HeadStart()
    start.begin(FLAGS)
    for one in more:
        start.take(one)
    start.end()
    assert read_note(note) == more


def test_other_flags_have_a_note_of_their_own(cache: Path) -> None:
    run()
    _, threads = run({**FLAGS, "weight_format": "int8"})
    assert "head start" not in threads and len(list((cache / "graphs").glob("start-*.json"))) == 2


def test_a_graph_that_is_gone_or_cannot_be_read_is_compiled_by_who_asks(cache: Path) -> None:
    expected, _ = run()
    for path in (cache / "graphs").rglob("graph.xml"):
        path.write_text("<broken/>")
    text, threads = run()
    assert text == expected and "head start" not in threads


@pytest.mark.parametrize(
    "note",
    [
        "",
        "[]",
        '{"graphs": 5}',
        '{"graphs": ["decoder"]}',
        '{"graphs": [{"folder": "decoder"}]}',
        json.dumps({"graphs": [{**KNOWN, "folder": "../x"}]}),
        json.dumps({"graphs": [{**KNOWN, "folder": 1}]}),
        json.dumps({"graphs": [{**KNOWN, "shapes": 1}]}),
        json.dumps({"graphs": [{**KNOWN, "more": 1}]}),
    ],
)
def test_a_broken_note_is_as_good_as_none(cache: Path, note: str) -> None:
    path = cache / "note.json"
    path.write_text(json.dumps({"graphs": [KNOWN]}))
    assert read_note(path) == [Compiling("decoder-1", ("[?,8]",), "f32", False, 1)]
    path.write_text(note)
    assert read_note(path) == []


def test_a_note_names_open_sizes_and_those_expected_first(cache: Path) -> None:
    """And not the sizes that a measurement compiled."""
    folder = cache / "graphs" / "decoder-1"
    folder.mkdir(parents=True)
    (folder / "first.json").write_text(json.dumps({"sizes": [1, 6]}))
    start = HeadStart()
    start.begin(FLAGS)
    shapes = ("[?,?,8]", "[1,6,8]", "[1,16,8]", "[1,60,8]")
    wanted = [Compiling("decoder-1", (shape, "[1,6]"), "f32", False, 2) for shape in shapes]
    assert [start.take(one) for one in wanted] == [None] * 4
    start.end()
    [note] = (cache / "graphs").glob("start-*.json")
    assert read_note(note) == wanted[:2]
    before = note.read_text()
    start.begin(FLAGS)
    for number in range(MOST + 1):  # too many for a note
        start.take(Compiling(f"decoder-{number}", ("[?,8]",), "f32", False, 2))
    start.end()
    assert note.read_text() == before


def test_what_was_not_begun_at_the_end_is_not_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [Compiling(f"g-{number}", ("[?,8]",), "f32", False, 1) for number in range(3)]
    begun, go_on, compiled = threading.Event(), threading.Event(), []

    def slowly(one: Compiling) -> str:
        compiled.append(one)
        begun.set()
        assert go_on.wait(10)
        return "made"

    monkeypatch.setattr(head_start, "compile_kept", slowly)
    monkeypatch.setattr(head_start, "read_note", lambda path: graphs)
    monkeypatch.setattr(head_start, "cores", lambda: 1)
    start, before = HeadStart(), set(threading.enumerate())
    start.begin(FLAGS)
    assert begun.wait(10)
    [thread] = set(threading.enumerate()) - before
    assert start.take(graphs[2]) is None  # its turn has not come: who asks compiles it sooner
    threading.Timer(0.05, go_on.set).start()
    assert start.take(graphs[0]) == "made"
    start.end()
    thread.join(10)
    assert graphs[2] not in compiled and not thread.is_alive()


def test_every_core_compiles_a_graph_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [Compiling(f"g-{number}", ("[?,8]",), "f32", False, 1) for number in range(4)]
    both = threading.Barrier(2, timeout=10)

    def together(one: Compiling) -> str:
        both.wait()  # raises unless two threads come here at a time
        return one.folder

    monkeypatch.setattr(head_start, "compile_kept", together)
    monkeypatch.setattr(head_start, "read_note", lambda path: graphs)
    monkeypatch.setattr(head_start, "cores", lambda: 2)
    start = HeadStart()
    start.begin(FLAGS)
    for thread in [one for one in threading.enumerate() if one.name == "head start"]:
        thread.join(10)
    assert [start.take(one) for one in graphs] == [one.folder for one in graphs]
    start.end()


def test_nothing_is_begun_where_nothing_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setenv(OFF, "1")
    _, threads = run()
    assert "head start" not in threads


def test_it_needs_no_torch() -> None:
    code = "import sys, eagle_fsd.runtime.openvino.kept.head_start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which this process's head start adds what is asked of it."""
    calls: list[str] = []

    class Recorder:
        def begin(self, arguments: object) -> None:
            json.dumps(arguments)
            calls.append("begin")

        def end(self, complete: bool = False) -> None:
            calls.append("complete" if complete else "end")

    recorder = Recorder()
    for module in (start, generate, chat):
        monkeypatch.setattr(module, "HEAD_START", recorder)
    return calls


@pytest.mark.parametrize(
    ("flags", "begins"), [("", True), ("--runtime torch", False), ("--device-map auto", False)]
)
def test_the_command_line_begins_before_it_imports_and_ends_whatever_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, begins: bool
) -> None:
    calls = recorded_calls(monkeypatch)
    assert generate.main([*flags.split(), "--base-model", "/nowhere", "Hello"]) == 2
    assert calls == ["begin"] * begins + ["end"]
    assert "/nowhere" in capsys.readouterr().err


def test_a_program_that_did_its_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_calls(monkeypatch)
    for module in (generate, chat):
        monkeypatch.setattr(module, "load_model", lambda args: tiny_engine())
    assert generate.main(["--max-new-tokens", "3", "--total-tokens", "4", "Hi"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert chat.main(["--max-new-tokens", "3", "--total-tokens", "4"]) == 0
    assert calls == ["begin", "complete", "end"] * 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("program", ["generate", "chat", "serve"])
@pytest.mark.parametrize(
    "flags",
    [
        "--top-p 0",
        "--temperature -1",
        "--max-new-tokens 0",
        "--total-tokens 0",
        "--threshold auto --quality-budget 2",
        "--threshold -1",
    ],
)
def test_a_mistake_in_a_flag_begins_nothing_and_imports_no_torch(
    cache: Path, program: str, flags: str
) -> None:
    """Threads that compile would be waited for."""
    code = (
        f"import sys\nfrom eagle_fsd.{program} import main\n"
        "from eagle_fsd.runtime.openvino.kept.head_start import HeadStart\n"
        "HeadStart.begin = lambda self, arguments: sys.exit('it began')\n"
        f"code = main({[*flags.split(), *(['Hello'] if program == 'generate' else [])]!r})\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    if program == "serve":
        pytest.importorskip("fastapi", reason='this needs an extra: pip install "eagle-fsd[serve]"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and flags.split()[-2] in done.stderr
