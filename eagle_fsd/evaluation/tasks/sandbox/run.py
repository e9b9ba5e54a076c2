"""Runs code that a model wrote: a process of its own, limited in time, memory, files and reach.

What holds on Linux, and where (`available()` says what this machine has; the child's side is confine.py):

- Everywhere: a fresh interpreter with an empty environment and only the standard library; limits of CPU
  seconds, memory, file size, open files and, but for root, of processes (none); a wall clock, after which
  the whole process group is killed; empty standard input; output cut at a cap. A program passes only if it
  runs to its end: a secret that the child reports then.
- `seccomp` (x86_64 and aarch64): the system calls for a new process or thread, another program, a socket, a
  new session, a mount, another process's memory or limits are refused. It binds root too, which
  RLIMIT_NPROC does not.
- `namespaces` (where unprivileged user namespaces are allowed, or as root outside a confined container): the
  program is alone in a process namespace whose end kills all that is in it, has no network, sees every file
  system read-only and without devices, and writes to a small file system in memory that is gone afterwards.
- Without `namespaces`, files are as writable as for the user who runs this, sizes limited, and so is
  /proc/PID/mem where the kernel leaves it open. Without `seccomp`, sockets that lie in the file system can
  be reached. With neither layer the network is open, and a root's program that makes a session of its own
  outlives its run.

Never held: what the user may read can be read, and shows in the captured output; a program that searches its
own interpreter for the secret finds it. This stops accidents and clumsy mischief; code that is meant to
attack belongs into a virtual machine.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

from eagle_fsd.core.checks import one_line

CHILD = Path(__file__).with_name("confine.py")
LAYERS = ("namespaces", "seccomp")
GRACE = 5.0  # seconds until a killed process must have let go of its pipes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a program may take.

    cpu, wall: seconds; the wall clock is the looser one, so that a busy machine changes no score. memory,
    file_size, disk, output: bytes; disk holds where there are namespaces.
    """

    cpu: int = 5
    wall: float = 60.0
    memory: int = 1 << 30
    file_size: int = 1 << 20
    disk: int = 16 << 20
    output: int = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    status: `passed` (ran to its end), `failed` (raised; error says what), `timeout` or `ended` (exited or
    killed before). output: standard output and error as one, cut at the limit.
    """

    status: str
    error: str
    output: str

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def run(code: str, limits: Limits | None = None, layers: Sequence[str] | None = None) -> Outcome:
    """Run Python source to its end, or to the limits.

    layers: of LAYERS; None: all that this machine has. Raises ValueError where there is no Linux or a layer
    that was asked for is missing, OSError where no process can be started.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"platform is {sys.platform!r}: generated code is run on Linux alone, in a sandbox; score there"
        )
    limits = limits or Limits()
    layers = available() if layers is None else layers
    secret = secrets.token_hex(16)
    request = {"code": code, "secret": secret, "layers": list(layers), **asdict(limits)}
    with tempfile.TemporaryDirectory(prefix="eagle_fsd-", ignore_cleanup_errors=True) as folder:
        report, output, timed_out = converse(json.dumps(request).encode(), folder, limits)
    first, *lines = report.decode("utf-8", "replace").splitlines() or [""]
    text = output.decode("utf-8", "replace")
    if first.startswith("cannot"):
        raise ValueError(
            f"layers is {', '.join(layers)}: {first}; leave it out for those that this machine has"
        )
    if first != "ready":
        raise OSError(
            f"the sandbox did not start ({one_line(text[-200:])}): start again, with more memory or time"
        )
    if secret in lines:
        return Outcome("passed", "", text)
    if timed_out or "timeout" in lines:
        return Outcome("timeout", f"ran longer than {limits.cpu} s of CPU or {limits.wall:g} s", text)
    raised = [line for line in lines if line.startswith("raised ")]
    if raised:
        return Outcome("failed", raised[-1].removeprefix("raised "), text)
    return Outcome("ended", "exited or was killed before its end", text)


def converse(request: bytes, folder: str, limits: Limits) -> tuple[bytes, bytes, bool]:
    """Start the child in `folder`, hand it the request, and read its report and output to their ends.

    The last value says whether the wall clock ended it.
    """
    reader, writer = os.pipe()
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
    environment["PYTHONHASHSEED"] = "0"  # a set's order must not decide a score
    command = [sys.executable, "-s", "-S", "-B", "-X", "utf8", str(CHILD), str(writer)]
    with os.fdopen(reader, "rb", buffering=0) as reports:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            deadline = time.monotonic() + limits.wall
            with suppress(BrokenPipeError):  # it has died; its report is missing then
                child.stdin.write(request)
                child.stdin.close()
            caps = {reports: 1 << 16, child.stdout: limits.output}
            received = {file: bytearray() for file in caps}
            timed_out = not drain(received, caps, deadline)
            if timed_out:
                kill(child)
                drain(received, caps, time.monotonic() + GRACE)
        finally:
            kill(child)
            child.stdout.close()
    return bytes(received[reports]), bytes(received[child.stdout]), timed_out


def drain(received: dict[IO[bytes], bytearray], caps: dict[IO[bytes], int], deadline: float) -> bool:
    """Read files until they end, keeping `caps` bytes of each; False where the deadline comes first."""
    with selectors.DefaultSelector() as selector:
        for file in received:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                received[key.fileobj] += data[: caps[key.fileobj] - len(received[key.fileobj])]
    return True


def kill(child: subprocess.Popen[bytes]) -> None:
    """End the child, which first ends the program and its namespace; then kill the process group."""
    if child.returncode is not None:  # reaped: the number may be another's by now
        return
    os.kill(child.pid, signal.SIGTERM)  # Popen.terminate would reap it, and the group lose its number
    deadline = time.monotonic() + GRACE
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@cache
def available() -> tuple[str, ...]:
    """Try once which layers this machine lets a process put on."""
    found = []
    for layer in LAYERS:
        with suppress(ValueError):
            if run("pass", layers=[layer]).passed:
                found.append(layer)
    if "namespaces" not in found:
        log.warning(
            "no namespaces here: generated code can write what you can; score in a container or as root"
        )
    return tuple(found)
