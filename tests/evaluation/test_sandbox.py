"""Generated code in its sandbox: what it may not do, and that none of it outlives its run."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from eagle_fsd.evaluation.tasks import sandbox
from eagle_fsd.evaluation.tasks.sandbox import ENDED, PASSED, TIMEOUT, Limits, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux alone")

QUICK = Limits(cpu=1, wall=30)


@pytest.fixture(autouse=True)
def confined(request: pytest.FixtureRequest) -> None:
    """Skip what runs a program where the kernel has no Landlock or seccomp."""
    if "monkeypatch" in request.fixturenames:
        return
    try:
        run("pass")
    except ValueError as error:
        pytest.skip(str(error))


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


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nassert 1 + 1 == 2", PASSED),
        ("print('x' * (8 << 20))", PASSED),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("raise SystemExit", "SystemExit"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("class passed(Exception): pass\nraise passed", "raised passed"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(0)", ENDED),
        ("import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'ready\\npassed\\n')\n"
         "  except OSError: pass\nos._exit(0)", ENDED),
        ("import ctypes; ctypes.string_at(0)", ENDED),
        ("input()", "EOFError"),
        ("import sys; assert sys.stdin.read() == '', 'something'; 1 / 0", "ZeroDivisionError"),
        ("x = 'a' * (3 << 30)", "MemoryError"),
        ("\0", "null bytes"),
        ("'\udcff'", "UnicodeEncodeError"),
    ],
)  # fmt: skip
def test_only_running_to_the_end_is_passing(code: str, ended: str) -> None:
    outcome = run(code)
    assert (
        outcome == ended if ended in (PASSED, ENDED) else outcome.startswith("raised ") and ended in outcome
    )


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
    assert run(textwrap.dedent(code)) == PASSED


def test_sets_and_draws_are_the_same_every_time() -> None:
    code = "import random\nraise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f'}), random.random())"
    assert run(code) == run(code)


def test_annotations_are_evaluated_as_in_any_program() -> None:
    assert run("def f(x: int): pass", QUICK) == PASSED
    assert run("def f(x: Undefined): pass", QUICK) == "raised NameError: name 'Undefined' is not defined"


# --- limits ---


def test_a_loop_ends_at_the_cpu_limit() -> None:
    assert run("while True: pass", QUICK) == TIMEOUT


def test_catching_the_cpu_signal_wins_a_second_and_no_more() -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(code, QUICK) == ENDED  # not "timeout": the wall clock would come later


def test_a_sleeper_ends_at_the_wall_clock() -> None:
    assert run("import time\ntime.sleep(600)", Limits(wall=2)) == TIMEOUT


def test_the_environment_is_empty_and_nothing_of_the_project_is_at_hand() -> None:
    code = """
    import importlib.util, os, sys
    assert set(os.environ) <= {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONHASHSEED", "LC_CTYPE"}, os.environ
    assert os.path.samefile(os.getcwd(), os.environ["HOME"])
    for name in ("eagle_fsd", "torch", "gsm8k", "sandbox", "pytest"):
        assert importlib.util.find_spec(name) is None, name
    """
    os.environ["SECRET_TOKEN"], os.environ["PYTHONPATH"] = "x", str(Path(__file__).parents[2])
    try:
        assert run(textwrap.dedent(code)) == PASSED
    finally:
        del os.environ["SECRET_TOKEN"]


# --- files ---


def test_its_folder_is_empty_writable_limited_and_gone_afterwards() -> None:
    code = """
    import os, tempfile
    assert os.listdir() == []
    open("a", "w").write("x" * 1000)
    with tempfile.TemporaryDirectory() as made:
        assert made.startswith(os.getcwd())
    try:
        with open("b", "w") as file:
            file.write("x" * 3000)
    except OSError as error:
        assert error.errno == 27, error
    else:
        raise ValueError("no limit")
    raise KeyError(os.getcwd())
    """
    outcome = run(textwrap.dedent(code), Limits(file_size=2000))
    folder = outcome.removeprefix("raised KeyError: ").strip("'")
    assert folder.startswith("/") and not os.path.exists(folder)


def test_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")
    code = f"""
    import os
    for action in (
        lambda: open({str(kept)!r}, "w"), lambda: os.remove({str(kept)!r}), lambda: open("/dev/shm/x", "w"),
        lambda: os.chmod({str(kept)!r}, 0), lambda: open("/proc/sys/kernel/hostname", "w"),
        lambda: os.utime({str(kept)!r}), lambda: os.truncate({str(kept)!r}, 0),
        lambda: os.rename({str(kept)!r}, "here"), lambda: os.link({str(kept)!r}, "here"),
        lambda: open("/dev/null", "w"), lambda: os.mkdir({str(tmp_path / "made")!r}),
    ):
        try:
            action()
        except OSError:
            continue
        raise ValueError(action)
    """
    assert run(textwrap.dedent(code)) == PASSED
    assert kept.read_text() == "old" and os.listdir(tmp_path) == ["kept"]


# --- network and processes ---


def test_no_connection_to_this_machines_own_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        outcome = run(code)
        assert "Error" in outcome
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
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    ],
)
def test_processes_programs_and_signals_are_refused(code: str) -> None:
    assert run(code) not in (PASSED, TIMEOUT, ENDED)


# --- where it cannot run ---


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"platform is 'darwin': .* on Linux alone"):
        run("pass")


def test_a_machine_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Path(sandbox.__file__).read_text()
    (tmp_path / "child.py").write_text(source.replace("syscall(444", "syscall(9999"))
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(ValueError, match=r"did not start \(OSError: Landlock: .*\): use a machine"):
        run("pass")
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="seccomp is not known here for pdp11"):
        sandbox.seccomp_filter()


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches this process alone, which must end the child's."""
    homes: list[str] = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            homes.append(os.readlink(f"/proc/{self.pid}/cwd"))
            raise KeyboardInterrupt

    monkeypatch.setattr(sandbox.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("import time; time.sleep(30)")
    assert not survivors(homes[0]) and not os.path.exists(homes[0])
