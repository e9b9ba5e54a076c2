"""Generated code in its sandbox: what it may not do, and that none of it outlives its run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from eagle_fsd.evaluation.tasks.sandbox import run as sandbox
from eagle_fsd.evaluation.tasks.sandbox.run import LAYERS, Limits, Outcome, available, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux alone")

SETS = [(), ("namespaces",), ("seccomp",), LAYERS]
QUICK = Limits(cpu=1, wall=30)


@pytest.fixture(params=SETS, ids=lambda layers: "+".join(layers) or "none")
def layers(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Every set of layers that this machine has."""
    missing = set(request.param) - set(available())
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)}")
    return request.param


def program(code: str) -> str:
    return textwrap.dedent(code)


def survivors(folder: str) -> list[int]:
    """Processes that were born with this folder as their home."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


# --- passing means running to the end ---


def test_a_program_that_runs_to_its_end_passes(layers: tuple[str, ...]) -> None:
    outcome = run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nassert 1 + 1 == 2", layers=layers)
    assert outcome.passed and outcome.status == "passed" and outcome.error == ""
    assert set(outcome.output.split()) == {"out", "err"}


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("assert 1 == 2, 'no'", "failed", "AssertionError: no"),
        ("raise SystemExit", "failed", "SystemExit"),
        ("import sys; sys.exit(0)", "failed", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
        ("def f(:", "failed", "SyntaxError"),
        ("import os; os._exit(0)", "ended", "exited"),
        ("import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'ready\\npassed\\n')\n"
         "  except OSError: pass\nos._exit(0)", "ended", "exited"),
        ("import ctypes; ctypes.string_at(0)", "ended", "killed"),
        ("input()", "failed", "EOFError"),
        ("import sys; assert sys.stdin.read() == '', 'something'; 1 / 0", "failed", "ZeroDivisionError"),
        ("x = 'a' * (3 << 30)", "failed", "MemoryError"),
        ("\0", "failed", "null bytes"),
        ("'\udcff'", "failed", "UnicodeEncodeError"),
    ],
)  # fmt: skip
def test_anything_else_does_not(code: str, status: str, error: str) -> None:
    outcome = run(code)
    assert not outcome.passed
    assert outcome.status == status and error in outcome.error


def test_the_main_block_is_not_run_and_the_module_is_one() -> None:
    code = """
    from __future__ import annotations
    from dataclasses import dataclass
    @dataclass
    class A:
        x: int
    assert A(1) == A(1)
    if __name__ == "__main__":
        raise ValueError
    """
    assert run(program(code)).passed


def test_sets_and_draws_are_the_same_every_time() -> None:
    code = "import random\nprint(list({'a', 'b', 'c', 'd', 'e', 'f'}), random.random())"
    first = run(code)
    assert first.passed and run(code) == first


# --- limits ---


def test_a_loop_ends_at_the_cpu_limit(layers: tuple[str, ...]) -> None:
    outcome = run("while True: pass", QUICK, layers)
    assert outcome == Outcome("timeout", "ran longer than 1 s of CPU or 30 s", "")


def test_annotations_are_evaluated_as_in_any_program() -> None:
    assert run("def f(x: int): pass", QUICK).passed
    assert run("def f(x: Undefined): pass", QUICK).error == "NameError: name 'Undefined' is not defined"


def test_catching_the_cpu_signal_wins_a_second_and_no_more() -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(code, QUICK).status == "ended"  # not "timeout": the wall clock would come later


def test_a_sleeper_ends_at_the_wall_clock_and_its_output_is_kept(layers: tuple[str, ...]) -> None:
    outcome = run("import time\nprint('here', flush=True)\ntime.sleep(600)", Limits(wall=2), layers)
    assert (outcome.status, outcome.output) == ("timeout", "here\n")


def test_megabytes_of_output_are_read_and_cut(layers: tuple[str, ...]) -> None:
    outcome = run("print('x' * (8 << 20))\nprint('y' * (8 << 20))", Limits(output=1000), layers)
    assert outcome.passed and outcome.output == "x" * 1000


def test_the_environment_is_empty_and_nothing_of_the_project_is_at_hand(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code = """
    import importlib.util, os, sys
    assert set(os.environ) <= {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONHASHSEED", "LC_CTYPE"}, os.environ
    assert os.path.samefile(os.getcwd(), os.environ["HOME"])
    for name in ("eagle_fsd", "torch", "gsm8k", "sandbox", "pytest"):
        assert importlib.util.find_spec(name) is None, name
    """
    assert run(program(code), layers=layers) == Outcome("passed", "", "")


# --- files ---


def test_its_folder_is_empty_writable_limited_and_gone_afterwards(layers: tuple[str, ...]) -> None:
    code = """
    import os, tempfile
    assert os.listdir() == []
    open("a", "w").write("x" * 1000)
    with tempfile.TemporaryDirectory() as made:
        assert made.startswith(os.getcwd())
    print(os.getcwd())
    try:
        with open("b", "w") as file:
            file.write("x" * 3000)
    except OSError as error:
        assert error.errno == 27, error
    else:
        raise ValueError("no limit")
    """
    outcome = run(program(code), Limits(file_size=2000), layers)
    assert outcome.passed, outcome
    assert not os.path.exists(outcome.output.strip())


def test_namespaces_let_nothing_be_written_elsewhere(tmp_path: Path, layers: tuple[str, ...]) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")
    code = f"""
    import os
    for action in (
        lambda: open({str(kept)!r}, "w"), lambda: os.remove({str(kept)!r}), lambda: open("/dev/shm/x", "w"),
        lambda: os.chmod({str(kept)!r}, 0), lambda: open("/proc/sys/kernel/hostname", "w"),
        lambda: open("/dev/null", "w"), lambda: os.mkdir({str(tmp_path / "made")!r}),
    ):
        try:
            action()
        except OSError:
            continue
        raise ValueError(action)
    """
    if "namespaces" not in layers:
        assert not run(f"open({str(kept)!r}, 'w')\n1 / 0", layers=layers).passed
        assert kept.read_text() == "", "as the docstring says: without namespaces files are not kept apart"
        return
    assert run(program(code), layers=layers) == Outcome("passed", "", "")
    assert kept.read_text() == "old" and os.listdir(tmp_path) == ["kept"]


def test_namespaces_limit_all_files_together() -> None:
    if "namespaces" not in available():
        pytest.skip("this machine has no namespaces")
    code = "for n in range(100): open(str(n), 'w').write('x' * 100_000)"
    outcome = run(code, Limits(disk=1 << 20))
    assert outcome.error.startswith("OSError: [Errno 28]")


# --- network and processes ---


def test_no_connection_to_this_machines_own_server(layers: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        outcome = run(code, layers=layers)
        if not layers:
            assert outcome.passed, "else this test would see nothing"
            return
        assert outcome.status == "failed" and "Error" in outcome.error
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import threading; threading.Thread(target=print).start()",
        "import os; os.setsid()",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    ],
)
def test_seccomp_refuses_processes_programs_and_signals(code: str) -> None:
    if "seccomp" not in available():
        pytest.skip("this machine has no seccomp")
    assert run(code, layers=["seccomp"]).status == "failed"


DAEMON = """
import os, sys, time
print(os.getcwd(), flush=True)
for _ in range({count}):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(64):
                try: os.close(fd)
                except OSError: pass
            time.sleep(30)
        os._exit(0)
time.sleep({stays})
"""


@pytest.mark.parametrize("stays", [0, 600], ids=["ends", "stays"])
def test_no_grandchild_outlives_the_run(layers: tuple[str, ...], stays: int) -> None:
    outcome = run(DAEMON.format(count=20 if layers else 1, stays=stays), Limits(wall=4), layers)
    folder = outcome.output.strip()
    left = survivors(folder)
    if "seccomp" in layers or os.getuid() != 0:  # RLIMIT_NPROC binds every user but root
        assert outcome.status == "failed" and "Error" in outcome.error and not left
    elif layers:
        assert outcome.status == ("timeout" if stays else "passed") and not left
    else:
        assert left, "else this test would see nothing"
        for pid in left:
            os.kill(pid, signal.SIGKILL)


# --- where it cannot run ---


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"platform is 'darwin': .* on Linux alone"):
        run("pass")


def test_a_layer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = sandbox.CHILD.read_text().replace("check(libc.unshare(NEW_NAMESPACES)", "check(-1")
    source = source.replace("platform.machine() not in", "'pdp11' not in")
    (tmp_path / "child.py").write_text(source)
    monkeypatch.setattr(sandbox, "CHILD", tmp_path / "child.py")
    for layer, why in (("namespaces", "a namespace is refused"), ("seccomp", "not known")):
        with pytest.raises(ValueError, match=f"layers is {layer}: cannot: .*{why}.*; leave it out"):
            run("pass", layers=[layer])
    available.cache_clear()
    try:
        assert available() == () and run("pass").passed
    finally:
        available.cache_clear()


def test_a_child_that_cannot_start_is_no_failed_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text("raise MemoryError('none left')")
    monkeypatch.setattr(sandbox, "CHILD", tmp_path / "child.py")
    with pytest.raises(OSError, match=r"did not start \(.*none left\): start again"):
        run("pass", layers=[])


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches this process alone, which must end the child's."""
    folders: list[str] = []
    started = sandbox.converse

    def converse(request: bytes, folder: str, limits: Limits) -> tuple[bytes, bytes, bool]:
        folders.append(folder)
        return started(request, folder, limits)

    def interrupted(*_: object) -> bool:
        assert survivors(folders[-1]), "else this test would see nothing"
        raise KeyboardInterrupt

    available()
    monkeypatch.setattr(sandbox, "converse", converse)
    monkeypatch.setattr(sandbox, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("import time; time.sleep(30)")
    assert not survivors(folders[-1]) and not os.path.exists(folders[-1])
