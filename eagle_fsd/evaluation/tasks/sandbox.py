"""Run code that a model wrote: a process of its own, limited in time, memory, files and reach. Linux alone.

The parent starts this file as a script. The child limits itself, and then runs the program:

- A fresh interpreter with an empty environment, empty input and only the standard library. A program passes
  only if it runs to its end: the child then reports a secret.
- Resource limits bound CPU seconds, memory and the size of a file. A wall clock ends what sleeps.
- Landlock (Linux 5.13 and newer) lets it write only in its temporary folder, which is gone afterwards.
- Seccomp refuses the system calls for another process, thread or program, for sockets, signals, mounts and
  other files' modes. So a program is one process without a network, and nothing is left of it when that ends.

A machine that lacks one of these is refused: rows keep their texts, and can be scored on another one. What
the user may read can be read, and a program that searches its own interpreter for the secret finds it. This
stops accidents and clumsy mischief. Code that is meant to attack belongs into a virtual machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import types
from dataclasses import asdict, dataclass

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
# By machine: the audit architecture, and the numbers of the calls that seccomp refuses: new processes and
# programs (clone, fork, execve), sockets and io_uring, namespaces and mounts, other processes (kill, ptrace,
# limits, pidfd), the kernel (modules, keys, perf, bpf, userfaultfd), modes, owners and times of files.
REFUSED = {
    "x86_64": (
        0xC000003E,
        (
            *(56, 57, 58, 59, 322, 435, 41, 53, 425),
            *(155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 442),
            *(62, 101, 129, 200, 234, 297, 302, 310, 311, 424, 434, 438),
            *(175, 246, 248, 249, 250, 298, 313, 321, 323),
            *(90, 91, 92, 93, 94, 132, 188, 189, 190, 235, 260, 261, 268, 280, 452),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(220, 221, 281, 435, 198, 199, 425),
            *(39, 40, 41, 51, 97, 268, 428, 429, 430, 431, 432, 442),
            *(117, 129, 130, 131, 138, 240, 261, 270, 271, 424, 434, 438),
            *(104, 105, 217, 218, 219, 241, 273, 280, 282),
            *(5, 6, 7, 52, 53, 54, 55, 88, 452),
        ),
    ),
}


@dataclass(frozen=True)
class Limits:
    """What a program may take. cpu, wall: seconds, and the wall clock is looser, so that a busy machine
    changes no score; memory, file_size: bytes."""

    cpu: int = 5
    wall: float = 60.0
    memory: int = 1 << 30
    file_size: int = 1 << 20


PASSED, TIMEOUT, ENDED = "passed", "timeout", "ended"  # or "raised " and an error


def run(code: str, limits: Limits | None = None) -> str:
    """Run Python source to its end, or to the limits; returns how it ended.

    PASSED: it ran to its end. TIMEOUT; ENDED: it exited or was killed before; else "raised " and the error.
    Raises ValueError where it cannot be confined.
    """
    if sys.platform != "linux":
        raise ValueError(f"platform is {sys.platform!r}: generated code is run on Linux alone; run it there")
    limits, secret = limits or Limits(), secrets.token_hex(16)
    command = [sys.executable, "-s", "-S", "-B", "-X", "utf8", __file__]
    with (
        tempfile.TemporaryDirectory(prefix="eagle_fsd-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as request,
        tempfile.TemporaryFile() as report,
    ):
        request.write(json.dumps({"code": code, "secret": secret, **asdict(limits)}).encode())
        request.seek(0)
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        environment["PYTHONHASHSEED"] = "0"  # a set's order must not decide a score
        child = subprocess.Popen(
            command, stdin=request, stdout=report, stderr=report, cwd=folder, env=environment
        )
        try:
            status = child.wait(limits.wall)
        except subprocess.TimeoutExpired:
            status = -signal.SIGXCPU
        finally:  # also where the user interrupts
            child.kill()
            child.wait()
        report.seek(0)
        first, *lines = report.read().decode("utf-8", "replace").splitlines() or [""]
    if first != "ready":
        said = lines[-1] if lines else first
        raise ValueError(f"the sandbox did not start ({said}): use a machine with Landlock and seccomp")
    if secret in lines:
        return PASSED
    if status == -signal.SIGXCPU:
        return TIMEOUT
    raised = [line for line in lines if line.startswith("raised ")]
    return raised[-1] if raised else ENDED


def run_confined() -> None:
    """Run the request of standard input in this process, confined, and report to standard output."""
    request = json.load(sys.stdin)
    report, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    confine(request)
    os.write(report, b"ready\n")
    for standard in (0, 1, 2):  # from here on input() finds the end at once, and output is lost
        os.dup2(nowhere, standard)
    code, secret = request.pop("code"), request.pop("secret")
    try:
        del sys.path[0]  # this script's folder is no place for the program to import from
        random.seed(0)  # tests that draw their cases draw the same ones every time
        module = types.ModuleType("program")
        sys.modules["program"] = module
        # Not under this file's own future imports: annotations are evaluated, as everywhere.
        exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
        said = secret
    except BaseException as error:  # noqa: BLE001 - SystemExit is the program's failure too
        words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        said = f"raised {words[:500]}"
    os.write(report, f"{said}\n".encode("utf-8", "replace"))
    os._exit(0)


def confine(request: dict[str, float]) -> None:
    """Limit this process and drop its privileges for good. Raises OSError where the kernel refuses."""
    import resource  # which other systems than Linux and its kin do not have

    libc = ctypes.CDLL(None, use_errno=True)

    def call(what: str, result: int) -> int:
        if result < 0:
            raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
        return result

    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it does not outlive the scoring
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    # Landlock: no writing, removing, making or truncating anywhere but below the current folder.
    known = call("Landlock", libc.syscall(444, None, 0, 1))
    writing = sum(1 << bit for bit in (1, *range(4, 12 + min(known, 3))))
    rules = call("Landlock", libc.syscall(444, struct.pack("Q", writing), 8, 0))
    beneath = struct.pack("=Qi", writing, os.open(".", os.O_PATH))
    call("Landlock", libc.syscall(445, rules, 1, beneath, 0))
    call("Landlock", libc.syscall(446, rules, 0))
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    limits = {"AS": request["memory"], "FSIZE": request["file_size"], "NOFILE": 64, "CORE": 0}
    for name, least in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        least = least if most == resource.RLIM_INFINITY else min(least, most)
        resource.setrlimit(kind, (least, least))
    # SIGXCPU at the first tells the parent so; a program that catches it is killed a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu"], request["cpu"] + 1))
    program = ctypes.create_string_buffer(seccomp_filter())
    header = struct.pack("HxxxxxxP", len(program.raw) // 8, ctypes.addressof(program))
    call("seccomp", libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))


def seccomp_filter() -> bytes:
    """Return a filter that answers EPERM to the calls of REFUSED, and to those of a foreign architecture."""
    if platform.machine() not in REFUSED:
        raise OSError(f"seccomp is not known here for {platform.machine()}")
    architecture, calls = REFUSED[platform.machine()]
    refuse, allow = 0x00050001, 0x7FFF0000
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    # (code, jump if true, jump if false, value); jumps are counted from the next line; the last two answer.
    lines = [(load, 0, 0, 4), (equal, 0, len(calls) + 3, architecture), (load, 0, 0, 0)]
    lines.append((at_least, len(calls) + 1, 0, 0x40000000))  # x32's numbers
    lines += [(equal, len(calls) - place, 0, number) for place, number in enumerate(calls)]
    lines += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


if __name__ == "__main__":
    run_confined()
